"""Tests that a worker that fails, dies or hangs causes an error with a reason, and never a benchmark that hangs."""

import importlib.util
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.harness.benchmark import BATCH_THREADS, Benchmark, Round, RunsIn, Settings
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


def prepare_policy(settings: Settings) -> Round:
    def policies() -> dict[str, float]:
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
        thread.start()
        thread.join()
        program = "import os; print(os.sched_getscheduler(0))"
        child = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
        return {"thread": found[0], "process": int(child.stdout)}

    return policies


def prepare_example(settings: Settings) -> Round:
    spec = importlib.util.find_spec("examples.gpt")
    return lambda: {"found": float(spec is not None)}


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
    return replace(BENCHMARKS[0], prepare=f"{__name__}:{prepare}", runs_in=RunsIn.WORKER, round_deadline=1.0)


def test_a_worker_keeps_its_benchmark_from_round_to_round():
    with Child(benchmark("prepare_counting"), STOCK) as child:
        assert [child.measure(), child.measure()] == [{"rounds": 1, "work": 2}, {"rounds": 2, "work": 2}]


def test_the_benchmark_gets_its_settings():
    with Child(benchmark("prepare_counting"), Settings("stock", quick=True)) as child:
        assert child.measure()["work"] == 1


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="batch threads are Linux's")
def test_a_peer_can_be_started_with_batch_threads_as_those_of_atolls_devices():
    policies = {}
    for backend in ("stock", f"stock{BATCH_THREADS}"):
        with Child(benchmark("prepare_policy"), Settings(backend)) as child:
            policies[backend] = child.measure()
    here = os.sched_getscheduler(0)
    assert policies["stock"] == {"thread": here, "process": here}
    assert policies[f"stock{BATCH_THREADS}"] == {"thread": os.SCHED_BATCH, "process": os.SCHED_BATCH}


def test_a_worker_finds_the_repository_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with Child(benchmark("prepare_example"), STOCK) as child:
        assert child.measure() == {"found": 1}


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
