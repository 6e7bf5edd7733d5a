"""Tests of the pipeline example: its losses do not depend on the number of stages, and stages overlap."""

import functools
import json
import os
import re
import sys
from argparse import Namespace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import msgspec
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from atoll.ir.program import Call, Program
from atoll.ir.types import ArraySpec, ShardType, shard_shape
from atoll.testing import NullProgram, VirtualCluster
from examples import pipeline
from tests.forked_process import run
from tests.quick_xla import quick

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "pipeline.py"
STEPS = 4
DEADLINE = 300.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * DEADLINE + 10)]


# Runs the example with fewer stages, all on one cluster. Prints the losses of each.
FEWER = """
import json, sys
from argparse import Namespace
import atoll
from examples.pipeline import Config, train

found = {}
with atoll.connect(islands="2x1x2"):
    for stages in sys.argv[2:]:
        options = Namespace(stages=int(stages), spmd=False, steps=int(sys.argv[1]), trace=None)
        found[stages] = train(Config(), options)
print(json.dumps(found))
"""


def start(*command: str) -> str:
    """Return the output of Python started with these arguments."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "ATOLL_"))}
    command = (sys.executable, *command)
    ended = run(command, env=quick(env), cwd=ROOT, timeout=DEADLINE)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return ended.stdout


@functools.cache
def four_stages() -> tuple[list[float], list[dict[str, Any]], str]:
    """Return the script's losses, the events of the last step's trace, and the output."""
    with TemporaryDirectory(prefix="test-pipeline-") as directory:
        losses, trace = Path(directory) / "losses.json", Path(directory) / "trace.json"
        out = ("--losses-out", str(losses), "--trace", str(trace))
        printed = start(str(SCRIPT), "--stages", "4", "--steps", str(STEPS), *out)
        return json.loads(losses.read_text()), json.loads(trace.read_text())["traceEvents"], printed


@functools.cache
def fewer_stages() -> dict[str, list[float]]:
    found: dict[str, list[float]] = json.loads(start("-c", FEWER, str(STEPS), "1", "2").splitlines()[-1])
    return found


@functools.cache
def one_function() -> list[float]:
    """Return the losses of the model as one SPMD function on stock JAX."""
    with jax.enable_x64(False):
        return pipeline.train(pipeline.Config(), Namespace(stages=1, spmd=True, steps=STEPS, trace=None))


# The suite has losses of pipelines in `tests/end_to_end/pipelines`.
@pytest.mark.thorough
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_losses_of_a_pipeline_are_those_of_one_spmd_function_within_rounding(stages: int):
    losses = four_stages()[0] if stages == 4 else fewer_stages()[str(stages)]
    assert losses == pytest.approx(one_function(), rel=1e-5)
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.thorough
def test_a_step_runs_all_of_its_nodes_and_prints_how_many_stages_computed_at_a_time():
    _, events, printed = four_stages()
    calls = [event for event in events if event.get("cat") == "call"]
    # Forward, backward and sums of 8 micro-batches, and updates. The last stage runs forward and backward in one call.
    assert {island: sum(c["args"]["nodes"] for c in calls if c["pid"] == island) for island in range(4)} == {
        0: 24,
        1: 24,
        2: 24,
        3: 16,
    }
    at_a_time = float(re.search(r"([0-9.]+) stages computed at a time", printed).group(1))
    assert at_a_time == pytest.approx(sum(call["dur"] for call in calls) / covered(calls), abs=0.02)


def covered(calls: list[dict[str, float]]) -> float:
    """Return the microseconds in which at least one call was running."""
    total, until = 0.0, 0.0
    for call in sorted(calls, key=lambda each: each["ts"]):
        end = call["ts"] + call["dur"]
        total += max(0.0, end - max(call["ts"], until))
        until = max(until, end)
    return total


PASS = 0.01  # seconds of a stage per micro-batch, forward or backward
STAGES, MICRO_BATCHES = 3, 8


def traced_step() -> Any:
    """Return the program of the example's step, and the names of its functions."""
    devices = np.array(jax.devices()[: 2 * STAGES]).reshape(STAGES, 2)
    optimizer = optax.sgd(1e-3)
    config = pipeline.Config(16, STAGES, heads=2, seq=16, batch=2 * MICRO_BATCHES, microbatches=MICRO_BATCHES)
    meshes = [Mesh(each, ("data",)) for each in devices]
    stages = [pipeline.Stage(mesh, config.heads, optimizer, config.microbatches) for mesh in meshes]
    states = [
        (params, stage.init(params))
        for stage, part in zip(stages, pipeline.cut(pipeline.first_params(config), STAGES), strict=True)
        for params in [jax.device_put(part, stage.whole)]
    ]
    ((tokens, targets),) = pipeline.batches(config, 1)
    parts = [list(np.split(each, MICRO_BATCHES)) for each in (tokens, targets)]
    built = pipeline.make_step(stages).lower(states, *parts)._built
    for function in built.functions:
        function.compiled()  # its threads have completed their work
    return built.program, [function.call.name for function in built.functions]


