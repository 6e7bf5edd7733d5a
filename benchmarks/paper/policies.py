"""The cost of fair shares: the policy `fair` beside `first-come`, with equal tenants that have work all the time."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness.benchmark import Benchmark, Metric, Round, Settings
from benchmarks.harness.record import BenchmarkRecord, Claim
from benchmarks.paper import fig8
from benchmarks.paper.figure import Figure, Options, at_least, quotient_by_rounds

FAIR, FIRST_COME = "fair", "first-come"
_MILLISECONDS = 0.04  # so short that the controller is what limits
# A single round cannot distinguish a change of 3 % from none.
_ROUNDS, _PREPARATIONS = 75, 5
# Clients, and calls of each: for a second at most, so that the machine is the same for both sides of a round. With
# fewer than a session may have in flight, all are taken before most have run, and the controller's turns are of nothing
# but what ends and starts then. With many more, clients launch all the time.
_POINTS = (("1 client", 1, 3400), ("8 clients", 8, 2500), ("8 clients, all calls in line", 8, 420))


def _points(options: Options) -> list[Benchmark]:
    if not options.null:
        return []
    return [
        Benchmark(
            key="policies",
            title=title,
            prepare="benchmarks.paper.policies:prepare",
            metrics=(
                Metric("rate", "all clients", "computations/s"),
                Metric("controller_us", "the controller, of each", "us"),
            ),
            contestants=(FAIR, FIRST_COME),
            point={"clients": count, "milliseconds": _MILLISECONDS, "hosts": 1, "devices": 4, "calls": calls},
            preparations=_PREPARATIONS,
        )
        for title, count, calls in _POINTS
    ]


def prepare(settings: Settings) -> Round:
    """Null devices: each client is a session of one and the same tenant."""
    return fig8.null_round(settings, int(settings.point["calls"]), settings.backend)


def _claims(points: Sequence[BenchmarkRecord], options: Options) -> list[Claim]:
    return [
        at_least(f"{FAIR} over {FIRST_COME}, {point.title}", quotient_by_rounds(point, FAIR, FIRST_COME, "rate"), 0.97)
        for point in points
    ]


FIGURE = Figure(
    key="policies",
    title="The cost of fair shares",
    explanation=(
        "The computations take 0.04 ms on null devices, so the controller limits their rate. The policies `fair` "
        "and `first-come` alternate in many short rounds. The figure shows the throughput of all clients together, "
        "and the CPU time of the controller. Eight clients either launch all the time, or make so few calls that "
        "all of them are in the queue before most have run, so that choosing is a larger part of the controller's "
        "work. Each policy has five clusters, one after the other. The claims refer to the median ratio of the "
        "rounds."
    ),
    paper="Not in the paper.",
    axes=None,
    points=_points,
    claims=_claims,
    rounds=_ROUNDS,
)
