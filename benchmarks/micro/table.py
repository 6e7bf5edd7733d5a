"""The micro-benchmarks (a) to (ak), as data: speed that users notice, beside stock JAX and other peers."""

import importlib.util

from benchmarks.harness.benchmark import BATCH_THREADS, Benchmark, Metric, RunsIn, Target

# A ratio is judged against the second contestant, whose threads are scheduled as ours; the third is JAX as users start
# it.
_LIKE_FOR_LIKE = ("atoll", f"stock{BATCH_THREADS}", "stock")

# Name, title and target in ms of the operations of (z).
_WAITS: tuple[tuple[str, str, float | None], ...] = (
    ("read", "np.asarray of 4 B, computed before", 0.5),
    ("read_launched", "np.asarray of 4 B, just launched", None),
    ("put", "device_put of 4 B", 0.8),
    ("call", "a jitted call", None),
    ("call_float", "a jitted call and float()", 1.2),
    ("eager", "an eager addition", None),
    ("eager_in_a_row", "an eager operation, 100 in a row", 0.15),
    ("any", "bool(jnp.any(x))", None),
    ("decode", "a decoding step whose token is read", 1.5),
    ("jit", "a new small jit: compile and first call", None),
    ("get_tree", "device_get of 100 arrays of 4 B", 3.0),
    ("put_tree", "device_put of 100 arrays of 4 B", None),
)

# Key, size, bytes and calls per round of AllReduce over islands.
_ALL_REDUCES = (("ac", "4 B", 4, 600), ("ad", "1 MB", 1 << 20, 40), ("ae", "64 MB", 64 << 20, 2))

