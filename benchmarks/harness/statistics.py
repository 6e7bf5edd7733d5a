"""Medians, quartiles and ratios of rounds. Pure functions: samples in, numbers out.

Medians, because a round that another process disturbed must not move the result; quartiles, because a number
without its spread cannot be compared.
"""

import itertools
import math
import statistics
from collections.abc import Sequence

import msgspec


class Summary(msgspec.Struct, frozen=True):
    """Statistics of one metric's rounds. `low` and `high` are the first and third quartile."""

    median: float
    low: float
    high: float
    count: int


class Ratio(msgspec.Struct, frozen=True):
    """One contestant against another.

    `of_medians` is the result. `low` and `high` are the quartiles of the ratios round by round: both sides of
    a round run within seconds of one another, so what slows the whole machine cancels. With few or noisy
    rounds `of_medians` can lie outside them.
    """

    of_medians: float
    low: float
    high: float
    count: int


# (when, how many have ended by then), in order of time: from a client's start to its end.
Progress = Sequence[tuple[float, float]]


def rate_in_common_window(clients: Sequence[Progress]) -> float:
    """Return the rate at which all clients together complete work, from the start of the last one to the end of the
    first one.

    Between two points of a client's progress, its completions are spread evenly. Raise ValueError if a client ends
    before another one has started, because the clients were then never all at work.
    """
    start, end = max(each[0][0] for each in clients), min(each[-1][0] for each in clients)
    if start >= end:
        raise ValueError(f"a client had ended {start - end:.3f} s before the last one started")
    return sum(_ended(each, end) - _ended(each, start) for each in clients) / (end - start)


def _ended(progress: Progress, when: float) -> float:
    for (before, fewer), (after, more) in itertools.pairwise(progress):
        if before <= when <= after:
            return fewer + (more - fewer) * ((when - before) / (after - before) if after > before else 1.0)
    raise ValueError(f"{when} is not between {progress[0][0]} and {progress[-1][0]}")


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile; between samples by linear interpolation.

    Raises ValueError if there is no sample or one is not finite.
    """
    if not samples:
        raise ValueError("no samples: a benchmark needs at least one round")
    if not all(math.isfinite(sample) for sample in samples):
        raise ValueError(f"samples that are not finite numbers: {list(samples)}")
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, middle, high


def summarize(samples: Sequence[float]) -> Summary:
    low, median, high = quartiles(samples)
    return Summary(median=median, low=low, high=high, count=len(samples))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Ours over theirs; the n-th samples of both belong to the n-th round.

    Raises ValueError if the numbers of rounds differ, or a sample of theirs is not positive.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} rounds of ours against {len(theirs)} of theirs: rounds come in pairs")
    if any(sample <= 0 for sample in theirs):
        raise ValueError(f"samples that cannot be divided by: {list(theirs)}")
    low, _, high = quartiles([our / their for our, their in zip(ours, theirs, strict=True)])
    of_medians = quartiles(ours)[1] / quartiles(theirs)[1]
    return Ratio(of_medians=of_medians, low=low, high=high, count=len(ours))


def number(value: float) -> str:
    """Three significant digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def with_quartiles(summary: Summary) -> str:
    """Return the median, with the quartiles in brackets."""
    return f"{number(summary.median)} ({number(summary.low)}-{number(summary.high)})"
