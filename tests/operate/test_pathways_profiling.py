"""Tests of profiling by Google's client with `atoll proxy`: workers write to the directory that it requests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from jax.profiler import ProfileData

from tests.cluster_process import User, finish, first_line, free_port

# gcsfs, which fsspec uses for gs:// on the workers.
STORE = Path(__file__).parent / "object_store"

START = """
    import jax
    import jax.numpy as jnp
    import pathwaysutils
    from pathwaysutils import profiling

    # jaxlib has a client of its own for gs://, which has nobody to talk to here.
    original = profiling._original_start_trace
    profiling._original_start_trace = lambda log_dir, **options: original("script", **options)
    pathwaysutils.initialize()

    def work():
        for device in jax.devices():
            x = jax.device_put(jnp.ones((64, 64)), device)
            jax.jit(lambda x: jnp.tanh(x @ x))(x).block_until_ready()
"""


@dataclass(frozen=True)
class Served:
    """User whose proxy serves two islands of one host each, and whose buckets are directories."""

    user: User
    environment: dict[str, str]
    buckets: Path

    def run(self, code: str) -> list[str]:
        """Return a script's output."""
        ended = self.user.script(START + code, **self.environment).check()
        return ended.stdout.splitlines()


@pytest.fixture(scope="module")
def served(tmp_path_factory: Any, program_cache: Path) -> Iterator[Served]:
    import shutil
    import tempfile

    directory = Path(tempfile.mkdtemp(prefix="at-"))
    buckets = tmp_path_factory.mktemp("buckets")
    with User(directory, program_cache) as user:
        path = os.pathsep.join([str(STORE), *filter(None, [user.env.get("PYTHONPATH")])])
        process = user.start_atoll("proxy", "--port", "0", "--islands", "2x1x1", PYTHONPATH=path, BUCKETS=str(buckets))
        environment = {
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "JAX_PLATFORMS": "proxy",
            "JAX_BACKEND_TARGET": first_line(process),
            "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS": "true",
        }
        yield Served(user, environment, buckets)
        process.send_signal(signal.SIGINT)
        finish(process).check()
    shutil.rmtree(directory, ignore_errors=True)


def hosts_in(directory: Path) -> list[str]:
    """Return the hosts of the profiles in the only run of a directory, after checking that the profiles can be read."""
    (run,) = (directory / "plugins" / "profile").iterdir()
    for path in run.iterdir():
        assert any(plane.name == "/host:CPU" for plane in ProfileData.from_file(str(path)).planes)
    return sorted(path.name for path in run.iterdir())


@pytest.mark.thorough
def test_start_trace_and_stop_trace_write_to_a_bucket(served: Served) -> None:
    served.run(
        """
    jax.profiler.start_trace("gs://one/logs", max_num_hosts=2)
    work()
    jax.profiler.stop_trace()
    """
    )
    assert hosts_in(served.buckets / "one" / "logs") == ["host_0.xplane.pb", "host_1.xplane.pb"]


def test_one_host_is_profiled_by_default_and_options_are_taken(served: Served) -> None:
    served.run(
        """
    options = jax.profiler.ProfileOptions()
    options.session_id = "named"
    options.host_tracer_level = 1
    jax.profiler.start_trace("gs://two/logs", profiler_options=options)
    work()
    jax.profiler.stop_trace()
    """
    )
    assert hosts_in(served.buckets / "two" / "logs") == ["host_0.xplane.pb"]
    assert (served.buckets / "two/logs/plugins/profile/named").is_dir()


def test_a_request_of_ones_own_names_a_directory_of_the_hosts(served: Served, tmp_path: Path) -> None:
    served.run(
        f"""
    for name in ("first", "second"):
        request = {{"traceLocation": {str(tmp_path)!r}, "maxNumHosts": 2, "includeResourceManagers": True}}
        request["xprofTraceOptions"] = {{"traceSessionName": name}}
        profiling._start_pathways_trace_from_profile_request(request)
        work()
        profiling._profile_state.call_profile_executable()
        profiling._profile_state.reset()
    """
    )
    runs = sorted(path.name for path in (tmp_path / "plugins" / "profile").iterdir())
    assert runs == ["first", "second"]


def test_a_place_that_hosts_do_not_write_to_is_refused(served: Served) -> None:
    assert (
        served.run(
            """
    for place in ("logs", "http://there", "gs://x/../y"):
        try:
            profiling._start_pathways_trace_from_profile_request({"traceLocation": place})
        except Exception as error:
            print("INVALID_ARGUMENT" in str(error))
    """
        )
        == ["True"] * 3
    )


def test_the_profile_server_profiles_while_the_script_works(served: Served) -> None:
    port = free_port()
    served.run(
        f"""
    import threading
    import time
    import requests

    work()
    jax.profiler.start_server({port})
    while True:
        try:
            requests.get("http://127.0.0.1:{port}/")
            break
        except requests.ConnectionError:
            time.sleep(0.05)
    done = []
    collect = lambda: done.append(profiling.collect_profile({port}, 300, "127.0.0.1", "gs://three/logs"))
    collector = threading.Thread(target=collect)
    collector.start()
    while collector.is_alive():
        work()
    assert done == [True], done
    import os
    os._exit(0)  # their server does not stop
    """
    )
    assert hosts_in(served.buckets / "three" / "logs") == ["host_0.xplane.pb"]
