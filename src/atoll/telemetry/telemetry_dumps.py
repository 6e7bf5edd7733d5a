"""The structs of traces, histories and checks. See `atoll.state.object_dumps`."""

from __future__ import annotations

from collections import deque
from typing import Annotated, Any

from atoll.protocol import messages as m
from atoll.protocol.events import Load
from atoll.protocol.spans import SessionCalls, SessionName
from atoll.state.gang_specs import GangSpec, RunGangs
from atoll.state.gang_states import Reason
from atoll.state.object_dumps import As, CountsOf, Deque, Dump, Ref, Shared, dump_of
from atoll.state.stored_forms import Hosts, RunGangsForm
from atoll.state.tallies import Histogram
from atoll.state.tenants import Tenant
from atoll.telemetry.clocks import Clock, _RoundTrip
from atoll.telemetry.consistency import Checks, _Check
from atoll.telemetry.history import History
from atoll.telemetry.load import LoadRecord
from atoll.telemetry.snapshot import Event
from atoll.telemetry.trace import MAX_SPANS_KEPT, Trace, _Clocks, _GangEnds, _RunEnds, _Skip
from atoll.telemetry.trace_requests import Tracing, _Answer, _Recording


@dump_of(LoadRecord, "load")
class LoadRecordDump(Dump):
    last: Load
    lag: Ref[Histogram]


@dump_of(History, "history", version=2)
class HistoryDump(Dump):
    _next: int
    counts: CountsOf[tuple[str, int]] = {}
    _events: Deque[Event] = []
    working_since: dict[int, float] = {}


@dump_of(Checks, "checks")
class ChecksDump(Dump):
    _next: int
    _checks: dict[int, _Check] = {}


# ---- traces


@dump_of(Clock, "clock")
class ClockDump(Dump):
    samples: int = 0
    _kept: list[_RoundTrip] = []
    _period: int = 0


@dump_of(_Clocks, "clocks")
class ClocksDump(Dump):
    since: list[int]
    clocks: list[Ref[Clock]]


def _read_ends(ends: _GangEnds | _RunEnds) -> tuple[Any, ...]:
    """Return the ends of a gang, or those of a run with the sequence number of its first gang and a position."""
    common = ends.island, ends.session, ends.program
    if isinstance(ends, _GangEnds):
        own = ends.spec, None, ends.sequence, 0, ends.hosts, ends.times, b""
        return *common, *own, ends.launched, ends.waited, ends.nbytes, ends.node
    own_of_run = None, ends.gangs, ends.first, ends.position, ends.hosts, (), ends.packed
    return *common, *own_of_run, ends.launched, ends.waited, 0, 0


def _ends(
    island: int,
    session: int,
    program: str,
    spec: GangSpec | None,
    gangs: RunGangs | None,
    first: int,
    place: int,
    hosts: tuple[int, ...],
    times: tuple[int, ...],
    packed: bytes,
    launched: float,
    waited: tuple[tuple[Reason, float], ...],
    nbytes: int,
    node: int,
) -> _GangEnds | _RunEnds:
    if gangs is not None:
        return _RunEnds(island, session, program, gangs, first, place, hosts, packed, launched, waited)
    assert spec is not None
    return _GangEnds(island, session, program, spec, first, hosts, times, launched, waited, nbytes, node)


EndsForm = Annotated[
    tuple[
        int,
        int,
        str,
        Ref[GangSpec] | None,
        Shared[RunGangsForm] | None,
        int,
        int,
        Hosts,
        tuple[int, ...],
        bytes,
        float,
        tuple[tuple[Reason, float], ...],
        int,
        int,
    ],
    As(_ends, True, _read_ends),
]


def last_ends(ends: deque[_GangEnds | _RunEnds]) -> deque[_GangEnds | _RunEnds]:
    """Return the last `MAX_SPANS_KEPT` spans: all of them would take three quarters of a dump."""
    found: deque[_GangEnds | _RunEnds] = deque()
    count = 0
    for each in reversed(ends):
        count += each.count
        if count > MAX_SPANS_KEPT:
            break
        found.appendleft(each)
    return found


def count_spans(trace: Trace) -> None:
    """Count the spans of a loaded trace."""
    trace._count = sum(each.count for each in trace._ends)


@dump_of(Trace, "trace", version=2, rebuild=count_spans)
class TraceDump(Dump):
    _ends: Annotated[list[EndsForm], As(deque, read=last_ends)] = []
    _recorded: int = 0
    _clocks: dict[int, Ref[_Clocks]] = {}
    _skips: list[_Skip] = []


@dump_of(_Recording, "recording")
class RecordingDump(Dump):
    viewer: Ref[Tenant] | None
    began: float
    ends: float
    sessions: set[int] = set()


@dump_of(_Answer, "trace answer")
class AnswerDump(Dump):
    connection: int
    request: m.TraceRequest
    viewer: Ref[Tenant] | None
    until: float
    awaited: set[int]
    seconds: float = 0.0
    calls: dict[int, SessionCalls] = {}
    missing: list[str] = []


@dump_of(Tracing, "tracing")
class TracingDump(Dump):
    _next: int
    _recordings: dict[int, Ref[_Recording]] = {}
    _answers: dict[int, Ref[_Answer]] = {}
    _clocks: dict[int, Ref[Clock]] = {}
    _ended: dict[int, tuple[Ref[Tenant], SessionName]] = {}
