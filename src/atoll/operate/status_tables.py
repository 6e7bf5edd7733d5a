"""The tables of `atoll status`, `atoll tenants` and `atoll usage`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from atoll.cluster.sandbox.grants import View
from atoll.cluster.tenant_settings import DEFAULT_NAME
from atoll.protocol.events import JournalLoad
from atoll.quantities import counted, human_bytes, noun_for
from atoll.telemetry.snapshot import (
    HostSnapshot,
    IslandSnapshot,
    MachineSnapshot,
    SessionSnapshot,
    Snapshot,
    TenantSnapshot,
    VersionSnapshot,
)
from atoll.telemetry.tables import state_of_version
from atoll.telemetry.tenant_limits import limits_of
from atoll.telemetry.usage_tables import TITLES, usage_notes, usage_rows

_STATE_STYLES = {
    "ready": "green",
    **dict.fromkeys(("failed", "removed"), "bold red"),
    **dict.fromkeys(("starting", "restarting", "draining"), "yellow"),
}
_MECHANISMS = {"user": "a separate user ID", "landlock": "Landlock"}  # names of mechanisms of sandboxes, for users


def status_tables(snapshot: Snapshot, address: str, name: str = "") -> RenderableType:
    """Return the tables for the cluster at `address`.

    The memory column shows the host's fullest device. The work in flight is a number of gangs and their expected
    duration.
    """
    heading = Text.assemble(
        ("cluster ", "bold"),
        f"{name} at {address}" if name else address,
        f"  ({snapshot.topology}, {counted(snapshot.devices, 'device')}, atoll {snapshot.version})",
    )
    parts: list[RenderableType] = [heading, _islands(snapshot.islands)]
    for island in snapshot.islands:
        if island.waits_for:
            parts.append(Text.assemble((f"island {island.id} ", "bold"), island.waits_for))
        if island.last_failure and island.state != "drained":
            text = f"{island.id}: {island.last_failure}"
            parts.append(Text.assemble(("last failure of island ", "bold"), text))
    if snapshot.machines:
        parts.append(_machines(snapshot.machines))
    journal = snapshot.load.journal
    if journal is not None:
        parts.append(Text.assemble(("journal ", "bold"), _journal(journal)))
    parts.append(_sessions(snapshot.sessions) if snapshot.sessions else Text("no sessions are open"))
    if any(session.slices or session.moved for session in snapshot.sessions):
        parts.append(_slices(snapshot.sessions))
    if snapshot.versions:
        names = len({(each.tenant, each.name) for each in snapshot.versions})
        size = human_bytes(sum(each.bytes for each in snapshot.versions))
        versions = counted(len(snapshot.versions), "version")
        parts.append(Text(f"published arrays: {versions} of {counted(names, 'name')}, {size} (atoll arrays)"))
    functions = snapshot.functions
    parts.append(
        Text(
            f"compiled functions: {functions.compiled} compiled in {functions.seconds:.1f} s, "
            f"{functions.cached} found in the cache"
        )
    )
    return Group(*parts)


def security_tables(snapshot: Snapshot, address: str, name: str = "") -> RenderableType:
    """Return the table of the mechanisms that confine users' Python on each host, and the reasons for missing ones."""
    hosts = [host for island in snapshot.islands for host in island.hosts]
    table = Table("host", "worker", title="Python of users", title_justify="left")
    for column in ("namespaces", "user ID", "seccomp", "Landlock", "files", "network"):
        table.add_column(column)
    python = snapshot.python
    is_granted = python.view is View.GRANTED
    for host in hosts:
        sandbox = host.sandbox
        row: tuple[str | Text, ...] = ("not known",) * 6
        if sandbox is not None:
            row = (
                sandbox.namespaces.value,
                "its own" if sandbox.own_user and is_granted else "the worker's",
                "on" if sandbox.seccomp else "off",
                f"version {sandbox.landlock}" if sandbox.landlock and is_granted else "off",
                "those granted" if is_granted and sandbox.confine_files else "those of the worker's user",
                "on" if python.network else "off",
            )
        table.add_row(str(host.id), str(host.pid), *row)
    missing: dict[tuple[str, str], list[str]] = {}  # numbers of hosts
    for host in hosts:
        for item in sorted(host.sandbox.missing.items()) if host.sandbox is not None else ():
            missing.setdefault(item, []).append(str(host.id))
    lines = [
        f"{noun_for(len(numbers), 'host')} {', '.join(numbers)} without {_MECHANISMS.get(name, name)}: {reason}"
        for (name, reason), numbers in missing.items()
    ]
    heading = Text.assemble(("cluster ", "bold"), f"{name} at {address}" if name else address)
    return Group(heading, table, *map(Text, lines))


