"""Who holds a device's memory: for the error of a gang that gets none, and for who waits for some."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from atoll.cluster.locations import HostDevice
from atoll.errors import Code, Status
from atoll.protocol import messages as m
from atoll.quantities import human_bytes, parse_bytes
from atoll.scheduling.memory_ledger import MemoryLedger
from atoll.scheduling.queued_nodes import Gang, QueuedNode
from atoll.scheduling.session import GangRun, Session

_NAMED_HOLDERS = 5


def exhausted(
    ledger: MemoryLedger,
    sessions: Iterable[Session],
    gang: Gang[GangRun],
    device: HostDevice,
    nbytes: int,
    quota: str,
) -> Status:
    """The gang needs so many bytes of the device and gets none: for want of memory, or of its tenant's quota."""
    text = f"out of memory on device {device[1]} of host {device[0]}: {gang.run.launch.program.name} needs "
    tenant = gang.node.tenant
    if quota and tenant.memory is not None:
        limit = int(getattr(tenant.settings, quota))
        where, used = "", tenant.memory.total
        if quota == "memory":
            where, used = " of each device", tenant.memory.used.get(device, 0)
        # In units that hide no byte that counts: rounded, what is needed may seem to fit.
        needs, has, most = _amounts(nbytes, used, limit)
        text += f"{needs}, and tenant {tenant.name} has {has} of its quota `{quota}`, {most}{where}"
        sessions, of_rest = [each for each in sessions if each.tenant is tenant], "; held there by "
    else:
        needs, free, capacity = _amounts(nbytes, max(0, ledger.free(device)), ledger.capacity[device], adds_up=False)
        text += f"{needs}, and {free} of {capacity} are free"
        of_rest = "; the rest is held by "
    holders, largest = _holders(sessions, gang.node, device)
    if largest:
        text += of_rest + ", ".join(largest)
    report = m.MemoryReport(f"device {device[1]} of host {device[0]}", tuple(holders))
    return Status(Code.RESOURCE_EXHAUSTED, text, {m.MEMORY_REPORT: msgspec.msgpack.encode(report)})


def _amounts(needs: int, other: int, limit: int, adds_up: bool = True) -> tuple[str, str, str]:
    """Return the amounts as text: rounded, or as bytes if the rounded amounts would contradict that too little is left.

    With `adds_up`, `needs` and `other` are more than `limit` together; otherwise `needs` is more than `other`.
    """
    texts = tuple(map(human_bytes, (needs, other, limit)))
    rounded = [parse_bytes(each) for each in texts]
    is_clear = rounded[0] + rounded[1] > rounded[2] if adds_up else rounded[0] > rounded[1]
    one, two, three = texts if is_clear else tuple(f"{each} B" for each in (needs, other, limit))
    return one, two, three


def holds(session: Session, device: HostDevice) -> bool:
    """Whether some array of the session has memory there."""
    return any(
        where == device
        for entry in session.directory.entries.values()
        for block in entry.blocks
        for where, _ in block.requirement
    )


def _holders(
    among: Iterable[Session], asking: QueuedNode[GangRun], device: HostDevice
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
                key = (entry.producer, entry.traceback_id) if mine else (label, 0)
                counts = sums.setdefault(key, [0, 0, 0, 0])
                counts[0 if entry.ready else 2] += 1
                counts[1 if entry.ready else 3] += size
                held += size
        if held:
            sessions.append((held, f"{label}: {human_bytes(held)}"))
    holders = [m.MemoryHolder(traceback_id, producer, *counts) for (producer, traceback_id), counts in sums.items()]
    holders.sort(key=lambda holder: -(holder.ready_bytes + holder.unready_bytes))
    return holders, [text for _, text in sorted(sessions, reverse=True)[:_NAMED_HOLDERS]]
