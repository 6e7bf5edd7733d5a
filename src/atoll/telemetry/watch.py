"""A cluster over time: the last snapshot, the rates since the one before, samples and the time line. Pure.

`SnapshotSource` is the interface to a cluster. Each display (`atoll web`, `atoll top`, `atoll metrics`) has one source
with one identity, and sees what that identity may see.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from atoll.cluster.usage.usage_records import By
from atoll.protocol.messages import Operation
from atoll.protocol.spans import Span
from atoll.quantities import human_seconds
from atoll.state.tallies import BOUNDS
from atoll.telemetry.log_rows import LogRow
from atoll.telemetry.samples import Sample, Samples
from atoll.telemetry.snapshot import HistogramView, Snapshot, read_snapshot
from atoll.telemetry.timeline import TimeLine


class SnapshotSource(Protocol):
    """A connection to one cluster. All methods raise AtollError, and never block the event loop."""

    @property
    def name(self) -> str:
        """The name of the cluster, for people."""

    async def report(self) -> bytes:
        """Return the current report."""

    async def spans(self, position: int, limit: int) -> tuple[list[Span], int]:
        """Return the newest `limit` spans after `position`, and the position for the next call. Begin with 0."""

    async def usage(self, by: By, seconds: float) -> dict[str, Any]:
        """Return the usage of the last `seconds`, or of all time if 0; see `cluster.usage.usage_store`."""

    async def trace(self) -> bytes:
        """Return a trace of recent work, as Chrome trace events."""

    async def log(self) -> list[LogRow]:
        """Return the last rows of the cluster's log, oldest first. They are about all tenants."""

    async def operate(self, operation: Operation) -> str:
        """Perform an operation, and return a sentence for people. Raises StatusError if refused."""


class ClusterRates(msgspec.Struct, frozen=True):
    """Rates per second, over an interval."""

    seconds: float = 0.0  # length of the interval
    gangs: float = 0.0  # gangs that were started, per second
    messages: float = 0.0  # messages that the controller received and sent, per second
    bytes_moved: float = 0.0  # bytes that were transferred, per second
    controller: float = 0.0  # CPU seconds of the controller, per second


class Watch:
    """Follows one cluster. `update` and `add_spans` take its data; `now` is the reader's clock."""

    def __init__(self) -> None:
        self.snapshot = Snapshot()
        self.time_line = TimeLine()
        self.samples = Samples()
        self.rates = ClusterRates()
        self.shares: dict[str, float] = {}  # of the last interval's device time, per tenant
        self.position = 0  # after the last spans
        self.updates = 0
        self.problem = ""  # why the snapshot is not current
        self._at = 0.0

    def update(self, report: bytes, now: float) -> None:
        """Take a new report. Raises msgspec.MsgspecError if it is invalid."""
        before, after = self.snapshot, read_snapshot(report)
        seconds = after.seconds - before.seconds
        if self.updates and seconds > 0:
            self._compare(before, after, seconds, now)
        elif seconds < 0:  # another controller
            self.rates, self.shares, self.position = ClusterRates(), {}, 0
        self.snapshot = after
        self.updates += 1
        self.problem = ""
        self._at = now

    def fail(self, problem: str, now: float) -> None:
        """Note why the cluster does not answer. Displays continue to show the last report, with its age."""
        age = f" (this is the report of {human_seconds(now - self._at)} ago)" if self.updates else ""
        self.problem, self.rates = problem + age, ClusterRates()

    def add_spans(self, spans: list[Span], position: int, now: float) -> None:
        self.position = position
        self.time_line.add(spans, now)

    def wall_time(self, seconds: float, now: float, wall: float) -> float:
        """Return the wall-clock time of `seconds` of the controller's clock. The wall clock shows `wall` at `now`."""
        return wall - (now - self._at) - max(0.0, self.snapshot.seconds - seconds)

    def _compare(self, before: Snapshot, after: Snapshot, seconds: float, now: float) -> None:
        self.rates = ClusterRates(
            seconds,
            _rate(sum(each.started for each in before.islands), sum(each.started for each in after.islands), seconds),
            _rate(_messages(before), _messages(after), seconds),
            _rate(_moved(before), _moved(after), seconds),
            _rate(before.load.cpu_seconds, after.load.cpu_seconds, seconds),
        )
        earlier = {tenant.name: tenant.device_seconds for tenant in before.tenants}
        took = {
            tenant.name: max(0.0, tenant.device_seconds - earlier.get(tenant.name, 0.0)) for tenant in after.tenants
        }
        total = sum(took.values())
        self.shares = {name: part / total for name, part in took.items()} if total else {}
        devices = [device for island in after.islands for host in island.hosts for device in host.devices]
        sample = Sample(
            self._at,
            now,
            min(1.0, total / (seconds * len(devices))) if devices else 0.0,
            sum(device.used_bytes for device in devices),
            sum(device.memory_bytes for device in devices),
            sum(island.waiting for island in after.islands),
        )
        self.samples.add(sample)


def _rate(before: float, after: float, seconds: float) -> float:
    return max(0.0, after - before) / seconds


def _messages(snapshot: Snapshot) -> int:
    return snapshot.load.messages_in + snapshot.load.messages_out


def _moved(snapshot: Snapshot) -> int:
    return sum(each.bytes for gangs in snapshot.gangs for each in gangs.transfers if each.kind != "send")


def quantile(histogram: HistogramView, part: float) -> float:
    """Return the bucket bound below which the fraction `part` of the observations lies, in seconds; 0 without any."""
    left = histogram.count * part
    if not left:
        return 0.0
    for count, bound in zip(histogram.counts, (*BOUNDS, BOUNDS[-1]), strict=True):
        left -= count
        if left <= 0:
            return bound
    return BOUNDS[-1]
