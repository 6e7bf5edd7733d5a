"""A figure or a table of the paper: points to measure, and claims about them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.record import BenchmarkRecord, Claim
from benchmarks.harness.statistics import quartiles
from benchmarks.paper.traces import TracePoint


class Options(msgspec.Struct, frozen=True):
    """Arguments of the command. `hosts` is empty for the figure's own."""

    hosts: tuple[int, ...] = ()
    devices_per_host: int = 2
    null: bool = False
    quick: bool = False


@dataclass(frozen=True)
class Axes:
    """How the paper draws it: by which of a point's numbers, and which metrics.

    There is a line for each contestant and metric; also for each value of the point's number `split`, if there is one.
    """

    x: str
    x_label: str
    metrics: tuple[str, ...]
    y_label: str
    log_x: bool = True
    log_y: bool = True
    split: str = ""
    split_unit: str = ""


@dataclass(frozen=True)
class Figure:
    """A figure with its `explanation`, and the result of the `paper`.

    `points(options)` are benchmarks, one for each point of the x axis (`Benchmark.point`) and all contestants there.
    Where there is nothing to measure in that way, real or null, it is empty. `claims(points, options)` judges. With
    `virtual`, null devices are in virtual time, which no load of the machine disturbs. `traces(options)` are those of
    which a picture is made.
    """

    key: str
    title: str
    explanation: str
    paper: str
    axes: Axes | None
    points: Callable[[Options], Sequence[Benchmark]]
    claims: Callable[[Sequence[BenchmarkRecord], Options], Sequence[Claim]]
    virtual: bool = False
    traces: Callable[[Options], Sequence[TracePoint]] = lambda options: ()
    rounds: int = 5


def count_of(number: int, noun: str) -> str:
    """Return a count with its noun: "1 host", "2 hosts"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def median(point: BenchmarkRecord, contestant: str, metric: str) -> float | None:
    """None where it was not measured."""
    for record in point.metrics:
        if record.name == metric and contestant in record.summaries:
            return record.summaries[contestant].median
    return None


def quotient(point: BenchmarkRecord, first: str, second: str, metric: str) -> float | None:
    """Return the median of one contestant divided by that of another."""
    ours, theirs = median(point, first, metric), median(point, second, metric)
    return ours / theirs if ours is not None and theirs else None


def difference(point: BenchmarkRecord, first: str, second: str, metric: str) -> float | None:
    """Return the median of one contestant minus that of another."""
    ours, theirs = median(point, first, metric), median(point, second, metric)
    return None if ours is None or theirs is None else ours - theirs


def quotient_by_rounds(point: BenchmarkRecord, first: str, second: str, metric: str) -> float | None:
    """One contestant over another, round by round; the median. For differences that a drift of the machine would hide.

    Both sides of a round run right after one another: the shorter a round, the less the machine changes between them.
    """
    (samples,) = (record.samples for record in point.metrics if record.name == metric)
    ours, theirs = samples.get(first, []), samples.get(second, [])
    pairs = list(zip(ours, theirs, strict=False))
    return quartiles([our / their for our, their in pairs])[1] if pairs else None


def apart(point: BenchmarkRecord, metric: str) -> float | None:
    """How far the contestants are apart in any round, of what they have; None where one has nothing."""
    (samples,) = (list(record.samples.values()) for record in point.metrics if record.name == metric)
    if len(samples) < len(point.contestants) or len({len(each) for each in samples}) > 1:
        return None
    rounds: Iterable[tuple[float, ...]] = zip(*samples, strict=True)
    return max((max(each) - min(each)) / min(map(abs, each)) for each in rounds)


def at_least(text: str, value: float | None, bound: float) -> Claim:
    return Claim(text, value, bound, None if value is None else value >= bound)


def at_most(text: str, value: float | None, bound: float) -> Claim:
    return Claim(text, value, bound, None if value is None else value <= bound, at_least=False)
