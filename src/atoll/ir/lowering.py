"""Lowering of a program on virtual devices to gangs, and one plan per host. Pure.

The stages are those of section 4.2 of the paper: checks, passes that return simpler programs, placement on physical
devices, and the cut into plans, which makes transfers explicit. The docstring of each stage specifies its input, its
guarantees and its errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pkgutil import resolve_name

from atoll.cluster.locations import Placement
from atoll.errors import invalid
from atoll.ir.cut import cut
from atoll.ir.node_types import check_types_in_steps
from atoll.ir.passes import PASSES
from atoll.ir.place import place
from atoll.ir.plan import Lowered
from atoll.ir.program import Call, Program, check_node, check_results
from atoll.ir.steps import Steps, finish, freed

_PASSES: tuple[Callable[[Program], Steps[Program]], ...] = tuple(map(resolve_name, PASSES))


def lower(program: Program, placement: Placement, functions: Mapping[int, str]) -> Lowered:
    """Run all steps of `lower_in_steps`."""
    return finish(lower_in_steps(program, placement, functions))


def lower_in_steps(program: Program, placement: Placement, functions: Mapping[int, str]) -> Steps[Lowered]:
    """Lower `program` to gangs and plans. `functions` contains the workers' names of the session's functions.

    Raises INVALID_ARGUMENT or UNIMPLEMENTED if the program cannot run.
    """
    defined = len(program.arguments)
    for node in program.nodes:
        defined = check_node(program.name, node, defined, program.feeds)
        yield
    check_results(program, defined)
    yield from check_types_in_steps(program)
    rewritten = program
    for each in _PASSES:
        nodes = list(rewritten.nodes)
        rewritten = yield from each(rewritten)
        yield from freed(nodes)
    placed = yield from place(rewritten, placement)
    for node in program.nodes:
        if isinstance(node, Call) and node.function not in functions:
            raise invalid(f"{program.name!r} calls function {node.function}, which is not registered")
        yield
    lowered = yield from cut(placed, functions)
    nodes, values = list(rewritten.nodes), placed.values
    del rewritten, placed
    yield from freed(nodes, values)
    return lowered
