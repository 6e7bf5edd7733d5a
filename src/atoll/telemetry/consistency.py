"""Whether what the controller keeps agrees with itself: what is kept twice, for speed, is counted anew.

A contradiction is a fault of Atoll's. Nothing is changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from atoll.cluster.locations import HostDevice
from atoll.cluster.resources import ResourceManager
from atoll.scheduling.buffer_directory import Entry
from atoll.scheduling.memory_ledger import Block, MemoryLedger
from atoll.scheduling.queued_nodes import Gang
from atoll.scheduling.remains import Remains
from atoll.scheduling.scheduler import Scheduler
from atoll.scheduling.session import GangRun, Session
from atoll.scheduling.tenants import Tenants


class Launching(Protocol):
    """What of a launcher is looked at."""

    @property
    def in_flight(self) -> Mapping[int, Gang[GangRun]]: ...
    @property
    def scheduler(self) -> Scheduler[GangRun]: ...
    @property
    def remains(self) -> Remains: ...


class Checked(Protocol):
    """What of a controller is looked at."""

    @property
    def sessions(self) -> dict[int, Session]: ...
    @property
    def resources(self) -> ResourceManager: ...
    @property
    def launcher(self) -> Launching: ...
    @property
    def memory(self) -> MemoryLedger: ...
    @property
    def tenants(self) -> Tenants: ...


def contradictions(checked: Checked) -> list[str]:
    """A sentence for each."""
    return [*_memory(checked), *_gangs(checked), *_sessions(checked)]


def _memory(checked: Checked) -> Iterator[str]:
    """The ledger's sums are those of the blocks that buffers and gangs hold."""
    gangs = [*checked.launcher.in_flight.values(), *_waiting(checked)]
    entries = [entry for session in checked.sessions.values() for entry in session.directory.entries.values()]
    entries += [entry for gang in gangs for entry in gang.run.launch.entries]
    entries += checked.launcher.remains.left(Entry)
    held = [block for entry in entries for block in entry.blocks]
    held += [block for gang in gangs for block in gang.run.blocks]
    yield from _differences("the ledger", checked.memory.used, held)
    for tenant in checked.tenants.by_name.values():
        if tenant.memory is not None:
            own = [block for block in held if block.owner is tenant.memory]
            yield from _differences(f"the ledger of tenant {tenant.name}", tenant.memory.used, own)


def _differences(whose: str, used: Mapping[HostDevice, int], held: Iterable[Block]) -> Iterator[str]:
    sums = Counter[HostDevice]()
    for block in {id(block): block for block in held}.values():
        for device, nbytes in block.requirement:
            sums[device] += nbytes
    for device in sorted({*used, *sums}):
        if used.get(device, 0) != sums[device]:
            host, ordinal = device
            yield (
                f"{whose} has {used.get(device, 0)} bytes in use on device {ordinal} of host {host}, and buffers and "
                f"gangs hold {sums[device]}"
            )


def _waiting(checked: Checked) -> list[Gang[GangRun]]:
    scheduler = checked.launcher.scheduler
    nodes = {id(node): node for island in checked.resources.islands for node in scheduler.nodes(island)}
    return [gang for node in nodes.values() for gang in node.gangs]


def _gangs(checked: Checked) -> Iterator[str]:
    """Each island's count is that of its gangs in flight."""
    in_flight = Counter(gang.island for gang in checked.launcher.in_flight.values() if gang.run.spec.weight)
    for island in checked.resources.islands:
        counted = checked.launcher.scheduler.statistics(island).in_flight
        if bool(counted) != bool(in_flight[island]):
            yield f"island {island} counts {counted} segments in flight, and has {in_flight[island]} gangs"


def _sessions(checked: Checked) -> Iterator[str]:
    open_ones = Counter(session.tenant.name for session in checked.sessions.values())
    for name, tenant in checked.tenants.by_name.items():
        if tenant.sessions < open_ones[name]:  # others may wait for the cluster to be complete
            yield f"tenant {name} counts {tenant.sessions} sessions, and has {open_ones[name]}"
    for number, session in checked.sessions.items():
        entries = session.directory.entries
        if session.directory.nbytes != (nbytes := sum(entry.nbytes for entry in entries.values())):
            yield f"session {number} counts {session.directory.nbytes} bytes of arrays, and has {nbytes}"
        yield from _arrays(number, entries)


def _arrays(session: int, entries: Mapping[int, Entry]) -> Iterator[str]:
    for handle, entry in entries.items():
        if entry.released and entry.uses <= 0 and entry.waits is None and entry.ready:
            yield f"session {session} has released array {handle}, which nothing needs, and it is still kept"
        if entry.uses < 0:
            yield f"array {handle} of session {session} is needed by {entry.uses} gangs"
