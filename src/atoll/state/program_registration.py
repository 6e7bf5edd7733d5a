"""Lower a program, and make the record that its launches use, in steps. Pure."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from atoll.cluster.locations import MemoryRequirement, Placement
from atoll.errors import invalid
from atoll.ir import plan as p
from atoll.ir.lowering import lower_in_steps
from atoll.ir.plan import Lowered, LoweredGang, LoweredValue
from atoll.ir.program import Program, Report, specs_of
from atoll.ir.steps import Steps, collected, freed
from atoll.ir.types import DTYPE_BITS, ArraySpec, Box, nbytes
from atoll.state.compiled_functions import FunctionReport, check_calls
from atoll.state.delegated_parts import NotDelegated
from atoll.state.dispatch_units import UnitBuilder
from atoll.state.gang_specs import ClientFeed, DurationEstimate, GangSpec, HostFeeds, MadeValue
from atoll.state.joint_gangs import joint_nodes
from atoll.state.programs import HostPlan, ProgramValue, RegisteredProgram
from atoll.state.queued_nodes import UNKNOWN_NS, HostCallKind
from atoll.state.usage import Account

# A worker ends if it receives a control frame of more than 64 MiB.
MAX_PLAN_BYTES = 48 << 20
# A launch's message has a number of up to this size for each feed of the client.
_FEED_BYTES = 9
# Bytes of all arrays that one launch makes.
MAX_PROGRAM_BYTES = 1 << 56
# Plans from this size on are sent to hosts in pieces, and launches wait until they have arrived.
LARGE_PLAN_BYTES = 64 << 10
# At most 15: a MessagePack array of so few items has a header of one byte.
_SEGMENTS_PER_STEP = 15
_FOUR_FIELDS, _ARRAY_32, _ARRAY = b"\x94", 0xDD, struct.Struct(">BI")
_UNKNOWN = FunctionReport()  # for gangs that run no function


def register_in_steps(
    program: Program,
    number: int,
    placement: Placement,
    functions: Mapping[int, str],
    compiled: Mapping[str, FunctionReport],
    account: Account | None = None,
    joint_islands: int = 0,
) -> Steps[RegisteredProgram]:
    """Lower a program, and return what its launches need.

    Args:
      program: the client's definition.
      number: the number that the plans get on all hosts.
      placement: the physical devices of the virtual ones.
      functions: the workers' names of functions, by the client's number.
      compiled: the workers' reports about functions, by name.
      account: the account that launches are charged to.
      joint_islands: number of islands from which a call of one function has a joint gang, or 0.

    Raises:
      StatusError: INVALID_ARGUMENT or UNIMPLEMENTED if the program cannot run.
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
        raise invalid(f"program {program.name!r} is too large for one message to a host: split it")
    segments_of = yield from _segments_of(lowered)
    specs, reports = yield from _declared(program)
    gangs = _GangSpecs()
    for gang in lowered.gangs:
        gangs.add(gang, segments_of.pop(), lowered, position_of, program, compiled.get(gang.function, _UNKNOWN))
        yield
    values, inner = yield from _values(program, lowered, position_of, gangs.memory)
    nodes = tuple((yield from collected(tuple(each) for each in gangs.by_node.values())))
    joint = nodes
    if joint_islands and len(gangs.islands) > 1:
        joint = yield from joint_nodes(nodes, joint_islands, gangs.shared)
    result_specs = tuple((yield from collected(specs[value] for value in program.results)))
    result_values = yield from collected(value for value in lowered.results if value >= count)
    argument_memory = tuple((yield from collected(value.memory for value in lowered.values[:count])))
    donated, result_count, host_feeds = lowered.donated, len(lowered.results), lowered.host_feeds
    parts: list[list[Any]] = [list(lowered.gangs), list(lowered.values)]
    own = lowered.plans
    del lowered
    yield from freed(gangs.by_node, results, specs, *parts)
    while own:
        segments_left = list(own.popitem()[1].segments)
        yield from freed(segments_left)
    return RegisteredProgram(
        name=program.name,
        number=number,
        arguments=count,
        results=result_count,
        feeds=program.feeds,
        host_feeds=host_feeds,
        nodes=nodes,
        plans=plans,
        values=tuple(values),
        result_specs=result_specs,
        donated=donated,
        functions=tuple(gangs.functions),
        islands=tuple(sorted(gangs.islands)),
        units=UnitBuilder(joint),
        is_unbounded=gangs.is_unbounded,
        account=account or Account(),
        is_large=largest >= LARGE_PLAN_BYTES,
        reports=reports,
        fed=frozenset(gangs.fed),
        delegated=NotDelegated.UNKNOWN if len(gangs.islands) > 1 else NotDelegated.IMPOSSIBLE,
        result_values=tuple(sorted(result_values)),
        inner_values=tuple(inner),
        argument_memory=argument_memory,
    )


