"""Runs a benchmark's contestants one after the other, while the others sleep.

Each round has every one of them once, in an order that is reversed from round to round, so that a slow drift of the
machine favours none.
"""

import pkgutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Protocol

from benchmarks.harness.benchmark import Benchmark, Round, RunsIn, Settings
from benchmarks.harness.child import Child, ContestantError
from benchmarks.harness.record import BenchmarkRecord, record_benchmark


class Contestant(Protocol):
    """A backend with one benchmark prepared."""

    def measure(self) -> Mapping[str, float]:
        """One round. Raises ContestantError."""


@dataclass(frozen=True)
class Local:
    """A benchmark that runs here, because it starts the backend's processes itself."""

    measure: Round


def run_benchmark(
    benchmark: Benchmark, contestants: list[str], rounds: int, quick: bool, report: Callable[[str, int], None]
) -> BenchmarkRecord:
    """All rounds of a benchmark. Calls report(what happens now, rounds done).

    A contestant that fails is left out of the following rounds, and the others go on.
    """
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
    failures: dict[str, str] = {}
    with ExitStack() as stack:
        ready: dict[str, Contestant] = {}
        for name in contestants:
            report(f"{name}: preparing", 0)
            try:
                ready[name] = stack.enter_context(_contestant(benchmark, Settings(name, quick, dict(benchmark.point))))
            except ContestantError as error:
                failures[name] = str(error)
        for number in range(rounds):
            for name in contestants if number % 2 == 0 else reversed(contestants):
                if name in failures:
                    continue
                report(name, number)
                try:
                    samples[name].append(dict(ready[name].measure()))
                except ContestantError as error:
                    failures[name] = str(error)
        report("ending", rounds)
    return record_benchmark(benchmark, contestants, samples, failures)


def _contestant(benchmark: Benchmark, settings: Settings) -> AbstractContextManager[Contestant]:
    if benchmark.runs_in is RunsIn.WORKER:
        return Child(benchmark, settings)
    return nullcontext(Local(pkgutil.resolve_name(benchmark.prepare)(settings)))
