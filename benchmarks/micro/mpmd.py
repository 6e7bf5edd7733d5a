"""(af), (ag): a training step by Shardy's `mpmd.jit`, beside the same schedule by `atoll.pipeline`.

On real devices, the model is that of `benchmarks.paper.sleeping`: each of its layers sleeps, so order and messages
count, and the cores of the machine do not. On null devices, the calls and copies are those that Shardy makes of this
model, in virtual time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from benchmarks.harness.benchmark import Round, Settings
from benchmarks.paper import sleeping

if TYPE_CHECKING:
    from atoll.ir.outline import Outline
    from atoll.ir.program import Program
    from atoll.session.bare import BareClient

MPMD, NULL_MPMD = "atoll, mpmd.jit", "atoll, mpmd.jit on null devices"
MICRO_BATCHES = 16
_RATE = 1e-3
_STEPS, _QUICK_STEPS = 4, 2
_BACKWARD = 2  # times as long as forward


# ---- real devices


def step(settings: Settings) -> Round:
    sleeping.tell_workers()
    run = _mpmd() if settings.system == MPMD else sleeping.Pipeline("1f1b", MICRO_BATCHES).run
    run(3)  # compiles, and lets the scheduler see how long gangs take
    steps = settings.size(_STEPS, _QUICK_STEPS)

    def measure() -> dict[str, float]:
        started = time.perf_counter()
        run(steps)
        return {"step": (time.perf_counter() - started) / steps}

    return measure


def _mpmd() -> Callable[[int], None]:
    """Return a function that runs so many steps, and waits for the last one's loss."""
    import jax

    lowered, given = _lowered()
    compiled = lowered.compile()
    weights, rows = jax.tree.map(jax.device_put, given, lowered.function_named_shardings.input_specs)

    def run(steps: int) -> None:
        nonlocal weights
        loss = None
        for _ in range(steps):
            weights, loss = compiled(weights, rows)
        sleeping.check(loss)

    return run


def _lowered() -> tuple[Any, tuple[Any, Any]]:
    """Return Shardy's lowered step, and its arguments: the weights, and the rows of each micro-batch."""
    import jax
    import numpy as np
    from jax.sharding import Mesh

    from atoll.devices.missing_modules import import_mpmd

    devices = sorted(jax.devices(), key=lambda device: getattr(device, "slice_index", device.id))
    import_mpmd()
    from shardy.integrations.python.jax import mpmd

    stages = range(sleeping.STAGES)
    config = mpmd.make_config(
        {f"island{i}": Mesh(np.array(devices[i : i + 1]), ("x",)) for i in stages},
        {f"stage{i}": f"island{i}" for i in stages},
        name_to_stage_assignment={f"stage{i}": i for i in stages},
        partitioning_options={"mpmd_pipeline_schedule": "1F1B"},
    )
    weights = sleeping.first_weights()
    rows = [np.ones((sleeping.ROWS, sleeping.WIDTH), np.float32)] * MICRO_BATCHES
    train = mpmd.jit(lambda weights, rows: _train_step(weights, rows, mpmd), config, donate_argnums=(0,))
    return train.lower(weights, rows), (weights, rows)


def _train_step(weights: Any, microbatches: Any, mpmd: Any) -> tuple[Any, Any]:
    """Return the new weights and the loss, with marks for Shardy."""
    import jax
    import jax.numpy as jnp

    each = sleeping.LAYERS // sleeping.STAGES

    def stage(weights: Any, x: Any) -> Any:
        for weight in weights:
            x = sleeping.layer(False)(weight, x)
        return x

    def loss_of(weights: Any, x: Any) -> Any:
        for i in range(sleeping.STAGES):
            x = mpmd.named_computation(stage, name=f"stage{i}")(weights[i * each : (i + 1) * each], x)
        return jnp.mean(x**2)

    loss, total = 0.0, None
    for number, rows in enumerate(microbatches):
        part, gradients = mpmd.call(jax.value_and_grad(loss_of), call_counter=number)(weights, rows)
        loss = loss + part / MICRO_BATCHES
        total = gradients if total is None else jax.tree.map(jnp.add, total, gradients)
    return jax.tree.map(lambda weight, gradient: weight - _RATE / MICRO_BATCHES * gradient, weights, total), loss


# ---- null devices


