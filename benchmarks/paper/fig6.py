"""Figure 6: how long a computation has to be for the controller not to matter.

The computations of figure 5, op by op, each made longer; the throughput is compared with multi-controller JAX's, or
with that of null devices which are never kept waiting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from benchmarks.harness.benchmark import BATCH_THREADS, Benchmark, Metric, Round, Settings
from benchmarks.harness.record import BenchmarkRecord, Claim
from benchmarks.paper.figure import Axes, Figure, Options, at_most, count_of, median, quotient

PARITY = 0.98
_MILLISECONDS = (0.3, 0.6, 1.2, 2.3, 4.6, 9.2)
_NULL_MILLISECONDS = {
    4: (0.3, 0.6, 1.2, 2.3, 4.6),
    16: (0.6, 1.2, 2.3, 4.6, 9.2),
    512: (9.2, 10.0, 18.0, 35.0, 70.0, 140.0),
}
_CONTROLLER_MS = {512: 1.5}  # at most, by hosts
_FILL = 8  # calls ahead of the clock
ATOLL, JAX = "Atoll, op by op", "JAX, op by op"
BATCH_JAX = f"{JAX}{BATCH_THREADS}"  # threads as those of Atoll's devices: what the claims judge against


def _points(options: Options) -> list[Benchmark]:
    rate = Metric("rate", "op by op", "computations/s")
    if options.null:
        hosts = options.hosts or ((16, 512))
        cost = Metric("controller_us", "controller, a gang and host", "us")
        return [
            Benchmark(
                key="fig6",
                title=f"{count} hosts of 4 null devices, {milliseconds:g} ms",
                prepare="benchmarks.paper.fig6:prepare_ideal",
                prepare_of={"Atoll": "benchmarks.paper.fig6:prepare_null"},
                metrics=(rate, cost),
                contestants=("Atoll", "ideal"),
                point={"hosts": count, "devices": 4, "milliseconds": milliseconds},
                round_deadline=300.0,
            )
            for count in hosts
            for milliseconds in _NULL_MILLISECONDS.get(count, (2.3, 9.2, 35.0))[: 3 if options.quick else None]
        ]
    hosts = options.hosts or (4,)
    times = _MILLISECONDS[1:4] if options.quick else _MILLISECONDS
    return [
        Benchmark(
            key="fig6",
            title=f"{count_of(count, 'host')} of {options.devices_per_host} devices, about {milliseconds:g} ms",
            prepare="benchmarks.paper.fig6:prepare",
            prepare_of=dict.fromkeys((JAX, BATCH_JAX), "benchmarks.paper.fig6:prepare_jax"),
            metrics=(rate, Metric("milliseconds", "one computation", "ms")),
            contestants=(ATOLL, JAX, BATCH_JAX),
            point={"hosts": count, "devices": options.devices_per_host, "milliseconds": milliseconds},
        )
        for count in hosts
        for milliseconds in times
    ]


def prepare(settings: Settings) -> Round:
    """Atoll, on real devices."""
    from benchmarks.paper.workload import Loop

    return Loop(float(settings.point["milliseconds"])).rounds(_calls(settings))


def prepare_jax(settings: Settings) -> Round:
    """Multi-controller JAX, on as many."""
    from benchmarks.paper.peers.multi_controller import Work, over_hosts

    point = settings.point
    return over_hosts(
        Work(
            int(point["hosts"]),
            int(point["devices"]),
            _calls(settings),
            milliseconds=float(point["milliseconds"]),
        )
    )


def _calls(settings: Settings) -> int:
    """For about a second."""
    return round(settings.size(full=600, quick=300) / float(settings.point["milliseconds"])) + 50


def prepare_ideal(settings: Settings) -> Round:
    """Devices that are never kept waiting."""
    milliseconds = float(settings.point["milliseconds"])
    return lambda: {"rate": 1e3 / milliseconds}


def prepare_null(settings: Settings) -> Round:
    from benchmarks.paper.cluster import NullCluster, costs
    from benchmarks.paper.null_steps import Steps

    point = settings.point
    hosts, seconds = int(point["hosts"]), float(point["milliseconds"]) / 1e3
    cluster = NullCluster(f"1x{hosts}x{point['devices']}")
    steps = cluster.run(Steps.prepare(cluster.client(), seconds))
    calls = max(16, math.ceil(settings.size(full=2, quick=1) / seconds))

    def measure() -> dict[str, float]:
        rates: dict[str, float] = {}

        def work() -> None:
            rates["rate"] = calls / cluster.run(steps.run(calls, _FILL))

        return rates | {"controller_us": costs(cluster, _FILL + calls, hosts, work)["controller_us"]}

    cluster.run(steps.run(16))
    return measure


def _claims(points: Sequence[BenchmarkRecord], options: Options) -> list[Claim]:
    first, second = ("Atoll", "ideal") if options.null else (ATOLL, BATCH_JAX)
    bounds = {4: 2.3, 16: 2.3, 512: 10.0}
    claims = []
    for hosts in sorted({int(point.point["hosts"]) for point in points}):
        if hosts not in bounds:
            continue
        here = [point for point in points if point.point["hosts"] == hosts]
        text = f"ms of the shortest computation at {PARITY} of {second}, {hosts} hosts"
        claim = at_most(text, parity(here, first, second), bounds[hosts])
        longest = max(_took(point, second) for point in here)
        claims.append(msgspec.structs.replace(claim, beyond=longest if claim.value == math.inf else None))
        if options.null and hosts in _CONTROLLER_MS:
            shortest = min(here, key=lambda each: float(each.point["milliseconds"]))
            cost = median(shortest, first, "controller_us")
            text = f"ms of the controller's CPU time a gang, {hosts} hosts, {shortest.point['milliseconds']:g} ms"
            claims.append(at_most(text, None if cost is None else cost * hosts / 1e3, _CONTROLLER_MS[hosts]))
    return claims


def parity(points: Sequence[BenchmarkRecord], first: str, second: str) -> float | None:
    """From how many milliseconds on a computation runs as often with `first` as with `second`; infinity if never."""
    shortest = math.inf
    for point in sorted(points, key=lambda each: float(each.point["milliseconds"]), reverse=True):
        ratio = quotient(point, first, second, "rate")
        if ratio is None:
            return None
        if ratio < PARITY:
            break
        shortest = _took(point, second)
    return shortest


def _took(point: BenchmarkRecord, contestant: str) -> float:
    """Return the milliseconds of a computation, as measured or, of null devices, as configured."""
    took = median(point, contestant, "milliseconds")
    return took if took is not None else float(point.point["milliseconds"])


FIGURE = Figure(
    key="fig6",
    title="The smallest computation that hides the controller",
    explanation=(
        "The computations are those of figure 5, op by op, with a loop that makes each of them longer. The figure "
        f"shows from which length on Atoll reaches {PARITY} of the rate of multi-controller JAX, whose threads are "
        "scheduled like those of Atoll's devices (batch threads). It also shows JAX as users start it. Null devices "
        "are compared with ideal dispatch, which never keeps them waiting, and the CPU time of the controller per "
        "gang and host is given."
    ),
    paper="2.3 ms with 16 hosts and 128 TPU cores, 35 ms with 512 hosts and 2,048.",
    axes=Axes("milliseconds", "computation, ms", ("rate",), "computations a second", split="hosts", split_unit="hosts"),
    points=_points,
    claims=_claims,
)
