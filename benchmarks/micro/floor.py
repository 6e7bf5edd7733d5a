"""(ak): a put, a call and a read of 4 B, each waited for, beside jaxlib's client with a proxy that answers at once.

jaxlib's client is the floor of an operation that goes through it. Here it is JAX's unpatched client, and its server is
`instant_proxy` in a separate process, which computes nothing. The computation returns its argument, so that results
are checked on each side.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from typing import Any

import jax
import numpy as np
from jax._src import xla_bridge

from atoll.client.timer_slack import relaxed
from benchmarks.harness.benchmark import Round, Settings
from benchmarks.micro.waits import Operation, round_of

FLOOR = "jaxlib's client, instant proxy"
PLATFORM = "instant"


def floor(settings: Settings) -> Round:
    """Measure the median time of each operation, and its mean CPU time under its name with `_cpu`, in ms."""
    if settings.system == FLOOR:
        xla_bridge.register_backend_factory(PLATFORM, connect)
    count = settings.size(full=100, quick=10)
    return round_of(operations(), count, count)


def operations() -> dict[str, Operation]:
    """Return the operations on the first device, by name."""
    device = jax.devices()[0]
    same = jax.jit(lambda x: x + 0)

    def put(number: Any) -> jax.Array:
        return jax.device_put(np.float32(number), device)

    def ready(number: int) -> jax.Array:
        return put(number).block_until_ready()

    def expected(number: int) -> float:
        return number

    return {
        "put": Operation(np.float32, lambda value: put(value).block_until_ready(), expected),
        "call": Operation(ready, lambda x: same(x).block_until_ready(), expected),
        "read": Operation(lambda number: same(ready(number)).block_until_ready(), np.asarray, expected),
        "call_float": Operation(ready, lambda x: float(same(x)), expected),
    }


def connect() -> Any:
    """Start the proxy, which ends with this process, and connect jaxlib's client to it as Atoll does."""
    from jax._src.lib import ifrt_proxy

    directory = tempfile.mkdtemp(prefix="atoll-bench-")
    path = f"{directory}/proxy.sock"
    proxy = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.micro.instant_proxy", path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert proxy.stdin is not None
    assert proxy.stdout is not None
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    atexit.register(proxy.stdin.close)
    proxy.stdout.readline()
    os.environ["IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS"] = "true"
    with relaxed():
        return ifrt_proxy.get_client(f"grpc://unix:{path}", ifrt_proxy.ClientConnectionOptions())
