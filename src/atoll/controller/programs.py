"""Registered programs: lowered once, launched many times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from atoll.errors import invalid
from atoll.ir.lowering import Placement, lower
from atoll.ir.plan import Plan
from atoll.ir.program import Call, Program


@dataclass(slots=True)
class RunTemplate:
    """A plan's part in a launch: which handles it takes and gives, by their place in the launch's list of handles."""

    host: int
    plan: int
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    awaited: tuple[int, ...]


@dataclass(slots=True)
class RegisteredProgram:
    """A program cut into gangs. A launch's handles are its arguments, results and temporaries, in this order."""

    name: str
    arguments: int
    results: int
    feeds: int  # the client's
    all_feeds: int  # and those between hosts
    temporaries: int
    gangs: list[tuple[int, tuple[RunTemplate, ...]]]  # (island, runs)
    donated: frozenset[int]
    result_hosts: tuple[tuple[int, ...], ...]
    result_bytes: tuple[int, ...]
    functions: tuple[str, ...]
    # Gangs that have not started still need the plans, also of a program that its session has released.
    waiting: int = 0
    released: bool = False


def register(
    body: Program,
    placement: Placement,
    functions: Mapping[int, str],
    island_of: Callable[[int], int],
    keep_plan: Callable[[int, Plan], int],
) -> RegisteredProgram:
    """Lowers a program; `keep_plan(host, plan)` sends a plan to its host and gives its number.

    Raises INVALID_ARGUMENT or UNIMPLEMENTED where the program cannot run.
    """
    lowered = lower(body, placement, functions)
    count = len(body.arguments)
    if len(set(body.results)) != len(body.results) or any(value < count for value in body.results):
        raise invalid(f"program {body.name!r} returns a value twice, or an argument")
    slots = {value: value for value in range(count)}
    slots.update((value, count + i) for i, value in enumerate(body.results))
    gangs: list[tuple[int, tuple[RunTemplate, ...]]] = []
    for segment in lowered.segments:
        islands: dict[int, list[RunTemplate]] = {}
        for host, plan in segment.items():
            for value in (*plan.arguments, *plan.results):
                slots.setdefault(value, len(slots))
            run = RunTemplate(
                host,
                keep_plan(host, plan),
                tuple(slots[value] for value in plan.arguments),
                tuple(slots[value] for value in plan.results),
                plan.awaited,
            )
            islands.setdefault(island_of(host), []).append(run)
        gangs.extend((island, tuple(runs)) for island, runs in islands.items())
    return RegisteredProgram(
        body.name,
        count,
        len(body.results),
        body.feeds,
        lowered.feeds,
        len(slots) - count - len(body.results),
        gangs,
        lowered.donated,
        lowered.result_hosts,
        lowered.result_bytes,
        tuple(functions[node.function] for node in body.nodes if isinstance(node, Call)),
    )
