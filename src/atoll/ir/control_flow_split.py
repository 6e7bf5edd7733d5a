"""Splits programs with control flow nodes into launches.

Each control flow node (`Switch` or `Loop`; the paper calls them irregular, section 4.5) is a launch of several
programs. All other nodes that depend on the same control flow nodes form one launch. Therefore a launch only waits for
the control flow nodes that it depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from atoll.errors import invalid
from atoll.ir.program import (
    Loop,
    Mapping,
    Node,
    Program,
    Rearrange,
    Report,
    Switch,
    consumes,
    output_count,
    preserving,
    value_specs,
)
from atoll.ir.types import ArraySpec

# A control flow node adds one or two launches, and a session's window has several hundred credits.
MAX_CONTROL_FLOW = 128
MAX_NODES = 1 << 14


class SwitchPrograms(msgspec.Struct, frozen=True):
    """`index` reports which of the branches to run. All branches have the same argument and result types."""

    index: Program
    branches: tuple[Program, ...]


class LoopPrograms(msgspec.Struct, frozen=True):
    """The programs of a loop.

    `first` reports whether to run the body. The first iteration runs `begins`, and the others run `following`: they
    return the next carried arrays, and report whether to continue. All three take the constants and the carried arrays.
    Only `following` may consume carried arrays. `last` makes the results from the carried arrays.
    """

    constants: int
    first: Program
    begins: Program
    following: Program
    last: Program


class SplitLaunch(msgspec.Struct, frozen=True):
    """One of the launches of a program. Its arguments and results are values of the program."""

    programs: Program | SwitchPrograms | LoopPrograms
    arguments: tuple[int, ...]
    results: tuple[int, ...]


def has_control_flow(program: Program) -> bool:
    return any(isinstance(node, Switch | Loop) for node in program.nodes)


def split(program: Program) -> tuple[SplitLaunch, ...]:
    """Return the program's launches in topological order. Raises INVALID_ARGUMENT if there are too many."""
    specs = value_specs(program)
    depends: list[frozenset[int]] = [frozenset()] * len(program.arguments)  # by value: the nodes that it depends on
    readers: list[frozenset[int]] = [frozenset()] * len(specs)  # by value: the nodes that its readers depend on
    groups: dict[frozenset[int], list[tuple[Node, int]]] = {}  # with the first output of each node
    pieces: list[tuple[int, int, SplitLaunch]] = []
    nodes = 0
    for number, node in enumerate(program.nodes):
        needed = frozenset[int]().union(*(depends[value] for value in node.inputs))
        needed = needed.union(*(readers[value] for value in consumes(node)))  # readers run before the consumer
        first = len(depends)
        given = needed
        if isinstance(node, Switch | Loop):
            results = tuple(range(first, first + len(node.outputs)))
            programs = _switch(node, specs, program.name) if isinstance(node, Switch) else _loop(node, program.name)
            pieces.append((len(needed), 1, SplitLaunch(programs, node.inputs, results)))
            nodes += sum(len(each.nodes) for each in parts_of(programs))
            given = needed | {number}
        else:
            groups.setdefault(needed, []).append((node, first))
            nodes += 1
        for value in node.inputs:
            readers[value] |= given
        depends.extend([given] * output_count(node))
    if len(pieces) > MAX_CONTROL_FLOW or nodes > MAX_NODES:
        raise invalid(
            f"program {program.name!r} has {len(pieces)} control flow nodes and {nodes} nodes in total; at most "
            f"{MAX_CONTROL_FLOW} and {MAX_NODES} are allowed in a program with control flow nodes"
        )
    wanted = set(program.results)
    for _, _, piece in pieces:
        wanted.update(piece.arguments)
    for needed, group in groups.items():
        for node, _ in group:
            wanted.update(value for value in node.inputs if depends[value] != needed)
    for needed, group in groups.items():
        pieces.append((len(needed), 0, _straight(program.name, group, specs, wanted)))
    pieces.sort(key=lambda each: each[:2])
    return tuple(piece for _, _, piece in pieces)


def parts_of(programs: Program | SwitchPrograms | LoopPrograms) -> tuple[Program, ...]:
    """Return all programs that a launch may run, in the order of their registration."""
    if isinstance(programs, SwitchPrograms):
        return (programs.index, *programs.branches)
    if isinstance(programs, LoopPrograms):
        return programs.first, programs.begins, programs.following, programs.last
    return (programs,)


def _straight(
    name: str, group: Sequence[tuple[Node, int]], specs: Sequence[ArraySpec | None], wanted: set[int]
) -> SplitLaunch:
    made = {value for node, first in group for value in range(first, first + output_count(node))}
    arguments = tuple(dict.fromkeys(value for node, _ in group for value in node.inputs if value not in made))
    numbers = {value: i for i, value in enumerate(arguments)}
    nodes = []
    for node, first in group:
        nodes.append(_renumbered(node, numbers.__getitem__))
        for value in range(first, first + output_count(node)):
            numbers[value] = len(numbers)
    results = tuple(sorted(made & wanted))
    program = Program(name, _arrays(specs, arguments), tuple(nodes), tuple(numbers[value] for value in results))
    return SplitLaunch(program, arguments, results)


def _switch(node: Switch, specs: Sequence[ArraySpec | None], name: str) -> SwitchPrograms:
    index = Program(f"{name} (index)", _arrays(specs, node.inputs[:1]), (Report((0,)),), ())
    return SwitchPrograms(index, tuple(_distinct(branch) for branch in node.branches))


def _loop(node: Loop, name: str) -> LoopPrograms:
    body, condition = _distinct(node.body), node.condition
    carried = range(node.constants, len(body.arguments))
    nodes = list(body.nodes)
    defined = len(body.arguments) + sum(map(output_count, nodes))
    # The condition takes the body's results as the carried arrays.
    numbers = [*range(node.constants), *body.results]
    for each in condition.nodes:
        nodes.append(_renumbered(each, numbers.__getitem__))
        numbers.extend(range(defined, defined + output_count(each)))
        defined += output_count(each)
    (continues,) = condition.results
    nodes.append(Report((numbers[continues],)))
    first = msgspec.structs.replace(condition, nodes=(*condition.nodes, Report((continues,))), results=())
    following = msgspec.structs.replace(body, nodes=tuple(nodes))
    begins = msgspec.structs.replace(body, nodes=tuple(preserving(each, frozenset(carried)) for each in nodes))
    specs = tuple(body.arguments[i] for i in carried)
    last = _distinct(Program(f"{name} (results)", specs, (), tuple(range(len(specs)))))
    return LoopPrograms(node.constants, first, begins, following, last)


def _distinct(program: Program) -> Program:
    """Return the program with views in the place of results that are arguments, or that repeat."""
    specs = value_specs(program)
    nodes, results = list(program.nodes), []
    defined = len(specs)
    seen: set[int] = set()
    for value in program.results:
        spec = specs[value]
        if (value < len(program.arguments) or value in seen) and spec is not None:
            whole = (0, len(spec.sharding.devices), 1)
            nodes.append(Rearrange((value,), (spec,), (Mapping(0, 0, whole, whole),)))
            value, defined = defined, defined + 1
        seen.add(value)
        results.append(value)
    return msgspec.structs.replace(program, nodes=tuple(nodes), results=tuple(results))


def _renumbered(node: Node, number_of: Callable[[int], int]) -> Node:
    return msgspec.structs.replace(node, inputs=tuple(map(number_of, node.inputs)))


def _arrays(specs: Sequence[ArraySpec | None], values: Iterable[int]) -> tuple[ArraySpec, ...]:
    return tuple(spec for value in values if (spec := specs[value]) is not None)
