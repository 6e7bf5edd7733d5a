"""A small Ray cluster on loopback, for one benchmark, that leaves nothing behind.

Ray's files are in a separate directory. A janitor removes the directory, and ends what still uses it, once this process
has ended, however it did: a killed driver's actors and agents live on for seconds, and its directory for ever.
"""

import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

import ray

from benchmarks.paper.peers import ray_janitor

STORE = 80_000_000  # bytes: about the least that Ray takes; the benchmark's values are a few bytes each


def start(cpus: int) -> None:
    """Start Ray with CPUs for `cpus` actors of one CPU each. It ends with this process.

    The environment must have RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 before Ray is imported: on Linux Ray replaces
    127.0.0.1 by the machine's public address otherwise, and listens on all of them. RAY_AUTH_MODE=token has every
    connection show a token, as Ray's local clusters do by default.
    """
    directory = Path(tempfile.mkdtemp(prefix="atoll-ray-"))
    ended, _ = os.pipe()  # the other end is never closed: that happens when this process ends
    subprocess.Popen(
        [sys.executable, "-m", ray_janitor.__name__, str(directory)],
        stdin=ended,
        start_new_session=True,  # it survives the end of this process group
    )
    os.close(ended)
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(
        16
    )  # Ray would make one itself, and leave it in the home directory
    ray.init(
        address="local",
        num_cpus=cpus,
        include_dashboard=False,
        object_store_memory=STORE,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(directory),
    )
    if (address := ray.util.get_node_ip_address()) != "127.0.0.1":
        raise RuntimeError(f"Ray listens at {address}, not on loopback: set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0")
