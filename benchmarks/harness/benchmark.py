"""Definition of a benchmark: what it measures, its contestants, and its targets.

To add one, write a function that takes `Settings`, does all that is not to be measured (building, compiling,
warming up), and returns a function that runs one round and returns its metrics; then give it a row in a table.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

# A peer of this name is started as users start it, but all of its threads are batch threads, as those of Atoll's CPU
# devices are (atoll.devices.xla.threads): `chrt --batch 0 python ...` does the same.
BATCH_THREADS = " (batch threads)"

# A contestant named "x @ abc" is the contestant x with the code of the commit abc.
AT = " @ "

Round = Callable[[], Mapping[str, float]]


class Settings(msgspec.Struct, frozen=True):
    """The arguments of a benchmark's function. `point` is its position in a figure, such as {"hosts": 4}.

    `source` is a directory with another version of the package `atoll`; empty: the installed version.
    """

    backend: str
    quick: bool = False
    point: dict[str, int | float | str] = {}
    source: str = ""

    @property
    def system(self) -> str:
        """The backend, whatever its version and however its threads are scheduled."""
        return self.backend.partition(AT)[0].removesuffix(BATCH_THREADS)

    @property
    def has_batch_threads(self) -> bool:
        return self.backend.partition(AT)[0].endswith(BATCH_THREADS)

    def size(self, full: int, quick: int) -> int:
        """How much work a round does."""
        return quick if self.quick else full


class RunsIn(StrEnum):
    """Place in which a benchmark's function runs."""

    WORKER = "worker"  # in a process of the backend that lives for all rounds of the benchmark
    PARENT = "parent"  # beside the reports: it starts the backend's processes itself


@dataclass(frozen=True)
class Target:
    """A bound on a metric's median, or on the first contestant's ratio to the second."""

    bound: float
    at_least: bool = True
    ratio: bool = False

    def reached(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound

    def describe(self, unit: str, compared_with: str) -> str:
        sign = "≥" if self.at_least else "≤"
        return f"{sign} {self.bound:g} " + (f"of {compared_with}" if self.ratio else unit)


@dataclass(frozen=True)
class Metric:
    name: str
    title: str
    unit: str
    target: Target | None = None


@dataclass(frozen=True)
class Benchmark:
    """`prepare` is "module:function", resolved where it runs: the parent never imports JAX. `prepare_of` has the
    functions of those contestants that have one of their own.

    The deadlines are for one preparation and one round, in seconds. The first contestant is the one that is
    judged; the second is what it is compared with.

    All are started and prepared `preparations` times, and the rounds are divided among these: processes with the same
    code may differ by 5 % in all of their rounds, which no number of rounds shows.
    """

    key: str
    title: str
    prepare: str
    metrics: tuple[Metric, ...]
    contestants: tuple[str, ...] = ("atoll", "stock")
    runs_in: RunsIn = RunsIn.WORKER
    prepare_of: Mapping[str, str] = field(default_factory=dict)
    point: Mapping[str, int | float | str] = field(default_factory=dict)
    prepare_deadline: float = 120.0
    round_deadline: float = 120.0
    preparations: int = 1
