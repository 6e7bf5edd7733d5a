"""(j) to (m), (u): programs of many nodes and of many shards, against JAX's own ways to say the same.

The computation is the paper's micro-benchmark (section 5.1): a scalar per device, an AllReduce and an addition.
"""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import atoll
from benchmarks.harness.benchmark import Round, Settings
from benchmarks.micro.dispatch import allreduce_and_add, counting_rounds, repeated

NODES = 128
STOCK = "stock"


def chained(settings: Settings) -> Round:
    """128 nodes in one program; JAX has no such thing, and calls them op by op."""
    add_one, zero = allreduce_and_add(jax.devices()[:4])
    many = repeated(jax.jit(add_one), NODES)
    step = many if settings.system == STOCK else atoll.program(many)
    return counting_rounds(step, zero, settings.size(full=40, quick=4), each=NODES)


def fused(settings: Settings) -> Round:
    """Measure the 128 computations in one compiled function."""
    add_one, zero = allreduce_and_add(jax.devices()[:4])
    return counting_rounds(jax.jit(repeated(add_one, NODES)), zero, settings.size(full=40, quick=4), each=NODES)


def client_cost(settings: Settings) -> Round:
    """Measure the client's cost of a cached call of a program of 128 nodes, or in stock JAX, of the 128 calls."""
    add_one, zero = allreduce_and_add(jax.devices()[:4])
    many = repeated(jax.jit(add_one), NODES)
    call = many if settings.system == STOCK else atoll.program(many)
    call(zero).block_until_ready()

    def measure() -> dict[str, float]:
        costs = []
        for _ in range(settings.size(full=30, quick=5)):
            started = time.perf_counter()
            x = call(zero)
            costs.append(time.perf_counter() - started)
            x.block_until_ready()
        return {"call": 1e6 * float(np.median(costs))}

    return measure


def lowering(settings: Settings) -> Round:
    """2,000 nodes from a program to plans; the peer lowers 2,000 additions from Python to StableHLO."""
    nodes = settings.size(full=2000, quick=200)
    lower = _stock_lowering(nodes) if settings.system == STOCK else _atoll_lowering(nodes)
    lower()

    def measure() -> dict[str, float]:
        started = time.perf_counter()
        lower()
        return {"seconds": time.perf_counter() - started}

    return measure


def resharding(settings: Settings) -> Round:
    """Each host has something for each other one: what a plan and a launch say of it, and how long lowering takes."""
    import msgspec

    from atoll.cluster.locations import DeviceLocation
    from atoll.ir import types
    from atoll.ir.program import Transfer, single
    from atoll.ir.steps import finish
    from atoll.ir.types import ArraySpec, Sharding, Tiled
    from atoll.protocol import messages as m
    from atoll.protocol.number_ranges import HOST_FEEDS
    from atoll.state.program_registration import register_in_steps

    shards = settings.size(full=1024, quick=64)
    order = tuple(range(shards))
    placement = {device: DeviceLocation(device // shards, device // 8, device % 8) for device in range(2 * shards)}
    rows = ArraySpec("float32", (shards, shards), Sharding(order, Tiled((shards, 1), order)))
    others = tuple(range(shards, 2 * shards))
    columns = ArraySpec("float32", (shards, shards), Sharding(others, Tiled((1, shards), order)))
    program = single("reshard", (rows,), Transfer((0,), (columns,), reshard=True))

    def measure() -> dict[str, float]:
        types.shard_boxes.cache_clear()  # a program of other shapes would not find them there
        started = time.perf_counter()
        registered = finish(register_in_steps(program, 1, placement, {}, {}))
        seconds = time.perf_counter() - started
        plans = [msgspec.msgpack.encode(host.plan) for host in registered.plans.values()]
        runs = [
            m.Run(1 << 32, 1, 1, host.arguments, host.results, (), HOST_FEEDS.start)
            for host in registered.plans.values()
        ]
        launches = [msgspec.msgpack.encode(run) for run in runs]
        return {
            "lowering": 1e3 * seconds,
            "plan": float(max(map(len, plans))),
            "launch": float(max(map(len, launches))),
        }

    return measure


def _stock_lowering(nodes: int) -> Callable[[], object]:
    def lower() -> object:
        def many(x: jax.Array) -> jax.Array:  # a new function each time, which JAX's caches do not know
            for _ in range(nodes):
                x = x + 1.0
            return x

        return jax.jit(many).lower(jnp.zeros(8))

    return lower


def _atoll_lowering(nodes: int) -> Callable[[], object]:
    """Four of five nodes are calls over four devices, the others transfers to another island of one."""
    from atoll.cluster.locations import DeviceLocation
    from atoll.ir.lowering import lower
    from atoll.ir.program import Call, Node, Program, Transfer
    from atoll.ir.types import ArraySpec, Sharding, Tiled

    placement = {device: DeviceLocation(device // 4, device // 4, device % 4) for device in range(8)}
    tiling = Tiled((4,), (0, 1, 2, 3))
    sides = [ArraySpec("float32", (8,), Sharding(devices, tiling)) for devices in ((0, 1, 2, 3), (4, 5, 6, 7))]
    body: list[Node] = []
    side = 0
    for value in range(nodes):
        if value % 5 == 4:
            side = 1 - side
            body.append(Transfer((value,), (sides[side],), reshard=True))
        else:
            body.append(Call(side, (value,), (sides[side],), sides[side].sharding.devices))
    program = Program("many", (sides[0],), tuple(body), (nodes,))
    return lambda: lower(program, placement, {0: "f", 1: "g"})
