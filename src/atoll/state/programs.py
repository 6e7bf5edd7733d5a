"""Registered programs: lowered once, launched many times."""

from __future__ import annotations

import copy
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from atoll.cluster.locations import MemoryRequirement, Placement
from atoll.errors import invalid
from atoll.ir import plan as p
from atoll.ir.lowering import lower_in_steps
from atoll.ir.plan import Lowered, LoweredGang, LoweredValue
from atoll.ir.program import Call, Node, Program, Report, specs_of
from atoll.ir.steps import Steps, collected, finish, freed
from atoll.ir.types import DTYPE_BITS, ArraySpec, Box
from atoll.ir.validation import DefinitionCheck
from atoll.state.compiled_functions import FunctionReport, check_calls
from atoll.state.dispatch_units import Unit, UnitBuilder
from atoll.state.gangs import ClientFeed, DurationEstimate, GangSpec, HostFeeds, MadeValue
from atoll.state.queued_nodes import UNKNOWN_NS, HostCallKind
from atoll.state.usage import Account

# A worker ends over a control frame of 64 MiB. A launch's message has a number of up to 9 bytes for each feed of its
# client.
MAX_PLAN_BYTES = 48 << 20
_FEED_BYTES = 9
# Plans from here on go to their hosts in pieces, and launches wait until they are there.
LARGE_PLAN_BYTES = 64 << 10
# The header of a MessagePack array of so few has one byte.
_SEGMENTS_PER_STEP = 15
_FOUR_FIELDS, _ARRAY_32, _ARRAY = b"\x94", 0xDD, struct.Struct(">BI")
_UNKNOWN = FunctionReport()  # for gangs that run no function


@dataclass(frozen=True, slots=True)
class HostPlan:
    """A host's plan, and the handles that a run of it takes and gives, by their positions in the launch's.

    Hosts with equal plans share one object. A large plan is encoded, as in the messages that contain it.
    """

    plan: p.Plan | msgspec.Raw
    arguments: tuple[int, ...]
    results: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ProgramValue:
    """A value that a launch makes. `result` is its position among the results, or -1 for one between nodes."""

    hosts: tuple[int, ...]
    nbytes: int
    result: int


@dataclass(slots=True)
class RegisteredProgram:
    """A program cut into gangs. A launch's handles are its arguments and results, in this order."""

    name: str
    number: int  # of its plans, on all hosts
    arguments: int
    results: int
    feeds: int  # the client's
    host_feeds: int  # those between hosts
    nodes: tuple[Unit, ...]  # the gangs of each node
    plans: dict[int, HostPlan]  # by host
    values: tuple[ProgramValue, ...]  # those after the arguments
    result_specs: tuple[ArraySpec | None, ...]  # None: a completion
    donated: frozenset[int]
    functions: tuple[str, ...]
    islands: tuple[int, ...]
    units: UnitBuilder  # of its launches
    is_unbounded: bool  # some of its gangs call host Python
    account: Account  # that its launches are charged to
    # Gangs that have not started still need the plans, also of a program that its session has released.
    waiting: int = 0
    released: bool = False
    is_large: bool = False  # some plan of it is: all are sent in pieces
    reports: int = 0  # numbers that a launch of it reports
    fed: frozenset[int] = frozenset()  # islands that the client sends bytes to
    argument_memory: tuple[MemoryRequirement, ...] = ()  # of each argument

    result_values: tuple[int, ...] = ()
    inner_values: tuple[int, ...] = ()  # that are no results
    delegated: Any = None  # a `DelegatedProgram`; False if there can be none; None if unknown

    _by_plan: dict[tuple[int, ...], list[tuple[HostPlan, tuple[int, ...]]]] = field(default_factory=dict)

    def by_plan(self, hosts: tuple[int, ...]) -> list[tuple[HostPlan, tuple[int, ...]]]:
        """These of its hosts by what they do: those together that do the same, and follow one another."""
        found = self._by_plan.get(hosts)
        if found is None:
            cut = [i for i, host in enumerate(hosts) if not i or self.plans[host] is not self.plans[hosts[i - 1]]]
            found = [
                (self.plans[hosts[first]], hosts[first:stop])
                for first, stop in zip(cut, [*cut[1:], len(hosts)], strict=False)
            ]
            self._by_plan[hosts] = found
        return found

    @property
    def gangs(self) -> list[GangSpec]:
        return [gang for node in self.nodes for gang in node]

    @property
    def expected(self) -> int:
        """Nanoseconds that a launch is expected to take; 0 where nobody knows yet."""
        if not any(gang.duration_estimate.runs for gang in self.gangs):
            return 0
        return sum(max(gang.duration_estimate.nanoseconds for gang in node) for node in self.nodes)


