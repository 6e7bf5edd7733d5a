"""How far the clocks of hosts and proxies are from the controller's, and how far that may be wrong.

A peer reads its clock when it answers a ping: between when the ping was sent and when the answer came. So each round
trip bounds the offset from both sides, by half of its length: the shorter, the better (Cristian's algorithm). Clocks
drift, by `DRIFT` at most; so a round trip says something of other times, too, the less the further away these are. What
holds at a time is what all round trips agree on: the intersection of their bounds (Marzullo's algorithm).
"""

from __future__ import annotations

from typing import NamedTuple

# How much faster or slower one clock may run than another: crystals are within 50 parts in a million of what they
# are to be. A clock that NTP is just about to correct may be slewed by ten times that: then the bound is passed.
DRIFT = 1e-4
# Of the round trips of so many nanoseconds what they agree on is kept.
PERIOD_NS = 4_000_000_000
# Round trips that are kept of a clock: the older, the sparser.
MOST_SAMPLES = 64
# An answer that took longer says nothing.
_MOST_SECONDS = 60.0
# Between times that are so far apart, 0.13 s, the offset is interpolated.
_GRID_BITS = 27
_GRID_MASK = (1 << _GRID_BITS) - 1


class _RoundTrip(NamedTuple):
    """When the peer's clock shows `at`, the controller's less that is between `low` and `high`, in nanoseconds."""

    at: int
    low: int
    high: int


def _agreed(one: _RoundTrip, other: _RoundTrip) -> _RoundTrip | None:
    """What both say, of the time of the shorter; None where they contradict each other."""
    best, less = (one, other) if one.high - one.low < other.high - other.low else (other, one)
    drifted = int(DRIFT * abs(one.at - other.at)) + 1
    low, high = max(best.low, less.low - drifted), min(best.high, less.high + drifted)
    return _RoundTrip(best.at, low, high) if low <= high else None


class Clock:
    """A clock that is read from afar, in nanoseconds."""

    def __init__(self) -> None:
        self.samples = 0  # round trips that were measured
        self._kept: list[_RoundTrip] = []  # in order
        self._period = 0  # when that of the last one began

    def measure(self, sent: float, read: int, received: float) -> bool:
        """Asked at `sent`, the peer has said `read`, which came at `received`: seconds of the controller's clock.

        False where this cannot be the clock that was measured before: one that was stopped, with its virtual machine,
        say. It is not counted then.
        """
        if not 0 <= received - sent < _MOST_SECONDS:  # nor where one of them is no number
            return True
        trip = _RoundTrip(read, int(sent * 1e9) - read, int(received * 1e9) - read + 1)
        agreed = _agreed(self._kept[-1], trip) if self._kept else trip
        if agreed is None:
            return False
        self.samples += 1
        if self._kept and 0 <= read - self._period < PERIOD_NS:
            self._kept[-1] = agreed
            return True
        self._period = read
        self._kept.append(trip)
        if len(self._kept) > MOST_SAMPLES:
            half = MOST_SAMPLES // 2
            self._kept[:half] = self._kept[:half:2]
        return True

    @property
    def read(self) -> int | None:
        """A time at which it was read lately; None where it never was."""
        return self._kept[-1].at if self._kept else None

    def offset(self, at: int) -> tuple[int, int]:
        """What is to be added to the peer's time `at` for the controller's, and how far that may be wrong; (0, -1)
        where nothing was measured.
        """
        if not self._kept:
            return 0, -1
        low = max(trip.low - int(DRIFT * abs(at - trip.at)) for trip in self._kept)
        high = min(trip.high + int(DRIFT * abs(at - trip.at)) for trip in self._kept)
        if low <= high:
            return (low + high) // 2, (high - low + 1) // 2
        # It drifts by more: the nearest is right where it was measured, and the others say how wrong it is here.
        nearest = min(self._kept, key=lambda trip: abs(at - trip.at))
        middle = (nearest.low + nearest.high) // 2
        return middle, max(low - middle, middle - high, (nearest.high - nearest.low + 1) // 2)


def offsets(clock: Clock, seconds: float) -> tuple[tuple[tuple[int, int], ...], int]:
    """A table of the clock's last so many seconds: times of it, each with the offset then; and the error of all times
    in between, where the offset is interpolated. Empty, with an error of -1, where nothing was measured.
    """
    latest = clock.read
    if latest is None:
        return (), -1
    step = max(1 << _GRID_BITS, int(1e9 * seconds) // MOST_SAMPLES)
    times = range(latest - int(1e9 * seconds) - step, latest + 2 * step, step)
    table = [(at, *clock.offset(at)) for at in times]
    return tuple((at, offset) for at, offset, _ in table), max(error for *_, error in table) + int(DRIFT * step)


class Alignment:
    """Times of a clock as those of the controller's. `error` is how far those that were asked for may be wrong.

    Asked for in whatever order, later times stay later.
    """

    def __init__(self, clock: Clock) -> None:
        self.error = -1 if clock.samples == 0 else 0
        self.offset = 0  # of the last time that was asked for, about
        self._clock = clock
        self._cell = -1  # of the grid: that of the last time
        self._rise = 0  # of the offset, over that
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
