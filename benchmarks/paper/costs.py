"""Measure the costs of the control plane and the data path on a real machine, for figures in virtual time.

`python -m benchmarks costs` measures it and writes benchmarks/results/costs.json; `measured_costs` makes of that what
`atoll.testing` takes. Nothing is typed in by hand, so a figure follows whatever is measured.
"""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import msgspec
import numpy as np

from atoll.devices.null.model import MODELS
from atoll.virtual.simulated_costs import Costs
from benchmarks.harness.benchmark import Benchmark, Metric, Round, Settings
from benchmarks.harness.record import RESULTS, BenchmarkRecord, RunRecord

FILE = "costs.json"
HOSTS = (1, 4, 16, 64)
MACHINE = "this machine"
_ECHO_BYTES = 128  # about a control message
_TOGETHER = 16
_COPY_BYTES = 64_000_000
_NETWORK = MODELS["tpu-v3"].dcn_bandwidth  # of the controller's host in all figures in virtual time


def points(quick: bool) -> list[Benchmark]:
    return [
        *(
            Benchmark(
                key="control",
                title=f"a gang of {hosts} null hosts",
                prepare="benchmarks.paper.costs:prepare_control",
                metrics=(
                    Metric("gang_us", "controller, a gang", "us"),
                    Metric("gang_bytes", "its messages", "B"),
                ),
                contestants=("Atoll",),
                point={"hosts": hosts},
            )
            for hosts in (HOSTS[:3] if quick else HOSTS)
        ),
        Benchmark(
            key="worker",
            title="a gang of one device",
            prepare="benchmarks.paper.costs:prepare_worker",
            metrics=(Metric("worker_us", "worker, a gang", "us"),),
            contestants=("atoll, 1 device",),
        ),
        Benchmark(
            key="message",
            title="questions of a client and their answers",
            prepare="benchmarks.paper.costs:prepare_message",
            metrics=(Metric("message_us", "controller, a message", "us"),),
            contestants=("Atoll",),
        ),
        Benchmark(
            key="latency",
            title=f"{_ECHO_BYTES} B over TCP on loopback, one way",
            prepare="benchmarks.paper.costs:prepare_latency",
            metrics=(Metric("latency_us", "latency", "us"),),
            contestants=(MACHINE,),
        ),
        Benchmark(
            key="data",
            title="64 MB from island to island",
            prepare="benchmarks.micro.islands:copy_between",
            metrics=(Metric("rate", "the data path", "GB/s"),),
            contestants=("atoll, 2 islands",),
        ),
        Benchmark(
            key="staging",
            title="64 MB from host memory to host memory",
            prepare="benchmarks.paper.costs:prepare_staging",
            metrics=(Metric("copy", "a copy", "GB/s"),),
            contestants=(MACHINE,),
        ),
    ]


