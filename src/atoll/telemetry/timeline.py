"""What ran when on which device, lately: a row for each device, made of spans as they come.

Spans have times of the controller's clock. One is heard of soon after its end, so the shortest time between the two, by
the reader's clock, is how far the controller's clock is from that; it is kept as the smallest so far, and follows a
controller that is another one. It is good for a picture: to within the time that a message takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from atoll.protocol.spans import Span
from atoll.telemetry.layout import laid_out

WINDOW_SECONDS = 10.0
# Of one device, in the window.
MOST_BARS = 20_000
# What one session does with pauses shorter than that is one bar: less than a picture can show.
_PAUSE_SECONDS = 0.001
# A clock that seems to be off by more than that is another one.
_RESTART_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Bar:
    """A device was busy for a session, from `started` to `ended` by the reader's clock, in seconds."""

    started: float
    ended: float
    session: int


@dataclass(slots=True)
class Row:
    """One device; `free` is when its last gang ended, by the controller's clock, in nanoseconds."""

    island: int
    host: int
    ordinal: int
    bars: deque[Bar] = field(default_factory=lambda: deque(maxlen=MOST_BARS))
    free: int = 0

    def append(self, bar: Bar) -> None:
        last = self.bars[-1] if self.bars else None
        if last is not None and last.session == bar.session and bar.started - last.ended < _PAUSE_SECONDS:
            self.bars[-1] = Bar(last.started, max(last.ended, bar.ended), bar.session)
        else:
            self.bars.append(bar)


class TimeLine:
    """The last `window` seconds of each device. Bars of one device never overlap."""

    def __init__(self, window: float = WINDOW_SECONDS) -> None:
        self.window = window
        self._rows: dict[tuple[int, int], Row] = {}
        self._offset: float | None = None  # the reader's clock less the controller's

    def add(self, spans: Iterable[Span], now: float) -> None:
        """Spans that were just heard of, in the order in which they were reported."""
        spans = list(spans)
        offset = self._align(spans, now)
        for span in laid_out(spans):
            rows = [self._row(span, ordinal) for ordinal in span.devices or (0,)]
            started = min(max([span.started, *(row.free for row in rows)]), span.ended)
            if started == span.ended:  # what was before it has its time
                continue
            bar = Bar(started / 1e9 + offset, span.ended / 1e9 + offset, span.session)
            for row in rows:
                row.free = max(row.free, span.ended)
                row.append(bar)
        self.trim(now)

    def trim(self, now: float) -> None:
        """Forgets what is older than the window."""
        for row in self._rows.values():
            while row.bars and row.bars[0].ended < now - self.window:
                row.bars.popleft()

    def _align(self, spans: list[Span], now: float) -> float:
        """The offset, as these show it, too."""
        offset = min((now - span.ended / 1e9 for span in spans), default=now)
        known = offset if self._offset is None else self._offset
        if spans and abs(offset - known) > self.window + _RESTART_SECONDS:
            known = offset
            for row in self._rows.values():
                row.free = 0
        if spans:
            self._offset = min(offset, known)
        return offset if self._offset is None else self._offset

    def _row(self, span: Span, ordinal: int) -> Row:
        key = (span.host, ordinal)
        if key not in self._rows:
            self._rows[key] = Row(span.island, span.host, ordinal)
        return self._rows[key]

    def rows(self) -> list[Row]:
        """By host and device."""
        return [self._rows[key] for key in sorted(self._rows)]

    def busy(self, host: int, ordinal: int, now: float, seconds: float) -> float:
        """Which part of the last seconds the device was busy, as far as spans have come."""
        row = self._rows.get((host, ordinal))
        if row is None:
            return 0.0
        first = now - seconds
        return min(1.0, sum(max(0.0, min(bar.ended, now) - max(bar.started, first)) for bar in row.bars) / seconds)


@dataclass(frozen=True, slots=True)
class Stripe:
    """Pixels of a row, from `first` to before `last`, that show one session."""

    first: int
    last: int
    session: int


def stripes(bars: Iterable[Bar], first: float, last: float, pixels: int) -> list[Stripe]:
    """The bars of a device between two times, as so many pixels at most: what is shorter than one joins others.

    A pixel shows who had most of it, and is empty where nobody had a quarter.
    """
    width = (last - first) / pixels
    shares: list[dict[int, float]] = [{} for _ in range(pixels)]
    for bar in bars:
        start, end = max(bar.started, first), min(bar.ended, last)
        if end <= start:
            continue
        left, right = int((start - first) / width), min(int((end - first) / width), pixels - 1)
        for pixel in range(left, right + 1):
            begins = first + pixel * width
            part = min(end, begins + width) - max(start, begins)
            shares[pixel][bar.session] = shares[pixel].get(bar.session, 0.0) + part
    found: list[Stripe] = []
    for pixel, share in enumerate(shares):
        if not share or sum(share.values()) < width / 4:
            continue
        session = max(sorted(share), key=lambda each: share[each])
        if found and found[-1].last == pixel and found[-1].session == session:
            found[-1] = Stripe(found[-1].first, pixel + 1, session)
        else:
            found.append(Stripe(pixel, pixel + 1, session))
    return found
