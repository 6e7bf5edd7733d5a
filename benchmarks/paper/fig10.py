"""Figure 10: a pipeline of 16 stages on one island and over four, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from benchmarks.harness.benchmark import Benchmark, Round, Settings
from benchmarks.harness.record import BenchmarkRecord, Claim
from benchmarks.paper.figure import Figure, Options, at_least, median, quotient
from benchmarks.paper.table2 import METRICS, QUICK_STEPS, STEPS, batch_tokens, pipeline, simulate

STAGES, MICRO_BATCHES, CORES = 16, 64, 128


def _points(options: Options) -> list[Benchmark]:
    if not options.null:
        return []
    return [
        Benchmark(
            key="fig10",
            title=f"1 island of {CORES} cores" if islands == 1 else f"{islands} islands of {CORES // islands} cores",
            prepare="benchmarks.paper.fig10:prepare",
            metrics=METRICS,
            contestants=("Atoll", "ideal"),
            point={"islands": islands},
            round_deadline=600.0,
        )
        for islands in (1, 4)
    ]


def prepare(settings: Settings) -> Round:
    pipe = pipeline(STAGES, MICRO_BATCHES, CORES)
    busy = MICRO_BATCHES * (pipe.forward + pipe.backward) + pipe.update

    @cache  # virtual time: another round would give the same
    def measure() -> dict[str, float]:
        if settings.backend == "ideal":
            seconds = pipe.ideal_seconds
        else:
            seconds = simulate(pipe, int(settings.point["islands"]), CORES, settings.size(STEPS, QUICK_STEPS))
        return {"tokens": batch_tokens(CORES) / seconds, "step": seconds, "busy": 100 * busy / seconds}

    return measure


def _claims(points: Sequence[BenchmarkRecord], options: Options) -> list[Claim]:
    one, four = (median(point, "Atoll", "tokens") for point in points)
    return [
        at_least("four islands' throughput, relative to one island", four / one if one and four else None, 0.98),
        # So that both are not slow alike.
        at_least("relative to theory, four islands", quotient(points[-1], "Atoll", "ideal", "tokens"), 0.98),
    ]


FIGURE = Figure(
    key="fig10",
    title="A pipeline over islands",
    explanation=(
        "The figure uses table 2's pipeline of 16 stages and 64 micro-batches on 128 cores, each stage on a host of "
        "8 cores, on null devices in virtual time. All hosts are in one island, or in four islands of four hosts. "
        "Between islands, the activations of a micro-batch (134 MB per host) use the network of the data center, "
        "which takes 11 ms. Meanwhile a stage computes for 71 ms forward and 214 ms backward."
    ),
    paper="The same throughput, 131.4k tokens/s, on one island of 128 cores and on four of 32.",
    axes=None,
    points=_points,
    claims=_claims,
    virtual=True,
)
