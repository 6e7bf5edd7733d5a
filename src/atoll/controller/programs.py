"""Registered programs: lowered once, launched many times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from atoll.controller.memory import total
from atoll.controller.scheduler import UNKNOWN_NS
from atoll.errors import invalid
from atoll.ir.lowering import Needs, Placement, lower
from atoll.ir.plan import Plan
from atoll.ir.program import Call, Program, value_specs
from atoll.ir.types import ArraySpec


@dataclass(slots=True)
class RunTemplate:
    """A plan's part in a launch: which handles it takes and gives, by their place in the launch's list of handles.

    `awaited` are the client's feeds that it takes, `incoming` those of other hosts.
    """

    host: int
    plan: int
    body: Plan
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    awaited: tuple[int, ...]
    incoming: tuple[int, ...]


@dataclass(slots=True)
class GangTemplate:
    """What a launch of the program does on one island. `estimate` is the time that this takes, as learnt from its runs.

    A gang that waits for other hosts teaches nothing: how long it takes is not its own doing.
    """

    island: int
    runs: tuple[RunTemplate, ...]
    estimate: int = UNKNOWN_NS
    waits: bool = False
    together: bool = False  # its hosts compute something together: on none of them it ends without the others
    # What it makes here: (which result, its bytes, the arguments whose memory it shares instead).
    makes: tuple[tuple[int, Needs, frozenset[int]], ...] = ()
    scratch: Needs = ()  # while it runs

    def learn(self, nanoseconds: int) -> None:
        if self.waits:
            return
        # Slow to forget: the first run often takes longer, and one that was disturbed should not count for much.
        self.estimate += (nanoseconds - self.estimate) // 4


@dataclass(slots=True)
class RegisteredProgram:
    """A program cut into gangs, one an island. A launch's handles are its arguments and results, in this order."""

    name: str
    arguments: int
    results: int
    feeds: int  # the client's
    all_feeds: int  # and those between hosts
    gangs: tuple[GangTemplate, ...]
    donated: frozenset[int]
    result_hosts: tuple[tuple[int, ...], ...]
    result_bytes: tuple[int, ...]
    result_specs: tuple[ArraySpec | None, ...]
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
    scratch_of: Callable[[str], int],
) -> RegisteredProgram:
    """Lowers a program; `keep_plan(host, plan)` sends a plan to its host and gives its number.

    `scratch_of(function)` is what the workers' function of that name needs on each of its devices while it runs.

    Raises INVALID_ARGUMENT or UNIMPLEMENTED where the program cannot run.
    """
    lowered = lower(body, placement, functions)
    count = len(body.arguments)
    if len(set(body.results)) != len(body.results) or any(value < count for value in body.results):
        raise invalid(f"program {body.name!r} returns a value twice, or an argument")
    slots = {value: value for value in range(count)}
    slots.update((value, count + i) for i, value in enumerate(body.results))
    islands: dict[int, list[RunTemplate]] = {}
    for host, plan in lowered.plans.items():
        run = RunTemplate(
            host,
            keep_plan(host, plan),
            plan,
            tuple(slots[value] for value in plan.arguments),
            tuple(slots[value] for value in plan.results),
            tuple(feed for feed in plan.awaited if feed < body.feeds),
            tuple(feed for feed in plan.awaited if feed >= body.feeds),
        )
        islands.setdefault(island_of(host), []).append(run)
    specs = value_specs(body)
    scratch = [lowered.scratch]
    for node in body.nodes:
        if isinstance(node, Call):
            seats = (placement[device] for device in node.devices)
            nbytes = scratch_of(functions[node.function])
            scratch.append(tuple(((seat.host, seat.ordinal), nbytes) for seat in seats))
    return RegisteredProgram(
        body.name,
        count,
        len(body.results),
        body.feeds,
        lowered.feeds,
        tuple(
            GangTemplate(
                island,
                tuple(runs),
                waits=any(run.incoming for run in runs),
                together=any(run.body.together for run in runs),
                makes=tuple(
                    (i, _on(runs, needs), views)
                    for i, (needs, views) in enumerate(zip(lowered.result_needs, lowered.result_views, strict=True))
                ),
                scratch=_on(runs, total(scratch)),
            )
            for island, runs in islands.items()
        ),
        lowered.donated,
        lowered.result_hosts,
        lowered.result_bytes,
        tuple(specs[value] for value in body.results),
        tuple(functions[node.function] for node in body.nodes if isinstance(node, Call)),
    )


def _on(runs: list[RunTemplate], needs: Needs) -> Needs:
    """The part of it that lies on the hosts of these runs."""
    hosts = {run.host for run in runs}
    return tuple(need for need in needs if need[0][0] in hosts and need[1])
