"""The trace: the last gangs of all sessions, per host.

A gang keeps some devices of a host busy from its dispatch there, or from the end of the previous gang on one of these
devices, to its own end, by the host's clock (`layout`). So spans of one device never overlap, while spans of different
devices can.

The trace has a clock: the controller's, and the time that this one does not count, because no controller ran or it was
stopped. Hosts worked on meanwhile. No decision depends on it.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import NamedTuple

import msgspec

from atoll.protocol.spans import ClockError, Span
from atoll.state.gang_specs import GangSpec, RunGangs
from atoll.state.gang_states import Reason, Waited
from atoll.state.queued_nodes import Gang
from atoll.state.session import GangRun
from atoll.state.tallies import TRANSFERS
from atoll.telemetry.clocks import Alignment, Clock
from atoll.telemetry.layout import laid_out

MAX_SPANS = 100_000
# In a snapshot of the controller. All spans would take three quarters of the snapshot.
MAX_SPANS_KEPT = 10_000
_TEXTS = {reason: reason.value for reason in Reason}  # messages have plain text
# Spans per answer, and earlier spans, which may have kept devices busy when those of the answer were dispatched. Making
# and laying out a span takes 8 us.
MAX_ANSWERED = 64
_LOOK_BACK = 64
_MAX_CLOCKS = 16  # per host, one after another
_MAX_SKIPS = 64
_PAIRS = struct.Struct("<2q")


class _Skip(NamedTuple):
    """From the time `since` of the controller's clock on, the trace's clock is `seconds` ahead."""

    since: float
    seconds: float


class _GangEnds(msgspec.Struct, frozen=True, gc=False):
    """The ends of a gang on some of its hosts. `times` has two items per host: dispatch and end.

    Not tracked by the garbage collector, which would traverse the whole trace again and again.
    """

    island: int
    session: int
    program: str
    spec: GangSpec
    sequence: int
    hosts: tuple[int, ...]
    times: tuple[int, ...]
    launched: float
    waited: Waited
    nbytes: int
    node: int

    @property
    def count(self) -> int:
        """The number of spans."""
        return len(self.hosts)

    def spans(self, aligned: Callable[[int], Alignment], ahead: Callable[[float], float]) -> Iterable[Span]:
        """Yield the spans.

        `aligned(host)` converts the host's times to the trace's. `ahead` returns what to add to the controller's.
        """
        kind, segments, devices = self.spec.kind, self.spec.segments, self.spec.devices
        launched = int(1e9 * (self.launched + ahead(self.launched)))
        waits, at = [], self.launched
        for reason, seconds in self.waited:
            waits.append((_TEXTS[reason], int(1e9 * (seconds + ahead(at + seconds) - ahead(at)))))
            at += seconds
        for host, started, ended in zip(self.hosts, self.times[::2], self.times[1::2], strict=True):
            align = aligned(host)
            enqueued = align(min(started, ended))
            yield Span(
                self.spec.island_of(host) if self.spec.islands else self.island,
                host,
                self.session,
                self.program,
                kind,
                self.sequence,
                enqueued,
                align(ended),
                segments,
                devices[host],
                enqueued,
                launched,
                tuple(waits),
                self.nbytes,
                self.node,
                self.spec.title,
            )

    def bare_spans(self, offset: Callable[[int], int]) -> Iterable[Span]:
        """Yield the spans without waits and launch times; `offset(host)` is added to the host's times."""
        kind, segments, devices = self.spec.kind, self.spec.segments, self.spec.devices
        for host, started, ended in zip(self.hosts, self.times[::2], self.times[1::2], strict=True):
            shift = offset(host)
            yield Span(
                self.spec.island_of(host) if self.spec.islands else self.island,
                host,
                self.session,
                self.program,
                kind,
                self.sequence,
                (started if started < ended else ended) + shift,
                ended + shift,
                segments,
                devices[host],
                function=self.spec.title,
            )