def _islands(islands: Iterable[IslandSnapshot]) -> Table:
    table = Table("island", "state", "host", "worker", "devices", "kind", title="Islands", title_justify="left")
    for column in ("memory in use", "in flight", "waiting", "gangs started", "restarts"):
        table.add_column(column, justify="right")
    for island in islands:
        flying = f"{island.in_flight} ({island.busy_ms:.1f} ms)"
        gangs = (flying, str(island.waiting), str(island.started), str(island.restarts))
        first = (str(island.id), state_text(island.state))
        for number, host in enumerate(island.hosts):
            if number == 0:
                table.add_row(*first, *_host(host), *gangs)
            else:
                table.add_row("", "", *_host(host))
        if not island.hosts:
            table.add_row(*first, "-", "", "", "", "", *gangs)
    return table


def _host(host: HostSnapshot) -> tuple[str | Text, ...]:
    devices = host.devices
    where = f" on {host.machine}" if host.machine else ""
    worker = Text.assemble(f"pid {host.pid}{where} ", state_text(host.state))
    kinds = ", ".join(sorted({device.kind for device in devices}))
    used = max(device.used_bytes for device in devices)
    capacity = min(device.memory_bytes for device in devices)
    memory = human_bytes(used) + (f" of {human_bytes(capacity)}" if capacity else "")
    return str(host.id), worker, ranges([device.id for device in devices]), kinds, memory


def _journal(journal: JournalLoad) -> str:
    """Describe the journal, the standby and the external lease of a controller."""
    state = "complete" if journal.complete else "incomplete: if the controller ends now, the cluster ends"
    standby = f"the standby at {journal.standby} follows" if journal.standby else "no standby follows"
    if not journal.lease:
        return f"{state}; {standby}"
    held = f"holds {journal.lease}" if journal.holds_lease else f"does not hold {journal.lease}, so it sends nothing"
    return f"{state}; {standby}; the controller {held}"


def _machines(machines: Iterable[MachineSnapshot]) -> Table:
    table = Table("machine", "address", "group", "accelerators", "memory", "does", title="Machines")
    table.title_justify = "left"
    for each in machines:
        accelerators = ", ".join(f"{count} {platform}" for platform, count in sorted(each.devices.items()))
        memory = human_bytes(each.memory_bytes)
        table.add_row(each.name, each.address, each.group, accelerators, memory, each.state)
    return table


def _sessions(sessions: Sequence[SessionSnapshot]) -> Table:
    table = Table("session", "program", title="Sessions", title_justify="left")
    show_tenant = any(each.tenant != DEFAULT_NAME for each in sessions)
    if show_tenant:
        table.add_column("tenant")
    table.add_column("pid")
    for column in ("arrays", "memory", "functions", "launches", "in flight"):
        table.add_column(column, justify="right")
    show_state = any(each.state for each in sessions)
    if show_state:
        table.add_column("state")
    for each in sessions:
        counts = (each.functions, each.launches, each.in_flight)
        table.add_row(
            str(each.id),
            Text(each.label),
            *([Text(each.tenant)] if show_tenant else []),
            f"{each.pid} on {each.machine}" if each.machine else str(each.pid),
            str(each.arrays),
            human_bytes(each.bytes),
            *map(str, counts),
            *([Text(each.state or "runs")] if show_state else []),
        )
    return table


