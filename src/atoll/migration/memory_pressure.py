"""Reclaim device memory under pressure, as far as the settings of the cluster allow it.

A node that waits for device memory gets it in this order. Idle arrays of sessions of a lower priority spill, the
largest first, as far as `spill_bytes` of each host's memory go. If that is not enough, the session of the lowest
priority that holds most of the device is suspended, if sessions may be. If the node would otherwise fail for lack of
memory, idle arrays of its own session and of others of its priority spill as well. A spilled array is restored when it
is used (`migration.array_spiller`), and a suspended session is resumed when there is memory (`migration.suspensions`).

Pure. Invariant: no session loses anything to a session of a lower priority.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from atoll.cluster.locations import DeviceLocation, HostDevice
from atoll.cluster.settings import SuspendLower
from atoll.cluster.slice_placement import Choice, Slices
from atoll.errors import Status, StatusError
from atoll.migration.array_spiller import ArraySpiller
from atoll.migration.suspensions import Suspensions
from atoll.scheduling.buffer_directory import Entry
from atoll.scheduling.queued_nodes import QueuedNode
from atoll.scheduling.reservations import Reservations
from atoll.scheduling.session import GangRun, Session

# Until a session that could not be suspended, or an array that could not spill, is asked again.
RETRY_SECONDS = 30.0
_UNMOVABLE = ("token", "opaque")


@dataclass(eq=False)
class _Way:
    """Sessions that are on their way out for somebody, who goes on with `then` when the last of them is."""

    left: set[int]
    then: Callable[[], None]


class MemoryPressure:
    """Reclaims device memory, as far as the settings of the cluster allow it."""

    def __init__(
        self,
        sessions: Mapping[int, Session],
        memory: Reservations,
        slices: Slices,
        spiller: ArraySpiller,
        suspensions: Suspensions,
        spill_bytes: int,
        suspend_lower: SuspendLower,
    ) -> None:
        self._sessions = sessions
        self._memory = memory
        self._slices = slices
        self._spiller = spiller
        self._suspensions = suspensions
        self._spill_bytes = spill_bytes
        self._suspend_lower = suspend_lower
        self._spilling: dict[tuple[int, int], Entry] = {}  # by session and handle
        self._stuck: dict[tuple[int, int], float] = {}  # what could not spill, and when
        self._refused: dict[int, float] = {}  # sessions that could not be suspended, and when
        if spill_bytes or suspend_lower is not SuspendLower.OFF:
            memory.waits.reclaim = self.reclaim

    # ---- memory

    def reclaim(self, node: QueuedNode[GangRun], device: HostDevice, nbytes: int, is_last: bool) -> bool:
        """Return whether memory of the device becomes free for the node, which fails otherwise if `is_last` is set."""
        missing = nbytes - self._memory.ledger.free(device)
        if missing <= 0:
            return True
        missing -= sum(_bytes_on(entry, device) for entry in self._spilling.values())
        if missing > 0 and self._spill_bytes:
            missing -= self._spill(node, device, missing, is_last)
        if missing <= 0 or self._is_suspending(device):
            return True
        return self._suspend_one(node, device)

    def _spill(self, node: QueuedNode[GangRun], device: HostDevice, missing: int, is_last: bool) -> int:
        """Begin to spill idle arrays that have memory there. Return the bytes of the device that this will free."""
        room = self._room()
        freed = 0
        priority = node.tenant.settings.priority
        for session in sorted(self._sessions.values(), key=lambda each: (each.tenant.settings.priority, each.number)):
            own = session.tenant.settings.priority
            if own > priority or (own == priority and not is_last) or session.suspended:
                continue
            idle = sorted(self._idle(session, device), key=lambda each: -_bytes_on(each[1], device))
            chosen = []
            for handle, entry in idle:
                needed = _by_host(entry)
                if freed >= missing or any(room[host] < size for host, size in needed.items()):
                    continue
                room.subtract(needed)
                freed += _bytes_on(entry, device)
                chosen.append(handle)
                self._spilling[session.number, handle] = entry
            if chosen:
                self._spiller.spill(session, chosen, partial(self._spilled, session.number, chosen))
        return freed

    def _spilled(self, session: int, handles: list[int], status: Status) -> None:
        for handle in handles:
            self._spilling.pop((session, handle), None)
            if not status.ok:  # its host has no memory left for it, say: asked at once, it would say the same
                self._stuck[session, handle] = self._memory.waits.now

    def _idle(self, session: Session, device: HostDevice) -> Iterator[tuple[int, Entry]]:
        now = self._memory.waits.now
        self._stuck = {key: since for key, since in self._stuck.items() if now - since < RETRY_SECONDS}
        for handle, entry in session.directory.entries.items():
            if entry.is_idle and entry.spec is not None and entry.spec.dtype not in _UNMOVABLE:
                key = (session.number, handle)
                is_new = key not in self._spilling and key not in self._stuck
                # What shares its memory with others would free none.
                if is_new and _bytes_on(entry, device) and all(block.users == 1 for block in entry.blocks):
                    yield handle, entry

    def _room(self) -> Counter[int]:
        """What is left of each host's memory for what spills."""
        room: Counter[int] = Counter({host: self._spill_bytes for host, _ in self._memory.ledger.capacity})
        for session in self._sessions.values():
            for entry in session.directory.entries.values() if session.has_spilled and not session.suspended else ():
                if entry.spilled is not None:
                    room.subtract({part.host: part.piece.nbytes for part in entry.spilled.parts})
        for entry in self._spilling.values():
            room.subtract(_by_host(entry))
        return room

    # ---- sessions

    def _is_suspending(self, device: HostDevice) -> bool:
        """Whether a session that holds memory there is on its way out."""
        coming = self._suspensions.coming()
        return any(_holds(session, device) for session in coming)

    def _suspend_one(self, node: QueuedNode[GangRun], device: HostDevice) -> bool:
        lower = [each for each in self._lower(node.tenant.settings.priority) if _holds(each, device)]
        if not lower:
            return False
        lowest = min(each.tenant.settings.priority for each in lower)
        victim = max(
            (each for each in lower if each.tenant.settings.priority == lowest), key=lambda each: _holds(each, device)
        )
        return self._suspend(victim, None)

    def _lower(self, priority: int) -> list[Session]:
        """Sessions of a lower priority that may be suspended now."""
        if self._suspend_lower is SuspendLower.OFF:
            return []
        now = self._memory.waits.now
        self._refused = {number: since for number, since in self._refused.items() if now - since < RETRY_SECONDS}
        return [
            session
            for session in self._sessions.values()
            if session.tenant.settings.priority < priority
            and not session.suspended
            and session.number not in self._refused
        ]

    def _suspend(self, session: Session, way: _Way | None) -> bool:
        """Begins to; for somebody who waits until all of some have made way."""
        to_disk = self._suspend_lower is SuspendLower.DISK
        try:
            self._suspensions.suspend(session, to_disk, partial(self._suspended, session.number, way), by_system=True)
        except StatusError:
            return False
        return True

    def _suspended(self, session: int, way: _Way | None, status: Status) -> None:
        if not status.ok:
            self._refused[session] = self._memory.waits.now
        if way is not None:
            way.left.discard(session)
            if not way.left:
                way.then()

    def evict_for(self, session: Session, choose: Callable[[], Choice], then: Callable[[], None]) -> bool:
        """Suspends those of a lower priority who are where a slice of the session could be, and then calls `then`.

        False where that would not help: `choose()` raises StatusError where there is no room for the slice.
        """
        lower = self._lower(session.tenant.settings.priority)
        for each in lower:
            each.devices.are_free = True
        try:
            wanted = set(choose().locations)
        except StatusError:
            return False
        finally:
            for each in lower:
                each.devices.are_free = False
        in_the_way = [each for each in lower if wanted & _places(each)]
        way = _Way({each.number for each in in_the_way}, then)
        begun = [self._suspend(each, way) for each in in_the_way]
        return bool(begun) and all(begun)


def _places(session: Session) -> set[DeviceLocation]:
    devices = session.devices
    return {devices.locations[device] for device in {*devices.used, *devices.sliced}}


def _bytes_on(entry: Entry, device: HostDevice) -> int:
    return sum(size for block in entry.blocks for where, size in block.requirement if where == device)


def _by_host(entry: Entry) -> dict[int, int]:
    sums: dict[int, int] = {}
    for block in entry.blocks:
        for (host, _), size in block.requirement:
            sums[host] = sums.get(host, 0) + size
    return sums


def _holds(session: Session, device: HostDevice) -> int:
    """The bytes of the device that the session's arrays have."""
    return sum(_bytes_on(entry, device) for entry in session.directory.entries.values())
