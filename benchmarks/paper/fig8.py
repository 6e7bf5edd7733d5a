"""Figure 8: many clients on the same devices, each with separate computations, one after another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from atoll.cluster.settings import DEFAULT_POLICY
from benchmarks.harness.benchmark import BATCH_THREADS, Benchmark, Metric, Round, Settings
from benchmarks.harness.record import BenchmarkRecord, Claim
from benchmarks.harness.statistics import rate_in_common_window
from benchmarks.paper.figure import Axes, Figure, Options, at_least, count_of, median

MILLISECONDS = (0.04, 0.33, 1.04, 2.4)
ATOLL, JAX = "Atoll, many clients", "JAX, one process"
BATCH_JAX = f"{JAX}{BATCH_THREADS}"  # threads as those of Atoll's devices: what the claims judge against
_HOSTS, _DEVICES = 1, 4
_FILL = 2  # calls of each client ahead of its clock
_PARTS = 4  # of a client's calls, after each of which its progress is noted


def _points(options: Options) -> list[Benchmark]:
    times = MILLISECONDS[1:3] if options.quick else MILLISECONDS
    clients: tuple[int, ...]
    contestants: tuple[str, ...]
    if options.null:
        clients = (1, 8) if options.quick else (1, 4, 16, 64, 256)
        prepare, contestants = "benchmarks.paper.fig8:prepare_null", ("Atoll", "ideal")
    else:
        clients = (1, 4) if options.quick else (1, 2, 4, 8)
        prepare, contestants = "benchmarks.paper.fig8:prepare", (ATOLL, JAX, BATCH_JAX)
    return [
        Benchmark(
            key="fig8",
            title=f"{milliseconds:g} ms, {count_of(count, 'client')}",
            prepare=prepare,
            prepare_of={
                "ideal": "benchmarks.paper.fig6:prepare_ideal",
                JAX: "benchmarks.paper.fig8:prepare_jax",
                BATCH_JAX: "benchmarks.paper.fig8:prepare_jax",
            },
            metrics=(Metric("rate", "all clients", "computations/s"),),
            contestants=contestants,
            point={"clients": count, "milliseconds": milliseconds, "hosts": _HOSTS, "devices": _DEVICES},
        )
        for milliseconds in times
        for count in clients
    ]


def prepare_null(settings: Settings) -> Round:
    """Open this many sessions, each with a separate program, and one call per computation.

    A round takes two seconds, and longer if many clients have to start.
    """
    clients, seconds = int(settings.point["clients"]), float(settings.point["milliseconds"]) / 1e3
    calls = settings.size(full=2, quick=1) * (1 + clients / 64) / max(seconds, 1e-4)
    return null_round(settings, max(4, round(calls / clients)))


def null_round(settings: Settings, calls: int, policy: str = DEFAULT_POLICY) -> Round:
    """So many calls of each client, with any scheduling policy. Also what the controller's process takes for a
    computation: `controller_us`.
    """
    from benchmarks.paper.cluster import NullCluster
    from benchmarks.paper.null_steps import Steps

    point = settings.point
    clients, seconds = int(point["clients"]), float(point["milliseconds"]) / 1e3
    cluster = NullCluster(f"1x{point['hosts']}x{point['devices']}", policy=policy)
    steps = [cluster.run(Steps.prepare(cluster.client(f"client {number}"), seconds)) for number in range(clients)]

    async def all_clients() -> list[list[tuple[float, float]]]:
        return await asyncio.gather(*(one.progress(calls, _FILL, _PARTS) for one in steps))

    def measure() -> dict[str, float]:
        before = cluster.cpu_seconds()["controller"]
        rate = rate_in_common_window(cluster.run(all_clients()))
        took = cluster.cpu_seconds()["controller"] - before
        return {"rate": rate, "controller_us": 1e6 * took / (calls + _FILL) / clients}

    measure()
    return measure


def prepare(settings: Settings) -> Round:
    """Start one process per client. All of them compute at the same time."""
    from benchmarks.paper.workload import Clients

    point = settings.point
    islands = f"1x{point['hosts']}x{point['devices']}"
    clients = Clients(int(point["clients"]), float(point["milliseconds"]), islands)
    seconds = settings.size(full=2, quick=1)
    return lambda: {"rate": clients.rate(seconds)}


def prepare_jax(settings: Settings) -> Round:
    """Devices are one process's: it dispatches the programs of all clients, in turn."""
    from benchmarks.paper.workload import Loop

    loops = [Loop(float(settings.point["milliseconds"])) for _ in range(int(settings.point["clients"]))]
    seconds = settings.size(full=2, quick=1)

    def measure() -> dict[str, float]:
        runs = [loop.start() for loop in loops]
        started = time.monotonic()
        while time.monotonic() < started + seconds:
            for run in runs:
                run.go_on()
        return {"rate": rate_in_common_window([run.end() for run in runs])}

    return measure


def _claims(points: Sequence[BenchmarkRecord], options: Options) -> list[Claim]:
    ours, theirs = ("Atoll", "ideal") if options.null else (ATOLL, BATCH_JAX)
    claims = []
    for milliseconds in sorted({float(point.point["milliseconds"]) for point in points}):
        here = [point for point in points if point.point["milliseconds"] == milliseconds]
        one, many = median(here[0], ours, "rate"), median(here[-1], ours, "rate")
        clients = here[-1].point["clients"]
        ratio = many / one if one and many else None
        claims.append(at_least(f"{clients} clients over one, {milliseconds:g} ms", ratio, 1.0))
        if not options.null:
            peers = [rate for point in here if (rate := median(point, theirs, "rate")) is not None]
            best = many / max(peers) if many and peers else None
            claims.append(at_least(f"{clients} clients over {theirs}, {milliseconds:g} ms", best, 1.0))
    return claims


FIGURE = Figure(
    key="fig8",
    title="Many clients on the same devices",
    explanation=(
        "Each client repeats its own computation, each feeding the next, on the same four devices. The figure shows "
        "the throughput of all clients together, from when the last one has started to when the first one has "
        "ended. JAX's devices belong to one process, so one process dispatches the programs of all clients in turn. "
        "It is measured as users start it, and with batch threads, scheduled like those of Atoll's devices, to "
        "which the claims refer. Null devices: one host with four devices, compared with their highest possible "
        "rate."
    ),
    paper=(
        "Total throughput with up to 256 clients is at least JAX's, for computations of 0.04 to 2.4 ms: there is no "
        "cost of switching between clients. For very short computations it exceeds JAX's, since one client cannot "
        "keep the devices busy."
    ),
    axes=Axes("clients", "clients", ("rate",), "computations a second", split="milliseconds", split_unit="ms"),
    points=_points,
    claims=_claims,
)