def register(
    program: Program,
    number: int,
    placement: Placement,
    functions: Mapping[int, str],
    compiled: Mapping[str, FunctionReport],
    account: Account | None = None,
) -> RegisteredProgram:
    """As `register_in_steps`, all at once."""
    return finish(register_in_steps(program, number, placement, functions, compiled, account))


def register_in_steps(
    program: Program,
    number: int,
    placement: Placement,
    functions: Mapping[int, str],
    compiled: Mapping[str, FunctionReport],
    account: Account | None = None,
) -> Steps[RegisteredProgram]:
    """Lowers a program, whose plans are to have this number, and whose launches are charged to the account.

    `compiled` has the reports of workers about their functions, by name.

    Raises INVALID_ARGUMENT or UNIMPLEMENTED where the program cannot run.
    """
    lowered = yield from lower_in_steps(program, placement, functions)
    yield from check_calls(program, placement, functions, compiled)
    count = len(program.arguments)
    results = yield from collected((value, count + i) for i, value in enumerate(lowered.results))
    position_of = dict(results)
    if len(position_of) != len(lowered.results) or any(value < count for value in position_of):
        raise invalid(f"program {program.name!r} returns a value twice, or an argument")
    position_of.update((value, value) for value in range(count))
    yield
    plans, largest = yield from _host_plans(lowered.plans, position_of)
    if max(largest, program.feeds * _FEED_BYTES) > MAX_PLAN_BYTES:
        raise invalid(f"program {program.name!r} is too large for one message to a host: make it of several")
    segments_of = yield from _segments_of(lowered)
    specs: list[ArraySpec | None] = list(program.arguments)
    reports = 0
    for node in program.nodes:
        specs.extend(specs_of(node))
        reports += isinstance(node, Report)
        yield
    nodes: dict[int, list[GangSpec]] = {}
    same: dict[MemoryRequirement, MemoryRequirement] = {}  # the ledger knows requirements by their identity

    def on(hosts: tuple[int, ...], requirement: MemoryRequirement) -> MemoryRequirement:
        found = _on(hosts, requirement)
        return same.setdefault(found, found)

    islands: set[int] = set()
    called: dict[str, None] = {}
    fed: set[int] = set()
    memory: dict[int, MemoryRequirement] = {}  # of values that take something else than is declared
    is_unbounded = False
    for gang in lowered.gangs:
        segments = segments_of.pop()
        report = compiled.get(gang.function, _UNKNOWN)
        _account(segments, report, lowered.values, memory)
        host_call = HostCallKind.PYTHON if gang.colocated else HostCallKind.CLIENT if report.calls_client else None
        spec = _spec(gang, segments, lowered, position_of, program, report, host_call, on, memory)
        nodes.setdefault(gang.node, []).append(spec)
        islands.add(gang.island)
        if gang.function:
            called[gang.function] = None
        if spec.awaited:
            fed.add(gang.island)
        is_unbounded = is_unbounded or host_call is not None
        yield
    values: list[ProgramValue] = []
    inner: list[int] = []
    for value, made in enumerate(lowered.values[count:], start=count):
        position = position_of.get(value)
        nbytes = sum([each for _, each in memory[value]]) if value in memory else made.nbytes
        values.append(ProgramValue(made.hosts, nbytes, -1 if position is None else position - count))
        if position is None:
            inner.append(value)
        yield
    gangs = tuple((yield from collected(tuple(each) for each in nodes.values())))
    result_specs = tuple((yield from collected(specs[value] for value in program.results)))
    result_values = yield from collected(value for value in lowered.results if value >= count)
    argument_memory = tuple((yield from collected(value.memory for value in lowered.values[:count])))
    donated, result_count, host_feeds = lowered.donated, len(lowered.results), lowered.host_feeds
    parts: list[list[Any]] = [list(lowered.gangs), list(lowered.values)]
    own = lowered.plans
    del lowered
    yield from freed(nodes, results, specs, *parts)
    while own:
        segments_left = list(own.popitem()[1].segments)
        yield from freed(segments_left)
    return RegisteredProgram(
        program.name,
        number,
        count,
        result_count,
        program.feeds,
        host_feeds,
        gangs,
        plans,
        tuple(values),
        result_specs,
        donated,
        tuple(called),
        tuple(sorted(islands)),
        UnitBuilder(gangs),
        is_unbounded,
        account or Account(),
        is_large=largest >= LARGE_PLAN_BYTES,
        reports=reports,
        fed=frozenset(fed),
        delegated=None if len(islands) > 1 else False,
        result_values=tuple(sorted(result_values)),
        inner_values=tuple(inner),
        argument_memory=argument_memory,
    )


