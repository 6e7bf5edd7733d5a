"""The end of section 5.3: very large models trained data-parallel over two islands, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from atoll.devices.null.model import MODELS
from benchmarks.harness.benchmark import Benchmark, Metric, Round, Settings
from benchmarks.harness.record import BenchmarkRecord, Claim
from benchmarks.paper.costs import measured_costs
from benchmarks.paper.decoder import BACKWARD, GRADIENT_BYTES, SEQUENCE, WEIGHT_BYTES
from benchmarks.paper.figure import Figure, Options, apart, at_least, at_most, quotient

MODEL = MODELS["tpu-v3"]
DEVICES = 8  # of a host
REPLICA = 128  # cores that hold a copy of the model together
STEPS, QUICK_STEPS = 5, 2
TWO, ONE = "Atoll, two islands", "Atoll, one island"
REAL_TWO, REAL_ONE = "Atoll, 2 islands of 2 devices", "Atoll, 1 island of 2 hosts"
METRICS = (Metric("tokens", "throughput", "tokens/s"), Metric("step", "step", "s"))


@dataclass(frozen=True)
class Work:
    """A model on `cores`, half of them in each island: one sequence a core and step.

    `exchanged` bytes go between the islands in a step, both ways together, as in the paper.
    """

    parameters: float
    cores: int
    exchanged: float

    @property
    def tokens(self) -> int:
        return self.cores * SEQUENCE

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes that a core of an island sends to its partner, which are its part of the island's sum."""
        return int(self.exchanged / 2 / (self.cores / 2))

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the weights on a core."""
        return int(WEIGHT_BYTES * self.parameters / REPLICA)

    @property
    def compute_seconds(self) -> float:
        """Return the seconds of computation in a step. The forward pass has two operations per parameter and token."""
        return MODEL.compute_seconds((1 + BACKWARD) * 2 * self.parameters * self.tokens / self.cores)

    def reduce_seconds(self, cores: int) -> float:
        """Return the seconds of the sum of gradients over the copies of the model on so many cores of an island."""
        return MODEL.all_reduce_seconds(GRADIENT_BYTES * self.parameters / REPLICA, cores // REPLICA)


WORKS = {"64B": Work(64e9, 1024, 457e9), "136B": Work(136e9, 2048, 1030e9)}


def _points(options: Options) -> list[Benchmark]:
    if not options.null:
        return [
            Benchmark(
                key="two-islands",
                title="8 layers of 128",
                prepare="benchmarks.paper.small_decoder:prepare_two_islands",
                metrics=(*METRICS, Metric("loss", "last loss", "nats")),
                contestants=(REAL_TWO, REAL_ONE),
                prepare_deadline=300.0,
            )
        ]
    return [
        Benchmark(
            key="two-islands",
            title=f"{name}, {work.cores} cores",
            prepare="benchmarks.paper.two_islands:prepare",
            metrics=METRICS,
            contestants=(TWO, ONE),
            point={"model": name},
            round_deadline=600.0,
        )
        for name, work in WORKS.items()
    ]


def prepare(settings: Settings) -> Round:
    work = WORKS[str(settings.point["model"])]
    simulate = simulate_two if settings.backend == TWO else simulate_one

    @cache  # virtual time: another round would give the same
    def measure() -> dict[str, float]:
        seconds = simulate(work, settings.size(STEPS, QUICK_STEPS))
        return {"tokens": work.tokens / seconds, "step": seconds}

    return measure


def simulate_one(work: Work, steps: int) -> float:
    """Seconds of a step on one island of all cores."""
    from atoll.virtual.cluster import VirtualCluster
    from benchmarks.paper.spmd import make_training
    from benchmarks.paper.training import step_seconds

    cluster = VirtualCluster(f"1x{work.cores // DEVICES}x{DEVICES}", MODEL, measured_costs())
    client = cluster.client()
    seconds = work.compute_seconds + work.reduce_seconds(work.cores)
    training = cluster.run(make_training(client, client.devices, seconds, work.weight_bytes))
    return cluster.run(step_seconds(cluster, client, training, steps))


def simulate_two(work: Work, steps: int) -> float:
    """Seconds of a step on two islands."""
    from atoll.virtual.cluster import VirtualCluster
    from benchmarks.paper.data_parallel import make_training
    from benchmarks.paper.training import step_seconds

    cluster = VirtualCluster(f"2x{work.cores // DEVICES // 2}x{DEVICES}", MODEL, measured_costs())
    client = cluster.client()
    seconds = work.compute_seconds + work.reduce_seconds(work.cores // 2)
    training = cluster.run(make_training(client, client.islands, seconds, work.weight_bytes, work.gradient_bytes))
    return cluster.run(step_seconds(cluster, client, training, steps))


def _claims(points: Sequence[BenchmarkRecord], options: Options) -> list[Claim]:
    if not options.null:
        (point,) = points
        return [
            at_least("two islands, relative to one", quotient(point, REAL_TWO, REAL_ONE, "tokens"), 0.97),
            at_most("relative difference of the losses", apart(point, "loss"), 1e-5),
        ]
    return [
        at_least(f"two islands, relative to one: {point.title}", quotient(point, TWO, ONE, "tokens"), 0.97)
        for point in points
    ]


FIGURE = Figure(
    key="two-islands",
    title="Data-parallel training over two islands",
    explanation=(
        "Decoders of 64B and 136B parameters run on null devices in virtual time, on two islands of 512 and of "
        "1,024 cores, and on one island of twice as many. A step is a program. First, each island computes its "
        "gradients and their sum over its own interconnect. Then each host sends its part to its partner in the "
        "other island over the network of the data center, in both directions at once. Finally, each island applies "
        "the sum. The bytes between islands are those of the paper (457 and 1,030 GB per step, both directions "
        "together). No computation overlaps the transfer, as in figure 12 of the paper. Assumptions: a sequence of "
        "1,024 tokens per core and step, and a copy of the model on 128 cores. On real devices a small decoder (8 "
        "layers, d_model 128, 64 sequences of 64 bytes per step; 6.6 MB of gradients in each direction) runs on two "
        "hosts of two devices, which share this machine's cores. They form two islands, with the same steps, or one "
        "island, where a step is one jit function whose sums go from host to host through gloo. The one island "
        "lacks the fast interconnect of the paper's island, so two islands may be faster."
    ),
    paper="Over two islands, 97 % of the throughput on one island of twice as many devices (97.2 % with 64B).",
    axes=None,
    points=_points,
    claims=_claims,
    virtual=True,
)
