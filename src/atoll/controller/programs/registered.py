"""Registered programs: lowered once, launched many times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from atoll.cluster.locations import MemoryRequirement, Placement
from atoll.errors import invalid
from atoll.ir import plan as p
from atoll.ir.lowered import Lowered, LoweredGang
from atoll.ir.lowering import lower
from atoll.ir.program import Program, value_specs
from atoll.ir.types import ArraySpec
from atoll.scheduling.dispatch_units import UnitBuilder
from atoll.scheduling.gangs import GangSpec

# A worker ends over a control frame of 64 MiB. A launch's message has a number of up to 9 bytes for each feed.
MAX_PLAN_BYTES = 48 << 20
_FEED_BYTES = 9


@dataclass(slots=True)
class HostPlan:
    """A host's plan under its number; which handles a run of it takes and gives, by their place in the launch's."""

    host: int
    number: int
    body: p.Plan
    arguments: tuple[int, ...]
    results: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MadeValue:
    """A value that a launch makes. `result` is its place among the results, or -1 for one between nodes."""

    hosts: tuple[int, ...]
    nbytes: int
    result: int


@dataclass(slots=True)
class RegisteredProgram:
    """A program cut into gangs. A launch's handles are its arguments and results, in this order."""

    name: str
    arguments: int
    results: int
    feeds: int  # the client's
    all_feeds: int  # and those between hosts
    nodes: tuple[tuple[GangSpec, ...], ...]  # the gangs of each node
    plans: dict[int, HostPlan]  # by host
    values: tuple[MadeValue, ...]  # those after the arguments
    result_specs: tuple[ArraySpec | None, ...]  # None: a completion
    donated: frozenset[int]
    functions: tuple[str, ...]
    islands: tuple[int, ...]
    turns: UnitBuilder  # what its launches do
    # Gangs that have not started still need the plans, also of a program that its session has released.
    waiting: int = 0
    released: bool = False

    @property
    def gangs(self) -> list[GangSpec]:
        return [gang for node in self.nodes for gang in node]


def register(
    body: Program,
    placement: Placement,
    functions: Mapping[int, str],
    keep_plan: Callable[[int, p.Plan], int],
    scratch_of: Callable[[str], MemoryRequirement],
) -> RegisteredProgram:
    """Lowers a program; `keep_plan(host, plan)` sends a plan to its host and gives its number.

    `scratch_of(function)` is what the workers' function of that name needs on its devices while it runs.

    Raises INVALID_ARGUMENT or UNIMPLEMENTED where the program cannot run.
    """
    lowered = lower(body, placement, functions)
    largest = max((len(msgspec.msgpack.encode(plan)) for plan in lowered.plans.values()), default=0)
    if max(largest, lowered.feeds * _FEED_BYTES) > MAX_PLAN_BYTES:
        raise invalid(f"program {body.name!r} is too large for one message to a host: make it of several")
    count = len(body.arguments)
    place_of = {value: count + i for i, value in enumerate(lowered.results)}
    if len(place_of) != len(lowered.results) or any(value < count for value in place_of):
        raise invalid(f"program {body.name!r} returns a value twice, or an argument")
    place_of.update((value, value) for value in range(count))
    segments_of: list[dict[int, p.Segment]] = [{} for _ in lowered.gangs]
    for host, plan in lowered.plans.items():
        for segment in plan.segments:
            segments_of[segment.gang][host] = segment
    specs = value_specs(body)
    nodes: dict[int, list[GangSpec]] = {}
    for gang, segments in zip(lowered.gangs, segments_of, strict=True):
        scratch = _on(gang.hosts, scratch_of(gang.function)) if gang.function else ()
        nodes.setdefault(gang.node, []).append(_template(gang, segments, lowered, place_of, body.feeds, scratch))
    gangs = tuple(tuple(each) for each in nodes.values())
    return RegisteredProgram(
        body.name,
        count,
        len(lowered.results),
        body.feeds,
        lowered.feeds,
        gangs,
        {
            host: HostPlan(
                host,
                keep_plan(host, plan),
                plan,
                tuple(place_of[value] for value in plan.arguments),
                tuple(place_of[value] for value in plan.results),
            )
            for host, plan in lowered.plans.items()
        },
        tuple(
            MadeValue(made.hosts, made.nbytes, place_of.get(value, count - 1) - count)
            for value, made in enumerate(lowered.values[count:], start=count)
        ),
        tuple(specs[value] for value in body.results),
        lowered.donated,
        tuple({gang.function: None for gang in lowered.gangs if gang.function}),
        tuple(sorted({gang.island for gang in lowered.gangs})),
        UnitBuilder(gangs),
    )


def _template(
    gang: LoweredGang,
    segments: Mapping[int, p.Segment],
    lowered: Lowered,
    place_of: Mapping[int, int],
    client_feeds: int,
    scratch: MemoryRequirement,
) -> GangSpec:
    values = lowered.values
    steps = [step for segment in segments.values() for step in segment.steps]
    uses = {value for step in steps for value in p.uses(step)}
    return GangSpec(
        gang.island,
        gang.hosts,
        p.STEP_KINDS[type(steps[-1])],
        (gang.function,) if gang.function else (),
        tuple((host, feed) for host, segment in segments.items() for feed in segment.awaited if feed < client_feeds),
        tuple(
            (host, feeds)
            for host, segment in segments.items()
            if (feeds := tuple(feed for feed in segment.awaited if feed >= client_feeds))
        ),
        tuple(sorted({place_of[value] for value in uses.union(gang.makes) if value in place_of})),
        tuple((value, _on(gang.hosts, values[value].memory), values[value].views) for value in gang.makes),
        tuple({value: None for step in steps for value in p.consumes(step)}),
        gang.drops,
        scratch,
        gang.collective,
    )


def _on(hosts: tuple[int, ...], needs: MemoryRequirement) -> MemoryRequirement:
    """The part of it that lies on these hosts."""
    return tuple(need for need in needs if need[0][0] in hosts and need[1])
