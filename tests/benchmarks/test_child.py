"""A worker that fails, dies or hangs becomes an error with a reason, and never a benchmark that hangs."""

import os
import time
from dataclasses import replace

import pytest

from benchmarks.harness.benchmark import Benchmark, Place, Round, Settings
from benchmarks.harness.child import Child, ContestantError
from benchmarks.micro.table import BENCHMARKS

STOCK = Settings("stock")


def prepare_counting(settings: Settings) -> Round:
    rounds = 0

    def measure() -> dict[str, float]:
        nonlocal rounds
        rounds += 1
        print("a print that is no reply")
        return {"rounds": rounds, "work": settings.size(full=2, quick=1)}

    return measure


def prepare_nothing(settings: Settings) -> Round:
    raise RuntimeError("no such device")


def prepare_to_die(settings: Settings) -> Round:
    return lambda: os._exit(3)


def prepare_to_hang(settings: Settings) -> Round:
    def hang() -> dict[str, float]:
        time.sleep(60)
        return {}

    return hang


def benchmark(prepare: str) -> Benchmark:
    return replace(BENCHMARKS[0], prepare=f"{__name__}:{prepare}", place=Place.WORKER, round_deadline=1.0)


def test_a_worker_keeps_its_benchmark_from_round_to_round():
    with Child(benchmark("prepare_counting"), STOCK) as child:
        assert [child.measure(), child.measure()] == [{"rounds": 1, "work": 2}, {"rounds": 2, "work": 2}]


def test_the_benchmark_is_told_its_settings():
    with Child(benchmark("prepare_counting"), Settings("stock", quick=True)) as child:
        assert child.measure()["work"] == 1


def test_a_failed_preparation_says_why():
    with pytest.raises(ContestantError, match="no such device"):
        Child(benchmark("prepare_nothing"), STOCK)


def test_a_worker_that_dies_says_with_which_status():
    with (
        Child(benchmark("prepare_to_die"), STOCK) as child,
        pytest.raises(ContestantError, match="status 3"),
    ):
        child.measure()


def test_a_worker_past_its_deadline_says_where_it_was():
    with (
        Child(benchmark("prepare_to_hang"), STOCK) as child,
        pytest.raises(ContestantError, match=r"(?s)deadline.*in hang"),
    ):
        child.measure()
