"""(a), (b): the rate of tiny computations, op by op and pipelined: x = f(x), many times, then block."""

import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import NamedSharding, P
from jax.sharding import Mesh

from benchmarks.harness.benchmark import Round, Settings


def jit_op_by_op(settings: Settings) -> Round:
    """Measure a jitted addition of one to float32[8] on one device."""
    return counting_rounds(
        jax.jit(lambda x: x + 1.0),
        jax.device_put(jnp.zeros(8, jnp.float32), jax.devices()[0]),
        calls=settings.size(full=10_000, quick=5000),
    )


def allreduce_op_by_op(settings: Settings) -> Round:
    """Measure the paper's micro-benchmark: an AllReduce and an addition of one scalar per device, on four devices.

    The sum is divided by the number of devices, so that the value is the number of calls and can be checked.
    """
    add_one, zero = allreduce_and_add(jax.devices()[:4])
    return counting_rounds(jax.jit(add_one), zero, calls=settings.size(full=5000, quick=1000))


def allreduce_and_add(
    devices: Sequence[jax.Device], elements: int = 1
) -> tuple[Callable[[jax.Array], jax.Array], jax.Array]:
    """Return an AllReduce and an addition of one on these devices, and the first argument."""
    mesh = Mesh(np.array(devices), ("d",))

    def body(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, "d") / mesh.size + 1.0

    sharding = NamedSharding(mesh, P("d"))
    zeros = np.zeros(mesh.size * elements, np.float32)
    zero = jax.make_array_from_callback(zeros.shape, sharding, lambda index: zeros[index])
    return jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d")), zero


def repeated(step: Callable[[jax.Array], jax.Array], nodes: int) -> Callable[[jax.Array], jax.Array]:
    """Return a function that runs `step` so many times, each time on the previous result."""

    def many(x: jax.Array) -> jax.Array:
        for _ in range(nodes):
            x = step(x)
        return x

    return many


def counting_rounds(step: Callable[[jax.Array], jax.Array], zero: jax.Array, calls: int, *, each: int = 1) -> Round:
    """Return rounds of `calls` dependent calls that add `each`. A round fails if a call was lost.

    The rate counts additions. If an array spans several processes, each process checks its own shards.
    """
    for _ in range(3):
        step(zero).block_until_ready()

    def measure() -> dict[str, float]:
        x = zero
        started = time.perf_counter()
        for _ in range(calls):
            x = step(x)
        x.block_until_ready()
        seconds = time.perf_counter() - started
        for shard in x.addressable_shards:
            if not np.all(np.asarray(shard.data) == calls * each):
                raise ArithmeticError(f"after {calls * each} additions of one: {np.asarray(shard.data)}")
        return {"rate": calls * each / seconds}

    return measure
