"""The record of a run, as JSON: all samples, the numbers computed from them, and the machine."""

from pathlib import Path

import msgspec

from benchmarks.harness.benchmark import Benchmark, Metric, Target
from benchmarks.harness.machine import Machine
from benchmarks.harness.statistics import Ratio, Summary, ratio, summarize

RESULTS = Path(__file__).resolve().parents[1] / "results"
# CPUs that others keep busy just before a run; with more, its numbers do not count. The load average would not
# do: it remembers for minutes, also what the run before has done.
BUSY_CPUS = 0.3


class MetricRecord(msgspec.Struct, frozen=True):
    name: str
    title: str
    unit: str
    samples: dict[str, list[float]]  # by backend, one a round
    summaries: dict[str, Summary]
    ratio: Ratio | None  # first contestant over second, if both ran
    target: str | None
    reached: bool | None  # None: there is no target, or what it judges was not measured
    sure: bool | None  # whether the quartiles lie on the same side of the target as the median


class BenchmarkRecord(msgspec.Struct, frozen=True):
    key: str
    title: str
    contestants: list[str]  # those of this run
    metrics: list[MetricRecord]
    failures: dict[str, str]  # by backend
    point: dict[str, int | float | str] = {}  # its position in a figure


class Claim(msgspec.Struct, frozen=True):
    """Requirement for a figure, and the measured result. `reached` is None if it was not measured.

    If the value is above all that was measured, it is infinite, or null in JSON, and `beyond` is the largest that was.
    """

    text: str
    value: float | None
    bound: float
    reached: bool | None
    at_least: bool = True
    beyond: float | None = None


class RunRecord(msgspec.Struct, frozen=True):
    name: str
    started: str  # ISO 8601, UTC
    seconds: float
    command: list[str]
    rounds: int
    quick: bool
    machine: Machine
    load_before: float
    load_after: float
    busy: bool
    benchmarks: list[BenchmarkRecord]
    claims: list[Claim] = []
    busy_cpus: float | None = None  # just before the run; older results judge by the load
    costs: dict[str, float] = {}  # that figures in virtual time were computed with


def record_benchmark(
    benchmark: Benchmark,
    contestants: list[str],
    rounds: dict[str, list[dict[str, float]]],
    failures: dict[str, str],
) -> BenchmarkRecord:
    """Record a benchmark.

    `rounds` has the metrics of each round, by backend. A backend that failed is recorded, but not judged.
    """
    sound = {name: rounds[name] for name in contestants if name not in failures}
    return BenchmarkRecord(
        key=benchmark.key,
        title=benchmark.title,
        contestants=contestants,
        metrics=[_record_metric(benchmark, metric, sound) for metric in benchmark.metrics],
        failures=failures,
        point=dict(benchmark.point),
    )


def _record_metric(benchmark: Benchmark, metric: Metric, rounds: dict[str, list[dict[str, float]]]) -> MetricRecord:
    samples = {
        name: [values[metric.name] for values in each]
        for name, each in rounds.items()
        if each and metric.name in each[0]  # not all contestants have all metrics
    }
    summaries = {name: summarize(each) for name, each in samples.items()}
    judged, compared = (*benchmark.contestants, "")[:2]
    both = judged in samples and compared in samples
    against = ratio(samples[judged], samples[compared]) if both and min(samples[compared]) > 0 else None
    target, reached, sure = metric.target, None, None
    if target and target.ratio and against:
        reached, sure = _judge(target, against.of_medians, against.low, against.high)
    elif target and not target.ratio and judged in summaries:
        summary = summaries[judged]
        reached, sure = _judge(target, summary.median, summary.low, summary.high)
    return MetricRecord(
        name=metric.name,
        title=metric.title,
        unit=metric.unit,
        samples=samples,
        summaries=summaries,
        ratio=against,
        target=target.describe(metric.unit, compared) if target else None,
        reached=reached,
        sure=sure,
    )


def ratio_to(metric: MetricRecord, first: str, other: str) -> Ratio | None:
    """Return the ratio of the first contestant to another one, or None if one of them was not measured."""
    ours, theirs = metric.samples.get(first), metric.samples.get(other)
    return ratio(ours, theirs) if ours and theirs and min(theirs) > 0 else None


def _judge(target: Target, median: float, low: float, high: float) -> tuple[bool, bool]:
    reached = target.reached(median)
    return reached, target.reached(low) == target.reached(high) == reached


def write(record: RunRecord, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