class _RunEnds(msgspec.Struct, frozen=True, gc=False):
    """The ends of consecutive gangs of a delegated run on its one host, from `position` on in `gangs`.

    `packed` has the dispatch and the end of each gang, as in `RunProgress`. `first` is the sequence number of the
    program's first gang.
    """

    island: int
    session: int
    program: str
    gangs: RunGangs
    first: int
    position: int
    hosts: tuple[int, ...]
    packed: bytes
    launched: float
    waited: Waited

    def _ends(self) -> Iterable[_GangEnds]:
        gangs = self.gangs
        for position, times in enumerate(_PAIRS.iter_unpack(self.packed), self.position):
            if not times[1]:  # the gang failed
                continue
            yield _GangEnds(
                self.island,
                self.session,
                self.program,
                gangs.specs[position],
                self.first + gangs.numbers[position],
                self.hosts,
                times,
                self.launched,
                self.waited,
                gangs.moved[position],
                self.first + gangs.nodes[position],
            )

    @property
    def count(self) -> int:
        return len(self.packed) // _PAIRS.size

    def spans(self, aligned: Callable[[int], Alignment], ahead: Callable[[float], float]) -> Iterable[Span]:
        for each in self._ends():
            yield from each.spans(aligned, ahead)

    def bare_spans(self, offset: Callable[[int], int]) -> Iterable[Span]:
        for each in self._ends():
            yield from each.bare_spans(offset)


class _Clocks:
    """The clocks of a host, one after another, because a restarted machine has a new clock.

    `since` has the position in the trace from which on each clock applies.
    """

    def __init__(self) -> None:
        self.since = [0]
        self.clocks = [Clock()]

    def begin(self, position: int) -> None:
        self.since.append(position)
        self.clocks.append(Clock())
        if len(self.since) > _MAX_CLOCKS:  # entries of the first clock then use the second
            del self.since[1], self.clocks[0]


class _Alignments:
    """Converts times of hosts to the trace's, for one answer."""

    def __init__(self, clocks: dict[int, _Clocks]) -> None:
        self.position = 0  # in the trace, of the entry to convert
        self._clocks = clocks
        self._known: dict[tuple[int, int], Alignment] = {}

    def of(self, host: int) -> Alignment:
        clocks = self._clocks[host]
        number = bisect_right(clocks.since, self.position) - 1 if len(clocks.since) > 1 else 0
        alignment = self._known.get((host, number))
        if alignment is None:
            alignment = self._known[host, number] = Alignment(clocks.clocks[number])
        return alignment

    def errors(self) -> tuple[ClockError, ...]:
        """Return the errors of the hosts that were converted, for the latest of their clocks."""
        last = {host: (number, alignment) for (host, number), alignment in sorted(self._known.items())}
        return tuple(
            ClockError(host, alignment.offset, alignment.error, self._clocks[host].clocks[number].samples)
            for host, (number, alignment) in last.items()
        )