BENCHMARKS = (
    Benchmark(
        key="a",
        title="jit op by op, 1 device",
        prepare="benchmarks.micro.dispatch:jit_op_by_op",
        metrics=(Metric("rate", "x = f(x), pipelined", "calls/s", Target(5000)),),
    ),
    Benchmark(
        key="b",
        title="AllReduce + add op by op, 4 devices",
        prepare="benchmarks.micro.dispatch:allreduce_op_by_op",
        contestants=_LIKE_FOR_LIKE,
        metrics=(Metric("rate", "x = f(x), pipelined", "calls/s", Target(0.8, ratio=True)),),
    ),
    Benchmark(
        key="c",
        title="training step, 8 devices",
        prepare="benchmarks.micro.training:gpt_step",
        contestants=_LIKE_FOR_LIKE,
        metrics=(
            Metric("rate", "GPT, data-parallel, pipelined", "steps/s", Target(0.97, ratio=True)),
            Metric("step", "one step (the target is for 20 ms or more)", "ms"),
        ),
    ),
    Benchmark(
        key="d",
        title="host to device and back",
        prepare="benchmarks.micro.transfers:put_and_get",
        metrics=(
            Metric("put_small", "device_put, 4 B", "us"),
            Metric("get_small", "np.asarray, 4 B", "us"),
            Metric("round_trip_small", "device_put + np.asarray, 4 B", "us", Target(1000, at_least=False)),
            Metric("put_large", "device_put, 64 MB", "GB/s", Target(4.0)),
            Metric("get_large", "np.asarray, 64 MB", "GB/s", Target(4.0)),
            Metric("copy_large", "np.array (a copy in memory), 64 MB", "GB/s"),
            Metric("put_huge", "device_put, 1 GiB", "GB/s", Target(4.0)),
            Metric("get_huge", "np.asarray, 1 GiB", "GB/s", Target(4.0)),
            Metric("copy_huge", "np.array (a copy in memory), 1 GiB", "GB/s"),
        ),
    ),
    Benchmark(
        key="e",
        title="process start to first result",
        prepare="benchmarks.micro.startup:first_result",
        metrics=(
            Metric("cold", "no compile cache", "s", Target(6.0, at_least=False)),
            Metric("warm", "warm compile cache", "s", Target(1.2, at_least=False)),
            Metric("end", "first result to end of process", "s"),
        ),
        runs_in=RunsIn.PARENT,
        round_deadline=300.0,
    ),
    Benchmark(
        key="f",
        title="AllReduce + add op by op, 2 hosts of 2 devices",
        prepare="benchmarks.micro.hosts:allreduce_over_hosts",
        contestants=("atoll, 2 hosts", f"multi-controller JAX{BATCH_THREADS}", "multi-controller JAX"),
        metrics=(Metric("rate", "x = f(x), pipelined", "calls/s", Target(0.7, ratio=True)),),
    ),
    Benchmark(
        key="g",
        title="64 MB from island to island",
        prepare="benchmarks.micro.islands:copy_between",
        contestants=("atoll, 2 islands", "blocking socket"),
        metrics=(Metric("rate", "device_put to the other island", "GB/s", Target(0.7, ratio=True)),),
    ),
    Benchmark(
        key="h",
        title="pipeline, each stage on a host of its own",
        prepare="benchmarks.micro.islands:pipeline",
        contestants=("atoll, parallel", "atoll, sequential"),
        metrics=(
            Metric("stages_2", "2 stages", "passes/s"),
            Metric("stages_4", "4 stages", "passes/s"),
            Metric("stages_8", "8 stages", "passes/s"),
            Metric("stages_16", "16 stages", "passes/s", Target(3.0, ratio=True)),
        ),
    ),
    Benchmark(
        key="i",
        title="the cost of order, computations of 1 ms",
        prepare="benchmarks.micro.order:order",
        contestants=("atoll, 1 device", "bare worker"),
        metrics=(
            Metric("rate", "x = f(x), pipelined", "calls/s", Target(0.95, ratio=True)),
            Metric("each", "one computation", "ms"),
        ),
    ),
    Benchmark(
        key="j",
        title="AllReduce + add, 128 nodes in one program, 4 devices; stock JAX op by op",
        prepare="benchmarks.micro.programs:chained",
        contestants=_LIKE_FOR_LIKE,
        metrics=(Metric("rate", "x = f(x), pipelined", "computations/s", Target(1.0, ratio=True)),),
    ),
    Benchmark(
        key="k",
        title="AllReduce + add, 128 in one compiled function, 4 devices",
        prepare="benchmarks.micro.programs:fused",
        contestants=_LIKE_FOR_LIKE,
        metrics=(Metric("rate", "x = f(x), pipelined", "computations/s", Target(0.98, ratio=True)),),
    ),
    Benchmark(
        key="l",
        title="the client's cost of a call of 128 nodes; stock JAX op by op",
        prepare="benchmarks.micro.programs:client_cost",
        metrics=(Metric("call", "a cached call", "us", Target(300, at_least=False)),),
    ),
    Benchmark(
        key="m",
        title="lowering 2,000 nodes; stock JAX: 2,000 additions to StableHLO",
        prepare="benchmarks.micro.programs:lowering",
        metrics=(Metric("seconds", "from a program to plans", "s", Target(1.0, at_least=False)),),
    ),
    Benchmark(
        key="n",
        title="callbacks into the script",
        prepare="benchmarks.micro.callbacks:callbacks",
        contestants=_LIKE_FOR_LIKE,
        metrics=(
            Metric("looped", "a callback in a loop", "ms", Target(0.5, at_least=False)),
            Metric("call", "a jit call with one callback", "ms"),
            Metric("bytes", "4 MB in and 4 MB out", "GB/s", Target(1.0)),
        ),
    ),
    Benchmark(
        key="o",
        title="colocated Python; stock JAX: in the script's process",
        prepare="benchmarks.micro.colocated:calls",
        metrics=(
            Metric("call", "a call", "ms"),
            Metric("pipelined", "dependent calls, pipelined", "calls/s"),
            Metric("bytes", "64 MB in and 64 MB out", "GB/s", Target(1.0)),
        ),
    ),
    Benchmark(
        key="p",
        title="input by grain: atoll.data; stock JAX: in the script, and device_put",
        prepare="benchmarks.micro.input:batches",
        metrics=(
            Metric("small", "batches of 4 kB", "batches/s"),
            Metric("large", "batches of 4 MB", "batches/s"),
        ),
    ),
    Benchmark(
        key="q",
        title="Orbax saves 1 GiB from 8 devices; by colocated Python (ocdbt) and persistence programs (zarr)",
        prepare="benchmarks.micro.checkpoints:save",
        contestants=_LIKE_FOR_LIKE,
        metrics=(
            Metric("ocdbt", "ocdbt, all written", "GB/s", Target(0.8, ratio=True)),
            Metric("ocdbt_returned", "ocdbt, save() returns", "s"),
            Metric("zarr", "zarr, all written", "GB/s", Target(0.8, ratio=True)),
            Metric("zarr_returned", "zarr, save() returns", "s"),
            Metric("growth", "the script's memory grows by at most", "MB", Target(200, at_least=False)),
        ),
        prepare_deadline=300.0,
        round_deadline=300.0,
    ),
    Benchmark(
        key="r",
        title="from machine to machine (network namespaces), TCP",
        prepare="benchmarks.micro.machines:between_machines",
        contestants=("atoll, 2 machines", "blocking socket, 2 machines"),
        metrics=tuple(
            Metric(f"{name}_{size}", f"{title}, {amount}", "GB/s", Target(0.9, ratio=True))
            for size, amount in (("64", "64 MB"), ("1024", "1 GiB"))
            for name, title in (
                ("island", "device_put to the other island"),
                ("put", "device_put from the client"),
                ("get", "np.asarray at the client"),
            )
        ),
        prepare_deadline=300.0,
        round_deadline=300.0,
    ),
    Benchmark(
        key="s",
        title="64 MB from island to island over TLS",
        prepare="benchmarks.micro.tls:copy_between",
        contestants=("atoll, TLS", "blocking TLS socket"),
        metrics=(Metric("rate", "device_put to the other island", "GB/s", Target(0.9, ratio=True)),),
    ),
    Benchmark(
        key="t",
        title="one launch, waited for, over TCP with TLS and without",
        prepare="benchmarks.micro.tls:launch",
        contestants=("atoll, TLS", "atoll, plain TCP"),
        metrics=(Metric("launch", "x = f(x), each waited for", "us", Target(1.15, at_least=False, ratio=True)),),
    ),
    Benchmark(
        key="u",
        title="1,024 rows become 1,024 columns on other devices, 128 hosts to 128 hosts",
        prepare="benchmarks.micro.programs:resharding",
        contestants=("atoll",),
        metrics=(
            Metric("lowering", "from a program to plans", "ms", Target(50, at_least=False)),
            Metric("plan", "the largest plan of a host", "B"),
            Metric("launch", "the largest message of a launch to a host", "B", Target(2048, at_least=False)),
        ),
    ),
    Benchmark(
        key="v",
        title="rows to experts on 4 islands and back, a quarter of the capacity used",
        prepare="benchmarks.micro.routing:exchange",
        contestants=("atoll, rows", "atoll, all-to-all"),
        metrics=tuple(
            Metric(f"{name}_{size}", f"{size} MB of rows, {what}", "steps/s", target)
            for name, what, target in (
                ("exchange", "each to 2 experts and back", Target(3.0, ratio=True)),
                ("rate", "with what experts do", None),
            )
            for size in ("1", "4", "8", "16")
        ),
    ),
    Benchmark(
        key="w",
        title="(a), (b) and (j) with a journal and without",
        prepare="benchmarks.micro.journaled:rows",
        contestants=("atoll, journal", "atoll, no journal"),
        metrics=(
            Metric("a", "jit op by op", "calls/s", Target(0.97, ratio=True)),
            Metric("b", "AllReduce + add op by op, 4 devices", "calls/s", Target(0.97, ratio=True)),
            Metric("j", "the same, 128 nodes in one program", "computations/s", Target(0.97, ratio=True)),
        ),
        preparations=15,
    ),
    Benchmark(
        key="x",
        title="the exchange of (v) between two machines (network namespaces), a link of 1 Gbit/s",
        prepare="benchmarks.micro.routing:between_machines",
        contestants=("atoll, rows, 2 machines", "atoll, all-to-all, 2 machines"),
        metrics=tuple(
            Metric(
                f"exchange_{size}", f"{size} MB of rows, each to 2 experts and back", "steps/s", Target(3.0, ratio=True)
            )
            for size in ("1", "4")
        ),
        prepare_deadline=120.0,
    ),
    Benchmark(
        key="y",
        title="a step of a pipeline, 1f1b, S=16, M=64: 5,856 gangs on null devices; node by node",
        prepare="benchmarks.micro.pipeline_steps:steps",
        contestants=("atoll, delegated runs", "atoll, node by node"),
        metrics=(
            Metric("controller", "the controller's CPU time", "ms", Target(5.0, at_least=False)),
            Metric("idle", "the controller's CPU time in as long a time without a step", "ms"),
            Metric("bytes", "what the controller reads and writes", "kB"),
            Metric("hosts", "the hosts' CPU time", "ms"),
            Metric("step", "a step", "ms"),
        ),
    ),
    Benchmark(
        key="z",
        title="operations, each waited for",
        prepare="benchmarks.micro.waits:waits",
        metrics=tuple(
            metric
            for name, title, target in _WAITS
            for metric in (
                Metric(name, title, "ms", None if target is None else Target(target, at_least=False)),
                Metric(f"{name}_cpu", f"{title}: CPU time of all processes", "ms"),
            )
        ),
    ),
    Benchmark(
        key="aa",
        title="serving: launch a step, then read the tokens of the previous one",
        prepare="benchmarks.micro.serving:serving",
        contestants=_LIKE_FOR_LIKE,
        metrics=tuple(
            Metric(f"steps_{length}", f"steps of {length} ms", "steps/s", target)
            for length, target in ((2, None), *((length, Target(0.9, ratio=True)) for length in (5, 10, 20)))
        ),
    ),
    Benchmark(
        key="ab",
        title="operations beside two processes that compute",
        prepare="benchmarks.micro.loaded:loaded",
        metrics=tuple(
            metric
            for name, title in (
                ("read", "np.asarray of 4 B, computed before"),
                ("call_float", "a jitted call and float()"),
            )
            for metric in (
                Metric(name, f"{title}, at rest", "ms"),
                Metric(f"{name}_loaded", f"{title}, beside processes of other sessions", "ms"),
                Metric(f"{name}_times", f"{title}, compared with at rest", "times", Target(3.0, at_least=False)),
                Metric(f"{name}_crowded", f"{title}, beside processes of the script's session", "ms"),
            )
        ),
    ),
    *(
        Benchmark(
            key=key,
            title=f"AllReduce + add of {size} per device over 2 islands of 4 devices",
            prepare="benchmarks.micro.hosts:allreduce_over_islands",
            contestants=(
                "atoll, 2 islands of 4 devices",
                f"multi-controller JAX{BATCH_THREADS}",
                "atoll, 2 hosts of 4 devices",
                "multi-controller JAX",
            ),
            point={"bytes": nbytes, "calls": calls},
            metrics=(Metric("rate", "x = f(x), pipelined", "calls/s", Target(0.9, ratio=True)),),
        )
        for key, size, nbytes, calls in _ALL_REDUCES
    ),
    *(
        (
            Benchmark(
                key="af",
                title="a training step, 1F1B, S=4, M=16, layers that sleep: Shardy's mpmd.jit; atoll.pipeline",
                prepare="benchmarks.micro.mpmd:step",
                contestants=("atoll, mpmd.jit", "atoll, pipeline"),
                metrics=(Metric("step", "a step", "s", Target(1.05, at_least=False, ratio=True)),),
                prepare_deadline=300.0,
            ),
            Benchmark(
                key="ag",
                title="a training step, 1F1B, S=4, M=16, null devices in virtual time",
                prepare="benchmarks.micro.mpmd:null_step",
                contestants=("atoll, mpmd.jit on null devices", "atoll, pipeline on null devices"),
                metrics=tuple(
                    Metric(f"step_{unit}", f"a step, {unit} ms forward", "s", Target(1.05, at_least=False, ratio=True))
                    for unit in (1, 10)
                ),
            ),
        )
        if importlib.util.find_spec("shardy") is not None
        else ()
    ),
    Benchmark(
        key="ah",
        title="a computation over 512 null islands of one host; one island of 512 hosts",
        prepare="benchmarks.micro.many_islands:computation",
        contestants=("atoll, 512 null islands", "atoll, 512 null hosts"),
        metrics=(
            Metric("start", "start of the cluster", "s"),
            Metric("controller", "the controller's CPU time, op by op", "ms", Target(1.0, at_least=False)),
            Metric("chained", "the same, 12 computations in one program", "ms"),
            Metric("parity", "rate of computations of 35 ms, of the devices' own", "times", Target(0.98)),
        ),
        prepare_deadline=300.0,
    ),
    Benchmark(
        key="ai",
        title="AllReduce + add of 1 MB per device over 2 islands of 4 devices, beside two processes that compute",
        prepare="benchmarks.micro.hosts:allreduce_beside_load",
        contestants=(
            "atoll, 2 islands of 4 devices",
            "multi-controller JAX",
            f"multi-controller JAX{BATCH_THREADS}",
        ),
        point={"bytes": 1 << 20, "calls": 40},
        metrics=(Metric("rate", "x = f(x), pipelined", "calls/s", Target(0.9, ratio=True)),),
    ),
    Benchmark(
        key="aj",
        title="device_put of 78 arrays of 256 KiB that are on 4 devices (2 for other devices of the island)",
        prepare="benchmarks.micro.tree_moves:move_trees",
        contestants=("atoll, 2 islands of 4 devices", "stock"),
        metrics=(
            Metric("axis", "to the same devices, divided along the other axis", "ms"),
            Metric("devices", "to other devices of the island", "ms"),
            Metric("spread", "from one device to each of the four", "ms"),
            Metric("island", "to the other island (stock JAX: to the other four devices)", "ms"),
            Metric("island_singly", "the same, one array per call", "ms"),
        ),
    ),
    Benchmark(
        key="ak",
        title="operations on 4 B, each waited for, and the floor: jaxlib's client with a proxy that answers at once",
        prepare="benchmarks.micro.floor:floor",
        contestants=("atoll", "jaxlib's client, instant proxy", "stock"),
        metrics=tuple(
            metric
            for name, title in (
                ("put", "device_put"),
                ("call", "a jitted call"),
                ("read", "np.asarray, computed before"),
                ("call_float", "a jitted call and float()"),
            )
            for metric in (
                Metric(name, title, "ms"),
                Metric(f"{name}_cpu", f"{title}: CPU time of all processes", "ms"),
            )
        ),
    ),
)
