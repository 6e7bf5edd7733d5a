"""A cluster over time: the last snapshot, what changed since the one before, and the time line. Pure: reports come in.

`Source` is the seam to a cluster: whoever shows one (`atoll web`, `atoll top`, `atoll metrics`) has one of them, with
one identity, and sees what that may see.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from atoll.protocol.spans import Span
from atoll.scheduling.tallies import BOUNDS
from atoll.telemetry.snapshot import HistogramView, Snapshot, read_snapshot
from atoll.telemetry.timeline import TimeLine


class Source(Protocol):
    """Asks one cluster. All methods raise AtollError (ConnectError where nobody answers), and never block the loop."""

    @property
    def name(self) -> str:
        """The cluster, for people."""

    async def report(self) -> bytes:
        """Its report now."""

    async def spans(self, position: int, most: int) -> tuple[list[Span], int]:
        """The newest `most` spans after this position, and the position for the next call. The first is 0."""

    async def drain(self, island: int) -> str:
        """Returns a sentence when it is done, as the following do. Raises StatusError where it is refused."""

    async def add_island(self, like: int) -> str: ...
    async def end_session(self, session: int) -> str: ...
    async def set_share(self, tenant: str, share: float) -> str: ...


@dataclass(frozen=True)
class Rates:
    """Of an interval, by the second."""

    seconds: float = 0.0
    gangs: float = 0.0  # that were started
    messages: float = 0.0
    bytes_moved: float = 0.0
    controller: float = 0.0  # cores


class Watch:
    """Follows one cluster. `update` and `add_spans` take what it says, at `now` by the reader's clock."""

    def __init__(self) -> None:
        self.snapshot = Snapshot()
        self.time_line = TimeLine()
        self.rates = Rates()
        self.shares: dict[str, float] = {}  # of the device time of the last interval, by tenant
        self.position = 0  # of the spans
        self.updates = 0
        self.problem = ""  # why there is no newer snapshot
        self._at = 0.0

    def update(self, report: bytes, now: float) -> None:
        """A new report. Raises msgspec.MsgspecError for what is none."""
        before, after = self.snapshot, read_snapshot(report)
        seconds = after.seconds - before.seconds
        if self.updates and seconds > 0:
            self._compare(before, after, seconds)
        elif seconds < 0:  # another controller
            self.rates, self.shares, self.position = Rates(), {}, 0
        self.snapshot = after
        self.updates += 1
        self.problem = ""
        self._at = now

    def fail(self, problem: str) -> None:
        """The cluster cannot be asked now."""
        self.problem, self.rates = problem, Rates()

    def add_spans(self, spans: list[Span], position: int, now: float) -> None:
        self.position = position
        self.time_line.add(spans, now)

    def seconds_ago(self, seconds: float) -> float:
        """How long before the snapshot something happened, by the controller's clock."""
        return max(0.0, self.snapshot.seconds - seconds)

    def wall_time(self, seconds: float, now: float, wall: float) -> float:
        """When something happened by the clock on the wall, which shows `wall` at `now`."""
        return wall - (now - self._at) - self.seconds_ago(seconds)

    def _compare(self, before: Snapshot, after: Snapshot, seconds: float) -> None:
        self.rates = Rates(
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


def _rate(before: float, after: float, seconds: float) -> float:
    return max(0.0, after - before) / seconds


def _messages(snapshot: Snapshot) -> int:
    return snapshot.load.messages_in + snapshot.load.messages_out


def _moved(snapshot: Snapshot) -> int:
    return sum(each.bytes for gangs in snapshot.gangs for each in gangs.transfers if each.kind != "send")


def quantile(histogram: HistogramView, part: float) -> float:
    """The bound below which that part of what was observed is, in seconds; 0 where nothing was."""
    left = histogram.count * part
    if not left:
        return 0.0
    for count, bound in zip(histogram.counts, (*BOUNDS, BOUNDS[-1]), strict=True):
        left -= count
        if left <= 0:
            return bound
    return BOUNDS[-1]
