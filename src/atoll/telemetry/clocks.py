"""Estimate the offset between the clocks of hosts or proxies and the controller's clock, with a bound of the error.

A peer reads its clock when it answers a ping, that is, between the time at which the controller sent the ping and the
time at which it received the answer. So each round trip bounds the offset from both sides, and shorter ones bound it
better (Cristian's algorithm). Clocks drift by at most `DRIFT`, so a round trip also bounds the offset at other times,
less tightly the further away they are. The offset at a given time lies in the intersection of the bounds of all round
trips (Marzullo's algorithm).
"""

from __future__ import annotations

from typing import NamedTuple

# The most by which two clocks may drift apart: each crystal is within 50 parts per million of its nominal rate. While
# NTP slews a clock, it may drift by ten times as much and exceed the bound.
DRIFT = 1e-4
# The round trips of this period are stored as one: their intersection.
PERIOD_NS = 4_000_000_000
# Stored round trips per clock. Older ones are sparser.
MAX_SAMPLES = 64
# Longer round trips are ignored.
_MAX_SECONDS = 60.0
# Offsets are interpolated between times that are 2**27 ns (0.13 s) apart.
_GRID_BITS = 27
_GRID_MASK = (1 << _GRID_BITS) - 1


class _RoundTrip(NamedTuple):
    """The bounds, in nanoseconds, of the controller's time minus the peer's when the peer's clock shows `at`."""

    at: int
    low: int
    high: int


def _agreed(one: _RoundTrip, other: _RoundTrip) -> _RoundTrip | None:
    """Return the intersection of two round trips, at the time of the shorter one; None if they are disjoint."""
    best, less = (one, other) if one.high - one.low < other.high - other.low else (other, one)
    drifted = int(DRIFT * abs(one.at - other.at)) + 1
    low, high = max(best.low, less.low - drifted), min(best.high, less.high + drifted)
    return _RoundTrip(best.at, low, high) if low <= high else None


class Clock:
    """A peer's clock, in nanoseconds."""

    def __init__(self) -> None:
        self.samples = 0  # measured round trips
        self._kept: list[_RoundTrip] = []  # in order
        self._period = 0  # start of the last one's period

    def measure(self, sent: float, read: int, received: float) -> bool:
        """Add a round trip: the peer's clock showed `read` between `sent` and `received`.

        `sent` and `received` are in seconds of the controller's clock. Returns False, and ignores the round trip, if
        this cannot be the same clock as before. For example, the clock of a virtual machine stops while the machine is
        suspended.
        """
        if not 0 <= received - sent < _MAX_SECONDS:  # also true for NaN
            return True
        kept = self._kept
        low, high = int(sent * 1e9) - read, int(received * 1e9) - read + 1
        is_same_period = bool(kept) and 0 <= read - self._period < PERIOD_NS
        if is_same_period:
            at, least, most = kept[-1]
            drifted = int(DRIFT * abs(read - at)) + 1
            if low - drifted <= least and most <= high + drifted and most - least < high - low:  # nothing new: mostly
                self.samples += 1
                return True
        trip = _RoundTrip(read, low, high)
        agreed = _agreed(kept[-1], trip) if kept else trip
        if agreed is None:
            return False
        self.samples += 1
        if is_same_period:
            kept[-1] = agreed
            return True
        self._period = read
        self._kept.append(trip)
        if len(self._kept) > MAX_SAMPLES:
            half = MAX_SAMPLES // 2
            self._kept[:half] = self._kept[:half:2]
        return True

    @property
    def read(self) -> int | None:
        """A recent time of the peer's clock, or None if it was never measured."""
        return self._kept[-1].at if self._kept else None

    def offset(self, at: int) -> tuple[int, int]:
        """Return what to add to the peer's time `at` to get the controller's, and the error of that.

        Without measurements, returns (0, -1).
        """
        if not self._kept:
            return 0, -1
        low = max(trip.low - int(DRIFT * abs(at - trip.at)) for trip in self._kept)
        high = min(trip.high + int(DRIFT * abs(at - trip.at)) for trip in self._kept)
        if low <= high:
            return (low + high) // 2, (high - low + 1) // 2
        # The clock drifts by more than `DRIFT`: use the nearest round trip, and the others to bound its error.
        nearest = min(self._kept, key=lambda trip: abs(at - trip.at))
        middle = (nearest.low + nearest.high) // 2
        return middle, max(low - middle, middle - high, (nearest.high - nearest.low + 1) // 2)


def offsets(clock: Clock, seconds: float) -> tuple[tuple[tuple[int, int], ...], int]:
    """Return a table of the clock's last `seconds`: (time, offset) pairs, and the error of interpolating between them.

    Without measurements, the table is empty and the error -1.
    """
    latest = clock.read
    if latest is None:
        return (), -1
    step = max(1 << _GRID_BITS, int(1e9 * seconds) // MAX_SAMPLES)
    times = range(latest - int(1e9 * seconds) - step, latest + 2 * step, step)
    table = [(at, *clock.offset(at)) for at in times]
    return tuple((at, offset) for at, offset, _ in table), max(error for *_, error in table) + int(DRIFT * step)


class Alignment:
    """Converts times of a peer's clock to the controller's. Later times stay later, in any order of calls.

    `error` bounds the error of all conversions so far.
    """

    def __init__(self, clock: Clock) -> None:
        self.error = -1 if clock.samples == 0 else 0
        self.offset = 0  # approximately, at the last converted time
        self._clock = clock
        self._cell = -1  # of the grid, at the last converted time
        self._rise = 0  # of the offset, within that cell
        self._grid: dict[int, int] = {}  # offsets, at multiples of `1 << _GRID_BITS`

    def __call__(self, at: int) -> int:
        cell = at >> _GRID_BITS
        if cell != self._cell:
            self._cell, self.offset = cell, self._at(cell)
            self._rise = self._at(cell + 1) - self.offset
        return at + self.offset + (self._rise * (at & _GRID_MASK) >> _GRID_BITS)

    def _at(self, number: int) -> int:
        offset = self._grid.get(number)
        if offset is None:
            offset, error = self._clock.offset(number << _GRID_BITS)
            self._grid[number] = offset
            if error >= 0:
                self.error = max(self.error, error + int(DRIFT * (1 << _GRID_BITS)))
        return offset
