"""Tests of jaxlib's client with a proxy that answers at once: each result is checked, and nothing is left behind."""

from __future__ import annotations

import psutil
import pytest

from benchmarks.harness.benchmark import Settings
from benchmarks.harness.child import Child
from benchmarks.micro.table import BENCHMARKS

pytestmark = pytest.mark.slow

FLOOR = next(each for each in BENCHMARKS if each.key == "ak")


def test_the_operations_of_the_floor_have_the_right_results_and_their_proxy_ends() -> None:
    name = FLOOR.contestants[1]
    with Child(FLOOR, Settings(name, quick=True)) as contestant:
        found = contestant.measure()
        processes = psutil.Process(contestant._process.pid).children(recursive=True)
    assert set(found) == {metric.name for metric in FLOOR.metrics}
    assert min(found[each] for each in ("put", "call", "read", "call_float")) > 0
    assert len(processes) == 1
    psutil.wait_procs(processes, timeout=60)
    assert not any(each.is_running() for each in processes)
