"""The rows of the tables that the page and `atoll top` show of a watched cluster.

A row has the displayed values and a field that identifies it. A field by which a table can be sorted is a number, with
its text in another field.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any, TypeVar

from atoll.quantities import counted, human_bytes
from atoll.telemetry.snapshot import (
    DeviceSnapshot,
    HistogramView,
    HostSnapshot,
    IslandSnapshot,
    Snapshot,
    VersionSnapshot,
)
from atoll.telemetry.tenant_limits import fullness, limits_of
from atoll.telemetry.watch import Watch, quantile

_BUSY_SECONDS = 5.0
_Row = TypeVar("_Row", bound=Any)


def matching(rows: Sequence[_Row], text: str) -> list[_Row]:
    """Return the rows of which some field contains `text`, without regard to case."""
    wanted = text.strip().casefold()
    return [row for row in rows if any(wanted in str(each).casefold() for each in astuple(row))]


@dataclass(frozen=True)
class IslandRow:
    id: int
    state: str
    hosts: str
    devices: int
    kind: str
    memory: str
    running: int
    waiting: int
    started: int
    restarts: int
    note: str
    full: float  # fraction of the memory in use on the fullest device; 0 if unknown


def island_rows(snapshot: Snapshot) -> list[IslandRow]:
    return [
        IslandRow(
            island.id,
            island.state,
            ", ".join(str(host.id) for host in island.hosts) or "-",
            sum(len(host.devices) for host in island.hosts),
            ", ".join(sorted({device.kind for host in island.hosts for device in host.devices})),
            _fullest(island.hosts),
            island.in_flight,
            island.waiting,
            island.started,
            island.restarts,
            _note(island),
            _fullness(island.hosts),
        )
        for island in snapshot.islands
    ]


def _fullest(hosts: Iterable[HostSnapshot]) -> str:
    """Return the memory of the device that has the most in use."""
    fullest = _fullest_device(hosts)
    return memory_text(fullest.used_bytes, fullest.memory_bytes) if fullest else ""


def _fullness(hosts: Iterable[HostSnapshot]) -> float:
    fullest = _fullest_device(hosts)
    return _fraction(fullest.used_bytes, fullest.memory_bytes) if fullest else 0.0


def _fullest_device(hosts: Iterable[HostSnapshot]) -> DeviceSnapshot | None:
    devices = (device for host in hosts for device in host.devices)
    return max(devices, key=lambda device: device.used_bytes, default=None)


def _fraction(used: int, limit: int) -> float:
    return round(min(1.0, used / limit), 3) if limit else 0.0


def memory_text(used: int, limit: int) -> str:
    return human_bytes(used) + (f" of {human_bytes(limit)}" if limit else "")


def _note(island: IslandSnapshot) -> str:
    if island.waits_for:
        return island.waits_for
    if island.last_failure and island.state != "drained":
        return f"last failure: {island.last_failure}"
    return ""


@dataclass(frozen=True)
class DeviceRow:
    id: int
    island: int
    host: str
    state: str
    kind: str
    memory: str
    used_bytes: int
    peak: str
    busy: float  # fraction of the last `_BUSY_SECONDS`
    busy_text: str
    full: float  # fraction of the memory in use; 0 if unknown


def device_rows(watch: Watch, now: float) -> list[DeviceRow]:
    rows = []
    for island in watch.snapshot.islands:
        for host in island.hosts:
            where = f"{host.id}" + (f" on {host.machine}" if host.machine else f" (pid {host.pid})")
            for ordinal, device in enumerate(host.devices):
                busy = round(watch.time_line.busy(host.id, ordinal, now, _BUSY_SECONDS), 2)
                rows.append(
                    DeviceRow(
                        device.id,
                        island.id,
                        where,
                        host.state,
                        device.kind,
                        memory_text(device.used_bytes, device.memory_bytes),
                        device.used_bytes,
                        human_bytes(device.peak_bytes),
                        busy,
                        percent(busy),
                        _fraction(device.used_bytes, device.memory_bytes),
                    )
                )
    return rows


def percent(part: float) -> str:
    return f"{100 * part:.0f} %"


@dataclass(frozen=True)
class TenantRow:
    """A tenant. `got` is its fraction of the device time of the last interval."""

    name: str
    role: str
    priority: int
    share: float
    got: float
    got_text: str
    sessions: int
    memory: str
    running: int
    waiting: int
    waited: str  # median and 99th percentile
    device_seconds: str
    limits: str
    full: float  # fraction of its memory limit in use; 0 without one
    memory_limit: int  # bytes on each device; 0 for no limit


def tenant_rows(watch: Watch) -> list[TenantRow]:
    snapshot = watch.snapshot
    rows = []
    for tenant in snapshot.tenants:
        gangs = [each for each in snapshot.gangs if each.tenant == tenant.name]
        waited = [each.waited for each in gangs]
        got = watch.shares.get(tenant.name, 0.0)
        rows.append(
            TenantRow(
                tenant.name,
                tenant.role,
                tenant.priority,
                tenant.share,
                round(got, 3),
                percent(got),
                tenant.open_sessions,
                human_bytes(tenant.bytes),
                sum(each.running for each in gangs),
                sum(each.waiting for each in gangs),
                _quantiles(waited),
                f"{tenant.device_seconds:.1f}",
                ", ".join(limits_of(tenant)),
                fullness(tenant),
                tenant.memory,
            )
        )
    return rows


def _quantiles(histograms: list[HistogramView]) -> str:
    counts = [sum(each) for each in zip(*(view.counts for view in histograms if view.counts), strict=False)]
    view = HistogramView(counts=tuple(counts))
    return f"{time_text(quantile(view, 0.5))} / {time_text(quantile(view, 0.99))}" if view.count else ""


def time_text(seconds: float) -> str:
    """Format a duration, such as "25 us", "2.5 ms" or "10 s"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:g} {unit}"
    return f"{seconds * 1e6:g} us"


