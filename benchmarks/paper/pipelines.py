"""The schedules of `atoll.pipeline`: how long a step takes, beside what the table says, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from atoll.devices.null.model import MODELS
from benchmarks.harness.benchmark import Benchmark, Metric, Round, Settings
from benchmarks.harness.record import BenchmarkRecord, Claim
from benchmarks.paper.costs import measured_costs
from benchmarks.paper.figure import Figure, Options, at_most, quotient

if TYPE_CHECKING:
    from atoll.pipelines.entries import Times
    from atoll.pipelines.schedule import Schedule

STAGES = (4, 8, 16)
NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1")
MICRO_BATCHES = 4  # for each stage
UNIT_SECONDS = 0.05  # a forward entry; a backward one takes two, each half of it one
ACTIVATION_BYTES = 1 << 20
STEPS, QUICK_STEPS = 2, 1

_METRICS = (
    Metric("step", "step", "s"),
    Metric("bubble", "stages do nothing", "% of the time"),
)


def _points(options: Options) -> list[Benchmark]:
    if not options.null:
        return []
    return [
        Benchmark(
            key="pipelines",
            title=f"{name}, S={stages}, M={MICRO_BATCHES * stages}",
            prepare="benchmarks.paper.pipelines:prepare",
            metrics=_METRICS,
            contestants=("Atoll", "ideal"),
            point={"stages": stages, "schedule": NAMES.index(name)},
            round_deadline=600.0,
        )
        for stages in STAGES[: 1 if options.quick else None]
        for name in NAMES
    ]


def prepare(settings: Settings) -> Round:
    from atoll.pipelines.entries import Times
    from atoll.pipelines.schedules import schedule

    stages = int(settings.point["stages"])
    table = schedule(NAMES[int(settings.point["schedule"])], stages, MICRO_BATCHES * stages)
    times = Times()
    busy = UNIT_SECONDS * sum(times.of(entry) for row in table.rows for entry in row)

    @cache  # virtual time: another round would give the same
    def measure() -> dict[str, float]:
        if settings.backend == "ideal":
            seconds = UNIT_SECONDS * table.check(times).length
        else:
            seconds = simulate(stages, table, times, settings.size(STEPS, QUICK_STEPS))
        return {"step": seconds, "bubble": 100 * (1 - busy / (stages * seconds))}

    return measure


def simulate(stages: int, table: Schedule, times: Times, steps: int) -> float:
    """Seconds of a step, each stage on an island of its own."""
    from atoll.virtual.cluster import VirtualCluster
    from benchmarks.paper.schedules import Sizes, make_training
    from benchmarks.paper.training import step_seconds

    cluster = VirtualCluster(f"{stages}x1x1", MODELS["tpu-v3"], measured_costs())
    client = cluster.client()
    groups = [[device] for device in client.devices]
    sizes = Sizes(UNIT_SECONDS, ACTIVATION_BYTES)
    training = cluster.run(make_training(client, groups, table, times, sizes))
    return cluster.run(step_seconds(cluster, client, training, steps))


def _claims(points: Sequence[BenchmarkRecord], options: Options) -> list[Claim]:
    return [
        at_most(f"of the table's step, {point.title}", quotient(point, "Atoll", "ideal", "step"), 1.02)
        for point in points
    ]


FIGURE = Figure(
    key="pipelines",
    title="Schedules of pipelines",
    explanation=(
        "A step in the schedules of `atoll.pipeline`, each stage on an island of its own, on null devices in virtual "
        f"time (model tpu-v3). Forward takes {1000 * UNIT_SECONDS:.0f} ms, backward twice as long, and each half of it "
        f"as long as forward; {ACTIVATION_BYTES >> 20} MiB go from stage to stage, and four micro-batches a stage "
        "through each. Nodes and their order are those of `atoll.pipeline`. Ideal is what `Schedule.check` says of the "
        "table, in which transfers and messages take no time. Interleaved has two parts a stage, so twice the work."
    ),
    paper="GPipe's order alone, in table 2.",
    axes=None,
    points=_points,
    claims=_claims,
    virtual=True,
)
