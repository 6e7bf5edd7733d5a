"""Memory for gangs, in the order of their turns: who gets it, who waits for it, who is told that there is none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from atoll.cluster.locations import HostDevice, MemoryRequirement
from atoll.controller.durations import Durations
from atoll.controller.memory.directory import Entry
from atoll.controller.memory.ledger import Block, Ledger, total
from atoll.controller.sessions.session import Session, Work
from atoll.errors import Code, Status
from atoll.protocol import messages as m
from atoll.quantities import human_bytes
from atoll.scheduling.scheduler import Gang, Scheduler

# For clients to let go of something, where nothing on the island runs that could.
PATIENCE_SECONDS = 1.0
_NAMED_HOLDERS = 5


class Reservations:
    """Takes memory from the ledger for gangs and entries, and gives it back."""

    def __init__(self, sessions: Mapping[int, Session], scheduler: Scheduler[Work], hosts_per_island: int) -> None:
        self.ledger = Ledger()
        self._sessions = sessions
        self._scheduler = scheduler
        self._hosts_per_island = hosts_per_island
        self._held_back: dict[int, tuple[Gang[Work], HostDevice, int]] = {}  # by island: what lacks how much where
        self._waiting: Durations[int] = Durations()  # gangs, by sequence

    # ---- taking

    def reserve(self, gang: Gang[Work]) -> bool:
        """Takes what the gang needs on its island; False where it has to wait for others to let go.

        A gang that can never fit waits, too, until `starving` names it.
        """
        template, entries = gang.work.template, gang.work.launch.entries
        reusable = self._consumed(gang) if template.consumes else {}
        fresh: list[tuple[Entry, MemoryRequirement]] = []
        inherited: list[tuple[Entry, Entry, Block]] = []
        for value, needs, views in template.makes:
            if views or not needs:
                continue
            donors = reusable.get(needs)
            if donors:
                inherited.append((entries[value], *donors.pop()))
            else:
                fresh.append((entries[value], needs))
        if self.ledger.capacity:
            wanted = total([template.scratch, *(needs for _, needs in fresh)])
            lacking = self.ledger.lacking(wanted)
            if lacking is not None:
                self._held_back[gang.island] = (gang, lacking, dict(wanted)[lacking])
                return False
        held = gang.work.blocks
        for entry, needs in fresh:
            block = self.ledger.take(needs)
            block.users += 1  # the gang is one until it has ended, even if the client lets go before
            entry.blocks += (block,)
            held.append(block)
        for entry, donor, block in inherited:
            donor.blocks = tuple(other for other in donor.blocks if other is not block)
            entry.blocks += (block,)
        for value, _, views in template.makes:
            for view in views:
                _share(entries[view], entries[value], template.hosts)
        if template.scratch:
            held.append(self.ledger.take(template.scratch))
        self._held_back.pop(gang.island, None)
        return True

    def _consumed(self, gang: Gang[Work]) -> dict[MemoryRequirement, list[tuple[Entry, Block]]]:
        """The blocks of donated inputs: an output of the same size is written in the place of one."""
        found: dict[MemoryRequirement, list[tuple[Entry, Block]]] = {}
        for value in gang.work.template.consumes:
            entry = gang.work.launch.entries[value]
            for block in _on(gang.work.template.hosts, entry):
                found.setdefault(block.needs, []).append((entry, block))
        return found

    # ---- giving back

    def release(self, entry: Entry) -> None:
        """The buffer's memory is needed by nobody, or lost."""
        blocks, entry.blocks = entry.blocks, ()
        self._let_go(blocks)

    def ended(self, gang: Gang[Work]) -> None:
        """Its own memory goes, and what only it and those before it needed."""
        blocks, gang.work.blocks = gang.work.blocks, []
        for value in gang.work.template.drops:
            entry = gang.work.launch.entries[value]
            dropped = _on(gang.work.template.hosts, entry)
            entry.blocks = tuple(block for block in entry.blocks if block not in dropped)
            blocks += dropped
        self._let_go(blocks)
        self._scheduler.go_on(gang.island)

    def _let_go(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if self.ledger.let_go(block):
                self._scheduler.go_on(block.needs[0][0][0] // self._hosts_per_island)

    # ---- waiting

    def is_waiting(self, session: int) -> bool:
        """Whether something of the session waits for memory."""
        return any(gang.ticket.session == session for gang, _, _ in self._held_back.values())

    def starving(self, now: float, is_idle: Mapping[int, bool]) -> list[tuple[Gang[Work], Status]]:
        """Gangs that get no memory however long they wait, and what they are told.

        Those are gangs that need more than there is, and gangs that nothing in flight on their island (`is_idle`) can
        help, once all clients had a while to let go of something.
        """
        found = []
        waiting = self._waiting.update(now, [gang.sequence for gang, _, _ in self._held_back.values()])
        for island, (gang, place, need) in list(self._held_back.items()):
            never = need > self.ledger.capacity.get(place, need)
            if gang.ticket.dropped or never or (is_idle[island] and waiting[gang.sequence] >= PATIENCE_SECONDS):
                del self._held_back[island]
                if not gang.ticket.dropped:
                    found.append((gang, self._exhausted(gang, place, need)))
        return found

    def _exhausted(self, gang: Gang[Work], place: HostDevice, need: int) -> Status:
        capacity = self.ledger.capacity[place]
        free = max(0, self.ledger.free(place))
        holders, largest = self._holders(gang.ticket.session, place)
        text = (
            f"out of memory on device {place[1]} of host {place[0]}: {gang.work.launch.program.name} needs "
            f"{human_bytes(need)}, and {human_bytes(free)} of {human_bytes(capacity)} are free"
        )
        if largest:
            text += "; the rest is held by " + ", ".join(largest)
        report = m.MemoryReport(f"device {place[1]} of host {place[0]}", tuple(holders))
        return Status(Code.RESOURCE_EXHAUSTED, text, {m.MEMORY_REPORT: msgspec.msgpack.encode(report)})

    def _holders(self, asking: int, place: HostDevice) -> tuple[list[m.MemoryHolder], list[str]]:
        """Who holds the device's memory: by program and stack for the session that asks, else by session."""
        sums: dict[tuple[str, int], list[int]] = {}
        sessions: list[tuple[int, str]] = []
        for session in self._sessions.values():
            mine = session.number == asking
            label = f"session {session.number} ({session.label or session.pid})"
            held = 0
            for entry in session.directory.entries.values():
                size = sum(nbytes for block in entry.blocks for where, nbytes in block.needs if where == place)
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
    return [block for block in entry.blocks if block.needs[0][0][0] in hosts]


def _share(source: Entry, view: Entry, hosts: tuple[int, ...]) -> None:
    """The view's memory on these hosts is that of its source."""
    for block in _on(hosts, source):
        if block not in view.blocks:
            block.users += 1
            view.blocks += (block,)
