"""What ran where and when: the last gangs of all sessions, host by host.

A gang keeps some devices of a host busy: from its dispatch there, or the end of the gang before it on one of these
devices, to its own end, by the host's clock. So the spans of one device never overlap; those
of several devices do where their gangs ran at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from atoll.protocol.spans import Span

MOST_SPANS = 100_000


class Trace:
    """Keeps the last spans.

    `record(span)` takes a span that starts with the gang's dispatch, in whatever order ends are reported: a host
    reports those of its devices, and of its transfers, independently.
    """

    def __init__(self) -> None:
        self._spans: deque[Span] = deque(maxlen=MOST_SPANS)
        self.record: Callable[[Span], None] = self._spans.append

    def spans(self, since: int = 0) -> list[Span]:
        """Those that ended at `since` or later, host by host in the order of their ends."""
        return [span for span in _without_queueing(self._spans) if span.ended >= since]


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
