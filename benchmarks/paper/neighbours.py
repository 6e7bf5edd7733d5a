"""Interference between tenants: how long a higher priority waits, and what a tenant at its quota costs the others."""

from __future__ import annotations

import asyncio
import statistics
import time
from bisect import bisect_left
from collections.abc import Sequence

from atoll.cluster.tenant_settings import TenantSettings, token_hash
from atoll.devices.null.null_program import NullProgram
from atoll.errors import StatusError
from atoll.session.bare import BareClient, call, program, sharded
from benchmarks.harness.benchmark import Benchmark, Metric, Round, Settings
from benchmarks.harness.record import BenchmarkRecord, Claim
from benchmarks.harness.statistics import rate_in_common_window
from benchmarks.paper.cluster import NullCluster
from benchmarks.paper.figure import Figure, Options, at_least, at_most, difference, median, quotient
from benchmarks.paper.null_steps import Steps
from benchmarks.paper.pauses import METRICS as PAUSES
from benchmarks.paper.pauses import points as pauses_of
from benchmarks.paper.shares import spans_since, token_of
from benchmarks.paper.watched import ALONE as UNWATCHED
from benchmarks.paper.watched import CORE, WATCHED
from benchmarks.paper.watched import point as watched

BESIDE, ALONE = "beside one at its quota", "alone"
_CROWD, _SERVICE = 0, 1  # tenants
_LONG, _SHORT = 200.0, 1.0  # milliseconds
_CALLS, _QUICK_CALLS = 50, 10
_PAUSE_SECONDS = 0.27  # between calls: not a multiple of what they wait for
_STEP_SECONDS = 2.4e-3
_QUOTA, _ARRAY = 32 << 20, 1 << 20  # bytes


def _points(options: Options) -> list[Benchmark]:
    platform = "null" if options.null else "real"
    priority = [
        Benchmark(
            key="neighbours",
            title=f"a call of a higher priority, beside {count} client{'s' if count > 1 else ''}",
            prepare=f"benchmarks.paper.neighbours:prepare_{platform}",
            metrics=(
                Metric("part", "wait over its bound, 99 %", ""),
                Metric("wait", "wait, 99 %", "ms"),
            ),
            contestants=("Atoll",),
            point={"clients": count},
        )
        for count in ((1, 256) if options.null else (1,))
    ]
    pauses = pauses_of(platform, (0.33, 2.4))
    if not options.null:
        return [*priority, *pauses]
    quota = Benchmark(
        key="neighbours",
        title="steps of 2.4 ms",
        prepare="benchmarks.paper.neighbours:prepare_quota",
        metrics=(Metric("rate", "steps", "steps/s"),),
        contestants=(BESIDE, ALONE),
        point={"clients": 1},
    )
    return [*priority, quota, *pauses, watched()]


def _tenants(quota: int = 0) -> tuple[TenantSettings, ...]:
    return (
        TenantSettings("crowd", token_hash(token_of(_CROWD)), memory=quota),
        TenantSettings("service", token_hash(token_of(_SERVICE)), priority=0 if quota else 1),
    )


# ---- priorities


def waits(address: str, session: int, since: float) -> dict[str, float]:
    """How long gangs of this session waited that were launched after `since`, by the monotonic clock of this machine.

    In milliseconds, and as a part of what they may wait for: the rest of the gang that ran, and the one after it.
    """
    spans = sorted(spans_since(address, since), key=lambda span: (span.host, span.started))
    parts, took = [], []
    for host in {span.host for span in spans}:
        own = [span for span in spans if span.host == host and span.session == session]
        others = [span for span in spans if span.host == host and span.session != session]
        starts = [span.started for span in others]
        whole = statistics.median(span.ended - span.started for span in others)
        for span in own:
            after = bisect_left(starts, span.launched)
            if not 0 < after < len(others):
                continue
            rest = max(0, others[after - 1].ended - span.launched)
            one_more = max(whole, others[after].ended - others[after].started)
            took.append((span.started - span.launched) / 1e6)
            parts.append((span.started - span.launched) / (rest + one_more))
    if not parts:
        raise AssertionError("nobody waited: the others were not at work")
    return {"part": _most(parts), "wait": _most(took)}


