"""What ran where and when: the last gangs of all sessions, host by host.

A gang keeps some devices of a host busy: from its dispatch there, or the end of the gang before it on one of these
devices, to its own end, by the host's clock (`layout`). So the spans of one device never overlap; those of several
devices do where their gangs ran at once.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import msgspec

from atoll.protocol.spans import ClockError, Span
from atoll.scheduling.gangs import GangSpec, RunGangs
from atoll.scheduling.queued_nodes import Gang
from atoll.scheduling.reasons import Reason, Waited
from atoll.scheduling.session import GangRun
from atoll.scheduling.tallies import TRANSFERS
from atoll.telemetry.clocks import Alignment, Clock
from atoll.telemetry.layout import laid_out

MOST_SPANS = 100_000
# Of them in a snapshot of the controller: the others were three quarters of what a snapshot takes.
MOST_SPANS_KEPT = 10_000
# Plain text: it is what messages have.
_TEXTS = {reason: reason.value for reason in Reason}
# What was recorded before a position and may have kept devices busy after it: more than are in flight on a host.
_LOOK_BACK = 256
# Spans of one answer to a request. A span takes ten microseconds to make.
MOST_ANSWERED = 512
# Of one host, one after another.
_MOST_CLOCKS = 16
_PAIRS = struct.Struct("<2q")


class _GangEnds(msgspec.Struct, frozen=True, gc=False):
    """A gang's ends on some of its hosts. `times` has for each its dispatch and its end.

    Without garbage collection: it would go through all that are kept, again and again.
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
        """Of spans."""
        return len(self.hosts)

    def spans(self, aligned: Callable[[int], Alignment]) -> Iterable[Span]:
        """`aligned(host)` makes the host's times those of the controller."""
        kind, segments, devices = self.spec.kind, self.spec.segments, self.spec.devices
        launched = int(1e9 * self.launched)
        waits = tuple([(_TEXTS[reason], int(1e9 * seconds)) for reason, seconds in self.waited])
        for host, started, ended in zip(self.hosts, self.times[::2], self.times[1::2], strict=True):
            align = aligned(host)
            enqueued = align(min(started, ended))
            yield Span(
                self.island,
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
                waits,
                self.nbytes,
                self.node,
                self.spec.title,
            )

    def bare_spans(self, offset: Callable[[int], int]) -> Iterable[Span]:
        """Without what they waited for; `offset(host)` is what is added to the host's times."""
        kind, segments, devices = self.spec.kind, self.spec.segments, self.spec.devices
        for host, started, ended in zip(self.hosts, self.times[::2], self.times[1::2], strict=True):
            shift = offset(host)
            yield Span(
                self.island,
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
    """Ends of gangs of a delegated run on its one host, from `place` on in `gangs`: `packed` has for each its dispatch
    and its end, as in `RunProgress`. `first` is the sequence number of the program's first gang.
    """

    island: int
    session: int
    program: str
    gangs: RunGangs
    first: int
    place: int
    hosts: tuple[int, ...]
    packed: bytes
    launched: float
    waited: Waited

    def _ends(self) -> Iterable[_GangEnds]:
        gangs = self.gangs
        for place, times in enumerate(_PAIRS.iter_unpack(self.packed), self.place):
            if not times[1]:  # it has failed
                continue
            yield _GangEnds(
                self.island,
                self.session,
                self.program,
                gangs.specs[place],
                self.first + gangs.numbers[place],
                self.hosts,
                times,
                self.launched,
                self.waited,
                gangs.moved[place],
                self.first + gangs.nodes[place],
            )

    @property
    def count(self) -> int:
        return len(self.packed) // _PAIRS.size

    def spans(self, aligned: Callable[[int], Alignment]) -> Iterable[Span]:
        for each in self._ends():
            yield from each.spans(aligned)

    def bare_spans(self, offset: Callable[[int], int]) -> Iterable[Span]:
        for each in self._ends():
            yield from each.bare_spans(offset)


class _Clocks:
    """The clocks of a host, one after another: a machine that starts anew has a new one. `since` are positions of the
    trace, from which on each of them is meant.
    """

    def __init__(self) -> None:
        self.since = [0]
        self.clocks = [Clock()]

    def begin(self, position: int) -> None:
        self.since.append(position)
        self.clocks.append(Clock())
        if len(self.since) > _MOST_CLOCKS:  # what was recorded by the first is taken for that of the second
            del self.since[1], self.clocks[0]


class _Alignments:
    """Times of hosts as those of the controller, while an answer is made."""

    def __init__(self, clocks: dict[int, _Clocks]) -> None:
        self.position = 0  # in the trace: of what is asked about
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
        """For the hosts that were asked for, of the last of their clocks."""
        last = {host: (number, alignment) for (host, number), alignment in sorted(self._known.items())}
        return tuple(
            ClockError(host, alignment.offset, alignment.error, self._clocks[host].clocks[number].samples)
            for host, (number, alignment) in last.items()
        )


class Trace:
    """Keeps the last spans. What is recorded starts with the gang's dispatch, in whatever order ends are reported: a
    host reports those of its devices, and of its transfers, independently. What is given is by the controller's clock.
    """

    def __init__(self, most: int = MOST_SPANS) -> None:
        self._ends: deque[_GangEnds | _RunEnds] = deque()
        self._count = 0
        self._recorded = 0  # entries, also of those that are not kept any more
        self._most = most
        self._clocks: dict[int, _Clocks] = defaultdict(_Clocks)  # by host

    def __getstate__(self) -> dict[str, Any]:
        """With the last ones. Another process goes on with them, and with all positions."""
        ends: deque[_GangEnds | _RunEnds] = deque()
        count = 0
        for each in reversed(self._ends):
            if count + each.count > MOST_SPANS_KEPT:
                break
            count += each.count
            ends.appendleft(each)
        return self.__dict__ | {"_ends": ends, "_count": count}

    @property
    def position(self) -> int:
        """After all that was recorded."""
        return self._recorded

    def clock(self, host: int) -> Clock:
        """That which the host has now."""
        return self._clocks[host].clocks[-1]

    def clock_began(self, host: int) -> None:
        """The host has started anew, and so has its clock."""
        self._clocks[host].begin(self._recorded)

    def record_gang(self, gang: Gang[GangRun], hosts: tuple[int, ...], times: tuple[int, ...]) -> None:
        """A gang has ended on some of its hosts. Spans are made of it when somebody asks: every gang comes by here."""
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

    def record_run(self, gang: Gang[GangRun], gangs: RunGangs, first: int, place: int, packed: bytes) -> None:
        """Gangs of a delegated run have ended, as `_RunEnds` has it."""
        run = gang.run
        launch = run.launch
        ends = _RunEnds(
            gang.island,
            launch.session,
            launch.program.name,
            gangs,
            first,
            place,
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
        while self._count > self._most:
            self._count -= self._ends.popleft().count

    def spans(self, since: int = 0) -> list[Span]:
        """Those that ended at `since` or later, host by host in the order of their ends."""
        return [span for span in self.since_position(0)[0] if span.ended >= since]

    def since_position(self, position: int) -> tuple[list[Span], tuple[ClockError, ...]]:
        """All that was recorded after `position` and is kept, host by host in the order of their ends; and how well the
        clocks of these hosts are known.
        """
        spans, clocks, _ = self.page(position, self._most)
        return spans, clocks

    def page(self, position: int, most: int = MOST_ANSWERED) -> tuple[list[Span], tuple[ClockError, ...], int]:
        """As `since_position`, for the first `most` spans, or those of one gang; and the position after these."""
        earlier, alignments = _Alignments(self._clocks), _Alignments(self._clocks)
        position = position if position <= self._recorded else 0
        first = self._recorded - len(self._ends)
        begin = max(first, position - _LOOK_BACK)
        position = max(first, position)
        found: list[Span] = []
        before = set()
        count = 0
        end = self._recorded
        for number, each in enumerate(islice(self._ends, begin - first, None), begin):
            alignments.position = earlier.position = number
            if number >= position:
                if count >= most:
                    end = number
                    break
                count += each.count
                found.extend(each.spans(alignments.of))
                continue
            for span in each.spans(earlier.of):
                found.append(span)
                before.add((span.host, span.sequence))
        spans = [span for span in laid_out(found) if (span.host, span.sequence) not in before]
        return spans, alignments.errors(), end

    def after(self, position: int, most: int) -> tuple[list[Span], int]:
        """The newest `most` spans of what was recorded after `position`, in that order, and the position now.

        As they were reported, from dispatch to end, without what they waited for, by what is known of clocks now: what
        it costs is what is new, and not what is kept. Begin with a position of 0, or of a controller that was another.
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
            if len(found) >= most:
                break
            found.extend(each.bare_spans(offset))
        return found[::-1], self._recorded
