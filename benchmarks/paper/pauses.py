"""One of four tenants pauses: how fast the others get its share of the devices' time, and how fast it gets the share
again.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence

from atoll.protocol.spans import Span
from benchmarks.harness.benchmark import Benchmark, Metric, Round, Settings
from benchmarks.paper.shares import parts, spans_since, tenants, token_of

_TENANTS = 4
_WITHIN = 50_000_000  # nanoseconds, after it leaves and after it returns
_AT_ONCE = 8  # computations that a client launches together, while as many others of its are in line
_PAUSE_SECONDS = 1.0
METRICS = (
    Metric("left", "deviation, one away", "%"),
    Metric("idle", "idle, one away", "%"),
    Metric("back", "deviation, all back", "%"),
)


def points(platform: str, times: Sequence[float]) -> list[Benchmark]:
    """With computations of so many milliseconds."""
    return [
        Benchmark(
            key="neighbours",
            title=f"one of four pauses for a second, {milliseconds} ms",
            prepare=f"benchmarks.paper.pauses:prepare_{platform}",
            metrics=METRICS,
            contestants=("Atoll",),
            point={"milliseconds": milliseconds},
        )
        for milliseconds in times
    ]


def pause(spans: Sequence[Span], sessions: Sequence[int]) -> dict[str, float]:
    """Return the metrics of a trace of one host, whose last session has paused once. See `METRICS`."""
    own = sorted((span for span in spans if span.session == sessions[-1]), key=lambda span: span.started)
    before, after = max(itertools.pairwise(own), key=lambda pair: pair[1].launched - pair[0].ended)
    staying = sessions[:-1]
    last = min(max(span.ended for span in spans if span.session == session) for session in sessions)
    got = parts(spans, staying, before.ended + _WITHIN, after.launched)
    whole = parts(spans, staying, before.ended, after.launched)
    devices = len(before.devices)
    again = parts(spans, sessions, after.launched + _WITHIN, last)
    return {
        "left": _furthest(got),
        "idle": 100 * (1 - sum(whole.values()) / devices / (after.launched - before.ended)),
        "back": _furthest(again),
    }


def _furthest(got: dict[int, float]) -> float:
    """From an equal part, in percent of that."""
    equal = sum(got.values()) / len(got)
    return max(100 * abs(each / equal - 1) for each in got.values())


def prepare_null(settings: Settings) -> Round:
    from benchmarks.paper.cluster import NullCluster
    from benchmarks.paper.null_steps import Steps

    cluster = NullCluster("1x1x2", tenants=tenants([1.0] * _TENANTS))
    clients = [cluster.client(f"client {number}", token_of(number)) for number in range(_TENANTS)]
    seconds = float(settings.point["milliseconds"]) / 1e3
    steps = [cluster.run(Steps.prepare(client, seconds)) for client in clients]
    phase = settings.size(full=3, quick=1)

    async def work(steps: Steps, seconds: float) -> None:
        """Computations for so long; by turns, so that there is always more in line."""
        until = time.monotonic() + seconds

        async def turns() -> None:
            while time.monotonic() < until:
                await steps.run(_AT_ONCE)

        await asyncio.gather(turns(), turns())

    async def with_a_pause(steps: Steps) -> None:
        await work(steps, phase)
        await asyncio.sleep(_PAUSE_SECONDS)
        await work(steps, phase)

    async def everybody() -> None:
        others = [work(each, 2 * phase + _PAUSE_SECONDS) for each in steps[:-1]]
        await asyncio.gather(*others, with_a_pause(steps[-1]))

    def measure() -> dict[str, float]:
        since = time.monotonic()
        cluster.run(everybody())
        return pause(spans_since(cluster.address, since), [client.session for client in clients])

    return measure


def prepare_real(settings: Settings) -> Round:
    """Start one process with JAX per client."""
    from benchmarks.paper.workload import Clients, Task

    tokens = [token_of(number) for number in range(_TENANTS)]
    milliseconds = float(settings.point["milliseconds"])
    clients = Clients(_TENANTS, milliseconds, "1x1x2", tenants([1.0] * _TENANTS), tokens)
    phase = settings.size(full=3, quick=1)
    tasks = [Task(seconds=2 * phase + _PAUSE_SECONDS)] * (_TENANTS - 1) + [Task(seconds=phase, pause=_PAUSE_SECONDS)]

    def measure() -> dict[str, float]:
        since = time.monotonic()
        clients.ask(tasks)
        return pause(spans_since(clients.address, since), clients.sessions())

    return measure
