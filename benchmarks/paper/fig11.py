"""Figure 11: traces of figure 8's workload, of more and more clients: they interleave, and keep the devices busy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from atoll.protocol.spans import Span
from benchmarks.harness.benchmark import Benchmark, Metric, Round, Settings
from benchmarks.harness.record import BenchmarkRecord, Claim
from benchmarks.paper.figure import Figure, Options, at_least, at_most, median
from benchmarks.paper.traces import SECONDS, Point, Take, TracePoint, beside, busy, spans_of, turn

if TYPE_CHECKING:
    from benchmarks.paper.cluster import NullCluster

_MILLISECONDS = 0.33
_NULL, _REAL = (1, 4, 8, 16), (1, 2, 4, 8)
_KEPT = 15.0  # of each trace, in milliseconds
_BUSY, _TURN = 95.0, 1.0  # what it must show, with many clients: percent, and milliseconds


def _counts(options: Options) -> tuple[int, ...]:
    counts = _NULL if options.null else _REAL
    return counts[:2] if options.quick else counts


def _points(options: Options) -> list[Benchmark]:
    return [
        Benchmark(
            key="fig11",
            title=_title(count),
            prepare=f"benchmarks.paper.fig11:{'prepare_null' if options.null else 'prepare'}",
            metrics=(
                Metric("busy", "a device is busy", "%"),
                Metric("turn", "until another client has it", "ms"),
            ),
            contestants=("Atoll",),
            point={"clients": count},
        )
        for count in _counts(options)
    ]


def _title(count: int) -> str:
    return f"{count} client{'s' if count > 1 else ''}"


def _null_clients(point: Point) -> tuple[NullCluster, Callable[[float], None]]:
    """Eight devices of two hosts, and what has all clients work for so many seconds."""
    from benchmarks.paper.cluster import NullCluster
    from benchmarks.paper.null_steps import Steps

    cluster = NullCluster("1x2x4")
    loops = [
        cluster.run(Steps.prepare(cluster.client(f"client {number + 1}"), _MILLISECONDS / 1e3))
        for number in range(int(point["clients"]))
    ]

    async def all_clients(seconds: float) -> None:
        await asyncio.gather(*(loop.run_for(seconds) for loop in loops))

    return cluster, lambda seconds: cluster.run(all_clients(seconds))


def prepare_null(settings: Settings) -> Round:
    """Have each client keep its session's window full."""
    cluster, run_for = _null_clients(settings.point)
    run_for(0.5)
    return lambda: _measured(cluster.address, lambda: run_for(4 * SECONDS), SECONDS)


def prepare(settings: Settings) -> Round:
    """Start one process with JAX per client, on four devices."""
    from benchmarks.paper.workload import Clients

    clients = Clients(int(settings.point["clients"]), _MILLISECONDS, "1x1x4")
    clients.rate(1.0)
    return lambda: _measured(clients.address, lambda: clients.rate(2.0), 1.0)


def _measured(address: str, work: Callable[[], object], after: float) -> dict[str, float]:
    spans: list[Span] = []
    beside(work, lambda: spans.extend(spans_of(address).spans), after)
    return {"busy": busy(spans), "turn": turn(spans)}


# ---- pictures


def _traces(options: Options) -> list[TracePoint]:
    function = f"benchmarks.paper.fig11:{'trace_null' if options.null else 'trace'}"
    return [TracePoint(_title(count), function, {"clients": count}, _KEPT) for count in _counts(options)]


def trace_null(point: Point, take: Take) -> None:
    cluster, run_for = _null_clients(point)
    run_for(0.5)
    beside(lambda: run_for(4 * SECONDS), lambda: take(cluster.address), SECONDS)


def trace(point: Point, take: Take) -> None:
    from benchmarks.paper.workload import Clients

    clients = Clients(int(point["clients"]), _MILLISECONDS, "1x1x4")
    clients.rate(1.0)
    beside(lambda: clients.rate(2.0), lambda: take(clients.address), 1.0)


def _claims(points: Sequence[BenchmarkRecord], options: Options) -> list[Claim]:
    last = points[-1]
    return [
        at_least(f"{last.title}: a device is busy, %", median(last, "Atoll", "busy"), _BUSY),
        *(
            at_most(f"{point.title}: until another client has it, ms", median(point, "Atoll", "turn"), _TURN)
            for point in points[1:]
        ),
    ]


FIGURE = Figure(
    key="fig11",
    title="Traces of many clients on the same devices",
    explanation=(
        "The workload is that of figure 8, with computations of 0.33 ms and one or more clients. The pictures are "
        "traces from `atoll trace`. The numbers are derived from such traces: the fraction of time that a device "
        "was busy, and the median time that one client used it before another client did (0 with one client). Null "
        "devices: eight on two hosts. Real devices: four on one host."
    ),
    paper=(
        "A single client with computations of 0.33 ms does not saturate the devices; with several, utilization rises "
        "to 100 %. Programs are gang-scheduled across all cores, and interleaved at a millisecond or less."
    ),
    axes=None,
    points=_points,
    claims=_claims,
    traces=_traces,
)
