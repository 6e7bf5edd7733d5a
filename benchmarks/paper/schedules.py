"""A training step of a pipeline schedule on null devices: the nodes that `atoll.pipeline` makes of it, in its order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.devices.null.program import NullProgram
from atoll.ir.program import Node
from atoll.ir.types import ShardType
from atoll.pipelines.entries import Entry, Kind, Times
from atoll.pipelines.order import Action, Move, order
from atoll.pipelines.schedule import Schedule
from atoll.session.bare import BareClient, call, program, sharded, transfer
from benchmarks.paper.training import Training

_VALUE: ShardType = ("uint8", (4,))


@dataclass(frozen=True)
class Sizes:
    """Seconds of one unit of `Times`, and bytes of what goes from stage to stage."""

    unit: float
    activation_bytes: int


async def make_training(
    client: BareClient, groups: Sequence[Sequence[int]], schedule: Schedule, times: Times, sizes: Sizes
) -> Training:
    """Compiles the functions and registers the step; stage i is on `groups[i]`. All parts are a chain."""
    builder = _Builder(client, groups, schedule, times, sizes)
    return await builder.build(order(schedule, {part: [part + 1] for part in range(schedule.parts - 1)}, times))


class _Builder:
    """An entry takes what its stage's last one gave, which stands for what a stage keeps, and what was sent to it."""

    def __init__(
        self, client: BareClient, groups: Sequence[Sequence[int]], schedule: Schedule, times: Times, sizes: Sizes
    ) -> None:
        self._client = client
        self._groups = groups
        self._schedule = schedule
        self._times = times
        self._sizes = sizes
        self._activations: ShardType = ("uint8", (sizes.activation_bytes,))
        self._stage = {part: schedule.stage_of(part) for part in range(schedule.parts)}
        self._functions: dict[tuple[int, float, int, int], int] = {}
        self._nodes: list[Node] = []
        self._values = schedule.stages
        self._kept = list(range(schedule.stages))  # at first a stage's weights
        self._sent: dict[tuple[int, int, bool], int] = {}  # by the part that takes it, micro-batch, and direction

    async def build(self, actions: Sequence[Action]) -> Training:
        stages = self._schedule.stages
        for action in actions:
            if isinstance(action, Move):
                key = action.target, action.microbatch, action.gradients
                group = self._groups[self._stage[action.target]]
                spec = sharded(group, self._sizes.activation_bytes)
                self._sent[key] = self._add(transfer(self._sent[key], spec), 1)
            else:
                await self._run(action.entry, action.whole)
        weights = [sharded(group) for group in self._groups]
        results = []
        for stage in range(stages):
            update = await self._function(stage, 0.0, 1)  # gives a value to send, too, which is the step's loss
            outputs = (sharded(self._groups[stage]), sharded(self._groups[stage], self._sizes.activation_bytes))
            results.append(self._add(call(update, (self._kept[stage],), outputs, self._groups[stage]), 2))
        first = []
        for stage, group in enumerate(self._groups):
            null = NullProgram("first", 0.0, (), (_VALUE,))
            first.append(call(await self._client.compile(null, group), (), (weights[stage],), group))
        loss = results[0] + 1
        return Training(
            self._client.register(program("first weights", (), first, range(stages))),
            self._client.register(program("step", weights, self._nodes, (*results, loss))),
            stages,
            1 + len(self._nodes) // 128,
        )

    async def _run(self, entry: Entry, whole: bool) -> None:
        part, microbatch, stage = entry.part, entry.microbatch, self._stage[entry.part]
        seconds = self._times.of(entry)
        if whole:
            seconds += self._times.backward
        gradients = entry.kind is not Kind.FORWARD
        taken = []
        for key in ((part, microbatch, False), (part, microbatch, True)):
            if key in self._sent and (key[2] == gradients or whole):
                taken.append(self._sent.pop(key))
        last, first = self._schedule.parts - 1, 0
        targets = []
        if (entry.kind is Kind.FORWARD and not whole) and part < last:
            targets = [(part + 1, microbatch, False)]
        elif (gradients or whole) and entry.kind is not Kind.WEIGHTS and part > first:
            targets = [(part - 1, microbatch, True)]
        function = await self._function(stage, seconds * self._sizes.unit, len(targets), len(taken))
        group = self._groups[stage]
        outputs = [sharded(group), *[sharded(group, self._sizes.activation_bytes)] * len(targets)]
        made = self._add(call(function, (self._kept[stage], *taken), outputs, group), len(outputs))
        self._kept[stage] = made
        for i, key in enumerate(targets):
            self._sent[key] = made + 1 + i

    async def _function(self, stage: int, seconds: float, sent: int, taken: int = 0) -> int:
        key = stage, seconds, sent, taken
        if key not in self._functions:
            takes = (_VALUE, *(self._activations,) * taken)
            gives = (_VALUE, *(self._activations,) * sent)
            null = NullProgram(f"{'entry' if seconds else 'update'} of stage {stage}", seconds, takes, gives)
            self._functions[key] = await self._client.compile(null, self._groups[stage])
        return self._functions[key]

    def _add(self, node: Node, outputs: int) -> int:
        """The first of its values."""
        self._nodes.append(node)
        self._values += outputs
        return self._values - outputs
