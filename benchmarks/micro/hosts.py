"""(f): the rate of AllReduce + add over two hosts with two devices each, against JAX's own multi-controller.

The peer is two processes joined by jax.distributed, each with two devices and the same compiled function, with gloo
between them as Atoll's workers have it.
"""

import jax

from benchmarks.harness.benchmark import Round, Settings
from benchmarks.micro.dispatch import allreduce_and_add, counting_rounds
from benchmarks.paper.peers.multi_controller import Work, over_hosts

HOSTS, DEVICES_PER_HOST = 2, 2
MULTI_CONTROLLER = "multi-controller JAX"


def allreduce_over_hosts(settings: Settings) -> Round:
    calls = settings.size(full=2000, quick=300)
    if settings.system == MULTI_CONTROLLER:
        return over_hosts(Work(HOSTS, DEVICES_PER_HOST, calls))
    assert len(jax.devices()) == HOSTS * DEVICES_PER_HOST
    add_one, zero = allreduce_and_add(jax.devices())
    return counting_rounds(jax.jit(add_one), zero, calls)