def _segments_of(lowered: Lowered) -> Steps[list[dict[int, p.Segment]]]:
    """Return the segments of each gang by host, the last gang first."""
    found: list[dict[int, p.Segment]] = [{} for _ in lowered.gangs]
    for host, plan in lowered.plans.items():
        for i, segment in enumerate(plan.segments):
            found[-1 - segment.gang][host] = segment
            if i % _SEGMENTS_PER_STEP == 0:
                yield
    return found


def _host_plans(plans: Mapping[int, p.Plan], position_of: Mapping[int, int]) -> Steps[tuple[dict[int, HostPlan], int]]:
    """Return the plans by host, and about how many bytes the largest of them has as a message."""
    found: dict[int, HostPlan] = {}
    last: HostPlan | None = None
    before: p.Plan | None = None
    largest = 0
    for host, plan in plans.items():
        if last is None or before is None or not (yield from _are_equal(plan, before)):
            encoded = yield from _encoded(plan)
            largest = max(largest, len(encoded))
            last = HostPlan(
                msgspec.Raw(encoded) if len(encoded) >= LARGE_PLAN_BYTES else plan,
                tuple((yield from collected(position_of[value] for value in plan.arguments))),
                tuple((yield from collected(position_of[value] for value in plan.results))),
            )
            before = plan
        found[host] = last
        yield
    return found, largest


def _are_equal(one: p.Plan, other: p.Plan) -> Steps[bool]:
    if (one.arguments, one.results, len(one.segments)) != (other.arguments, other.results, len(other.segments)):
        return False
    for i in range(0, len(one.segments), _SEGMENTS_PER_STEP):
        if one.segments[i : i + _SEGMENTS_PER_STEP] != other.segments[i : i + _SEGMENTS_PER_STEP]:
            return False
        yield
    return True


def _encoded(plan: p.Plan) -> Steps[bytes]:
    """Return the MessagePack encoding of a plan: an array of its fields, of which the segments are encoded in steps."""
    encode = msgspec.msgpack.encode
    count = len(plan.segments)
    parts = [_FOUR_FIELDS, encode(plan.name), encode(plan.arguments), _ARRAY.pack(_ARRAY_32, count)]
    for i in range(0, count, _SEGMENTS_PER_STEP):
        parts.append(encode(plan.segments[i : i + _SEGMENTS_PER_STEP])[1:])  # without the header of this short array
        yield
    parts.append(encode(plan.results))
    return b"".join(parts)


def _spec(
    gang: LoweredGang,
    segments: Mapping[int, p.Segment],
    lowered: Lowered,
    position_of: Mapping[int, int],
    program: Program,
    report: FunctionReport,
    host_call: HostCallKind | None,
    on: Callable[[tuple[int, ...], MemoryRequirement], MemoryRequirement],
    memory: Mapping[int, MemoryRequirement],
) -> GangSpec:
    values = lowered.values
    steps = [step for segment in segments.values() for step in segment.steps]
    uses = {value for step in steps for value in p.uses(step)}
    return GangSpec(
        gang.island,
        gang.hosts,
        p.STEP_KINDS[type(steps[-1])],
        (gang.function,) if gang.function else (),
        tuple(ClientFeed(host, feed) for host, segment in segments.items() for feed in segment.awaited),
        tuple(
            HostFeeds(host, feeds)
            for host, segment in segments.items()
            if (feeds := tuple(each for step in segment.steps for each in _received(step)))
        ),
        tuple(sorted({position_of[value] for value in uses.union(gang.makes) if value in position_of})),
        tuple(
            MadeValue(value, on(gang.hosts, memory.get(value, values[value].memory)), values[value].views)
            for value in gang.makes
        ),
        tuple({value: None for step in steps for value in p.consumes(step)}),
        gang.drops,
        on(gang.hosts, report.scratch),
        gang.collective,
        _devices(gang.hosts, uses.union(gang.makes), values),
        duration_estimate=DurationEstimate(0 if host_call else UNKNOWN_NS),
        host_call=host_call,
        moved=sum(bytes_moved(step, program.arguments) for step in steps),
        title=report.title,
    )


