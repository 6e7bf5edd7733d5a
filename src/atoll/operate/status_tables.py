"""The tables of `atoll status`, `atoll tenants` and `atoll usage`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from atoll.cluster.sandbox.grants import View
from atoll.cluster.tenant_settings import DEFAULT_NAME
from atoll.operate.text_tables import TextTable, amount_column, number_column, text_column, word_column
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
    duration. The heading has the kind of the devices, unless they differ.
    """
    kinds = sorted({device.kind for island in snapshot.islands for host in island.hosts for device in host.devices})
    kind = f"{kinds[0]} " if len(kinds) == 1 else ""
    heading = Text.assemble(
        ("cluster ", "bold"),
        f"{name} at {address}" if name else address,
        f"  ({snapshot.topology}, {counted(snapshot.devices, f'{kind}device')}, atoll {snapshot.version})",
    )
    parts: list[RenderableType] = [heading, _islands(snapshot.islands, show_kind=len(kinds) > 1)]
    for island in snapshot.islands:
        if island.waits_for:
            parts.append(Text.assemble((f"island {island.id} ", "bold"), island.waits_for))
        if island.last_failure and island.state != "drained":
            failure = f"{island.id}: {island.last_failure}"
            parts.append(Text.assemble(("last failure of island ", "bold"), failure))
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
    table = TextTable(
        "Python of users",
        word_column("host"),
        word_column("worker"),
        *map(text_column, ("namespaces", "user ID", "seccomp", "Landlock", "files", "network")),
    )
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


def _islands(islands: Iterable[IslandSnapshot], *, show_kind: bool) -> Table:
    table = TextTable(
        "Islands",
        *map(word_column, ("island", "state", "host")),
        *map(text_column, ("worker", "devices", *(["kind"] if show_kind else []))),
        amount_column("memory in use"),
        amount_column("in flight"),
        *map(number_column, ("waiting", "gangs started", "restarts")),
    )
    for island in islands:
        flying = str(island.in_flight) + (f" ({island.busy_ms:.1f} ms)" if island.in_flight else "")
        gangs = (flying, str(island.waiting), str(island.started), str(island.restarts))
        first = (str(island.id), state_text(island.state))
        for position, host in enumerate(island.hosts):
            cells = _host(host, island.state, show_kind=show_kind)
            if position == 0:
                table.add_row(*first, *cells, *gangs)
            else:
                table.add_row("", "", *cells)
        if not island.hosts:
            table.add_row(*first, "-", "", "", *([""] if show_kind else []), "", *gangs)
    return table


def _host(host: HostSnapshot, state: str, *, show_kind: bool) -> tuple[str | Text, ...]:
    """Return the cells of a host of an island in this state."""
    devices = host.devices
    worker = Text(f"{host.pid} on {host.machine}" if host.machine else str(host.pid))
    if host.state != state:
        worker = Text.assemble(worker, " ", state_text(host.state))
    kinds = ", ".join(sorted({device.kind for device in devices}))
    used = max(device.used_bytes for device in devices)
    capacity = min(device.memory_bytes for device in devices)
    memory = human_bytes(used) + (f" of {human_bytes(capacity)}" if capacity else "")
    numbers = ranges([device.id for device in devices])
    return str(host.id), worker, numbers, *([kinds] if show_kind else []), memory


def _journal(journal: JournalLoad) -> str:
    """Describe the journal, the standby and the external lease of a controller."""
    state = "complete" if journal.complete else "incomplete: if the controller ends now, the cluster ends"
    standby = f"the standby at {journal.standby} follows" if journal.standby else "no standby follows"
    if not journal.lease:
        return f"{state}; {standby}"
    held = f"holds {journal.lease}" if journal.holds_lease else f"does not hold {journal.lease}, so it sends nothing"
    return f"{state}; {standby}; the controller {held}"


def _machines(machines: Iterable[MachineSnapshot]) -> Table:
    table = TextTable(
        "Machines",
        *map(text_column, ("machine", "address", "group", "accelerators")),
        word_column("memory"),
        text_column("does"),
    )
    for each in machines:
        accelerators = ", ".join(f"{count} {platform}" for platform, count in sorted(each.devices.items()))
        memory = human_bytes(each.memory_bytes)
        table.add_row(each.name, each.address, each.group, accelerators, memory, each.state)
    return table


def _sessions(sessions: Sequence[SessionSnapshot]) -> Table:
    show_tenant = any(each.tenant != DEFAULT_NAME for each in sessions)
    show_state = any(each.state for each in sessions)
    table = TextTable(
        "Sessions",
        word_column("session"),
        text_column("program"),
        *([text_column("tenant")] if show_tenant else []),
        text_column("pid"),
        *map(number_column, ("arrays", "memory", "launches", "in flight")),
        *([text_column("state")] if show_state else []),
    )
    for each in sessions:
        counts = (each.launches, each.in_flight)
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
    table = TextTable(
        "Slices",
        *map(word_column, ("session", "slice", "shape")),
        text_column("virtual devices"),
        word_column("island"),
        text_column("physical devices"),
    )
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
    table = TextTable(
        "Tenants",
        word_column("tenant"),
        word_column("role"),
        *map(number_column, ("share", "priority", "sessions", "memory in use", "in flight")),
        text_column("limits and rights"),
    )
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
    table = TextTable(
        "Published arrays",
        word_column("name"),
        *map(number_column, ("version", "arrays", "size")),
        *map(text_column, ("state", "islands", "devices")),
        *map(number_column, ("readers", "sent", "passed on", "age (s)")),
    )
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
    table = TextTable(
        "Usage",
        *(text_column(TITLES[name]) for name in names),
        *map(number_column, ("device seconds", "memory x seconds", "moved", "compiling")),
        *([number_column("expected")] if has_expected else []),
    )
    for row in rows:
        amounts = (f"{row.device_seconds:.3f}", row.memory, row.moved, row.compiling)
        expected = [row.expected] if has_expected else []
        table.add_row(*(Text(getattr(row, name)) for name in names), *amounts, *expected)
    return Group(table if rows else Text("no usage"), *map(Text, usage_notes(usage)))
