"""Runs a benchmark's contestants one after the other, while the others sleep.

Each round has every one of them once, in an order that is reversed from round to round, so that a slow drift of the
machine favors none. The order in which they are prepared is reversed as well: of contestants with the same code, the
first one moved 64 MB between islands at 0.84 times the rate of the last one.
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
    benchmark: Benchmark,
    contestants: list[str],
    rounds: int,
    quick: bool,
    report: Callable[[str, int], None],
    sources: Mapping[str, str] | None = None,
) -> BenchmarkRecord:
    """All rounds of a benchmark. Calls report(what happens now, rounds done).

    A contestant that fails is left out of the following rounds, and the others continue. `sources`
    has the directory of the package `atoll` for contestants with the code of another commit.
    """
    run = _Run(benchmark, contestants, quick, report, sources or {})
    for turn, part in enumerate(_parts(rounds, 1 if quick else benchmark.preparations)):
        with ExitStack() as stack:
            run.prepare(turn, part.start, stack)
            for number in part:
                run.round(number)
            report("ending", part.stop)
    return record_benchmark(benchmark, contestants, run.samples, run.failures)


class _Run:
    """Results of the contestants so far, and the errors of those that have failed."""

    def __init__(
        self,
        benchmark: Benchmark,
        contestants: list[str],
        quick: bool,
        report: Callable[[str, int], None],
        sources: Mapping[str, str],
    ) -> None:
        self.samples: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
        self.failures: dict[str, str] = {}
        self._benchmark = benchmark
        self._quick = quick
        self._report = report
        self._sources = sources
        self._ready: dict[str, Contestant] = {}

    def prepare(self, turn: int, done: int, stack: ExitStack) -> None:
        """Prepare all contestants that have not failed. They end with the stack."""
        self._ready = {}
        sound = [each for each in self.samples if each not in self.failures]
        for name in sound if turn % 2 == 0 else reversed(sound):
            self._report(f"preparing {name}", done)
            source = self._sources.get(name, "")
            settings = Settings(name, self._quick, dict(self._benchmark.point), source)
            try:
                self._ready[name] = stack.enter_context(_contestant(self._benchmark, settings))
            except ContestantError as error:
                self.failures[name] = str(error)

    def round(self, number: int) -> None:
        for name in self.samples if number % 2 == 0 else reversed(self.samples):
            if name in self.failures:
                continue
            self._report(name, number)
            try:
                self.samples[name].append(dict(self._ready[name].measure()))
            except ContestantError as error:
                self.failures[name] = str(error)


def _parts(rounds: int, preparations: int) -> list[range]:
    """Which rounds each preparation has, of at least one each."""
    count = min(rounds, preparations)
    bounds = [number * rounds // count for number in range(count + 1)]
    return [range(*bound) for bound in itertools.pairwise(bounds)]


def _contestant(benchmark: Benchmark, settings: Settings) -> AbstractContextManager[Contestant]:
    if benchmark.runs_in is RunsIn.WORKER:
        return Child(benchmark, settings)
    return nullcontext(Local(pkgutil.resolve_name(benchmark.prepare)(settings)))