def _account(
    segments: Mapping[int, p.Segment],
    report: FunctionReport,
    values: Sequence[LoweredValue],
    memory: dict[int, MemoryRequirement],
) -> None:
    """Note the memory of the outputs of a gang's function, if its workers report something else than is declared."""
    if report.outputs is None:
        return
    for step in next(iter(segments.values())).steps:  # the same on each host
        if isinstance(step, p.Execute):
            for position in range(len(report.outputs)):
                value, requirement = step.first_output + position, report.output(position)
                if dict(values[value].memory) != dict(requirement):
                    memory[value] = requirement


def _received(step: p.Step) -> tuple[tuple[int, int], ...]:
    return step.may_get() if isinstance(step, p.Receive | p.ReceiveRows) else ()


def _devices(
    hosts: tuple[int, ...], values: Iterable[int], lowered: Sequence[LoweredValue]
) -> dict[int, tuple[int, ...]]:
    """The devices on these hosts that the values lie on, as ordinals by host."""
    found: dict[int, set[int]] = {host: set() for host in hosts}
    left, seen = list(values), set(values)
    while left:
        value = lowered[left.pop()]
        for (host, ordinal), _ in value.memory:
            if host in found:
                found[host].add(ordinal)
        left.extend(value.views - seen)  # whose memory it shares
        seen |= value.views
    return {host: tuple(sorted(ordinals)) for host, ordinals in found.items()}


def _on(hosts: tuple[int, ...], requirement: MemoryRequirement) -> MemoryRequirement:
    """The part of it that lies on these hosts."""
    return tuple(each for each in requirement if each[0][0] in hosts and each[1])


def device_groups(program: Program) -> Iterator[tuple[int, ...]]:
    """The devices of each array and each call of a program."""
    for spec in program.arguments:
        yield spec.sharding.devices
    for node in program.nodes:
        for spec in node.outputs:
            yield spec.sharding.devices
        if isinstance(node, Call):
            yield node.devices


def bytes_moved(step: p.Step, arguments: Sequence[ArraySpec]) -> int:
    """Return how many bytes a step moves between a client, devices and hosts: those that it writes.

    `arguments` are those of the step's program. What a compiled function moves in collectives is not known.
    """
    match step:
        case p.Put(array=array) | p.Receive(array=array):
            return _of_array(array)
        case p.Move(arrays=arrays):
            return sum(map(_of_array, arrays))
        case p.Get(input=value, boxes=boxes) if value < len(arguments):
            return _of_boxes(arguments[value].dtype, boxes)
    return 0


def _of_array(array: p.LocalArray) -> int:
    return sum(map(math.prod, array.shard_shapes)) * DTYPE_BITS[array.dtype] // 8


def _of_boxes(dtype: str, boxes: Sequence[Box]) -> int:
    elements = sum(math.prod(stop - start for start, stop in box) for box in boxes)
    return elements * DTYPE_BITS[dtype] // 8


@dataclass
class ProgramParts:
    """The parts that have arrived of a definition that is sent in several messages, and their check."""

    name: str
    arguments: tuple[ArraySpec, ...]
    feeds: int
    check: DefinitionCheck
    nodes: list[Node] = field(default_factory=list)
    called: dict[int, None] = field(default_factory=dict)  # functions

    def checked(self, part: Program) -> DefinitionCheck:
        """Return the check after this part. Raises INVALID_ARGUMENT; the parts so far stay as they are."""
        check = copy.copy(self.check)
        for node in part.nodes:
            check.node(node)
        return check

    def add(self, part: Program) -> None:
        """Keep a part that was checked."""
        self.check.count(part.nodes)
        self.nodes += part.nodes
        self.called.update(dict.fromkeys(calls_of(part)))

    def whole(self, last: Program) -> Program:
        """The program that this last part completes."""
        return Program(self.name, self.arguments, (*self.nodes, *last.nodes), last.results, self.feeds)


def calls_of(part: Program) -> list[int]:
    """Return the functions that the nodes of a program, or of a part of it, call."""
    return [node.function for node in part.nodes if isinstance(node, Call)]
