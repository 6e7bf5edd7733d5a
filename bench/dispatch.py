"""(a), (b): the rate of tiny computations, op by op and pipelined: x = f(x), many times, then block."""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import NamedSharding, P
from jax.sharding import Mesh

from bench.table import Round, Settings


def jit_op_by_op(settings: Settings) -> Round:
    """A jitted addition of one on float32[8], on one device."""
    return counting_rounds(
        jax.jit(lambda x: x + 1.0),
        jax.device_put(jnp.zeros(8, jnp.float32), jax.devices()[0]),
        calls=settings.size(full=10_000, quick=5000),
    )


def allreduce_op_by_op(settings: Settings) -> Round:
    """The paper's micro-benchmark: one scalar per device, an AllReduce and an addition, on four devices.

    The sum is divided by the number of devices, so that the value is the number of calls and can be checked.
    """
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",))

    def allreduce_and_add(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, "d") / mesh.size + 1.0

    return counting_rounds(
        jax.jit(jax.shard_map(allreduce_and_add, mesh=mesh, in_specs=P("d"), out_specs=P("d"))),
        jax.device_put(jnp.zeros(mesh.size, jnp.float32), NamedSharding(mesh, P("d"))),
        calls=settings.size(full=5000, quick=1000),
    )


def counting_rounds(add_one: Callable[[jax.Array], jax.Array], zero: jax.Array, calls: int) -> Round:
    """Rounds of `calls` dependent calls, checked: a backend that loses one does not get a rate.

    Of an array over several processes, each checks the shards that it has.
    """
    for _ in range(3):
        add_one(zero).block_until_ready()

    def measure() -> dict[str, float]:
        x = zero
        started = time.perf_counter()
        for _ in range(calls):
            x = add_one(x)
        x.block_until_ready()
        seconds = time.perf_counter() - started
        for shard in x.addressable_shards:
            if not np.all(np.asarray(shard.data) == calls):
                raise ArithmeticError(f"after {calls} additions of one: {np.asarray(shard.data)}")
        return {"rate": calls / seconds}

    return measure
