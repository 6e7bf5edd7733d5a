"""Figure 5: the cost of dispatch. A scalar on each device, an AllReduce and an addition, one after another.

Op by op: a call for each computation. Chained: a call for a program of 128 nodes. Fused: a call for 128 computations
compiled into one.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from benchmarks.harness.benchmark import BATCH_THREADS, Benchmark, Metric, Round, Settings
from benchmarks.harness.record import BenchmarkRecord, Claim
from benchmarks.paper.figure import Axes, Figure, Options, at_least, count_of, median, quotient

NODES = 128
ATOLL = tuple(f"Atoll, {way}" for way in ("op by op", "chained", "fused"))
JAX = tuple(f"JAX, {way}" for way in ("op by op", "fused"))
# The peer whose threads are scheduled like those of Atoll's devices, which the claims use.
BATCH_JAX = tuple(f"{name}{BATCH_THREADS}" for name in JAX)
RAY = tuple(f"Ray, {way}" for way in ("op by op", "chained", "fused"))
TENSORFLOW = tuple(f"TensorFlow, {way}" for way in ("op by op", "chained"))
_PREPARE = {
    **dict.fromkeys(ATOLL, "benchmarks.paper.fig5:prepare"),
    **dict.fromkeys((*JAX, *BATCH_JAX), "benchmarks.paper.peers.multi_controller:prepare"),
    **dict.fromkeys(RAY, "benchmarks.paper.peers.ray_actors:prepare"),
    **dict.fromkeys(TENSORFLOW, "benchmarks.paper.peers.tensorflow:prepare"),
}
_NULL_METRICS = (
    Metric("op_by_op", "op by op", "computations/s"),
    Metric("chained", "chained", "computations/s"),
    Metric("fused", "fused", "computations/s"),
    Metric("controller_us", "controller, a gang and host, op by op", "us"),
    Metric("hosts_us", "null host, a gang, op by op", "us"),
)


def _points(options: Options) -> list[Benchmark]:
    hosts = options.hosts or ((2, 8, 32, 128, 512) if options.null else (1, 2, 4))
    if options.quick:
        hosts = hosts[:2]
    if options.null:
        return [
            Benchmark(
                key="fig5",
                title=f"{count} hosts of 4 null devices",
                prepare="benchmarks.paper.fig5:prepare_null",
                metrics=_NULL_METRICS,
                contestants=("Atoll",),
                point={"hosts": count, "devices": 4},
                round_deadline=300.0,
            )
            for count in hosts
        ]
    return [
        Benchmark(
            key="fig5",
            title=f"{count_of(count, 'host')} of {options.devices_per_host} devices",
            prepare="",
            metrics=(Metric("rate", "rate", "computations/s"),),
            contestants=tuple(name for name in _PREPARE if _is_installed(name)),
            prepare_of=_PREPARE,
            point={"hosts": count, "devices": options.devices_per_host},
        )
        for count in hosts
    ]


def _is_installed(contestant: str) -> bool:
    """Peers are extras; those that are not there do not compete."""
    module = {"Ray": "ray", "TensorFlow": "tensorflow"}.get(contestant.partition(",")[0])
    return module is None or importlib.util.find_spec(module) is not None


def prepare(settings: Settings) -> Round:
    """Atoll's three ways, on real devices."""
    import jax

    import atoll
    from benchmarks.micro.dispatch import allreduce_and_add, counting_rounds

    add_one, zero = allreduce_and_add(jax.devices())
    compiled = jax.jit(add_one)

    def many(x: jax.Array) -> jax.Array:
        for _ in range(NODES):
            x = compiled(x)
        return x

    way = settings.backend.partition(", ")[2]
    if way == "op by op":
        return counting_rounds(compiled, zero, settings.size(full=2000, quick=300))
    step = atoll.program(many) if way == "chained" else jax.jit(many)
    calls = settings.size(full=30, quick=4) * (4 if way == "fused" else 1)
    return counting_rounds(step, zero, calls, each=NODES)