def _slices(sessions: Iterable[SessionSnapshot]) -> Table:
    table = Table("session", "slice", "shape", "virtual devices", "island", "physical devices", title="Slices")
    table.title_justify = "left"
    for session in sessions:
        for each in session.slices:
            table.add_row(
                str(session.id),
                str(each.id),
                "x".join(map(str, each.shape)),
                ", ".join(map(str, each.virtual)),
                str(each.island),
                ", ".join(map(str, each.physical)),
            )
        if session.moved:
            virtual, physical = zip(*session.moved.items(), strict=True)
            table.add_row(str(session.id), "none", "", ", ".join(virtual), "", ", ".join(map(str, physical)))
    return table


def state_text(state: str) -> Text:
    return Text(state, _STATE_STYLES.get(state, ""))


def ranges(numbers: list[int]) -> str:
    """Format numbers in ascending order, with ranges for consecutive ones: "0-3, 6"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def tenants_table(snapshot: Snapshot) -> RenderableType:
    """Return the table of `atoll tenants`."""
    table = Table("tenant", "role", title="Tenants", title_justify="left")
    for column in ("share", "priority", "sessions", "memory in use", "in flight"):
        table.add_column(column, justify="right")
    table.add_column("limits and rights")
    for each in snapshot.tenants:
        table.add_row(
            each.name,
            each.role,
            f"{each.share:g}",
            str(each.priority),
            str(each.open_sessions),
            human_bytes(each.bytes),
            str(each.in_flight),
            ", ".join((*limits_of(each), *_rights(each))) or "none",
        )
    return table


def _rights(tenant: TenantSnapshot) -> Iterator[str]:
    """Yield what the tenant may do with published arrays, where that differs from the default."""
    if tenant.publish != ("*",):
        yield f"publishes {', '.join(tenant.publish) or 'nothing'}"
    if tenant.subscribe:
        yield f"reads {', '.join(tenant.subscribe)}"


def versions_table(versions: Sequence[VersionSnapshot]) -> RenderableType:
    """Return the table of `atoll arrays`."""
    if not versions:
        return Text("no arrays are published")
    table = Table("name", title="Published arrays", title_justify="left")
    for column in ("version", "arrays", "size"):
        table.add_column(column, justify="right")
    for column in ("state", "islands", "devices"):
        table.add_column(column)
    for column in ("readers", "sent", "passed on", "age (s)"):
        table.add_column(column, justify="right")
    for each in sorted(versions, key=lambda each: (each.tenant, each.name, each.version)):
        numbers = (str(each.version), str(each.arrays), human_bytes(each.bytes))
        places = (ranges(list(each.islands)), ranges(list(each.devices)))
        state = Text(state_of_version(each))
        traffic = (str(each.readers), human_bytes(each.sent), human_bytes(each.passed_on))
        table.add_row(f"{each.tenant}/{each.name}", *numbers, state, *places, *traffic, f"{each.age:.0f}")
    return table


def usage_table(usage: dict[str, Any]) -> RenderableType:
    """Return the table for a reply to `UsageRequest`; see `atoll.cluster.usage.usage_store`."""
    rows = usage_rows(usage)
    names = [name for name in TITLES if any(name in row for row in usage["rows"])]
    has_expected = usage["by"] == "program"
    table = Table(*(TITLES[name] for name in names), title="Usage", title_justify="left")
    for column in ("device seconds", "memory x seconds", "moved", "compiling", *(["expected"] if has_expected else [])):
        table.add_column(column, justify="right")
    for row in rows:
        amounts = (f"{row.device_seconds:.3f}", row.memory, row.moved, row.compiling)
        expected = [row.expected] if has_expected else []
        table.add_row(*(Text(getattr(row, name)) for name in names), *amounts, *expected)
    return Group(table if rows else Text("no usage"), *map(Text, usage_notes(usage)))
