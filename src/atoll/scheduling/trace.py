"""What ran where and when: the last gangs of all sessions, host by host.

A gang keeps some devices of a host busy: from its dispatch there, or the end of the gang before it on one of these
devices, to its own end, by the host's clock. So the spans of one device never overlap; those
of several devices do where their gangs ran at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

import msgspec

from atoll.protocol.spans import Span
from atoll.scheduling.gangs import GangSpec

MOST_SPANS = 100_000


class _GangEnds(NamedTuple):
    """A gang's ends on some of its hosts. `times` has for each its dispatch and its end."""

    island: int
    session: int
    program: str
    spec: GangSpec
    sequence: int
    hosts: tuple[int, ...]
    times: tuple[int, ...]

    def spans(self) -> Iterable[Span]:
        kind, segments, devices = self.spec.kind, self.spec.segments, self.spec.devices
        for host, started, ended in zip(self.hosts, self.times[::2], self.times[1::2], strict=True):
            yield Span(
                self.island,
                host,
                self.session,
                self.program,
                kind,
                self.sequence,
                started,
                ended,
                segments,
                devices[host],
            )


class Trace:
    """Keeps the last spans. What is recorded starts with the gang's dispatch, in whatever order ends are reported: a
    host reports those of its devices, and of its transfers, independently.
    """

    def __init__(self, most: int = MOST_SPANS) -> None:
        self._ends: deque[_GangEnds | Span] = deque()
        self._count = 0
        self._recorded = 0  # entries, also of those that are not kept any more
        self._most = most

    def record_gang(
        self,
        island: int,
        session: int,
        program: str,
        spec: GangSpec,
        sequence: int,
        hosts: tuple[int, ...],
        times: tuple[int, ...],
    ) -> None:
        """A gang has ended on some of its hosts. Spans are made of it when somebody asks: every gang comes by here."""
        self._ends.append(_GangEnds(island, session, program, spec, sequence, hosts, times))
        self._added(len(hosts))

    def record(self, span: Span) -> None:
        self._ends.append(span)
        self._added(1)

    def _added(self, count: int) -> None:
        self._count += count
        self._recorded += 1
        while self._count > self._most:
            oldest = self._ends.popleft()
            self._count -= len(oldest.hosts) if isinstance(oldest, _GangEnds) else 1

    def spans(self, since: int = 0) -> list[Span]:
        """Those that ended at `since` or later, host by host in the order of their ends."""
        spans = [span for each in self._ends for span in (each.spans() if isinstance(each, _GangEnds) else (each,))]
        return [span for span in _without_queueing(spans) if span.ended >= since]

    def after(self, position: int, most: int) -> tuple[list[Span], int]:
        """The newest `most` spans of what was recorded after `position`, in that order, and the position now.

        As they were reported, from dispatch to end: what it costs is what is new, and not what is kept. Begin with a
        position of 0, or of a controller that was another one.
        """
        new = self._recorded - position if position <= self._recorded else self._recorded
        found: list[Span] = []
        for each in islice(reversed(self._ends), new):
            if len(found) >= most:
                break
            found.extend(each.spans() if isinstance(each, _GangEnds) else (each,))
        return found[::-1], self._recorded


def _without_queueing(spans: Iterable[Span]) -> Iterable[Span]:
    """Each span from when its devices were free; in the order of their ends."""
    free_at: dict[tuple[int, int], int] = {}  # by host and ordinal
    for span in sorted(spans, key=lambda span: (span.host, span.ended, span.sequence)):
        started = min(span.started, span.ended)
        for device in span.devices or (0,):
            key = (span.host, device)
            started = max(started, free_at.get(key, 0))
            free_at[key] = span.ended
        yield span if started == span.started else msgspec.structs.replace(span, started=started)