def _values(
    program: Program, lowered: Lowered, position_of: Mapping[int, int], memory: Mapping[int, MemoryRequirement]
) -> Steps[tuple[list[ProgramValue], list[int]]]:
    """Return the values that a launch makes, and the numbers of those that are not results.

    `memory` has the memory of values that need another amount than was declared. Raise INVALID_ARGUMENT if a launch
    makes too many bytes.
    """
    values: list[ProgramValue] = []
    inner: list[int] = []
    count, made_bytes = len(program.arguments), 0
    for value, made in enumerate(lowered.values[count:], start=count):
        position = position_of.get(value)
        nbytes = sum([each for _, each in memory[value]]) if value in memory else made.nbytes
        made_bytes += nbytes
        values.append(ProgramValue(made.hosts, nbytes, -1 if position is None else position - count))
        if position is None:
            inner.append(value)
        yield
    if made_bytes > MAX_PROGRAM_BYTES:
        raise invalid(f"program {program.name!r} makes arrays of {made_bytes} bytes, and may make {MAX_PROGRAM_BYTES}")
    return values, inner


def _declared(program: Program) -> Steps[tuple[list[ArraySpec | None], int]]:
    """Return the declared types of a program's values, and its number of reports to the controller."""
    specs: list[ArraySpec | None] = list(program.arguments)
    reports = 0
    for node in program.nodes:
        specs.extend(specs_of(node))
        reports += isinstance(node, Report)
        yield
    return specs, reports


def _segments_of(lowered: Lowered) -> Steps[list[dict[int, p.Segment]]]:
    """Return the segments of each gang, by host. The last gang is first."""
    found: list[dict[int, p.Segment]] = [{} for _ in lowered.gangs]
    for host, plan in lowered.plans.items():
        for i, segment in enumerate(plan.segments):
            found[-1 - segment.gang][host] = segment
            if i % _SEGMENTS_PER_STEP == 0:
                yield
    return found


def _host_plans(plans: Mapping[int, p.Plan], position_of: Mapping[int, int]) -> Steps[tuple[dict[int, HostPlan], int]]:
    """Return the plans by host, and the approximate size of the largest message that contains one of them."""
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
    """Return the MessagePack encoding of a plan, which is an array of its fields. The segments are encoded in steps."""
    encode = msgspec.msgpack.encode
    count = len(plan.segments)
    parts = [_FOUR_FIELDS, encode(plan.name), encode(plan.arguments), _ARRAY.pack(_ARRAY_32, count)]
    for i in range(0, count, _SEGMENTS_PER_STEP):
        parts.append(encode(plan.segments[i : i + _SEGMENTS_PER_STEP])[1:])  # without the header of the slice
        yield
    parts.append(encode(plan.results))
    return b"".join(parts)


