"""Figure 7: a pipeline of short computations on one host each, dispatched in parallel and in sequence."""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks.harness.benchmark import Benchmark, Metric, Round, Settings
from benchmarks.harness.record import BenchmarkRecord, Claim
from benchmarks.paper.figure import Axes, Figure, Options, at_least, quotient

NULL = ("Atoll", "Atoll, sequential dispatch")
REAL = ("atoll, parallel", "atoll, sequential")


def _points(options: Options) -> list[Benchmark]:
    rate = Metric("rate", "rate", "computations/s")
    if options.null:
        stages = options.hosts or ((1, 4, 16) if options.quick else (1, 2, 4, 8, 16, 32, 64, 128))
        prepare, contestants, what = "benchmarks.paper.fig7:prepare_null", NULL, "hosts of 4 null devices"
    else:
        stages = options.hosts or ((1, 16) if options.quick else (1, 2, 4, 8, 16))
        prepare, contestants, what = "benchmarks.paper.fig7:prepare", REAL, "islands of one device"
    return [
        Benchmark(
            key="fig7",
            title=f"{count} stages, {what}",
            prepare=prepare,
            metrics=(rate,),
            contestants=contestants,
            point={"stages": count},
        )
        for count in stages
    ]


def prepare(settings: Settings) -> Round:
    """Real devices: x + 1 on one island after the other, as one program; several passes in flight."""
    from benchmarks.micro.islands import Pipeline

    stages = int(settings.point["stages"])
    pipeline = Pipeline(stages)
    passes = settings.size(full=320, quick=40) // stages + 2
    pipeline.run(2)
    return lambda: {"rate": stages * passes / pipeline.run(passes)}


def prepare_null(settings: Settings) -> Round:
    from atoll.cluster.settings import Dispatch
    from atoll.devices.null.model import chosen_model
    from atoll.devices.null.null_program import NullProgram
    from atoll.ir.program import Node
    from atoll.session.bare import call, program, sharded, transfer
    from benchmarks.paper.cluster import NullCluster

    stages = int(settings.point["stages"])
    dispatch = Dispatch.PARALLEL if settings.backend == NULL[0] else Dispatch.SEQUENTIAL
    cluster = NullCluster(f"1x{stages}x4", dispatch)
    client = cluster.client()
    scalar, seconds = ("uint8", (4,)), chosen_model().all_reduce_seconds(4, 4)
    specs = [sharded(devices) for devices in client.hosts]
    functions = [
        cluster.run(client.compile(NullProgram("stage", seconds, (scalar,), (scalar,)), devices))
        for devices in client.hosts
    ]
    first = cluster.run(client.compile(NullProgram("first", 0.0, (), (scalar,)), client.hosts[0]))
    nodes: list[Node] = []
    value = 0
    for stage, devices in enumerate(client.hosts):
        if stage:
            nodes.append(transfer(value, specs[stage]))
            value += 1
        nodes.append(call(functions[stage], (value,), (specs[stage],), devices))
        value += 1
    made = client.register(program("first", (), [call(first, (), (specs[0],), client.hosts[0])], (0,)))
    through = client.register(program("through", (specs[0],), nodes, (value,)))
    passes = settings.size(full=960, quick=160) // stages + 2

    async def run() -> None:
        (x,) = await client.launch(made, (), 1)
        results = []
        for _ in range(passes):
            results += await client.launch(through, (x,), 1)
        await client.wait(results)
        client.release((x, *results))

    def measure() -> dict[str, float]:
        started = time.perf_counter()
        cluster.run(run())
        return {"rate": stages * passes / (time.perf_counter() - started)}

    measure()
    return measure


def _claims(points: Sequence[BenchmarkRecord], options: Options) -> list[Claim]:
    first, second = NULL if options.null else REAL
    return [
        at_least(
            f"parallel over sequential, {point.point['stages']} stages", quotient(point, first, second, "rate"), 3.0
        )
        for point in points
        if int(point.point["stages"]) >= 16
    ]


FIGURE = Figure(
    key="fig7",
    title="Parallel and sequential dispatch",
    explanation=(
        "The short computation of figure 5 runs in a pipeline: each stage is on a separate host and sends its "
        "result to the next stage. The pipeline is one program, and several passes are in flight. Sequential "
        "dispatch (`--dispatch sequential`) waits until a computation is enqueued before it sends the next one; "
        "parallel dispatch sends it to all hosts at once."
    ),
    paper=(
        "Parallel dispatch amortizes the client's and the scheduler's cost over the stages; sequential dispatch is "
        "several times slower."
    ),
    axes=Axes("stages", "pipeline stages", ("rate",), "computations a second", log_y=False),
    points=_points,
    claims=_claims,
)
