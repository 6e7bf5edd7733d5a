from collections.abc import Mapping

from benchmarks.harness.benchmark import Benchmark, Metric, Round, RunsIn, Settings
from benchmarks.harness.rounds import run_benchmark

prepared: list[str] = []


def prepare(settings: Settings) -> Round:
    """Make rounds that return the number of preparations so far."""
    prepared.append(settings.backend)
    number = prepared.count(settings.backend)

    def measure() -> Mapping[str, float]:
        return {"rate": float(number)}

    return measure


def rates(rounds: int, preparations: int, quick: bool = False) -> dict[str, list[float]]:
    prepared.clear()
    benchmark = Benchmark(
        "x",
        "a benchmark",
        "tests.benchmarks.test_rounds:prepare",
        (Metric("rate", "a rate", "calls/s"),),
        runs_in=RunsIn.PARENT,
        preparations=preparations,
    )
    record = run_benchmark(benchmark, ["atoll", "stock"], rounds, quick, lambda now, done: None)
    return record.metrics[0].samples


def test_rounds_are_divided_among_preparations():
    assert rates(5, 2) == {"atoll": [1, 1, 2, 2, 2], "stock": [1, 1, 2, 2, 2]}
    assert rates(2, 5) == {"atoll": [1, 2], "stock": [1, 2]}, "each has one round at least"
    assert rates(3, 1) == {"atoll": [1, 1, 1], "stock": [1, 1, 1]}


def test_a_quick_run_prepares_once():
    assert rates(3, 2, quick=True) == {"atoll": [1, 1, 1], "stock": [1, 1, 1]}


def test_the_order_of_preparation_is_reversed_each_time():
    rates(4, 2)
    assert prepared == ["atoll", "stock", "stock", "atoll"]
