import pytest

from benchmarks.harness.benchmark import Benchmark, Metric, Target
from benchmarks.harness.record import MetricRecord, record_benchmark


def record(target: Target, atoll: list[float], stock: list[float], failed: tuple[str, ...] = ()) -> MetricRecord:
    benchmark = Benchmark("x", "a benchmark", "no:function", (Metric("rate", "a rate", "calls/s", target),))
    rounds = {"atoll": [{"rate": rate} for rate in atoll], "stock": [{"rate": rate} for rate in stock]}
    (metric,) = record_benchmark(benchmark, ["atoll", "stock"], rounds, dict.fromkeys(failed, "why")).metrics
    return metric


@pytest.mark.parametrize(
    ("target", "atoll", "reached", "sure"),
    [
        (Target(10), [11, 12, 13], True, True),
        (Target(10), [7, 8, 9], False, True),
        (Target(10), [5, 11, 12], True, False),
        (Target(10, at_least=False), [7, 8, 9], True, True),
        (Target(10, at_least=False), [7, 11, 12], False, False),
        (Target(0.5, ratio=True), [60, 60, 60], True, True),
        (Target(0.5, ratio=True), [40, 51, 60], True, False),
        (Target(0.5, ratio=True), [10, 10, 10], False, True),
    ],
)
def test_a_target_is_judged_by_the_median_and_sure_if_the_quartiles_agree(
    target: Target, atoll: list[float], reached: bool, sure: bool
):
    metric = record(target, atoll, stock=[100, 100, 100])
    assert (metric.reached, metric.sure) == (reached, sure)


def test_a_ratio_is_not_judged_when_its_peer_failed():
    metric = record(Target(0.5, ratio=True), [1, 2], [3], failed=("stock",))
    assert (metric.ratio, metric.reached, list(metric.samples)) == (None, None, ["atoll"])


def test_a_contestant_that_failed_is_not_judged():
    metric = record(Target(1), [1], [3, 3], failed=("atoll",))
    assert (metric.reached, list(metric.samples)) == (None, ["stock"])
