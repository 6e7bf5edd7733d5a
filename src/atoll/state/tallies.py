"""Counts of gangs and histograms of their waiting times and durations, by island and tenant.

Each gang is counted when it starts and when it ends, so both take only a search in a short tuple and an addition.
Rates, quantiles and shares are computed where they are displayed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from operator import add

# Upper bounds of the histograms' buckets, in seconds. One more bucket is for larger values. Metrics contain the bounds.
BOUNDS = (
    *(1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
_BOUNDS_NS = (*(bound * 1e9 for bound in BOUNDS), float("inf"))

# The kinds of gangs that move bytes (`ir.plan.STEP_KINDS`). For transfers of rows, the hosts report how many.
ROW_TRANSFERS = frozenset({"send rows", "receive rows"})
TRANSFERS = frozenset({"put", "get", "move", "send", "receive"}) | ROW_TRANSFERS


def computes(kind: str, functions: object) -> bool:
    """Return whether a gang computes: it is not a transfer, or it runs functions."""
    return bool(functions) or kind not in TRANSFERS


def counts_of(nanoseconds: list[int]) -> list[int]:
    """Return how many of the values are in each bucket."""
    ordered, found, start = sorted(nanoseconds), [0] * len(_BOUNDS_NS), 0
    while start < len(ordered):
        bucket = bisect_left(_BOUNDS_NS, ordered[start])
        stop = bisect_right(ordered, _BOUNDS_NS[bucket], start)
        found[bucket] = stop - start
        start = stop
    return found


class Histogram:
    """A histogram of seconds. `counts` has one count per bucket, and `total` is the sum of the seconds."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += count
        self.total += seconds * count

    def add(self, other: Histogram) -> None:
        """Add the values of another histogram."""
        self.observe_all(other.counts, other.total)

    def observe_all(self, counts: Sequence[int], seconds: float) -> None:
        """Add many values, as counted by `counts_of`. `seconds` is their sum."""
        self.counts = list(map(add, self.counts, counts))
        self.total += seconds


class Tally:
    """Counts of the gangs of one tenant on one island."""

    __slots__ = ("device_ns", "failed", "moved", "ran", "waited")

    def __init__(self) -> None:
        self.waited = Histogram()  # from launch to start, of the gangs that have started
        self.ran = Histogram()  # on the slowest host, of the gangs that have ended well
        self.device_ns = 0  # busy time, summed over devices
        self.failed = 0  # gangs that have started and failed
        self.moved: dict[str, list[int]] = {}  # number of transfers and their bytes, by kind

    def ended(self, nanoseconds: int, device_ns: int, is_well: bool) -> None:
        """Count the end of a gang, with its duration on the slowest host."""
        self.device_ns += device_ns
        if is_well:
            self.ran.observe(nanoseconds * 1e-9)
        else:
            self.failed += 1

    def ended_all(self, waited: float, counts: Sequence[int], nanoseconds: int, device_ns: int) -> None:
        """Count the starts and ends of gangs that have ended well.

        Args:
          waited: the seconds that each of them waited.
          counts: the histogram of their durations, from `counts_of`.
          nanoseconds: the sum of their durations.
          device_ns: the time that they kept devices busy, summed over devices.
        """
        self.waited.observe(waited, sum(counts))
        self.ran.observe_all(counts, nanoseconds * 1e-9)
        self.device_ns += device_ns

    def move(self, kind: str, nbytes: int, count: int = 1) -> None:
        """Count the ends of transfers, with the sum of their bytes."""
        counts = self.moved.setdefault(kind, [0, 0])
        counts[0] += count
        counts[1] += nbytes

    def add(self, other: Tally, islands: int = 1, place: int = 0) -> None:
        """Add the counts of another tally, whose gangs have equal parts on this number of islands.

        The first islands, by `place`, get the rest of each division, so that no nanosecond is missing in the sum.
        """
        self.waited.add(other.waited)
        self.ran.add(other.ran)
        self.device_ns += (other.device_ns + islands - 1 - place) // islands
        self.failed += other.failed
        for kind, (count, nbytes) in other.moved.items():
            self.move(kind, (nbytes + islands - 1 - place) // islands, count)

    @property
    def started(self) -> int:
        return sum(self.waited.counts)

    @property
    def running(self) -> int:
        return self.started - sum(self.ran.counts) - self.failed


class Tallies(dict[tuple[int, str], Tally]):
    """Tallies by island and tenant. Missing tallies are added on access."""

    def add(self, islands: tuple[int, ...], tenant: str, joint: Tally) -> None:
        """Add the counts of joint gangs to the tallies of their islands."""
        for place, island in enumerate(islands):
            self[island, tenant].add(joint, len(islands), place)

    def with_joint(self, joint: Mapping[tuple[tuple[int, ...], str], Tally]) -> Tallies:
        """Return these tallies and those of joint gangs, by their islands and tenant. Only what changes is copied."""
        found = Tallies(self)
        for islands, tenant in joint:
            for key in [(island, tenant) for island in islands]:
                if found.get(key) is self.get(key):
                    found[key] = Tally()
                    if key in self:
                        found[key].add(self[key])
        for (islands, tenant), tally in joint.items():
            found.add(islands, tenant, tally)
        return found

    def __missing__(self, key: tuple[int, str]) -> Tally:
        tally = self[key] = Tally()
        return tally
