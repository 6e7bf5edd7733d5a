"""The cost for the controller of being observed once per second, as the page and `/metrics` do."""

from __future__ import annotations

import asyncio
import time

from atoll.operate.cluster_queries import ClusterSource, Target
from atoll.web.poller import Poller
from atoll.wire.address import parse_address
from benchmarks.harness.benchmark import Benchmark, Metric, Round, Settings
from benchmarks.paper.cluster import NullCluster
from benchmarks.paper.null_steps import Steps

WATCHED, ALONE = "watched", "not watched"
_STEP_SECONDS = 1e-3
CORE = Metric("core", "the controller, of a core", "%")


def point() -> Benchmark:
    return Benchmark(
        key="neighbours",
        title="1,000 gangs a second",
        prepare="benchmarks.paper.watched:prepare",
        metrics=(CORE, Metric("rate", "gangs", "gangs/s")),
        contestants=(WATCHED, ALONE),
        point={"milliseconds": 1e3 * _STEP_SECONDS},
    )


def prepare(settings: Settings) -> Round:
    """Steps of a millisecond on four null devices; who looks has the report and the time line, as the page does."""
    cluster = NullCluster("1x1x4")
    steps = cluster.run(Steps.prepare(cluster.client(), _STEP_SECONDS))
    poller = Poller(ClusterSource(Target(parse_address(cluster.address)), ""))
    calls = round(settings.size(full=10, quick=3) / _STEP_SECONDS)

    async def look() -> None:
        while True:
            await poller.refresh()
            await poller.refresh_time_line()
            if poller.watch.problem:
                raise AssertionError(poller.watch.problem)
            await asyncio.sleep(1.0)

    async def work() -> None:
        looking = asyncio.ensure_future(look()) if settings.backend == WATCHED else None
        await steps.run(calls, fill=8)
        if looking is not None:
            if looking.done():
                looking.result()
            looking.cancel()

    def measure() -> dict[str, float]:
        before, started = cluster.cpu_seconds()["controller"], time.monotonic()
        cluster.run(work())
        seconds = time.monotonic() - started
        return {
            "core": 100 * (cluster.cpu_seconds()["controller"] - before) / seconds,
            "rate": calls / seconds,
        }

    measure()
    return measure
