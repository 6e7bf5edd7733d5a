"""What fair shares cost: the policy `fair` beside `first-come`, with equal tenants that have work all the time."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness.benchmark import Benchmark, Metric, Round, Settings
from benchmarks.harness.record import BenchmarkRecord, Claim
from benchmarks.paper import fig8
from benchmarks.paper.figure import Axes, Figure, Options, at_least, quotient_by_rounds

FAIR, FIRST_COME = "fair", "first-come"
_MILLISECONDS = 0.04  # so short that the controller is what limits
_SECONDS = 0.3  # so short that the machine is the same for both sides of a round
_ROUNDS = 81  # of which one alone tells 3 % from nothing as little as a coin does


def _points(options: Options) -> list[Benchmark]:
    if not options.null:
        return []
    return [
        Benchmark(
            key="policies",
            title=f"{count} clients",
            prepare="benchmarks.paper.policies:prepare",
            metrics=(
                Metric("rate", "all clients", "computations/s"),
                Metric("controller_us", "the controller, of each", "us"),
            ),
            contestants=(FAIR, FIRST_COME),
            point={"clients": count, "milliseconds": _MILLISECONDS, "hosts": 1, "devices": 4},
        )
        for count in (1, 8)
    ]


def prepare(settings: Settings) -> Round:
    """Null devices: each client is a session of one and the same tenant."""
    return fig8.null_round(settings, _SECONDS, settings.backend)


def _claims(points: Sequence[BenchmarkRecord], options: Options) -> list[Claim]:
    return [
        at_least(f"{FAIR} over {FIRST_COME}, {point.title}", quotient_by_rounds(point, FAIR, FIRST_COME, "rate"), 0.97)
        for point in points
    ]


FIGURE = Figure(
    key="policies",
    title="What fair shares cost",
    explanation=(
        "Computations of 0.04 ms on null devices, which the controller limits, with the policy `fair` and with "
        "`first-come`, in turn, in many short rounds; throughput of all clients together, and "
        "processor time of the controller. The claims are of the median "
        "of the rounds' ratios."
    ),
    paper="Not in the paper.",
    axes=Axes("clients", "clients", ("rate",), "computations a second"),
    points=_points,
    claims=_claims,
    rounds=_ROUNDS,
)
