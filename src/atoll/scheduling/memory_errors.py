"""Who holds a device's memory: for the error of a gang that gets none, and for who waits for some."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from atoll.cluster.locations import HostDevice
from atoll.errors import Code, Status
from atoll.protocol import messages as m
from atoll.quantities import human_bytes
from atoll.scheduling.ledger import Ledger
from atoll.scheduling.session import GangRun, Session
from atoll.scheduling.tickets import Gang, Ticket

_NAMED_HOLDERS = 5


def exhausted(
    ledger: Ledger,
    sessions: Iterable[Session],
    gang: Gang[GangRun],
    device: HostDevice,
    nbytes: int,
    quota: str,
) -> Status:
    """The gang needs so many bytes of the device and gets none: for want of memory, or of its tenant's quota."""
    text = (
        f"out of memory on device {device[1]} of host {device[0]}: {gang.run.launch.program.name} needs "
        f"{human_bytes(nbytes)}, and "
    )
    tenant = gang.ticket.tenant
    if quota and tenant.memory is not None:
        limit = int(getattr(tenant.settings, quota))
        where, used = "", tenant.memory.total
        if quota == "memory":
            where, used = " of each device", tenant.memory.used.get(device, 0)
        of_quota = f"its quota `{quota}`, {human_bytes(limit)}{where}"
        text += f"tenant {tenant.name} has {human_bytes(used)} of {of_quota}"
    else:
        text += f"{human_bytes(max(0, ledger.free(device)))} of {human_bytes(ledger.capacity[device])} are free"
    holders, largest = _holders(sessions, gang.ticket, device)
    if largest:
        text += "; the rest is held by " + ", ".join(largest)
    report = m.MemoryReport(f"device {device[1]} of host {device[0]}", tuple(holders))
    return Status(Code.RESOURCE_EXHAUSTED, text, {m.MEMORY_REPORT: msgspec.msgpack.encode(report)})


def holds(session: Session, device: HostDevice) -> bool:
    """Whether some array of the session has memory there."""
    return any(
        where == device
        for entry in session.directory.entries.values()
        for block in entry.blocks
        for where, _ in block.requirement
    )


def _holders(
    among: Iterable[Session], asking: Ticket[GangRun], device: HostDevice
) -> tuple[list[m.MemoryHolder], list[str]]:
    """By program and stack for the session that asks, else by session.

    Users do not read what other tenants' programs are called.
    """
    sums: dict[tuple[str, int], list[int]] = {}
    sessions: list[tuple[int, str]] = []
    for session in among:
        mine = session.number == asking.session
        is_named = session.tenant is asking.tenant or asking.tenant.is_operator
        label = session.name if is_named else f"session {session.number} of tenant {session.tenant.name}"
        held = 0
        for entry in session.directory.entries.values():
            size = sum(nbytes for block in entry.blocks for where, nbytes in block.requirement if where == device)
            if size:
                key = (entry.maker, entry.context) if mine else (label, 0)
                counts = sums.setdefault(key, [0, 0, 0, 0])
                counts[0 if entry.ready else 2] += 1
                counts[1 if entry.ready else 3] += size
                held += size
        if held:
            sessions.append((held, f"{label}: {human_bytes(held)}"))
    holders = [m.MemoryHolder(context, maker, *counts) for (maker, context), counts in sums.items()]
    holders.sort(key=lambda holder: -(holder.ready_bytes + holder.unready_bytes))
    return holders, [text for _, text in sorted(sessions, reverse=True)[:_NAMED_HOLDERS]]
