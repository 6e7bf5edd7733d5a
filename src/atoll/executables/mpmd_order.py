"""Orders the nodes of an MPMD program for hosts that run them one after another. Pure.

A client lists the calls of each mesh in the order of its schedule, and each copy soon after the call that makes the
value. A host runs its nodes in the order of the program, and nodes after a receive wait for it. So a copy is placed
where the sender has just made the value and the receiver needs it next. If there is no such place, the client's order
decides. The calls of a mesh keep their order.

A copy of several values would send all of them when the last one is made, so it is divided by the calls that make them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec.structs import replace

from atoll.errors import invalid
from atoll.ir.program import Call, Node, Program, Transfer, check, consumes
from atoll.ir.types import ArraySpec


def ordered(program: Program, host_of: Callable[[int], int]) -> Program:
    """Return a program of calls and transfers with the same results.

    `host_of` returns the host of a device, or raises INVALID_ARGUMENT. Raise INVALID_ARGUMENT for an invalid program.
    """
    check(program)
    if any(isinstance(node, Call) and not node.devices for node in program.nodes):
        raise invalid(f"program {program.name!r} calls a function on no devices")
    return _Ordering(program, host_of).run()


class _Step(msgspec.Struct, eq=False):
    """A node, or a part of a divided transfer. Values have the numbers of the given program."""

    number: int  # in the client's order
    node: Node
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    after: list[_Step] = msgspec.field(default_factory=list)  # the steps that it must follow
    queue: int | None = None  # of its mesh, if it is a call
    source: int | None = None  # the queue that sends, if it is a transfer of a call's values that another call reads
    receives: list[_Step] = msgspec.field(default_factory=list)  # the transfers that this call is the first to read
    is_done: bool = False

    def may_follow(self) -> bool:
        return all(each.is_done for each in self.after)


class _Ordering:
    def __init__(self, program: Program, host_of: Callable[[int], int]) -> None:
        self._program = program
        self._queues = _queues(program.nodes, host_of)
        self._steps: list[_Step] = []
        self._specs: dict[int, ArraySpec] = {}
        self._made: dict[int, _Step] = {}  # by value
        self._readers: dict[int, list[_Step]] = {}  # by value
        first = len(program.arguments)
        for node in program.nodes:
            outputs = tuple(range(first, first + len(node.outputs)))
            first += len(outputs)
            self._specs.update(zip(outputs, node.outputs, strict=True))
            for inputs, made in self._divided(node, outputs):
                self._add(node, inputs, made)
        for step in self._steps:
            self._find_reader(step)

    def _divided(self, node: Node, outputs: tuple[int, ...]) -> Sequence[tuple[Sequence[int], Sequence[int]]]:
        """Return (inputs, outputs) of a node; of a transfer, a pair for each step that makes its inputs."""
        if not isinstance(node, Transfer):
            return [(node.inputs, outputs)]
        parts: dict[_Step | None, tuple[list[int], list[int]]] = {}
        for value, output in zip(node.inputs, outputs, strict=True):
            inputs, made = parts.setdefault(self._made.get(value), ([], []))
            inputs.append(value)
            made.append(output)
        return list(parts.values())

    def _add(self, node: Node, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        step = _Step(len(self._steps), node, tuple(inputs), tuple(outputs))
        step.after = [self._made[value] for value in inputs if value in self._made]
        for value in set(consumes(node)).intersection(inputs):
            step.after += self._readers.get(value, ())
        for value in set(inputs):
            self._readers.setdefault(value, []).append(step)
        if isinstance(node, Call):
            step.queue = self._queues[node.devices[0]]
        self._steps.append(step)
        self._made.update(dict.fromkeys(outputs, step))

    def _find_reader(self, step: _Step) -> None:
        """Find the first call that reads the values of a transfer."""
        readers = [each for value in step.outputs for each in self._readers.get(value, ()) if each.queue is not None]
        if step.queue is None and readers:
            first = min(readers, key=lambda each: each.number)
            first.receives.append(step)
            maker = self._made.get(step.inputs[0])
            step.source = maker.queue if maker is not None and maker.queue != first.queue else None

    def run(self) -> Program:
        calls: list[list[_Step]] = [[] for _ in range(1 + max(self._queues.values(), default=-1))]
        for step in reversed(self._steps):
            if step.queue is not None:
                calls[step.queue].append(step)  # the next one is the last
        sends = [0] * len(calls)  # number of transfers that each mesh may send
        sent_by: dict[_Step, list[_Step]] = {}  # transfers by the call that makes their values
        for step in self._steps:
            if step.source is not None:
                sent_by.setdefault(self._made[step.inputs[0]], []).append(step)
        done: list[_Step] = []
        oldest = 0  # all steps before it are done
        while len(done) < len(self._steps):
            while self._steps[oldest].is_done:
                oldest += 1
            step = self._choose([line[-1] for line in calls if line], sends) or self._steps[oldest]
            step.is_done = True
            done.append(step)
            if step.queue is not None:
                calls[step.queue].pop()
                sends[step.queue] += len(sent_by.get(step, ()))
            elif step.source is not None:
                sends[step.source] -= 1
        return self._program_of(done)

    def _choose(self, calls: Sequence[_Step], sends: Sequence[int]) -> _Step | None:
        """Return the step that follows, given the next call of each mesh; None if only the client's order is left."""
        late: list[_Step] = []
        for call in calls:
            receives = [each for each in call.receives if not each.is_done]
            for step in receives or (call,):
                if not step.may_follow():
                    continue
                assert call.queue is not None
                if not sends[call.queue]:  # a mesh sends before it waits
                    return step
                late.append(step)
        return min(late, key=lambda each: each.number, default=None)

    def _program_of(self, steps: Sequence[_Step]) -> Program:
        numbers = {value: value for value in range(len(self._program.arguments))}
        nodes: list[Node] = []
        for step in steps:
            node = replace(step.node, inputs=tuple(numbers[value] for value in step.inputs))
            if isinstance(node, Transfer):
                node = replace(node, outputs=tuple(self._specs[value] for value in step.outputs))
            nodes.append(node)
            for value in step.outputs:
                numbers[value] = len(numbers)
        results = tuple(numbers[value] for value in self._program.results)
        return replace(self._program, nodes=tuple(nodes), results=results)


def _queues(nodes: Sequence[Node], host_of: Callable[[int], int]) -> dict[int, int]:
    """Return the number of the queue of each device. Meshes that share hosts share a queue."""
    parents: dict[int, int] = {}

    def root(host: int) -> int:
        while parents.setdefault(host, host) != host:
            host = parents[host]
        return host

    calls = [node for node in nodes if isinstance(node, Call)]
    for call in calls:
        first, *others = (root(host_of(device)) for device in call.devices)
        for each in others:
            parents[root(each)] = root(first)
    numbers: dict[int, int] = {}
    return {
        device: numbers.setdefault(root(host_of(device)), len(numbers)) for call in calls for device in call.devices
    }
