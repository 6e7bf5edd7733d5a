"""The benchmarks, as data: what each measures, who competes, and what is to be reached.

To add one, write a function that takes `Settings`, does all that is not to be measured (building, compiling,
warming up), and returns a function that runs one round and returns its metrics; then give it a row here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

Round = Callable[[], Mapping[str, float]]
Prepare = Callable[["Settings"], Round]


class Settings(msgspec.Struct, frozen=True):
    """What a benchmark's function is told."""

    backend: str
    quick: bool = False

    def size(self, full: int, quick: int) -> int:
        """How much work a round does."""
        return quick if self.quick else full


class Place(StrEnum):
    """Where a benchmark's function runs."""

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
    """`prepare` is "module:function", resolved where it runs: the parent never imports JAX.

    The deadlines are for one preparation and one round, in seconds. The first contestant is the one that is
    judged; the second is what it is compared with.
    """

    key: str
    title: str
    prepare: str
    metrics: tuple[Metric, ...]
    contestants: tuple[str, ...] = ("atoll", "stock")
    place: Place = Place.WORKER
    prepare_deadline: float = 120.0
    round_deadline: float = 120.0


BENCHMARKS = (
    Benchmark(
        key="a",
        title="jit op by op, 1 device",
        prepare="bench.dispatch:jit_op_by_op",
        metrics=(Metric("rate", "x = f(x), pipelined", "calls/s", Target(5000)),),
    ),
    Benchmark(
        key="b",
        title="AllReduce + add op by op, 4 devices",
        prepare="bench.dispatch:allreduce_op_by_op",
        metrics=(Metric("rate", "x = f(x), pipelined", "calls/s", Target(0.5, ratio=True)),),
    ),
    Benchmark(
        key="c",
        title="training step, 8 devices",
        prepare="bench.training:gpt_step",
        metrics=(
            Metric("rate", "GPT, data-parallel, pipelined", "steps/s", Target(0.97, ratio=True)),
            Metric("step", "one step (the target is for 20 or more)", "ms"),
        ),
    ),
    Benchmark(
        key="d",
        title="host to device and back",
        prepare="bench.transfers:put_and_get",
        metrics=(
            Metric("put_small", "device_put, 4 B", "us"),
            Metric("get_small", "np.asarray, 4 B", "us"),
            Metric("round_trip_small", "device_put + np.asarray, 4 B", "us", Target(1000, at_least=False)),
            Metric("put_large", "device_put, 64 MB", "GB/s", Target(1.0)),
            Metric("get_large", "np.asarray, 64 MB", "GB/s", Target(1.0)),
        ),
    ),
    Benchmark(
        key="e",
        title="process start to first result",
        prepare="bench.startup:first_result",
        metrics=(
            Metric("cold", "no compile cache", "s", Target(6.0, at_least=False)),
            Metric("warm", "warm compile cache", "s", Target(6.0, at_least=False)),
            Metric("end", "first result to end of process", "s"),
        ),
        place=Place.PARENT,
        round_deadline=300.0,
    ),
    Benchmark(
        key="f",
        title="AllReduce + add op by op, 2 hosts of 2 devices",
        prepare="bench.hosts:allreduce_over_hosts",
        contestants=("atoll, 2 hosts", "multi-controller JAX"),
        metrics=(Metric("rate", "x = f(x), pipelined", "calls/s", Target(0.7, ratio=True)),),
    ),
    Benchmark(
        key="g",
        title="64 MB from island to island",
        prepare="bench.islands:copy_between",
        contestants=("atoll, 2 islands", "blocking socket"),
        metrics=(Metric("rate", "device_put to the other island", "GB/s", Target(0.7, ratio=True)),),
    ),
    Benchmark(
        key="h",
        title="pipeline, each stage on a host of its own",
        prepare="bench.islands:pipeline",
        contestants=("atoll, parallel", "atoll, sequential"),
        metrics=(
            Metric("stages_2", "2 stages", "passes/s"),
            Metric("stages_4", "4 stages", "passes/s"),
            Metric("stages_8", "8 stages", "passes/s"),
            Metric("stages_16", "16 stages", "passes/s", Target(3.0, ratio=True)),
        ),
    ),
    Benchmark(
        key="i",
        title="the cost of order, computations of 1 ms",
        prepare="bench.order:order",
        contestants=("atoll, 1 device", "worker alone"),
        metrics=(
            Metric("rate", "x = f(x), pipelined", "calls/s", Target(0.95, ratio=True)),
            Metric("each", "one computation", "ms"),
        ),
    ),
    Benchmark(
        key="j",
        title="AllReduce + add, 128 nodes in one program, 4 devices; stock JAX op by op",
        prepare="bench.programs:chained",
        metrics=(Metric("rate", "x = f(x), pipelined", "computations/s", Target(1.0, ratio=True)),),
    ),
    Benchmark(
        key="k",
        title="AllReduce + add, 128 in one compiled function, 4 devices",
        prepare="bench.programs:fused",
        metrics=(Metric("rate", "x = f(x), pipelined", "computations/s", Target(0.98, ratio=True)),),
    ),
    Benchmark(
        key="l",
        title="the client's cost of a call of 128 nodes; stock JAX op by op",
        prepare="bench.programs:client_cost",
        metrics=(Metric("call", "a cached call", "us", Target(300, at_least=False)),),
    ),
    Benchmark(
        key="m",
        title="lowering 2,000 nodes; stock JAX: 2,000 additions to StableHLO",
        prepare="bench.programs:lowering",
        metrics=(Metric("seconds", "from a program to plans", "s", Target(1.0, at_least=False)),),
    ),
)
