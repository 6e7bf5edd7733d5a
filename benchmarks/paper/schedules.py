"""A training step of a pipeline schedule on null devices: the nodes of `atoll.pipeline`, in its order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atoll.devices.null.null_program import NullProgram
from atoll.ir.program import Node
from atoll.ir.types import ShardType
from atoll.pipelines.entries import Kind, Times
from atoll.pipelines.order import Action, Move, Run, order
from atoll.pipelines.schedule import Schedule
from atoll.session.bare import BareClient, call, program, sharded, transfer
from benchmarks.paper.training import Training


@dataclass(frozen=True)
class Sizes:
    """Seconds of one unit of `Times`; bytes that go from stage to stage, and that forward keeps for backward, on each
    device; seconds of the update."""

    unit: float
    activation_bytes: int
    kept_bytes: int = 4
    update: float = 0.0


async def make_training(
    client: BareClient, groups: Sequence[Sequence[int]], schedule: Schedule, times: Times, sizes: Sizes
) -> Training:
    """Compiles the functions and registers the step; stage i is on `groups[i]`. All parts are a chain."""
    builder = _Builder(client, groups, schedule, times, sizes)
    return await builder.build(order(schedule, {part: [part + 1] for part in range(schedule.parts - 1)}, times))


class _Builder:
    """Nodes as those of `atoll.pipelines.step`: stages add up gradients, and keep something of each forward entry."""

    def __init__(
        self, client: BareClient, groups: Sequence[Sequence[int]], schedule: Schedule, times: Times, sizes: Sizes
    ) -> None:
        self._client = client
        self._groups = groups
        self._schedule = schedule
        self._times = times
        self._unit = sizes.unit
        self._update = sizes.update / sizes.unit
        self._stage = {part: schedule.stage_of(part) for part in range(schedule.parts)}
        self._small, self._activations, self._kept_bytes = 4, sizes.activation_bytes, sizes.kept_bytes
        self._functions: dict[Any, int] = {}
        self._nodes: list[Node] = []
        self._values: list[int] = [self._small] * schedule.stages  # bytes of each value: at first the weights
        self._sums: dict[int, int] = {}  # by stage
        self._kept: dict[tuple[int, int], int] = {}  # by part and micro-batch
        self._between: dict[tuple[int, int], int] = {}
        self._sent: dict[tuple[int, int, bool], int] = {}  # by the part that takes it, micro-batch, and direction

    async def build(self, actions: Sequence[Action]) -> Training:
        stages = range(self._schedule.stages)
        for stage in stages:
            (self._sums[stage],) = await self._call("zeros", stage, 0.0, [stage], [self._small])
        for action in actions:
            if isinstance(action, Move):
                key = action.target, action.microbatch, action.gradients
                spec = sharded(self._groups[self._stage[action.target]], self._activations)
                self._sent[key] = self._add(transfer(self._sent[key], spec), [self._activations])[0]
            else:
                await self._run(action)
        weights, losses = [], []
        for stage in stages:
            inputs, outputs = [stage, self._sums[stage]], [self._small] * 2
            made = await self._call("update", stage, self._update, inputs, outputs, (0, 1))
            weights.append(made[0])
            losses.append(made[1])
        specs = [sharded(group) for group in self._groups]
        null = NullProgram("first", 0.0, (), (_vector(self._small),))
        first = [
            call(await self._client.compile(null, group), (), (spec,), group)
            for group, spec in zip(self._groups, specs, strict=True)
        ]
        return Training(
            self._client.register(program("first weights", (), first, stages)),
            self._client.register(program("step", specs, self._nodes, (*weights, losses[0]))),
            len(stages),
        )

    async def _run(self, run: Run) -> None:
        entry = run.entry
        part, microbatch, stage = entry.part, entry.microbatch, self._stage[entry.part]
        key = part, microbatch
        seconds = self._times.of(entry) + (self._times.backward if run.whole else 0.0)
        if entry.kind is Kind.FORWARD and not run.whole:
            targets = [(part + 1, microbatch, False)] if part < self._schedule.parts - 1 else []
            inputs, outputs = [stage, *self._received(part, microbatch, False)], [self._kept_bytes]
            self._kept[key], *sent = await self._call(
                "forward", stage, seconds, inputs, outputs + [self._activations] * len(targets)
            )
        elif entry.kind is Kind.WEIGHTS:
            targets, sent = [], list[int]()
            inputs = [self._sums[stage], self._kept.pop(key), self._between.pop(key)]
            (self._sums[stage],) = await self._call("weights", stage, seconds, inputs, [self._small], (0,))
        else:
            targets = [(part - 1, microbatch, True)] if part else []
            outputs = [self._small] + [self._activations] * len(targets)
            if entry.kind is Kind.INPUT:
                inputs = [self._kept[key], *self._received(part, microbatch, True)]
                self._between[key], *sent = await self._call("inputs", stage, seconds, inputs, outputs)
            else:
                kept = self._received(part, microbatch, False) if run.whole else [self._kept.pop(key)]
                inputs = [self._sums[stage], *kept, *self._received(part, microbatch, True)]
                self._sums[stage], *sent = await self._call("backward", stage, seconds, inputs, outputs, (0,))
        self._sent.update(zip(targets, sent, strict=True))

    def _received(self, part: int, microbatch: int, gradients: bool) -> list[int]:
        found = self._sent.pop((part, microbatch, gradients), None)
        return [] if found is None else [found]

    async def _call(
        self,
        name: str,
        stage: int,
        seconds: float,
        inputs: Sequence[int],
        outputs: Sequence[int],
        donated: tuple[int, ...] = (),
    ) -> list[int]:
        """A node of a function that takes these values and gives some of so many bytes, whose numbers it returns."""
        takes = tuple(_vector(self._values[value]) for value in inputs)
        null = NullProgram(name, seconds * self._unit, takes, tuple(map(_vector, outputs)), donated)
        group = self._groups[stage]
        if (stage, null) not in self._functions:
            self._functions[stage, null] = await self._client.compile(null, group)
        specs = [sharded(group, nbytes) for nbytes in outputs]
        return self._add(call(self._functions[stage, null], inputs, specs, group, donated), outputs)

    def _add(self, node: Node, outputs: Sequence[int]) -> list[int]:
        first = len(self._values)
        self._nodes.append(node)
        self._values += outputs
        return list(range(first, len(self._values)))


def _vector(nbytes: int) -> ShardType:
    return "uint8", (nbytes,)