def prepare_control(settings: Settings) -> Round:
    """CPU time and bytes of the controller for a gang over so many null hosts, launched op by op."""
    from benchmarks.paper.cluster import NullCluster
    from benchmarks.paper.null_steps import Steps

    hosts = int(settings.point["hosts"])
    cluster = NullCluster(f"1x{hosts}x1")
    steps = cluster.run(Steps.prepare(cluster.client(), 0.0))
    gangs = max(50, settings.size(full=20_000, quick=4000) // hosts)

    def measure() -> dict[str, float]:
        before, sent = cluster.cpu_seconds(), cluster.controller_bytes()
        cluster.run(steps.run(gangs))
        after = cluster.cpu_seconds()
        return {
            "gang_us": 1e6 * (after["controller"] - before["controller"]) / gangs,
            "gang_bytes": (cluster.controller_bytes() - sent) / gangs,
        }

    measure()
    return measure


def prepare_worker(settings: Settings) -> Round:
    """CPU time of a worker with a real device for its part in a gang: a jitted addition of a few numbers."""
    from benchmarks.harness.cpu import cpu_seconds
    from benchmarks.micro.dispatch import jit_op_by_op

    run, calls = jit_op_by_op(settings), settings.size(full=10_000, quick=5000)

    def measure() -> dict[str, float]:
        before = cpu_seconds()["worker"]
        run()
        return {"worker_us": 1e6 * (cpu_seconds()["worker"] - before) / calls}

    measure()
    return measure


def prepare_message(settings: Settings) -> Round:
    """CPU time of the controller for a message that starts nothing: is this array ready? It is.

    Several are on their way at a time, as launches are.
    """
    from benchmarks.paper.cluster import NullCluster
    from benchmarks.paper.null_steps import Steps

    cluster = NullCluster("1x1x1")
    client = cluster.client()
    steps = cluster.run(Steps.prepare(client, 0.0))
    questions = settings.size(full=16_000, quick=3200)

    async def ask() -> None:
        (x,) = await steps.begin()
        await client.wait((x,))
        for _ in range(questions // _TOGETHER):
            for answer in [client.when_ready((x,)) for _ in range(_TOGETHER)]:
                await answer
        client.release((x,))

    def measure() -> dict[str, float]:
        before = cluster.cpu_seconds()["controller"]
        cluster.run(ask())
        # It receives one message and sends another.
        return {"message_us": 1e6 * (cluster.cpu_seconds()["controller"] - before) / questions / 2}

    measure()
    return measure


def prepare_latency(settings: Settings) -> Round:
    """Send a small message from one thread to another and back, over blocking sockets."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
    for end in (here, there):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    message, count = bytes(_ECHO_BYTES), settings.size(full=5000, quick=1000)

    def echo() -> None:
        while data := there.recv(_ECHO_BYTES):
            there.sendall(data)

    threading.Thread(target=echo, daemon=True).start()

    def measure() -> dict[str, float]:
        seconds = []
        for _ in range(count):
            started = time.perf_counter()
            here.sendall(message)
            left = _ECHO_BYTES
            while left:
                left -= len(here.recv(left))
            seconds.append(time.perf_counter() - started)
        return {"latency_us": 1e6 * statistics.median(seconds) / 2}

    measure()
    return measure


def prepare_staging(settings: Settings) -> Round:
    source, target = (np.ones(_COPY_BYTES, np.uint8) for _ in range(2))
    copies = settings.size(full=20, quick=5)

    def measure() -> dict[str, float]:
        started = time.perf_counter()
        for _ in range(copies):
            np.copyto(target, source)
        return {"copy": copies * _COPY_BYTES / 1e9 / (time.perf_counter() - started)}

    measure()
    return measure


def costs_of(record: RunRecord) -> Costs:
    """Return the costs, given the medians. The controller's time per gang is a linear function of the number of hosts.

    The time of a gang's messages on the controller's network link is added for each host. Raise ValueError if a
    measurement failed.
    """
    by_hosts = [point for point in record.benchmarks if point.key == "control"]
    hosts = [float(point.point["hosts"]) for point in by_hosts]
    each_host, each_gang = _line(hosts, [_median(point, "gang_us") for point in by_hosts])
    sent, _ = _line(hosts, [_median(point, "gang_bytes") for point in by_hosts])
    others = {point.key: point for point in record.benchmarks if point.key != "control"}
    return Costs(
        latency=1e-6 * _median(others["latency"], "latency_us"),
        controller_gang_host=1e-6 * each_host + sent / _NETWORK,
        controller_gang=1e-6 * each_gang,
        host_gang=1e-6 * _median(others["worker"], "worker_us"),
        message=1e-6 * _median(others["message"], "message_us"),
        data_bandwidth=1e9 * _median(others["data"], "rate"),
        staging_bandwidth=1e9 * _median(others["staging"], "copy"),
    )


def _line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Slope and intercept, neither below 0, of the line from which all points differ least for their size."""
    slope, intercept = np.polyfit(xs, ys, 1, w=[1 / y for y in ys])
    return max(0.0, float(slope)), max(0.0, float(intercept))


def _median(point: BenchmarkRecord, metric: str) -> float:
    for record in point.metrics:
        for summary in record.summaries.values():
            if record.name == metric:
                return summary.median
    raise ValueError(f"{point.title}: {metric} was not measured: {list(point.failures.values())}")


def read_costs(results: Path = RESULTS) -> RunRecord:
    """Read the result of `python -m benchmarks costs`. Raise FileNotFoundError if it is missing."""
    try:
        return msgspec.json.decode((results / FILE).read_bytes(), type=RunRecord)
    except FileNotFoundError:
        raise FileNotFoundError(f"{results / FILE}: measure it with `python -m benchmarks costs`") from None


@cache
def measured_costs() -> Costs:
    """Return the costs for figures in virtual time. Raise FileNotFoundError if they are missing."""
    return costs_of(read_costs())


def rows(costs: Costs) -> Sequence[tuple[str, str]]:
    """For a table: what costs how much."""
    microseconds = f"{1e6 * costs.controller_gang_host:.1f} us"
    return (
        ("a control message, one way", f"{1e6 * costs.latency:.1f} us"),
        ("controller, a gang and each host, its messages' time on the link included", microseconds),
        ("controller, a gang as such", f"{1e6 * costs.controller_gang:.1f} us"),
        ("controller, any other message", f"{1e6 * costs.message:.1f} us"),
        ("host, its part in a gang", f"{1e6 * costs.host_gang:.1f} us"),
        ("the data path between islands, a host", f"{costs.data_bandwidth / 1e9:.2f} GB/s"),
        ("between a device and host memory, at each end", f"{costs.staging_bandwidth / 1e9:.2f} GB/s"),
    )