@dataclass(frozen=True)
class SessionRow:
    id: int
    program: str
    tenant: str
    pid: int
    machine: str
    arrays: int
    memory: str
    bytes: int
    functions: int
    launches: int
    in_flight: int
    devices: str
    waits_for: str
    state: str
    last_error: str


def session_rows(snapshot: Snapshot) -> list[SessionRow]:
    waits: dict[int, list[str]] = {}
    for wait in snapshot.waits:
        waits.setdefault(wait.session, []).append(f"{wait.text} ({wait.gangs} on island {wait.island})")
    return [
        SessionRow(
            session.id,
            session.label,
            session.tenant,
            session.pid,
            session.machine,
            session.arrays,
            human_bytes(session.bytes)
            + (f", {human_bytes(session.spilled_bytes)} spilled" if session.spilled_bytes else ""),
            session.bytes,
            session.functions,
            session.launches,
            session.in_flight,
            "; ".join(f"slice {each.id} on {', '.join(map(str, each.physical))}" for each in session.slices),
            "; ".join(waits.get(session.id, ())),
            session.state or "runs",
            session.last_error,
        )
        for session in snapshot.sessions
    ]


@dataclass(frozen=True)
class SliceRow:
    """A slice of a session."""

    key: str
    session: int
    program: str
    tenant: str
    slice: int
    shape: str
    island: int
    devices: str


def slice_rows(snapshot: Snapshot) -> list[SliceRow]:
    return [
        SliceRow(
            f"{session.id}/{each.id}",
            session.id,
            session.label,
            session.tenant,
            each.id,
            "x".join(map(str, each.shape)),
            each.island,
            ", ".join(map(str, each.physical)),
        )
        for session in snapshot.sessions
        for each in session.slices
    ]


@dataclass(frozen=True)
class VersionRow:
    """A version of published arrays."""

    key: str
    name: str
    version: int
    state: str
    arrays: int
    memory: str
    bytes: int
    islands: str
    readers: int
    age: float


def state_of_version(version: VersionSnapshot) -> str:
    """Return the state of a version, the state of its files if it has some, and its note."""
    state = f"{version.state}, files {version.files}" if version.files else version.state
    return f"{state}: {version.note}" if version.note else state


def version_rows(snapshot: Snapshot) -> list[VersionRow]:
    """Return the versions, the newest first."""
    return [
        VersionRow(
            f"{each.tenant}/{each.name} {each.version}",
            f"{each.tenant}/{each.name}",
            each.version,
            state_of_version(each),
            each.arrays,
            human_bytes(each.bytes),
            each.bytes,
            ", ".join(map(str, each.islands)),
            each.readers,
            round(each.age, 1),
        )
        for each in reversed(snapshot.versions)
    ]


@dataclass(frozen=True)
class WaitRow:
    key: str
    session: int
    program: str
    island: int
    gangs: int
    seconds: float
    reason: str
    text: str
    tenant: str
    client: str  # label of the session


def wait_rows(snapshot: Snapshot) -> list[WaitRow]:
    sessions = {session.id: session for session in snapshot.sessions}
    return [
        WaitRow(
            f"{wait.session} {wait.island}",
            wait.session,
            wait.program,
            wait.island,
            wait.gangs,
            round(max(0.0, snapshot.seconds - wait.since), 3),
            wait.reason,
            wait.text,
            sessions[wait.session].tenant if wait.session in sessions else "",
            sessions[wait.session].label if wait.session in sessions else "",
        )
        for wait in snapshot.waits
    ]


@dataclass(frozen=True)
class TransferRow:
    kind: str
    count: int
    moved: str
    bytes: int


_KINDS = {
    "put": "client to device",
    "get": "device to client",
    "move": "within an island",
    "send": "to another island",
    "receive": "from another island",
}


def transfer_rows(snapshot: Snapshot) -> list[TransferRow]:
    sums: dict[str, list[int]] = {}
    for gangs in snapshot.gangs:
        for each in gangs.transfers:
            found = sums.setdefault(each.kind, [0, 0])
            found[0] += each.count
            found[1] += each.bytes
    return [
        TransferRow(f"{kind} ({_KINDS.get(kind, kind)})", count, human_bytes(nbytes), nbytes)
        for kind, (count, nbytes) in sorted(sums.items())
    ]


@dataclass(frozen=True)
class EventRow:
    """An event. `wall` is its time, as of `time.time()`."""

    number: int
    wall: float
    kind: str
    where: str
    text: str
    tenant: str


def event_rows(watch: Watch, now: float, wall: float) -> list[EventRow]:
    """Return the events, newest first."""
    return [
        EventRow(
            event.number,
            watch.wall_time(event.seconds, now, wall),
            event.kind,
            f"island {event.island}" if event.island >= 0 else f"session {event.session}" if event.session else "",
            f"{event.text} (by {event.actor})" if event.actor else event.text,
            event.tenant,
        )
        for event in reversed(watch.snapshot.events)
    ]


def headline(watch: Watch) -> str:
    """Return a line that summarizes the cluster."""
    snapshot, rates = watch.snapshot, watch.rates
    return (
        f"{snapshot.topology}, {counted(snapshot.devices, 'device')}, {counted(len(snapshot.sessions), 'session')}; "
        f"{rates.gangs:.0f} gangs/s, {human_bytes(int(rates.bytes_moved))}/s moved, "
        f"{rates.messages:.0f} messages/s; controller at {100 * rates.controller:.0f} % of a core, "
        f"late by {time_text(round(snapshot.load.lag, 4))} at most"
    )