class Trace:
    """Keeps the last spans.

    Recorded spans begin with the gang's dispatch, and can be recorded in any order: a host reports the ends of its
    devices, and of its transfers, independently. Returned spans have times of the trace's clock. Clocks of hosts are
    measured by this clock too.
    """

    def __init__(self, limit: int = MAX_SPANS) -> None:
        self._ends: deque[_GangEnds | _RunEnds] = deque()
        self._count = 0
        self._recorded = 0  # entries, including dropped ones
        self._limit = limit
        self._clocks: dict[int, _Clocks] = defaultdict(_Clocks)  # per host
        self._skips: list[_Skip] = []  # in order

    def skip(self, now: float, seconds: float) -> None:
        """Add time that the controller's clock did not count before the time `now`."""
        if seconds > 0:
            self._skips.append(_Skip(now, seconds + (self._skips[-1].seconds if self._skips else 0.0)))
            if len(self._skips) > _MAX_SKIPS:  # earlier times are then as far behind as those after the second one
                self._skips[:2] = [_Skip(-math.inf, self._skips[1].seconds)]

    def _ahead(self, seconds: float) -> float:
        """Return how far the trace's clock is ahead at a time of the controller's clock."""
        for skip in reversed(self._skips):
            if seconds >= skip.since:
                return skip.seconds
        return 0.0

    def time(self, seconds: float) -> float:
        """Return the time of the trace's clock at a time of the controller's, both in seconds."""
        return seconds + self._ahead(seconds)

    @property
    def position(self) -> int:
        """The position after the last recorded entry."""
        return self._recorded

    def clock(self, host: int) -> Clock:
        """Return the current clock of the host."""
        return self._clocks[host].clocks[-1]

    def clock_began(self, host: int) -> None:
        """Note that the host has restarted, and its clock with it."""
        self._clocks[host].begin(self._recorded)

    def record_gang(self, gang: Gang[GangRun], hosts: tuple[int, ...], times: tuple[int, ...]) -> None:
        """Record the end of a gang on some of its hosts. This runs per gang, so spans are created only on request."""
        run = gang.run
        launch, spec = run.launch, run.spec
        nbytes = run.moved(hosts) if spec.kind in TRANSFERS else 0
        self._ends.append(
            _GangEnds(
                gang.island,
                launch.session,
                launch.program.name,
                spec,
                gang.sequence,
                hosts,
                times,
                launch.seconds,
                run.waited,
                nbytes,
                gang.node.number,
            )
        )
        self._added(len(hosts))

    def record_run(self, gang: Gang[GangRun], gangs: RunGangs, first: int, position: int, packed: bytes) -> None:
        """Record ends of gangs of a delegated run; see `_RunEnds` for the arguments."""
        run = gang.run
        launch = run.launch
        ends = _RunEnds(
            gang.island,
            launch.session,
            launch.program.name,
            gangs,
            first,
            position,
            gang.hosts,
            packed,
            launch.seconds,
            run.waited,
        )
        self._ends.append(ends)
        self._added(ends.count)

    def _added(self, count: int) -> None:
        self._count += count
        self._recorded += 1
        while self._count > self._limit:
            self._count -= self._ends.popleft().count

    def spans(self, since: int = 0) -> list[Span]:
        """Return the spans that ended at `since` or later, ordered by host and end."""
        return [span for span in self.since_position(0)[0] if span.ended >= since]

    def since_position(self, position: int) -> tuple[list[Span], tuple[ClockError, ...]]:
        """Return all kept spans after `position`, ordered by host and end, and the errors of the hosts' clocks."""
        spans, clocks, _ = self.page(position, self._limit)
        return spans, clocks

    def page(self, position: int, limit: int = MAX_ANSWERED) -> tuple[list[Span], tuple[ClockError, ...], int]:
        """Return at most `limit` spans as `since_position` does, or those of one entry, and the position after them."""
        earlier, alignments = _Alignments(self._clocks), _Alignments(self._clocks)
        position = position if position <= self._recorded else 0
        first = self._recorded - len(self._ends)
        position = max(first, position)
        begin = position - self._entries_before(position - first)
        found: list[Span] = []
        before = set()
        count = 0
        end = self._recorded
        for number, each in enumerate(islice(self._ends, begin - first, None), begin):
            alignments.position = earlier.position = number
            if number >= position:
                if count >= limit:
                    end = number
                    break
                count += each.count
                found.extend(each.spans(alignments.of, self._ahead))
                continue
            for span in each.spans(earlier.of, self._ahead):
                found.append(span)
                before.add((span.host, span.sequence))
        spans = [span for span in laid_out(found) if (span.host, span.sequence) not in before]
        return spans, alignments.errors(), end

    def _entries_before(self, index: int) -> int:
        """Return how many entries before `index` have at most `_LOOK_BACK` spans, and at least one if there is one."""
        count = 0
        for entries, each in enumerate(islice(reversed(self._ends), len(self._ends) - index, None)):
            count += each.count
            if count > _LOOK_BACK:
                return max(entries, 1)
        return index

    def after(self, position: int, limit: int) -> tuple[list[Span], int]:
        """Return the newest `limit` spans after `position` in the order of their recording, and the current position.

        The spans run from dispatch to end, without waits, and use the current offsets of clocks. So the cost depends on
        the new spans, not on all kept ones. Begin with the position 0. A position of another controller counts as 0.
        """
        new = self._recorded - position if position <= self._recorded else self._recorded
        offsets: dict[int, int] = {}

        def offset(host: int) -> int:
            if host not in offsets:
                clock = self.clock(host)
                offsets[host] = clock.offset(clock.read or 0)[0]
            return offsets[host]

        found: list[Span] = []
        for each in islice(reversed(self._ends), new):
            if len(found) >= limit:
                break
            found.extend(each.bare_spans(offset))
        return found[::-1], self._recorded
