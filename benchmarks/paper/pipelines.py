"""The schedules of `atoll.pipeline`: how long a step takes, beside what the table says, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from benchmarks.harness.benchmark import Benchmark, Metric, Round, Settings
from benchmarks.harness.record import BenchmarkRecord, Claim
from benchmarks.paper.costs import measured_costs
from benchmarks.paper.decoder import BACKWARD
from benchmarks.paper.figure import Figure, Options, at_most, median, quotient
from benchmarks.paper.sleeping import SPMD, STAGE_SECONDS, compared, contestant
from benchmarks.paper.table2 import DEVICES, MODEL, pipeline, simulate_spmd, spmd_seconds

if TYPE_CHECKING:
    from atoll.pipelines.entries import Times
    from atoll.pipelines.schedule import Schedule
    from benchmarks.paper.schedules import Sizes

STAGES = (4, 8, 16)
NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1")
MICRO_BATCHES = 4  # for each stage
UNIT_SECONDS = 0.05  # a forward entry; a backward one takes two, each half of it one
ACTIVATION_BYTES = 1 << 20
STEPS, QUICK_STEPS = 2, 1

CORES = 128  # of the transformer

_METRICS = (
    Metric("step", "step", "s"),
    Metric("bubble", "stages do nothing", "% of the time"),
)
_SAME_MODEL = (
    *_METRICS,
    Metric("table", "the table's step", "s"),
    Metric("more", "step, more than the table's", "%"),
)
_MEMORY = Metric("memory", "activations on a device, at most", "GB")
_ALL = tuple(contestant(name) for name in (*NAMES, SPMD))


def _points(options: Options) -> list[Benchmark]:
    if not options.null:
        return [
            Benchmark(
                key="pipelines",
                title=f"8 layers that sleep, S=4, M={microbatches}",
                prepare="benchmarks.paper.sleeping:prepare",
                metrics=_SAME_MODEL,
                contestants=_ALL,
                point={"microbatches": microbatches},
            )
            for microbatches in (8, 16)[: 1 if options.quick else None]
        ]
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
    ] + [
        Benchmark(
            key="pipelines",
            title=f"3B parameters on {CORES} cores, S={stages}, M={MICRO_BATCHES * stages}",
            prepare="benchmarks.paper.pipelines:prepare_transformer",
            metrics=(*_SAME_MODEL, _MEMORY),
            contestants=_ALL,
            point={"stages": stages},
            round_deadline=600.0,
        )
        for stages in STAGES[: 1 if options.quick else None]
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
    """Return the seconds of a step, with each stage on a different island."""
    from benchmarks.paper.schedules import Sizes

    return _simulate(f"{stages}x1x1", stages, table, times, Sizes(UNIT_SECONDS, ACTIVATION_BYTES), steps)[0]


def _simulate(islands: str, stages: int, table: Schedule, times: Times, sizes: Sizes, steps: int) -> tuple[float, int]:
    """Seconds of a step, and the most bytes that the ledger of memory had for a device."""
    from atoll.virtual.cluster import VirtualCluster
    from benchmarks.paper.schedules import make_training
    from benchmarks.paper.training import step_seconds

    cluster = VirtualCluster(islands, MODEL, measured_costs())
    client = cluster.client()
    each = len(client.devices) // stages
    groups = [client.devices[stage * each : (stage + 1) * each] for stage in range(stages)]
    training = cluster.run(make_training(client, groups, table, times, sizes))
    seconds = cluster.run(step_seconds(cluster, client, training, steps))
    return seconds, max(cluster.controller.ledger.peak.values())


def prepare_transformer(settings: Settings) -> Round:
    """Table 2's, on one island: in a schedule, or as one SPMD computation."""
    from atoll.pipelines.entries import Times
    from atoll.pipelines.schedules import schedule
    from benchmarks.paper.schedules import Sizes

    stages, steps = int(settings.point["stages"]), settings.size(STEPS, QUICK_STEPS)
    name = settings.backend.removeprefix(contestant(""))
    times = Times(1.0, BACKWARD, BACKWARD - 1, 1.0)  # half I computes forward again

    @cache
    def measure() -> dict[str, float]:
        if name == SPMD:
            seconds, ideal = simulate_spmd(CORES, steps), spmd_seconds(CORES)
            return compared(seconds, ideal, ideal)
        pipe = pipeline(stages, MICRO_BATCHES * stages, CORES)
        table = schedule(name, stages, pipe.micro_batches)
        unit = pipe.forward * stages / table.parts
        sizes = Sizes(unit, pipe.activation_bytes, pipe.activation_bytes, pipe.update)
        seconds, peak = _simulate(f"1x{CORES // DEVICES}x{DEVICES}", stages, table, times, sizes, steps)
        busy = pipe.micro_batches * (pipe.forward + pipe.backward) + pipe.update
        ideal = unit * table.check(times).length + pipe.update
        return {**compared(seconds, ideal, busy), "memory": peak / 1e9}

    return measure


def _claims(points: Sequence[BenchmarkRecord], options: Options) -> list[Claim]:
    bound = 1.02 if options.null else 1.05
    claims = []
    for point in points:
        if "ideal" in point.contestants:
            ratio = quotient(point, "Atoll", "ideal", "step")
            claims.append(at_most(f"relative to the table's step, {point.title}", ratio, bound))
            continue
        for name in NAMES:
            more = median(point, contestant(name), "more")
            ratio = None if more is None else 1 + more / 100
            claims.append(at_most(f"relative to the table's step, {name}, {point.title}", ratio, bound))
    return claims


FIGURE = Figure(
    key="pipelines",
    title="Schedules of pipelines",
    explanation=(
        "This figure has two parts. The first part runs a step in each schedule of `atoll.pipeline`, with each stage "
        "on a separate island of null devices, in virtual time (model tpu-v3). Forward takes "
        f"{1000 * UNIT_SECONDS:.0f} ms. Backward takes twice as long, and each half of it as long as forward. "
        f"{ACTIVATION_BYTES >> 20} MiB are sent from stage to stage. Each step has four micro-batches per stage. "
        "The nodes and their order are those of `atoll.pipeline`. Ideal is the result of `Schedule.check`, in which "
        "transfers and messages take no time. Interleaved has two parts of the model per stage, so twice the work. "
        "The second part runs the same model in all schedules and as one SPMD computation. On null devices it is "
        f"table 2's transformer on {CORES} cores of one island. A backward pass computes the forward one again. SPMD "
        "shards the weights over all cores and gathers them. On real devices the model has 8 layers, which sleep in a "
        "custom call, so that the result does not depend on the two cores of the machine. A stage has two layers, "
        f"which take {1000 * STAGE_SECONDS:.0f} ms forward for each micro-batch. SPMD is data-parallel there, on four "
        "devices of one island. It communicates little, so it shows the time of a step without a bubble. The update "
        "counts as work. 1F1B has the bubble of GPipe, and needs less memory for activations, as the controller's "
        "ledger shows. A micro-batch keeps only its input."
    ),
    paper=(
        "Only GPipe's order, in table 2. JaxPP (Xhebraj et al., arXiv 2412.14374, MLSys 2025) has 1F1B and interleaved "
        "1F1B. It reports up to 1.11 times (in the proceedings: 1.16 times) the hardware utilization of the best SPMD "
        "configuration, on GPUs and with other models. SPMD spends time in collectives there, and a pipeline in its "
        "bubble. The model and the network decide which of them takes longer."
    ),
    axes=None,
    points=_points,
    claims=_claims,
    virtual=True,
)