def prepare_null(settings: Settings) -> Round:
    """The three ways on null devices; a fused call takes as long as 128 AllReduces of a scalar."""
    from atoll.devices.null.model import chosen_model
    from benchmarks.paper.cluster import NullCluster, costs
    from benchmarks.paper.null_steps import Steps

    hosts, devices = int(settings.point["hosts"]), int(settings.point["devices"])
    cluster = NullCluster(f"1x{hosts}x{devices}")
    client = cluster.client()
    each = chosen_model().all_reduce_seconds(4, hosts * devices)
    steps = {
        "op_by_op": cluster.run(Steps.prepare(client, each)),
        "chained": cluster.run(Steps.prepare(client, each, nodes=NODES)),
        "fused": cluster.run(Steps.prepare(client, NODES * each)),
    }
    # Approximate number of messages to hosts in a round, if that is at least a few computations.
    work = settings.size(full=40_000, quick=8000)
    calls = {"op_by_op": max(16, work // hosts), "chained": max(1, work // hosts // NODES), "fused": 100}
    each_call = {"op_by_op": 1, "chained": NODES, "fused": NODES}

    def measure() -> dict[str, float]:
        rates: dict[str, float] = {}

        def timed(way: str) -> None:
            rates[way] = calls[way] * each_call[way] / cluster.run(steps[way].run(calls[way]))

        rates |= costs(cluster, calls["op_by_op"], hosts, lambda: timed("op_by_op"))
        timed("chained")
        timed("fused")
        return rates

    measure()
    return measure


def _claims(points: Sequence[BenchmarkRecord], options: Options) -> list[Claim]:
    last = points[-1]
    where = f"{last.point['hosts']} hosts"
    if options.null:
        return [
            at_least(f"fused over chained, {where}", _over(last, "fused", "chained"), 1.0),
            at_least(f"chained over op by op, {where}", _over(last, "chained", "op_by_op"), 1.0),
        ]

    def of(point: BenchmarkRecord, ours: str, theirs: str, bound: float) -> Claim:
        hosts = point.point["hosts"]
        text = f"{ours}; over {theirs}; {hosts} {'host' if hosts == 1 else 'hosts'}"
        return at_least(text, quotient(point, ours, theirs, "rate"), bound)

    claims = [
        of(last, ATOLL[2], BATCH_JAX[1], 0.98),
        of(last, ATOLL[1], BATCH_JAX[0], 1.0),
        of(last, ATOLL[0], BATCH_JAX[0], 0.5),
        of(last, ATOLL[0], RAY[0], 10.0),
    ]
    # On one host both have all devices in one process; on several, TensorFlow's still are.
    alone = [point for point in points if point.point["hosts"] == 1]
    return [*claims, *(of(point, ATOLL[i], TENSORFLOW[i], 1.0) for point in alone for i in range(len(TENSORFLOW)))]


def _over(point: BenchmarkRecord, first: str, second: str) -> float | None:
    ours, theirs = median(point, "Atoll", first), median(point, "Atoll", second)
    return ours / theirs if ours is not None and theirs else None


FIGURE = Figure(
    key="fig5",
    title="Dispatch overhead",
    explanation=(
        "Each computation is a scalar float32 on each device, an AllReduce and an addition, and feeds the next one. "
        "The rate is in computations per second. Op by op is one call per computation, chained is one call per "
        "program of 128 nodes, and fused is one call per 128 computations that are compiled into one function. JAX "
        "is multi-controller JAX with one process per host, gloo between them, and the same functions. Atoll's "
        "workers start the threads of CPU devices as batch threads. So JAX is measured twice: as users start it, "
        "and with batch threads (`chrt --batch 0 python ...`), to which the claims refer. Ray has one actor per "
        "host, which runs the functions of JAX. TensorFlow has all devices, as logical ones, in one process for any "
        "number of hosts: its sums use no network, and it synchronizes no other process. So Atoll is compared with "
        "TensorFlow only on one host; the rows for more hosts show what a runtime without a network would reach. "
        "Ray and TensorFlow are as users start them."
    ),
    paper=(
        "Pathways keeps up with JAX fused up to 1,000 TPU cores and chained up to 256, and is faster than TensorFlow "
        "and Ray in every way of calling, Ray by an order of magnitude."
    ),
    axes=Axes("hosts", "hosts", ("rate", "op_by_op", "chained", "fused"), "computations a second"),
    points=_points,
    claims=_claims,
)