class _GangSpecs:
    """The specs of a program's gangs while it is lowered.

    Attributes:
      by_node: the specs, by the index of their node.
      functions: the functions that gangs run, in order.
      fed: the islands whose gangs await bytes of the client.
      memory: the memory of values whose functions report another one than was declared.
    """

    def __init__(self) -> None:
        self.by_node: dict[int, list[GangSpec]] = {}
        self.islands: set[int] = set()
        self.functions: dict[str, None] = {}
        self.fed: set[int] = set()
        self.memory: dict[int, MemoryRequirement] = {}
        self.is_unbounded = False
        self._requirements: dict[MemoryRequirement, MemoryRequirement] = {}

    def shared(self, requirement: MemoryRequirement) -> MemoryRequirement:
        """Return an equal requirement that all gangs share, since the ledger remembers them by identity."""
        return self._requirements.setdefault(requirement, requirement)

    def add(
        self,
        gang: LoweredGang,
        segments: Mapping[int, p.Segment],
        lowered: Lowered,
        position_of: Mapping[int, int],
        program: Program,
        report: FunctionReport,
    ) -> None:
        """Add a gang with its segments by host, and with the report about its function."""
        self._note_output_memory(segments, report, lowered.values)
        spec = self._spec(gang, segments, lowered.values, position_of, program, report)
        self.by_node.setdefault(gang.node, []).append(spec)
        self.islands.add(gang.island)
        if gang.function:
            self.functions[gang.function] = None
        if spec.awaited:
            self.fed.add(gang.island)
        self.is_unbounded = self.is_unbounded or spec.host_call is not None

    def _spec(
        self,
        gang: LoweredGang,
        segments: Mapping[int, p.Segment],
        values: Sequence[LoweredValue],
        position_of: Mapping[int, int],
        program: Program,
        report: FunctionReport,
    ) -> GangSpec:
        host_call = HostCallKind.PYTHON if gang.colocated else HostCallKind.CLIENT if report.calls_client else None
        steps = [step for segment in segments.values() for step in segment.steps]
        uses = {value for step in steps for value in p.uses(step)}
        return GangSpec(
            island=gang.island,
            hosts=gang.hosts,
            kind=p.STEP_KINDS[type(steps[-1])],
            functions=(gang.function,) if gang.function else (),
            awaited=tuple(ClientFeed(host, feed) for host, segment in segments.items() for feed in segment.awaited),
            incoming=tuple(
                HostFeeds(host, feeds)
                for host, segment in segments.items()
                if (feeds := tuple(each for step in segment.steps for each in _received(step)))
            ),
            handles=tuple(sorted({position_of[value] for value in uses.union(gang.makes) if value in position_of})),
            makes=tuple(
                MadeValue(
                    value, self._on(gang.hosts, self.memory.get(value, values[value].memory)), values[value].views
                )
                for value in gang.makes
            ),
            consumes=tuple({value: None for step in steps for value in p.consumes(step)}),
            drops=gang.drops,
            scratch=self._on(gang.hosts, report.scratch),
            collective=gang.collective,
            devices=_devices(gang.hosts, uses.union(gang.makes), values),
            duration_estimate=DurationEstimate(0 if host_call else UNKNOWN_NS),
            host_call=host_call,
            moved=sum(bytes_moved(step, program.arguments) for step in steps),
            title=report.title,
            is_apart=report.is_apart,
            stream=next((step.stream for step in steps if isinstance(step, p.Python)), None) if host_call else None,
        )

    def _on(self, hosts: tuple[int, ...], requirement: MemoryRequirement) -> MemoryRequirement:
        """Return the part of the requirement on these hosts."""
        return self.shared(tuple(each for each in requirement if each[0][0] in hosts and each[1]))

    def _note_output_memory(
        self, segments: Mapping[int, p.Segment], report: FunctionReport, values: Sequence[LoweredValue]
    ) -> None:
        """Note the memory of the outputs of a gang's function if the report differs from the declared memory."""
        if report.outputs is None:
            return
        for step in next(iter(segments.values())).steps:  # the same on each host
            if isinstance(step, p.Execute):
                for position in range(len(report.outputs)):
                    value, requirement = step.first_output + position, report.output(position)
                    if dict(values[value].memory) != dict(requirement):
                        self.memory[value] = requirement


def _received(step: p.Step) -> tuple[tuple[int, int], ...]:
    return step.may_get() if isinstance(step, p.Receive | p.ReceiveRows) else ()


def _devices(
    hosts: tuple[int, ...], values: Iterable[int], lowered: Sequence[LoweredValue]
) -> dict[int, tuple[int, ...]]:
    """Return the ordinals of the values' devices on these hosts, by host."""
    found: dict[int, set[int]] = {host: set() for host in hosts}
    left, seen = list(values), set(values)
    while left:
        value = lowered[left.pop()]
        for (host, ordinal), _ in value.memory:
            if host in found:
                found[host].add(ordinal)
        left.extend(value.views - seen)  # the values whose memory it shares
        seen |= value.views
    return {host: tuple(sorted(ordinals)) for host, ordinals in found.items()}


def bytes_moved(step: p.Step, arguments: Sequence[ArraySpec]) -> int:
    """Return how many bytes a step writes when it moves data between a client, devices and hosts.

    `arguments` has the arguments of the program. Bytes that compiled functions move in collectives are unknown.
    """
    match step:
        case p.Put(array=array) | p.Receive(array=array):
            return _of_array(array)
        case p.Move(arrays=arrays) | p.PutAll(arrays=arrays):
            return sum(map(_of_array, arrays))
        case p.Get(input=value, boxes=boxes) if value < len(arguments):
            return _of_boxes(arguments[value].dtype, boxes)
        case p.GetAll(inputs=values):
            return sum([_of_a_shard(arguments[value]) for value in values if value < len(arguments)])
    return 0


def _of_a_shard(spec: ArraySpec) -> int:
    return nbytes(spec) // max(1, len(spec.sharding.devices))


def _of_array(array: p.LocalArray) -> int:
    return sum(map(math.prod, array.shard_shapes)) * DTYPE_BITS[array.dtype] // 8


def _of_boxes(dtype: str, boxes: Sequence[Box]) -> int:
    elements = sum(math.prod(stop - start for start, stop in box) for box in boxes)
    return elements * DTYPE_BITS[dtype] // 8
