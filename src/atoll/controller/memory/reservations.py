"""Memory for gangs, in commit order: which get it, which wait for it, and which fail since it is never free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from atoll.cluster.locations import HostDevice, MemoryRequirement, total
from atoll.cluster.resources import ResourceManager
from atoll.controller.sessions.session import GangRun, Session
from atoll.errors import Code, Status
from atoll.protocol import messages as m
from atoll.quantities import human_bytes
from atoll.scheduling.buffer_directory import Entry
from atoll.scheduling.durations import Durations
from atoll.scheduling.ledger import Block, Ledger
from atoll.scheduling.scheduler import Scheduler
from atoll.scheduling.tickets import Gang

# Seconds that clients have to release something, where nothing that runs on the island could free memory.
PATIENCE_SECONDS = 1.0
_NAMED_HOLDERS = 5


class _Blocked(NamedTuple):
    """A gang that waits for memory: a device that lacks it, and how much the gang needs there."""

    gang: Gang[GangRun]
    device: HostDevice
    nbytes: int


class Reservations:
    """Takes memory from the ledger for gangs and entries, and gives it back."""

    def __init__(
        self, sessions: Mapping[int, Session], scheduler: Scheduler[GangRun], resources: ResourceManager
    ) -> None:
        self.ledger = Ledger()
        self._sessions = sessions
        self._scheduler = scheduler
        self._resources = resources
        self._blocked: dict[int, _Blocked] = {}  # by island
        self._waiting: Durations[int] = Durations()  # gangs, by sequence

    # ---- taking

    def reserve(self, gang: Gang[GangRun]) -> bool:
        """Takes what the gang needs on its island; False where it has to wait until memory is free.

        A gang that can never fit waits, too, until `starving` names it.
        """
        spec, entries = gang.run.spec, gang.run.launch.entries
        reusable = self._consumed(gang) if spec.consumes else {}
        fresh: list[tuple[Entry, MemoryRequirement]] = []
        inherited: list[tuple[Entry, Entry, Block]] = []
        for value, requirement, views in spec.makes:
            if views or not requirement:
                continue
            donors = reusable.get(requirement) if reusable else None  # to hash it would take long
            if donors:
                inherited.append((entries[value], *donors.pop()))
            else:
                fresh.append((entries[value], requirement))
        if self.ledger.capacity:
            wanted = [spec.scratch, *(requirement for _, requirement in fresh)]
            lacking = self.ledger.lacking(*wanted)
            if lacking is not None:
                self._blocked[gang.island] = _Blocked(gang, lacking, dict(total(wanted))[lacking])
                return False
        held = gang.run.blocks
        for entry, requirement in fresh:
            block = self.ledger.take(requirement)
            block.users += 1  # the gang is one until it has ended, even if the client releases it before
            entry.blocks += (block,)
            held.append(block)
        for entry, donor, block in inherited:
            donor.blocks = tuple(other for other in donor.blocks if other is not block)
            entry.blocks += (block,)
        for value, _, views in spec.makes:
            for view in views:
                _share(entries[view], entries[value], spec.hosts)
        if spec.scratch:
            held.append(self.ledger.take(spec.scratch))
        self._blocked.pop(gang.island, None)
        return True

    def _consumed(self, gang: Gang[GangRun]) -> dict[MemoryRequirement, list[tuple[Entry, Block]]]:
        """The blocks of donated inputs: an output of the same size is written to one of them."""
        found: dict[MemoryRequirement, list[tuple[Entry, Block]]] = {}
        for value in gang.run.spec.consumes:
            entry = gang.run.launch.entries[value]
            for block in _on(gang.run.spec.hosts, entry):
                found.setdefault(block.requirement, []).append((entry, block))
        return found

    # ---- giving back

    def release(self, entry: Entry) -> None:
        """The buffer's memory is needed no more, or lost."""
        blocks, entry.blocks = entry.blocks, ()
        self._release(blocks)

    def ended(self, gang: Gang[GangRun]) -> None:
        """Its own memory goes, and what only it and those before it needed."""
        blocks, gang.run.blocks = gang.run.blocks, []
        for value in gang.run.spec.drops:
            entry = gang.run.launch.entries[value]
            dropped = _on(gang.run.spec.hosts, entry)
            entry.blocks = tuple(block for block in entry.blocks if block not in dropped)
            blocks += dropped
        self._release(blocks)
        self._scheduler.unblock(gang.island)

    def _release(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if self.ledger.release(block):
                self._scheduler.unblock(self._resources.topology.island_of(block.requirement[0][0][0]))

    # ---- waiting

    def is_waiting(self, session: int) -> bool:
        """Whether something of the session waits for memory."""
        tickets = (each.gang.ticket for each in self._blocked.values())
        return any(ticket.session == session and not ticket.dropped for ticket in tickets)

    def starving(self, now: float, is_idle: Mapping[int, bool]) -> list[tuple[Gang[GangRun], Status]]:
        """Gangs that get no memory however long they wait, each with the error for it.

        Those are gangs that need more than there is, and gangs that nothing in flight on their island (`is_idle`) can
        help, once all clients had a while to release something.
        """
        found = []
        waiting = self._waiting.update(now, [each.gang.sequence for each in self._blocked.values()])
        for island, (gang, device, nbytes) in list(self._blocked.items()):
            if not gang.ticket.dropped and nbytes <= self.ledger.free(device):
                continue  # memory was freed just now: the gang is tried again
            never = nbytes > self.ledger.capacity.get(device, nbytes)
            if gang.ticket.dropped or never or (is_idle[island] and waiting[gang.sequence] >= PATIENCE_SECONDS):
                del self._blocked[island]
                if not gang.ticket.dropped:
                    found.append((gang, self._exhausted(gang, device, nbytes)))
        return found

    def _exhausted(self, gang: Gang[GangRun], device: HostDevice, nbytes: int) -> Status:
        capacity = self.ledger.capacity[device]
        free = max(0, self.ledger.free(device))
        holders, largest = self._holders(gang.ticket.session, device)
        text = (
            f"out of memory on device {device[1]} of host {device[0]}: {gang.run.launch.program.name} needs "
            f"{human_bytes(nbytes)}, and {human_bytes(free)} of {human_bytes(capacity)} are free"
        )
        if largest:
            text += "; the rest is held by " + ", ".join(largest)
        report = m.MemoryReport(f"device {device[1]} of host {device[0]}", tuple(holders))
        return Status(Code.RESOURCE_EXHAUSTED, text, {m.MEMORY_REPORT: msgspec.msgpack.encode(report)})

    def _holders(self, asking: int, device: HostDevice) -> tuple[list[m.MemoryHolder], list[str]]:
        """Who holds the device's memory: by program and stack for the session that asks, else by session."""
        sums: dict[tuple[str, int], list[int]] = {}
        sessions: list[tuple[int, str]] = []
        for session in self._sessions.values():
            mine = session.number == asking
            label = f"session {session.number} ({session.label or session.pid})"
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


def _on(hosts: tuple[int, ...], entry: Entry) -> list[Block]:
    """The blocks of a buffer that lie on these hosts."""
    return [block for block in entry.blocks if block.requirement[0][0][0] in hosts]


def _share(source: Entry, view: Entry, hosts: tuple[int, ...]) -> None:
    """The view's memory on these hosts is that of its source."""
    for block in _on(hosts, source):
        if block not in view.blocks:
            block.users += 1
            view.blocks += (block,)
