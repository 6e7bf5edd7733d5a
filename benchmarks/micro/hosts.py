"""(f), (ac), (ad), (ae), (ai): the rate of AllReduce + add over two hosts, against JAX's own multi-controller.

The peer is two processes joined by jax.distributed, with as many devices and the same compiled function, and with gloo
between them as Atoll's workers have it. In (f), Atoll's hosts are of one island. In the other rows, they are two
islands, and each device has as many bytes as the row says. In (ai), other processes keep all CPUs busy.
"""

import time

import jax

from benchmarks.harness.benchmark import Round, Settings
from benchmarks.micro.dispatch import allreduce_and_add, counting_rounds
from benchmarks.micro.loaded import BUSY, busy_processes
from benchmarks.paper.peers.multi_controller import Work, over_hosts

HOSTS, DEVICES_PER_HOST = 2, 2
DEVICES_PER_ISLAND = 4
MULTI_CONTROLLER = "multi-controller JAX"
_SETTLE_SECONDS = 3.0  # beside the load before the measurement: hosts adapt to it once per second


def allreduce_over_hosts(settings: Settings) -> Round:
    calls = settings.size(full=2000, quick=300)
    if settings.system == MULTI_CONTROLLER:
        return over_hosts(Work(HOSTS, DEVICES_PER_HOST, calls))
    assert len(jax.devices()) == HOSTS * DEVICES_PER_HOST
    add_one, zero = allreduce_and_add(jax.devices())
    return counting_rounds(jax.jit(add_one), zero, calls)


def allreduce_over_islands(settings: Settings) -> Round:
    nbytes, calls = int(settings.point["bytes"]), int(settings.point["calls"])
    calls, elements = settings.size(full=calls, quick=max(2, calls // 10)), nbytes // 4
    if settings.system == MULTI_CONTROLLER:
        return over_hosts(Work(HOSTS, DEVICES_PER_ISLAND, calls, elements=elements))
    assert len(jax.devices()) == HOSTS * DEVICES_PER_ISLAND
    add_one, zero = allreduce_and_add(jax.devices(), elements)
    return counting_rounds(jax.jit(add_one), zero, calls)


def allreduce_beside_load(settings: Settings) -> Round:
    at_rest = allreduce_over_islands(settings)

    def measure() -> dict[str, float]:
        with busy_processes(BUSY, is_apart=True):
            settled = time.perf_counter() + _SETTLE_SECONDS
            while time.perf_counter() < settled:
                at_rest()
            return dict(at_rest())

    return measure
