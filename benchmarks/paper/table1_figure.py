"""Table 1: T5 on Atoll and on plain JAX on real devices, and at the paper's sizes in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from atoll.devices.null.model import MODELS
from atoll.virtual.simulated_costs import Costs
from benchmarks.harness.benchmark import BATCH_THREADS, Benchmark, Metric, Round, Settings
from benchmarks.harness.record import BenchmarkRecord, Claim
from benchmarks.paper.costs import measured_costs
from benchmarks.paper.figure import Figure, Options, at_least, quotient

MODEL = MODELS["tpu-v3"]
DEVICES = 8  # of a null host
STEPS, QUICK_STEPS = 20, 5
JAX = "stock"
BATCH_JAX = f"{JAX}{BATCH_THREADS}"  # threads as those of Atoll's devices: what the claims judge against

# T5's pre-training (Raffel et al., section 3.1): 128 sequences of 512 tokens, of which 114 are to be predicted.
BATCH, INPUTS, TARGETS = 128, 512, 114
GRADIENT_BYTES = 4  # float32
WEIGHT_BYTES = 8  # float32, and as much again for what an optimizer keeps

# Model, its name in `t5`, cores, cores that hold a copy of it together, and the paper's thousands of tokens a second.
_CONFIGURATIONS = (
    ("T5-Base", "BASE", 32, 1, 618.0),
    ("T5-Large", "LARGE", 32, 1, 90.4),
    ("T5-3B", "T5_3B", 512, 8, 282.8),
    ("T5-11B", "T5_11B", 512, 8, 84.8),
)


def _points(options: Options) -> list[Benchmark]:
    if not options.null:
        return [
            Benchmark(
                key="table1",
                title="T5, 8 devices",
                prepare="benchmarks.paper.table1:prepare",
                metrics=(
                    Metric("tokens", "throughput", "tokens/s"),
                    Metric("step", "step", "ms"),
                    Metric("loss_sum", "sum of the losses", "nats"),
                    Metric("last_loss", "last loss", "nats"),
                ),
                contestants=("atoll", BATCH_JAX, JAX),
                prepare_deadline=300.0,
            )
        ]
    return [
        Benchmark(
            key="table1",
            title=f"{title}, {cores} cores (the paper: {paper}k)",
            prepare="benchmarks.paper.table1_figure:prepare",
            metrics=(
                Metric("tokens", "throughput", "tokens/s"),
                Metric("step", "step", "ms"),
                Metric("read_step", "step, each loss read", "ms"),
            ),
            contestants=("Atoll", "ideal"),
            point={"model": model, "cores": cores, "replica": replica},
        )
        for title, model, cores, replica, paper in _CONFIGURATIONS
    ]


def prepare(settings: Settings) -> Round:
    """On null devices."""
    from benchmarks.paper import t5

    config: t5.Config = getattr(t5, str(settings.point["model"]))
    cores, replica = int(settings.point["cores"]), int(settings.point["replica"])
    parameters = t5.parameters(config) / replica  # of a core
    ideal = MODEL.compute_seconds(t5.step_flops(config, BATCH, INPUTS, TARGETS) / cores)
    ideal += MODEL.all_reduce_seconds(GRADIENT_BYTES * parameters, cores // replica)

    @cache  # virtual time: another round would give the same
    def measure() -> dict[str, float]:
        seconds = read = ideal
        if settings.backend != "ideal":
            weight_bytes, steps = int(WEIGHT_BYTES * parameters), settings.size(STEPS, QUICK_STEPS)
            seconds, read = simulate(cores, ideal, weight_bytes, steps, measured_costs())
        return {"tokens": BATCH * (INPUTS + TARGETS) / seconds, "step": 1000 * seconds, "read_step": 1000 * read}

    return measure


def simulate(cores: int, seconds: float, weight_bytes: int, steps: int, costs: Costs) -> tuple[float, float]:
    """Seconds of a step that takes so many on its devices: with others in flight, and where each loss is read."""
    from atoll.virtual.cluster import VirtualCluster
    from benchmarks.paper.spmd import make_training
    from benchmarks.paper.training import read_step_seconds, step_seconds

    cluster = VirtualCluster(f"1x{cores // DEVICES}x{DEVICES}", MODEL, costs)
    client = cluster.client()
    training = cluster.run(make_training(client, client.devices, seconds, weight_bytes))
    return (
        cluster.run(step_seconds(cluster, client, training, steps)),
        cluster.run(read_step_seconds(cluster, client, training, steps)),
    )


def _claims(points: Sequence[BenchmarkRecord], options: Options) -> list[Claim]:
    if options.null:
        return [
            at_least(
                f"relative to ideal steps, each loss read, {point.title.partition(' (')[0]}",
                quotient(point, "ideal", "Atoll", "read_step"),
                0.98,
            )
            for point in points
        ]
    (point,) = points
    return [
        at_least(f"tokens/s, relative to {BATCH_JAX}", quotient(point, "atoll", BATCH_JAX, "tokens"), 0.98),
        at_least("equal losses, bit for bit", _equal(point, "loss_sum"), 1.0),
    ]


def _equal(point: BenchmarkRecord, name: str) -> float | None:
    """Whether all contestants had the same in all rounds; None where there is but one."""
    samples = next(metric.samples for metric in point.metrics if metric.name == name)
    if len(samples) < 2:
        return None
    return float(len({sample for each in samples.values() for sample in each}) == 1)


FIGURE = Figure(
    key="table1",
    title="T5",
    explanation=(
        "On real devices a small T5 (2 layers, d_model 128) is trained for 20 steps with Adafactor, with the batch "
        "in 4 parts and each layer in 2. Stock is JAX by itself on as many CPU devices, as users start it and with "
        "batch threads. On null devices, the models have the paper's sizes and run in virtual time (model tpu-v3, "
        "hosts of 8 cores). A step is an SPMD computation that takes the time of its operations and of an "
        "all-reduce of its float32 gradients; ideal is only this time. With several steps in flight, devices always "
        "have work, and the control plane matters only if it takes longer than a step. So the claims refer to a "
        "client that reads the loss of each step before it launches the next one. A step has 128 sequences of 512 "
        "and 114 tokens, as T5 was trained; the paper does not specify this. A copy of the 3B and 11B models is on "
        "8 cores."
    ),
    paper="The same tokens a second as multi-controller JAX with every model: 618k, 90.4k, 282.8k and 84.8k.",
    axes=None,
    points=_points,
    claims=_claims,
    virtual=True,
)
