"""How many gangs there were, how long they waited, and how long they took: by island and tenant.

Every gang comes by here twice, when it starts and when it ends, so both are a search in a short tuple and an addition.
What is derived from that (rates, quantiles, shares) is the matter of who looks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

# Upper bounds of the histograms' buckets, in seconds; a last one has what is above. They are part of the metrics.
BOUNDS = (
    *(1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
_BOUNDS_NS = (*(bound * 1e9 for bound in BOUNDS), float("inf"))

# The kinds of gangs that move bytes (`ir.plan.STEP_KINDS`), and those of them whose hosts know how many.
ROW_TRANSFERS = frozenset({"send rows", "receive rows"})
TRANSFERS = frozenset({"put", "get", "move", "send", "receive"}) | ROW_TRANSFERS


def computes(kind: str, functions: object) -> bool:
    """Whether a gang of that kind computes, rather than only moving bytes: `functions` are what it runs, if any."""
    return bool(functions) or kind not in TRANSFERS


def counts_of(nanoseconds: list[int]) -> list[int]:
    """How many of these are in each bucket."""
    ordered, before, found = sorted(nanoseconds), 0, []
    for bound in _BOUNDS_NS:
        until = bisect_right(ordered, bound, before)
        found.append(until - before)
        before = until
    return found


class Histogram:
    """Seconds, by bucket: `counts` has one more than there are bounds; `total` is their sum."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += count
        self.total += seconds * count

    def observe_all(self, counts: Sequence[int], seconds: float) -> None:
        """The same for many, as `counts_of` has them; they are so many seconds together."""
        self.counts = [old + new for old, new in zip(self.counts, counts, strict=True)]
        self.total += seconds


class Tally:
    """Of the gangs of one tenant on one island. Those that have started and not ended are running."""

    __slots__ = ("device_ns", "failed", "moved", "ran", "waited")

    def __init__(self) -> None:
        self.waited = Histogram()  # from the launch to the start, of all that have started
        self.ran = Histogram()  # on the slowest host, of those that have ended well
        self.device_ns = 0  # that its gangs kept devices busy, summed over these
        self.failed = 0  # of those that have started
        self.moved: dict[str, list[int]] = {}  # transfers, by kind: how many, and bytes

    def ended(self, nanoseconds: int, device_ns: int, is_well: bool) -> None:
        """A gang has ended, after so long on the slowest of its hosts."""
        self.device_ns += device_ns
        if is_well:
            self.ran.observe(nanoseconds * 1e-9)
        else:
            self.failed += 1

    def ended_all(self, waited: float, counts: Sequence[int], nanoseconds: int, device_ns: int) -> None:
        """Gangs that waited for so many seconds each have started, and ended well: as `Histogram.observe_all`."""
        self.waited.observe(waited, sum(counts))
        self.ran.observe_all(counts, nanoseconds * 1e-9)
        self.device_ns += device_ns

    def move(self, kind: str, nbytes: int, count: int = 1) -> None:
        """So many gangs that transfer have ended."""
        counts = self.moved.setdefault(kind, [0, 0])
        counts[0] += count
        counts[1] += nbytes

    @property
    def started(self) -> int:
        return sum(self.waited.counts)

    @property
    def running(self) -> int:
        return self.started - sum(self.ran.counts) - self.failed


class Tallies(dict[tuple[int, str], Tally]):
    """Tallies by island and tenant; one that is asked for is there."""

    def __missing__(self, key: tuple[int, str]) -> Tally:
        tally = self[key] = Tally()
        return tally
