"""Compute when devices were busy with each gang, from spans that run from dispatch to end.

A device computes one gang after another, in the order of their dispatches. Transfers overlap with that. A transfer that
was dispatched before a computing gang, and ended before it, had the device until its end. A transfer that was
dispatched later, and ended while a gang computed, counts as taking no time. `state.device_clocks` charges tenants
by the same rules, as ends are reported.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable

import msgspec

from atoll.protocol.spans import Span
from atoll.state.tallies import computes


def laid_out(spans: Iterable[Span]) -> list[Span]:
    """Return the spans, each beginning when its devices were free for it, so that spans of one device do not overlap.

    The result is ordered by host, then by end, then by start.
    """
    ordered = sorted(spans, key=lambda span: (span.host, span.ended, span.started, span.sequence))
    starts: dict[int, int] = {}  # by position in `ordered`
    devices: defaultdict[tuple[int, int], _Device] = defaultdict(_Device)
    of = [[devices[span.host, ordinal] for ordinal in span.devices or (0,)] for span in ordered]
    computing = [computes(span.kind, span.function) for span in ordered]
    for position, span in enumerate(ordered):
        if computing[position]:
            start = min(max(device.free_for(span) for device in of[position]), span.ended)
            starts[position] = start
            for device in of[position]:
                device.computed(start, span.ended)
        else:
            for device in of[position]:
                device.transfers.append((span.started, span.ended))
    for position, span in enumerate(ordered):
        if not computing[position]:
            starts[position] = min(max(device.free_beside(span) for device in of[position]), span.ended)
            if starts[position] < span.ended:
                for device in of[position]:
                    device.moved = max(device.moved, span.ended)
    return [
        span if starts[position] == span.started else msgspec.structs.replace(span, started=starts[position])
        for position, span in enumerate(ordered)
    ]


class _Device:
    """The busy times of one device.

    `transfers` are the (dispatch, end) pairs of transfers that ended since the last computation. `moved` is the end of
    the last transfer that took time.
    """

    __slots__ = ("_ended", "_started", "moved", "transfers")

    def __init__(self) -> None:
        self.transfers: list[tuple[int, int]] = []
        self.moved = 0
        self._started: list[int] = []
        self._ended: list[int] = []

    def free_for(self, span: Span) -> int:
        """Return when a computing `span` could start, after all spans that ended before it."""
        free = max(span.started, self._ended[-1]) if self._ended else span.started
        return max([free, *(ended for started, ended in self.transfers if started <= span.started)])

    def computed(self, started: int, ended: int) -> None:
        self.transfers.clear()
        self._started.append(started)
        self._ended.append(ended)

    def free_beside(self, span: Span) -> int:
        """Return when a transfer could start. Call it after `computed` for all computing spans."""
        after = bisect_right(self._ended, span.ended)
        if after < len(self._ended) and self._started[after] < span.ended:
            return span.ended
        return max(span.started, self.moved, self._ended[after - 1] if after else 0)
