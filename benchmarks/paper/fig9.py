"""Figure 9: clients with shares on the same devices, which get device time in proportion to these."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from benchmarks.harness.benchmark import Benchmark, Metric, Round, Settings
from benchmarks.harness.record import BenchmarkRecord, Claim
from benchmarks.paper.figure import Figure, Options, at_most, median
from benchmarks.paper.traces import SECONDS, Point, Take, TracePoint, beside

if TYPE_CHECKING:
    from atoll.session.bare import BareClient
    from benchmarks.paper.cluster import NullCluster
    from benchmarks.paper.workload import Clients

_WEIGHTS = {"1:1:1:1": (1.0, 1.0, 1.0, 1.0), "1:2:4:8": (1.0, 2.0, 4.0, 8.0)}
_MIXED = (0.3, 30.0, 0.3, 30.0)
_TIMES = {"0.33 ms": (0.33,) * 4, "2.4 ms": (2.4,) * 4, "0.3 and 30 ms": _MIXED, "1 ms": (1.0,)}
_MANY = 64
# Number of short computations that a process starts together. With the previous ones, these are some 150 ms of work.
# With less, a client that gets no CPU for a while has no work enqueued, and others get its share.
_SHORT_AT_ONCE = 128


def _weights(point: Point) -> tuple[float, ...]:
    shares = str(point["shares"])
    if shares in _WEIGHTS:
        return _WEIGHTS[shares]
    rng = random.Random(1)
    return tuple(round(rng.uniform(1, 8), 2) for _ in range(_MANY))


def _points(options: Options) -> list[Benchmark]:
    prepare = "benchmarks.paper.fig9:prepare_null" if options.null else "benchmarks.paper.fig9:prepare"
    times = list(_TIMES)[: 2 if options.quick else 3]
    chosen: list[tuple[str, str, int]] = [(shares, each, 1) for each in times for shares in _WEIGHTS]
    if options.null:
        chosen += [("1:2:4:8", "0.33 ms", 2), ("64 random ones", "1 ms", 1)]
    return [
        Benchmark(
            key="fig9",
            title=f"shares {shares}, {each}" + (f", {islands} islands" if islands > 1 else ""),
            prepare=prepare,
            metrics=(Metric("deviation", "largest deviation from its share", "%"),),
            contestants=("Atoll",),
            point={"shares": shares, "milliseconds": each, "islands": islands},
        )
        for shares, each, islands in chosen
    ]


def prepare_null(settings: Settings) -> Round:
    """Each client keeps its session's window full; with two islands it computes on both at once, in turn."""
    from benchmarks.paper.shares import deviation

    weights = _weights(settings.point)
    cluster, clients, run_for = _null_clients(settings.point, f"{settings.point['islands']}x1x1")
    seconds = settings.size(full=10, quick=3) * (4 if len(weights) == _MANY else 1)

    def measure() -> dict[str, float]:
        since = time.monotonic()
        run_for(seconds)
        return {"deviation": deviation(cluster.address, [client.session for client in clients], weights, since)}

    return measure


def _null_clients(point: Point, islands: str) -> tuple[NullCluster, list[BareClient], Callable[[float], None]]:
    """Return a cluster, its clients, and a function that has all clients compute for a number of seconds."""
    from benchmarks.paper.cluster import NullCluster
    from benchmarks.paper.null_steps import Steps
    from benchmarks.paper.shares import tenants, token_of

    weights = _weights(point)
    times = _TIMES[str(point["milliseconds"])]
    cluster = NullCluster(islands, tenants=tenants(weights))
    clients = [cluster.client(f"client {number}", token_of(number)) for number in range(len(weights))]
    loops = [
        cluster.run(Steps.prepare(client, times[number % len(times)] / 1e3, devices=devices))
        for number, client in enumerate(clients)
        for devices in client.islands
    ]

    async def all_clients(seconds: float) -> None:
        await asyncio.gather(*(loop.run_for(seconds) for loop in loops))

    return cluster, clients, lambda seconds: cluster.run(all_clients(seconds))


def prepare(settings: Settings) -> Round:
    """Start one process with JAX per client, on four devices."""
    from benchmarks.paper.shares import deviation

    weights, clients = _weights(settings.point), _processes(settings.point)
    seconds = settings.size(full=10, quick=3)

    def measure() -> dict[str, float]:
        since = time.monotonic()
        clients.rate(seconds)
        return {"deviation": deviation(clients.address, clients.sessions(), weights, since)}

    return measure


def _processes(point: Point) -> Clients:
    from benchmarks.paper.shares import tenants, token_of
    from benchmarks.paper.workload import BATCH, Clients

    weights = _weights(point)
    times = _TIMES[str(point["milliseconds"])]
    tokens = [token_of(number) for number in range(len(weights))]
    batch = _SHORT_AT_ONCE if max(times) < 1 else BATCH
    return Clients(len(weights), times, "1x1x4", tenants(weights), tokens, batch)


# ---- pictures


def _traces(options: Options) -> list[TracePoint]:
    function = f"benchmarks.paper.fig9:{'trace_null' if options.null else 'trace'}"
    return [
        TracePoint(f"shares {shares}, computations of {each}", function, {"shares": shares, "milliseconds": each}, kept)
        for each, kept in (("0.33 ms", 30.0), *((("2.4 ms", 150.0),) if not options.quick else ()))
        for shares in _WEIGHTS
    ]


def trace_null(point: Point, take: Take) -> None:
    """On eight devices of two hosts, all of which compute together."""
    cluster, _, run_for = _null_clients(point, "1x2x4")
    run_for(0.5)
    beside(lambda: run_for(4 * SECONDS), lambda: take(cluster.address), SECONDS)


def trace(point: Point, take: Take) -> None:
    clients = _processes(point)
    clients.rate(2.0)
    beside(lambda: clients.rate(3.0), lambda: take(clients.address), 1.5)


def _claims(points: Sequence[BenchmarkRecord], options: Options) -> list[Claim]:
    return [
        at_most(
            f"{point.title}: largest deviation from its share, %",
            median(point, "Atoll", "deviation"),
            3.0 if "random" in str(point.point["shares"]) else 2.0,
        )
        for point in points
    ]


FIGURE = Figure(
    key="fig9",
    title="Shares of the same devices",
    explanation=(
        "Tenants with shares of 1:1:1:1 and of 1:2:4:8 have one client each, and always have work. The figure shows "
        "the largest deviation of a tenant from its share of device time, as the hosts measure it, from when the "
        "last tenant has begun to when the first has ended. The computations have equal lengths, or 0.3 ms beside "
        "30 ms. Real devices: four on one host. Null devices: also two islands at once, and 64 clients with random "
        "shares. The pictures are traces from `atoll trace`; for null devices, of eight devices on two hosts."
    ),
    paper="Traces show four clients that interleave at the grain of a millisecond, in proportion to their shares.",
    axes=None,
    points=_points,
    claims=_claims,
    traces=_traces,
)
