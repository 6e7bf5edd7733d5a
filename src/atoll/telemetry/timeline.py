"""The recent activity of each device, built from spans as they arrive.

Spans carry times of the controller's clock. A span arrives soon after its end, so the smallest difference between its
arrival, by the reader's clock, and its end approximates the offset of the clocks. The smallest offset so far is kept,
and reset if another controller answers. For a picture this is accurate enough: the error is the time that a message
takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from atoll.protocol.spans import Span
from atoll.telemetry.layout import laid_out

WINDOW_SECONDS = 10.0
MAX_BARS = 20_000  # per device
# Bars of one session with a shorter pause between them are joined: a picture cannot show the pause.
_PAUSE_SECONDS = 0.001
# If the offset jumps by more than the window and this, another controller has answered.
_RESTART_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Bar:
    """The device was busy for a session from `started` to `ended`, in seconds of the reader's clock.

    `name` is that of the function or the program.
    """

    started: float
    ended: float
    session: int
    name: str = ""

    def continues(self, before: Bar) -> bool:
        """Return whether a picture shows this bar and the one before it as one."""
        is_same = self.session == before.session and self.name == before.name
        return is_same and self.started - before.ended < _PAUSE_SECONDS


@dataclass(slots=True)
class Row:
    """One device. `free` is the end of its last gang, in nanoseconds of the controller's clock."""

    island: int
    host: int
    ordinal: int
    bars: deque[Bar] = field(default_factory=lambda: deque(maxlen=MAX_BARS))
    free: int = 0

    def append(self, bar: Bar) -> None:
        last = self.bars[-1] if self.bars else None
        if last is not None and bar.continues(last):
            self.bars[-1] = Bar(last.started, max(last.ended, bar.ended), bar.session, bar.name)
        else:
            self.bars.append(bar)

    def copy(self) -> Row:
        return Row(self.island, self.host, self.ordinal, self.bars.copy(), self.free)


class TimeLine:
    """The last `window` seconds of each device. Bars of one device do not overlap."""

    def __init__(self, window: float = WINDOW_SECONDS) -> None:
        self.window = window
        self._rows: dict[tuple[int, int], Row] = {}
        self._offset: float | None = None  # the reader's clock less the controller's

    def add(self, spans: Iterable[Span], now: float) -> None:
        """Add spans that have just arrived, in the order in which they were reported."""
        spans = list(spans)
        offset = self._align(spans, now)
        for span in laid_out(spans):
            rows = [self._row(span, ordinal) for ordinal in span.devices or (0,)]
            started = min(max([span.started, *(row.free for row in rows)]), span.ended)
            if started == span.ended:  # earlier spans took all of its time
                continue
            bar = Bar(started / 1e9 + offset, span.ended / 1e9 + offset, span.session, span.function or span.program)
            for row in rows:
                row.free = max(row.free, span.ended)
                row.append(bar)
        self.trim(now)

    def trim(self, now: float) -> None:
        """Drop bars that are older than the window."""
        for row in self._rows.values():
            while row.bars and row.bars[0].ended < now - self.window:
                row.bars.popleft()

    def _align(self, spans: list[Span], now: float) -> float:
        """Update and return the offset, using these spans."""
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
        """Return the rows, ordered by host and device."""
        return [self._rows[key] for key in sorted(self._rows)]

    def busy(self, host: int, ordinal: int, now: float, seconds: float) -> float:
        """Return the fraction of the last `seconds` in which the device was busy, according to the spans so far."""
        row = self._rows.get((host, ordinal))
        if row is None:
            return 0.0
        first = now - seconds
        return min(1.0, sum(max(0.0, min(bar.ended, now) - max(bar.started, first)) for bar in row.bars) / seconds)


@dataclass(frozen=True, slots=True)
class Stripe:
    """The pixels of a row from `first` up to, not including, `last`, which show one function of one session."""

    first: int
    last: int
    session: int
    name: str = ""


def stripes(bars: Iterable[Bar], first: float, last: float, pixels: int) -> list[Stripe]:
    """Return the bars of a device between two times as at most `pixels` pixels.

    A pixel shows the session with the largest part of its time, and of that session the function with the largest part.
    It is empty if sessions had less than a quarter of it.
    """
    width = (last - first) / pixels
    shares: list[dict[int, dict[str, float]]] = [{} for _ in range(pixels)]
    for bar in bars:
        start, end = max(bar.started, first), min(bar.ended, last)
        if end <= start:
            continue
        left, right = int((start - first) / width), min(int((end - first) / width), pixels - 1)
        for pixel in range(left, right + 1):
            begins = first + pixel * width
            part = min(end, begins + width) - max(start, begins)
            names = shares[pixel].setdefault(bar.session, {})
            names[bar.name] = names.get(bar.name, 0.0) + part
    found: list[Stripe] = []
    for pixel, share in enumerate(shares):
        sums = {session: sum(names.values()) for session, names in share.items()}
        if not sums or sum(sums.values()) < width / 4:
            continue
        session = max(sorted(sums), key=sums.__getitem__)
        names = share[session]
        name = max(sorted(names), key=names.__getitem__)
        if found and (found[-1].last, found[-1].session, found[-1].name) == (pixel, session, name):
            found[-1] = Stripe(found[-1].first, pixel + 1, session, name)
        else:
            found.append(Stripe(pixel, pixel + 1, session, name))
    return found
