"""Builds a program from a recording: numbers the values, drops unused nodes, and donates arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from atoll.client import jax_internals as internals
from atoll.client.plugin_programs import is_atoll
from atoll.ir.program import Call, Loop, Node, Program, Route, Switch, Transfer, Unroute
from atoll.ir.types import ArraySpec
from atoll.programs.program_functions import ProgramFunction
from atoll.programs.recording import CallNode, ControlFlowNode, RecordedNode, Recording, Region, RowsNode, TransferNode
from atoll.programs.values import Value

internals.leave_out_of_tracebacks(__file__)


@dataclass(frozen=True)
class Built:
    """A program with its functions, by number, and the relation of its arguments and results to the user's.

    `arguments` and `made` are the values that the program takes and returns. `given` and `results` are the user's.
    """

    program: Program
    functions: tuple[ProgramFunction, ...]
    arguments: tuple[Value, ...]
    given: tuple[Value, ...]
    made: tuple[Value, ...]
    results: tuple[Result, ...]
    has_effects: bool

    @property
    def plain(self) -> bool:
        """Whether the user's results are those of the program."""
        return self.results == tuple(Result("made", i) for i in range(len(self.made)))

    def returned(self, made: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        """Return the user's results, given the program's results and the user's flat arguments."""
        results = []
        for each in self.results:
            if each.source == "made":
                results.append(made[each.number])
            else:
                results.append(_unchanged(leaves[each.number], each) if each.source else each.constant)
        return results

    def described(self) -> list[Any]:
        """Return a value or a constant array for each of the user's results."""
        values = {"made": self.made, "given": self.given}
        return [values[each.source][each.number] if each.source else each.constant for each in self.results]


@dataclass(frozen=True)
class Result:
    """The source of one of the user's results: "made" by the program, "given" as an argument, or "" for a constant.

    If the function has put a given argument onto another sharding, `sharding` is set.
    """

    source: str
    number: int = 0
    constant: Any = None
    sharding: Any = None


def _unchanged(leaf: Any, result: Result) -> Any:
    if result.sharding is not None:
        return jax.device_put(leaf, result.sharding)
    return leaf if hasattr(leaf, "sharding") else jax.numpy.asarray(leaf)


def build(recording: Recording, donated: frozenset[int]) -> Built:
    """Build the program of a recording. `donated` has the positions of the arguments that the user donates.

    Wait for XLA if it chooses a sharding. Raise ProgramError.
    """
    nodes = needed(recording)
    _donate(recording, nodes, [recording.arguments[i].root for i in sorted(donated)])
    made = {id(value.root) for node in nodes for value in node.outputs}
    used = list({id(v.root): v.root for node in nodes for v in node.inputs if id(v.root) not in made}.values())
    counts = Counter(len(value.spec.sharding.devices) for value in used)
    arguments = sorted(used, key=lambda value: (counts[n := len(value.spec.sharding.devices)], n))
    numbers = {id(value): i for i, value in enumerate(arguments)}
    compiled: dict[ProgramFunction, int] = {}
    body = _numbered(nodes, numbers, compiled, len(arguments))
    leaves = {id(value.root): i for i, value in enumerate(recording.arguments)}
    returned: dict[int, Value] = {}
    results = []
    for each in recording.results:
        if not isinstance(each, Value):
            results.append(Result("", constant=each))
        elif id(each.root) in leaves:
            put = each.view_of is not None
            results.append(Result("given", leaves[id(each.root)], sharding=each.sharding if put else None))
        elif each.root.constant is not None:
            results.append(Result("", constant=each.root.constant))
        else:
            returned.setdefault(id(each.root), each)
            results.append(Result("made", list(returned).index(id(each.root))))
    program = Program(
        recording.name, tuple(value.spec for value in arguments), body, tuple(numbers[root] for root in returned)
    )
    return Built(
        program,
        tuple(compiled),
        tuple(arguments),
        tuple(recording.arguments),
        tuple(returned.values()),
        tuple(results),
        any(isinstance(node, CallNode) and node.has_effects for node in nodes),
    )


def _numbered(
    nodes: Sequence[RecordedNode], numbers: dict[int, int], functions: dict[ProgramFunction, int], defined: int
) -> tuple[Node, ...]:
    """Return the program's nodes. Add new values to `numbers`, from `defined` on, and new functions to `functions`."""
    body: list[Node] = []
    for node in nodes:
        inputs = tuple(numbers[id(value.root)] for value in node.inputs)
        outputs = tuple(value.spec for value in node.outputs)
        for value in node.outputs:
            numbers[id(value)] = defined
            defined += 1
        if isinstance(node, TransferNode):
            body.append(Transfer(inputs, outputs, node.donated, reshard=True))
        elif isinstance(node, CallNode):
            number = functions.setdefault(node.function, len(functions))
            devices = tuple(device.id for device in node.function.devices)
            body.append(Call(number, inputs, outputs, devices, node.donated))
        elif isinstance(node, RowsNode) and node.is_back:
            (output,) = outputs
            body.append(Unroute(inputs, (output,), node.groups))
        elif isinstance(node, RowsNode):
            body.append(Route(inputs, outputs, node.groups))
        elif node.constants is None:
            specs = tuple(value.spec for value in node.inputs[1:])
            branches = tuple(_part(part, specs, functions) for part in node.parts)
            body.append(Switch(inputs, outputs, branches))
        else:
            specs = tuple(value.spec for value in node.inputs)
            condition, repeated = (_part(part, specs, functions) for part in node.parts)
            body.append(Loop(inputs, outputs, node.constants, condition, repeated))
    return tuple(body)


def _part(part: Region, arguments: tuple[ArraySpec, ...], functions: dict[ProgramFunction, int]) -> Program:
    numbers = dict(part.taken)
    body = _numbered(part.nodes, numbers, functions, len(arguments))
    return Program(part.name, arguments, body, tuple(numbers[id(value.root)] for value in part.results))


def needed(recording: Recording) -> list[RecordedNode]:
    """Return the nodes on which a result depends, that have effects, or that consume an argument or a constant."""
    wanted = {id(each.root) for each in recording.results if isinstance(each, Value)}
    users = {id(value.root) for value in recording.arguments}
    nodes = []
    for node in reversed(recording.nodes):
        consumes = node.inputs if isinstance(node, TransferNode) and node.donated else []
        has_effects = False
        if isinstance(node, CallNode):
            consumes = [node.inputs[i] for i in node.donated]
            has_effects = node.has_effects
        if (
            has_effects
            or any(id(value.root) in wanted for value in node.outputs)
            or any(id(value.root) in users or value.root.constant is not None for value in consumes)
        ):
            wanted.update(id(value.root) for value in node.inputs)
            nodes.append(node)
    return nodes[::-1]


def _donate(recording: Recording, nodes: list[RecordedNode], arguments: Sequence[Value]) -> None:
    """Let the last node that uses a donated argument consume it, unless the argument itself is a result."""
    returned = {id(each.root) for each in recording.results if isinstance(each, Value)}
    more: dict[CallNode, set[int]] = {}
    for value in arguments:
        users = [node for node in nodes if any(each.root is value for each in node.inputs)]
        if value.donated or not users or id(value) in returned:
            continue
        last = users[-1]
        positions = {i for i, each in enumerate(last.inputs) if each.root is value}
        if len(positions) > 1 or isinstance(last, ControlFlowNode | RowsNode):
            continue
        if isinstance(last, TransferNode):
            last.donated = True
        elif isinstance(last, CallNode) and last.reshards:  # XLA would not free memory that it cannot reuse
            nodes[nodes.index(last)] = TransferNode(last.inputs, last.outputs, True, last.line)
        else:
            more.setdefault(last, set()).update(positions)
    for node, consumed in more.items():
        node.donated = tuple(sorted({*node.donated, *consumed}))
        node.function = recording.functions.donating(node.function, consumed)


def devices(built: Built) -> set[Any]:
    """Return all devices on which the program stores or computes anything."""
    values = [*built.arguments, *built.made]
    found = {device for value in values for device in internals.devices_of(value.sharding) or ()}
    return found.union(*(function.devices for function in built.functions))


def on_atoll(built: Built) -> bool:
    return all(is_atoll(device.client) for device in devices(built))
