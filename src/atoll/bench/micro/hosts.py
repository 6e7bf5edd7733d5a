"""(f): the rate of AllReduce + add over two hosts with two devices each, against JAX's own multi-controller.

The peer is two processes joined by jax.distributed, each with two devices and the same compiled function, with gloo
between them as Atoll's workers have it. The second is started here and told when to begin a round.
"""

import os
import socket
import subprocess
import sys

import jax

from atoll.bench.harness.benchmark import Round, Settings
from atoll.bench.micro.dispatch import allreduce_and_add, counting_rounds

HOSTS, DEVICES_PER_HOST = 2, 2
MULTI_CONTROLLER = "multi-controller JAX"


def allreduce_over_hosts(settings: Settings) -> Round:
    calls = settings.size(full=2000, quick=300)
    if settings.backend != MULTI_CONTROLLER:
        return _rounds(calls)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    peer = subprocess.Popen(
        [sys.executable, "-m", "atoll.bench.micro.hosts", str(port), str(calls)],
        stdin=subprocess.PIPE,
        bufsize=0,
        env=os.environ,
    )
    assert peer.stdin is not None
    _join(port, 0)
    measure_here = _rounds(calls)  # the other prepares at the same time: compiling is a collective, too

    def measure() -> dict[str, float]:
        assert peer.stdin is not None
        peer.stdin.write(b"round\n")
        return dict(measure_here())

    return measure


def _join(port: int, rank: int) -> None:
    jax.config.update("jax_num_cpu_devices", DEVICES_PER_HOST)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", HOSTS, rank)


def _rounds(calls: int) -> Round:
    assert len(jax.devices()) == HOSTS * DEVICES_PER_HOST
    add_one, zero = allreduce_and_add(jax.devices())
    return counting_rounds(jax.jit(add_one), zero, calls)


def _peer() -> None:
    port, calls = int(sys.argv[1]), int(sys.argv[2])
    _join(port, 1)
    measure = _rounds(calls)
    for _ in sys.stdin.buffer:
        measure()
    os._exit(0)  # jax.distributed would wait for the other, which has ended


if __name__ == "__main__":
    _peer()
