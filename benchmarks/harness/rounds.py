"""Runs a benchmark's contestants one after the other, while the others sleep.

Each round has every one of them once, in an order that is reversed from round to round, so that a slow drift of the
machine favours none.
"""

import itertools
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
    for part in _parts(rounds, 1 if quick else benchmark.preparations):
        with ExitStack() as stack:
            report("preparing", part.start)
            ready = _prepared(benchmark, [name for name in contestants if name not in failures], quick, stack, failures)
            for number in part:
                for name in contestants if number % 2 == 0 else reversed(contestants):
                    if name in failures:
                        continue
                    report(name, number)
                    try:
                        samples[name].append(dict(ready[name].measure()))
                    except ContestantError as error:
                        failures[name] = str(error)
            report("ending", part.stop)
    return record_benchmark(benchmark, contestants, samples, failures)


def _prepared(
    benchmark: Benchmark, names: list[str], quick: bool, stack: ExitStack, failures: dict[str, str]
) -> dict[str, Contestant]:
    """Those that are ready; the others' `failures` are noted. All end with the stack."""
    ready: dict[str, Contestant] = {}
    for name in names:
        try:
            ready[name] = stack.enter_context(_contestant(benchmark, Settings(name, quick, dict(benchmark.point))))
        except ContestantError as error:
            failures[name] = str(error)
    return ready


def _parts(rounds: int, preparations: int) -> list[range]:
    """Which rounds each preparation has, of at least one each."""
    count = min(rounds, preparations)
    bounds = [number * rounds // count for number in range(count + 1)]
    return [range(*bound) for bound in itertools.pairwise(bounds)]


def _contestant(benchmark: Benchmark, settings: Settings) -> AbstractContextManager[Contestant]:
    if benchmark.runs_in is RunsIn.WORKER:
        return Child(benchmark, settings)
    return nullcontext(Local(pkgutil.resolve_name(benchmark.prepare)(settings)))