def test_the_stages_of_a_step_overlap_as_far_as_they_can():
    """Run the example's own program on null devices in virtual time: stage s has micro-batch m while s + 1 has m - 1.

    As in GPipe, all forward passes precede all backward passes.
    """
    step, names = traced_step()
    cluster = VirtualCluster(f"{STAGES}x1x2")
    client = cluster.client()
    at = dict(enumerate(client.devices))

    def here(spec: ArraySpec) -> ArraySpec:
        moved = msgspec.structs.replace(spec.sharding, devices=tuple(at[device] for device in spec.sharding.devices))
        return msgspec.structs.replace(spec, sharding=moved)

    def shard(spec: ArraySpec) -> ShardType:
        return spec.dtype, shard_shape(spec.sharding, spec.shape, 0)

    compiled: dict[Any, int] = {}

    def function(name: str, call: Call, takes: list[ArraySpec]) -> int:
        seconds = PASS if name in ("run_layers", "backward", "first_backward", "loss_of") else 0.0
        null = NullProgram(name, seconds, tuple(map(shard, takes)), tuple(map(shard, call.outputs)), call.donated)
        if (null, call.devices) not in compiled:
            compiled[null, call.devices] = cluster.run(client.compile(null, call.devices))
        return compiled[null, call.devices]

    values, nodes = [here(spec) for spec in step.arguments], list[Any]()
    for node in step.nodes:
        node = msgspec.structs.replace(node, outputs=tuple(map(here, node.outputs)))
        if isinstance(node, Call):
            node = msgspec.structs.replace(node, devices=tuple(at[device] for device in node.devices))
            number = function(names[node.function], node, [values[i] for i in node.inputs])
            node = msgspec.structs.replace(node, function=number)
        nodes.append(node)
        values += node.outputs
    makes = []
    for spec in values[: len(step.arguments)]:
        make = Call(0, (), (spec,), spec.sharding.devices)
        makes.append(msgspec.structs.replace(make, function=function("make", make, [])))
    arguments = client.register(Program("arguments", (), tuple(makes), tuple(range(len(makes)))))
    moved = msgspec.structs.replace(step, arguments=tuple(values[: len(makes)]), nodes=tuple(nodes))
    number = client.register(moved)

    async def run_step() -> float:
        made = await client.launch(arguments, (), len(makes))
        await client.wait(made)
        started = cluster.now()
        return await client.when_ready(await client.launch(number, made, len(step.results))) - started

    seconds = cluster.run(run_step())
    passes = sum(PASS for node in step.nodes if isinstance(node, Call) and "backward" in names[node.function])
    assert passes == pytest.approx((STAGES - 1) * MICRO_BATCHES * PASS)
    # The last but one stage is the busiest: it starts when it receives the first micro-batch, runs both passes of all
    # of them, and sends the last one back towards the first stage.
    ideal = (STAGES - 2 + 2 * MICRO_BATCHES + STAGES - 2) * PASS
    one_after_another = (2 * STAGES - 1) * MICRO_BATCHES * PASS
    assert ideal <= seconds <= 1.05 * ideal < one_after_another / 2
