"""Ray: an actor for each host, which runs the JAX computation on its devices; gloo adds over the actors.

The actors are the hosts of the multi-controller, joined by jax.distributed; the client calls all of them for each
computation. As in the paper (section 5.1), values pass through host memory and Ray's objects from call to call, because
Ray has no objects on devices.

Op by op, the client has the results of one computation before it calls the next. Chained, it passes the futures on, and
gets the results after 128 calls of each actor. Fused, one call runs a loop of 128 computations in the actor: the paper
also has a loop in the actor, and not one compiled function, which would be "JAX, fused" with a call around it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import ray

from benchmarks.harness.benchmark import Round, Settings
from benchmarks.micro.dispatch import allreduce_and_add
from benchmarks.paper.peers import ray_session
from benchmarks.paper.peers.multi_controller import NODES, free_port, join

Values = np.ndarray[Any, np.dtype[np.float32]]  # one host's: a scalar for each of its devices


@dataclass(frozen=True)
class Mode:
    """Computations in a call of an actor, and calls of each actor until the client gets the results."""

    computations: int
    calls: int


MODES = {"Ray, op by op": Mode(1, 1), "Ray, chained": Mode(1, NODES), "Ray, fused": Mode(NODES, 1)}


class Host:
    """The actor: one host of the computation."""

    def __init__(self, hosts: int, devices: int, host: int, port: int) -> None:
        join(hosts, devices, host, port)
        add_one, self._zero = allreduce_and_add(jax.devices())
        self._step = jax.jit(add_one)

    def add(self, values: Values, computations: int) -> Values:
        """Both are this host's parts of an array over all hosts. All hosts are to be called, in the same order."""
        parts = zip(values, self._zero.addressable_shards, strict=True)
        x = jax.make_array_from_single_device_arrays(
            self._zero.shape,
            self._zero.sharding,
            [jax.device_put(value[np.newaxis], shard.device) for value, shard in parts],
        )
        for _ in range(computations):
            x = self._step(x)
        return np.concatenate([np.asarray(shard.data) for shard in x.addressable_shards])


def prepare(settings: Settings) -> Round:
    """Takes {"hosts", "devices"} from the point; devices are those of one host. `rate` is in computations a second."""
    return rounds(start(int(settings.point["hosts"]), int(settings.point["devices"])), settings)


def start(hosts: int, devices: int) -> list[Any]:
    """Start Ray, and an actor for each host."""
    ray_session.start(cpus=hosts)
    actor, port = ray.remote(num_cpus=1)(Host), free_port()
    return [actor.remote(hosts, devices, host, port) for host in range(hosts)]


def rounds(actors: Sequence[Any], settings: Settings) -> Round:
    """Return the rounds of a backend on these actors."""
    hosts, devices, mode = len(actors), int(settings.point["devices"]), MODES[settings.system]
    zero = np.zeros(devices, np.float32)
    for _ in range(3):
        _run(actors, [zero] * hosts, mode)
    each = mode.computations * mode.calls
    full = (4096 if mode.computations > 1 else 1024) // hosts
    times = max(1, settings.size(full, full // 4) // each)

    def measure() -> dict[str, float]:
        values: Sequence[Values] = [zero] * hosts
        started = time.perf_counter()
        for _ in range(times):
            values = _run(actors, values, mode)
        seconds = time.perf_counter() - started
        if not np.all(np.stack(values) == times * each):
            raise ArithmeticError(f"after {times * each} additions of one: {values}")
        return {"rate": times * each / seconds}

    return measure


def _run(actors: Sequence[Any], values: Sequence[Values], mode: Mode) -> Sequence[Values]:
    """Run the client's work between two times at which it gets results."""
    passed: Sequence[Any] = values
    for _ in range(mode.calls):
        passed = [actor.add.remote(value, mode.computations) for actor, value in zip(actors, passed, strict=True)]
    got: Sequence[Values] = ray.get(passed)
    return got
