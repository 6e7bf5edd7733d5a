"""Table 2: a transformer of 3 billion parameters, as one SPMD computation and as pipelines, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from atoll.devices.null.model import MODELS, NullModel
from benchmarks.harness.benchmark import Benchmark, Metric, Round, Settings
from benchmarks.harness.record import BenchmarkRecord, Claim
from benchmarks.paper.costs import measured_costs
from benchmarks.paper.decoder import (
    ACTIVATION_BYTES,
    BACKWARD,
    DECODER_3B,
    GRADIENT_BYTES,
    SEQUENCE,
    WEIGHT_BYTES,
)
from benchmarks.paper.figure import Figure, Options, apart, at_least, at_most, quotient
from benchmarks.paper.pipeline import Pipeline

MODEL = MODELS["tpu-v3"]
DEVICES = 8  # of a host
EXAMPLES = 4  # of a micro-batch, on each core of a stage: 2,048 a step on 128 cores, 8,192 on 512
STEPS, QUICK_STEPS = 4, 2

METRICS = (
    Metric("tokens", "throughput", "tokens/s"),
    Metric("step", "step", "s"),
    Metric("busy", "a core computes", "% of the time"),
)
# On four real hosts of one device: stages and micro-batches.
REAL_SPMD = "Atoll, SPMD, 4 hosts"
REAL_PIPELINES = {"Atoll, S=2, M=8, 4 hosts": (2, 8), "Atoll, S=4, M=16, 4 hosts": (4, 16)}
REAL_METRICS = (*METRICS[:2], Metric("loss", "last loss", "nats"))
# Stages, micro-batches, cores, and the paper's thousands of tokens a second.
_CONFIGURATIONS = (
    (1, 1, 128, 125.7),
    (4, 16, 128, 133.7),
    (8, 32, 128, 132.7),
    (16, 64, 128, 131.4),
    (16, 64, 512, 507.8),
)


def _points(options: Options) -> list[Benchmark]:
    if not options.null:
        return [
            Benchmark(
                key="table2",
                title="8 layers of 128",
                prepare="benchmarks.paper.small_decoder:prepare_table2",
                metrics=REAL_METRICS,
                contestants=(*REAL_PIPELINES, REAL_SPMD),
                prepare_deadline=300.0,
            )
        ]
    return [
        Benchmark(
            key="table2",
            title=f"{'SPMD' if stages == 1 else f'S={stages}, M={micro_batches}'}, {cores} cores (the paper: {paper}k)",
            prepare="benchmarks.paper.table2:prepare",
            metrics=METRICS,
            contestants=("Atoll", "ideal"),
            point={"stages": stages, "micro_batches": micro_batches, "cores": cores},
            round_deadline=600.0,
        )
        for stages, micro_batches, cores, paper in _CONFIGURATIONS[: 3 if options.quick else None]
    ]


def pipeline(stages: int, micro_batches: int, cores: int, model: NullModel = MODEL) -> Pipeline:
    """Within a stage each core has its own examples and all of the stage's weights."""
    parts = DECODER_3B.parts / stages
    tokens = EXAMPLES * SEQUENCE
    forward = model.compute_seconds(DECODER_3B.forward_flops(parts, tokens))
    parameters = int(parts * DECODER_3B.layer_parameters)
    return Pipeline(
        stages,
        micro_batches,
        forward,
        BACKWARD * forward,
        model.all_reduce_seconds(GRADIENT_BYTES * parameters, cores // stages),
        ACTIVATION_BYTES * tokens * DECODER_3B.d_model,
        GRADIENT_BYTES * parameters,
        WEIGHT_BYTES * parameters,
    )


def batch_tokens(cores: int) -> int:
    """Of a step: the same for all configurations of so many cores."""
    return 16 * cores * SEQUENCE


def spmd_seconds(cores: int, model: NullModel = MODEL) -> float:
    """Of a step. Weights are cut over all cores, as GShard does: they are gathered for each pass, and their gradients
    summed where they lie, which is an all-reduce and a half in all, whatever the batch."""
    parameters = DECODER_3B.parts * DECODER_3B.layer_parameters
    flops = (1 + BACKWARD) * DECODER_3B.forward_flops(DECODER_3B.parts, batch_tokens(cores) / cores)
    return model.compute_seconds(flops) + 1.5 * model.all_reduce_seconds(ACTIVATION_BYTES * parameters, cores)


def prepare(settings: Settings) -> Round:
    stages, micro_batches, cores = (int(settings.point[name]) for name in ("stages", "micro_batches", "cores"))
    steps = settings.size(STEPS, QUICK_STEPS)
    is_ideal = settings.backend == "ideal"

    @cache  # virtual time: another round would give the same
    def measure() -> dict[str, float]:
        if stages == 1:
            busy = spmd_seconds(cores)
            seconds = busy if is_ideal else simulate_spmd(cores, steps)
        else:
            pipe = pipeline(stages, micro_batches, cores)
            busy = micro_batches * (pipe.forward + pipe.backward) + pipe.update
            seconds = pipe.ideal_seconds if is_ideal else simulate(pipe, 1, cores, steps)
        return {"tokens": batch_tokens(cores) / seconds, "step": seconds, "busy": 100 * busy / seconds}

    return measure


def simulate(pipe: Pipeline, islands: int, cores: int, steps: int) -> float:
    """Seconds of a step of the pipeline, its stages in order over the hosts of so many islands."""
    from atoll.virtual.cluster import VirtualCluster
    from benchmarks.paper.gpipe import make_training
    from benchmarks.paper.training import step_seconds

    cluster = VirtualCluster(f"{islands}x{cores // DEVICES // islands}x{DEVICES}", MODEL, measured_costs())
    client = cluster.client()
    each = cores // pipe.stages
    devices = [device for host in client.hosts for device in host]
    groups = [devices[stage * each : (stage + 1) * each] for stage in range(pipe.stages)]
    training = cluster.run(make_training(client, groups, pipe))
    return cluster.run(step_seconds(cluster, client, training, steps))


def simulate_spmd(cores: int, steps: int) -> float:
    """Seconds of a step that is one computation on all cores."""
    from atoll.virtual.cluster import VirtualCluster
    from benchmarks.paper.spmd import make_training
    from benchmarks.paper.training import step_seconds

    cluster = VirtualCluster(f"1x{cores // DEVICES}x{DEVICES}", MODEL, measured_costs())
    client = cluster.client()
    weights = WEIGHT_BYTES * DECODER_3B.parts * DECODER_3B.layer_parameters // cores
    training = cluster.run(make_training(client, client.devices, spmd_seconds(cores), weights))
    return cluster.run(step_seconds(cluster, client, training, steps))


def _claims(points: Sequence[BenchmarkRecord], options: Options) -> list[Claim]:
    if not options.null:
        (point,) = points
        few, many = REAL_PIPELINES
        return [
            at_least("tokens/s of S=4, relative to S=2", quotient(point, many, few, "tokens"), 0.98),
            *(
                at_least(f"tokens/s of {text}, relative to SPMD", quotient(point, name, REAL_SPMD, "tokens"), 1.0)
                for name, text in ((few, "S=2"), (many, "S=4"))
            ),
            at_most("relative difference of the losses", apart(point, "loss"), 1e-5),
        ]
    return [
        at_least(
            f"relative to theory, {point.title.partition(' (')[0]}", quotient(point, "Atoll", "ideal", "tokens"), 0.98
        )
        for point in points
    ]


FIGURE = Figure(
    key="table2",
    title="A transformer of 3B parameters, SPMD and pipelined",
    explanation=(
        "On null devices, in virtual time (model tpu-v3, hosts of 8 cores), the model has 62 decoder layers "
        "(d_model 2048, feed-forward 8192); the embedding and the softmax count as one more layer each. A step is "
        "one SPMD computation, or a pipeline of S stages on separate hosts with M micro-batches of 4 examples per "
        "core in GPipe's order, which is one program of about 4 S M nodes. Assumptions: sequences of 1,024 tokens, "
        "and backward passes that recompute the forward pass. Ideal is the theoretical time: (M + S - 1) times a "
        "stage's forward and backward pass, and the update, without messages and transfers. The ratio of SPMD to "
        "pipelines is a property of the model, not of Atoll. On real devices, the model is a small decoder (8 "
        "layers, d_model 128, 64 sequences of 64 bytes per step). It runs on four hosts of one device, which share "
        "this machine's cores. One run uses `atoll.pipeline` in GPipe's order, with 4 examples of a micro-batch per "
        "device; the other is one jit function on all four. A waiting stage leaves its core to other stages, so a "
        "bubble costs nothing there (in the figure pipelines, below, it does). The remaining difference is the cost "
        "of nodes, transfers and collectives."
    ),
    paper=(
        "125.7k tokens/s as SPMD on 128 cores; 133.7k, 132.7k and 131.4k with 4, 8 and 16 stages; 507.8k with 16 "
        "stages on 512 cores: stages add minimal overhead."
    ),
    axes=None,
    points=_points,
    claims=_claims,
    virtual=True,
)