def _most(values: Sequence[float]) -> float:
    """Return the value that 99 % of them do not exceed."""
    return sorted(values)[max(0, -(-99 * len(values) // 100) - 1)]


def prepare_null(settings: Settings) -> Round:
    """The crowd's sessions have a few computations each in line, all the time."""
    cluster = NullCluster("1x1x2", tenants=_tenants())
    service = cluster.client("service", token_of(_SERVICE))
    short = cluster.run(Steps.prepare(service, _SHORT / 1e3))
    calls = settings.size(_CALLS, _QUICK_CALLS)

    async def crowd() -> list[asyncio.Task[None]]:
        found = []
        for number in range(int(settings.point["clients"])):
            client = await BareClient.open(cluster.address, f"client {number}", token_of(_CROWD))
            steps = await Steps.prepare(client, _LONG / 1e3)
            found += [asyncio.ensure_future(_always(steps)) for _ in range(2)]  # by turns: there is always more in line
        return found

    async def now_and_then() -> None:
        for _ in range(calls):
            await asyncio.sleep(_PAUSE_SECONDS)
            await short.run(1)

    tasks = cluster.run(crowd())

    def measure() -> dict[str, float]:
        since = time.monotonic()
        cluster.run(now_and_then())
        for task in tasks:
            if task.done():
                task.result()
        return waits(cluster.address, service.session, since)

    return measure


async def _always(steps: Steps) -> None:
    while True:
        await steps.run(1, 1)


def prepare_real(settings: Settings) -> Round:
    """The crowd's one client has computations in line all the time."""
    from benchmarks.paper.workload import Clients, Task

    tokens = [token_of(_CROWD), token_of(_SERVICE)]
    clients = Clients(2, (_LONG, _SHORT), "1x1x2", _tenants(), tokens)
    calls = settings.size(_CALLS, _QUICK_CALLS)
    # Each call waits for up to two computations, and the crowd is to be at work until the last has ended.
    seconds = calls * (_PAUSE_SECONDS + 2 * _LONG / 1e3)

    def measure() -> dict[str, float]:
        since = time.monotonic()
        clients.ask([Task(seconds=seconds), Task(calls=calls, pause=_PAUSE_SECONDS)])
        return waits(clients.address, clients.sessions()[_SERVICE], since)

    return measure


# ---- quotas


def prepare_quota(settings: Settings) -> Round:
    """One tenant's steps; beside them, another's client makes arrays without end, and is refused more at its quota."""
    cluster = NullCluster("1x1x2", tenants=_tenants(_QUOTA))
    steps = cluster.run(Steps.prepare(cluster.client("service", token_of(_SERVICE)), _STEP_SECONDS))
    calls = round(settings.size(full=10, quick=5) / _STEP_SECONDS)  # it is refused every second or two
    greedy: Greedy | None = None
    task: asyncio.Task[None] | None = None
    if settings.backend == BESIDE:
        greedy = cluster.run(Greedy.prepare(cluster.client("greedy", token_of(_CROWD))))
        task = cluster.run(_begun(greedy))

    def measure() -> dict[str, float]:
        before = 0 if greedy is None else greedy.refusals
        rate = rate_in_common_window([cluster.run(steps.progress(calls, fill=8, parts=4))])
        if task is not None and task.done():
            task.result()
        if greedy is not None and greedy.refusals == before:
            raise AssertionError("the other tenant was never at its quota")
        return {"rate": rate}

    measure()
    return measure


async def _begun(greedy: Greedy) -> asyncio.Task[None]:
    return asyncio.ensure_future(greedy.run())


class Greedy:
    """Make arrays and keep them. When there is no memory for another one, release half of them, and continue."""

    def __init__(self, client: BareClient, made: int) -> None:
        self._client = client
        self._made = made
        self._kept: list[int] = []
        self.refusals = 0

    @classmethod
    async def prepare(cls, client: BareClient) -> Greedy:
        where = client.devices[:1]
        array = await client.compile(NullProgram("array", 0.0, (), (("uint8", (_ARRAY,)),)), where)
        return cls(
            client, client.register(program("array", (), [call(array, (), (sharded(where, _ARRAY),), where)], (0,)))
        )

    async def run(self) -> None:
        while True:
            self._kept += await self._client.launch(self._made, (), 1)
            try:
                await self._client.wait(self._kept[-1:])
            except StatusError:
                self.refusals += 1
                half = len(self._kept) // 2
                self._client.release(self._kept[half:])
                del self._kept[half:]


def _claims(points: Sequence[BenchmarkRecord], options: Options) -> list[Claim]:
    return [claim for point in points for claim in _claims_of(point)]


def _claims_of(point: BenchmarkRecord) -> list[Claim]:
    measured = {metric.name for metric in point.metrics}
    if CORE.name in measured:
        more = difference(point, WATCHED, UNWATCHED, CORE.name)
        return [at_most(f"{point.title}: {WATCHED}, more of the controller's core, %", more, 2.0)]
    if "rate" in measured:
        return [at_least(f"{point.title}, {BESIDE}, over {ALONE}", quotient(point, BESIDE, ALONE, "rate"), 0.98)]
    if "part" in measured:
        return [
            at_most(
                f"{point.title}: wait over its bound",
                median(point, "Atoll", "part"),
                1.1,
            )
        ]
    return [
        at_most(f"{point.title}: {metric.title}, {metric.unit}", median(point, "Atoll", metric.name), 2.0)
        for metric in PAUSES
    ]


FIGURE = Figure(
    key="neighbours",
    title="Interference between tenants",
    explanation=(
        "The first measurement has two tenants. The clients of one always have computations of 200 ms in the queue; "
        "a client of the other, with a higher priority, occasionally calls a computation of 1 ms. A trace gives its "
        "waiting time, relative to its bound: the rest of the computation that ran when it was launched, and the next "
        "one. 99 % of the calls wait no longer. In the second measurement, a tenant runs steps as fast as possible, in "
        "turn with and without another tenant's client. That client creates arrays all the time, and further arrays "
        "are rejected at its quota of memory. This uses only null devices, so that the CPUs do not decide. The third "
        "has four tenants with equal shares that always have work. One of them pauses. The deviation is the largest of "
        "a tenant's device time from its share: of the others meanwhile, and of all four when it has work again, both "
        "from 50 ms on. The devices' idle time is counted from the moment at which it leaves. The fourth is a "
        "controller that starts 1,000 gangs per second, with and without a viewer of the cluster's page."
    ),
    paper="Not in the paper.",
    axes=None,
    points=_points,
    claims=_claims,
)