def null_step(settings: Settings) -> Round:
    simulate = partial(_simulate, _outline()) if settings.system == NULL_MPMD else _pipeline
    steps = settings.size(_STEPS, _QUICK_STEPS)

    @cache  # virtual time: another round would give the same
    def measure() -> dict[str, float]:
        return {f"step_{unit}": simulate(unit / 1e3, steps) for unit in (1, 10)}

    return measure


def _outline() -> Outline:
    """Return the calls and copies of Shardy's step."""
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir

    from atoll.devices.xla.ifrt_ir import read_outline

    lowered, _ = _lowered()
    text = lowered.as_text()
    with mlir.make_ir_context(), ir.Location.unknown():
        return read_outline(text.encode())


def _pipeline(unit: float, steps: int) -> float:
    from atoll.pipelines.entries import Times
    from atoll.pipelines.schedules import schedule
    from atoll.virtual.cluster import VirtualCluster
    from benchmarks.paper.costs import measured_costs
    from benchmarks.paper.schedules import Sizes, make_training
    from benchmarks.paper.training import step_seconds

    cluster = VirtualCluster(f"{sleeping.STAGES}x1x1", costs=measured_costs())
    client = cluster.client()
    nbytes = 4 * sleeping.ROWS * sleeping.WIDTH
    training = cluster.run(
        make_training(
            client,
            [[device] for device in client.devices],
            schedule("1f1b", sleeping.STAGES, MICRO_BATCHES),
            Times(1, _BACKWARD, 1, 1),
            Sizes(unit, nbytes),
        )
    )
    return cluster.run(step_seconds(cluster, client, training, steps))


def _simulate(outline: Outline, unit: float, steps: int) -> float:
    """Return the seconds of a step of these calls and copies, ordered as for real devices."""
    from atoll.executables.mpmd_order import ordered
    from atoll.virtual.cluster import VirtualCluster
    from benchmarks.paper.costs import measured_costs

    cluster = VirtualCluster(f"{sleeping.STAGES}x1x1", costs=measured_costs())
    client = cluster.client()
    placed = outline.on(client.devices)
    program = ordered(placed.program, lambda device: device)
    names = [fragment.name for fragment in placed.fragments]
    made, step = cluster.run(_register(client, program, names, unit))
    return cluster.run(_seconds(cluster.now, client, made, step, program, steps))


async def _register(client: BareClient, program: Program, names: Sequence[str], unit: float) -> tuple[int, int]:
    """Register a program that makes the arguments, and the step with null functions."""
    from msgspec.structs import replace

    from atoll.devices.null.null_program import NullProgram
    from atoll.ir.program import Call
    from atoll.session import bare

    specs, nodes = list(program.arguments), []
    functions: dict[int, int] = {}
    for node in program.nodes:
        if isinstance(node, Call):
            if node.function not in functions:
                name = names[node.function]
                types = tuple((specs[value].dtype, specs[value].shape) for value in node.inputs)
                made = tuple((spec.dtype, spec.shape) for spec in node.outputs)
                seconds = unit * (_BACKWARD if "bwd" in name else 1)
                null = NullProgram(name, seconds, types, made, node.donated)
                functions[node.function] = await client.compile(null, node.devices)
            node = replace(node, function=functions[node.function])
        specs += node.outputs
        nodes.append(node)
    first = []
    for spec in program.arguments:
        devices = spec.sharding.devices
        null = NullProgram("first", 0.0, (), ((spec.dtype, spec.shape),))
        first.append(bare.call(await client.compile(null, devices), (), (spec,), devices))
    arguments = bare.program("arguments", (), first, range(len(first)))
    return client.register(arguments), client.register(replace(program, nodes=tuple(nodes)))


async def _seconds(
    now: Callable[[], float], client: BareClient, made: int, step: int, program: Program, steps: int
) -> float:
    """Return the seconds of a step, with another one in flight behind it."""
    weights = sleeping.LAYERS
    arguments = await client.launch(made, (), len(program.arguments))
    await client.wait(arguments)
    warm_up, ends, losses = 4, list[float](), list[int]()
    for _ in range(warm_up + steps):
        *following, loss = await client.launch(step, arguments, len(program.results))
        client.release(arguments[:weights])
        arguments = [*following, *arguments[weights:]]
        losses.append(loss)
        if len(losses) > 1:
            await client.wait((losses[-2],))
            ends.append(now())
    await client.wait((losses[-1],))
    ends.append(now())
    return (ends[-1] - ends[warm_up - 1]) / steps
