"""Reclaim device memory under pressure, within the limits of the cluster's settings.

A node that waits for device memory gets it in this order:

1. Idle arrays of sessions with a lower priority spill, the largest first, up to the setting `spill` on each host.
2. If that is not enough and sessions may be suspended, suspend the session with the lowest priority that holds the most
   memory of the device.
3. If the node would otherwise fail, idle arrays of its own session and of others with its priority spill as well.

A spilled array is restored when it is used (`migration.array_spiller`). A suspended session is resumed when enough
memory is free (`migration.suspensions`).

Pure. Invariant: no session loses memory to a session with a lower priority.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec

from atoll.cluster.locations import DeviceLocation, HostDevice
from atoll.cluster.settings import SuspendLower
from atoll.cluster.slice_placement import Choice
from atoll.errors import Code, Status, StatusError
from atoll.launch.memory_holders import DeviceMemory, examined, holds, share_of, time_of_searches, turns_of
from atoll.launch.memory_waits import MemoryWait
from atoll.launch.reservations import Reservations
from atoll.launch.shared_state import SharedState
from atoll.migration.array_spiller import ArraySpiller
from atoll.migration.suspensions import Suspensions
from atoll.state.buffer_directory import Entry
from atoll.state.queued_nodes import QueuedNode
from atoll.state.session import GangRun, Session

# Until Atoll tries again to suspend a session, or to spill an array, after a failure.
RETRY_SECONDS = 30.0
# Seconds for which a node does not fail because only some arrays were examined.
_MAX_TURNS = 10
_UNMOVABLE = ("token", "opaque")


class _Eviction(msgspec.Struct, eq=False):
    """Sessions that are being suspended. `then` is called when the last of them is suspended."""

    left: set[int]
    then: Callable[[], None]


class MemoryPressure:
    """Reclaims device memory, within the limits of the cluster's settings."""

    def __init__(
        self,
        shared: SharedState,
        memory: Reservations,
        spiller: ArraySpiller,
        suspensions: Suspensions,
    ) -> None:
        self._sessions = shared.sessions
        self._memory = memory
        self._spiller = spiller
        self._suspensions = suspensions
        self._spill_bytes = shared.settings.spill
        self._suspend_lower = shared.settings.suspend_lower
        self._spilling: dict[tuple[int, int], Entry] = {}  # by session and handle
        self._stuck: dict[tuple[int, int], float] = {}  # arrays that could not spill, with the time
        self._searched_until = 0.0  # see `time_of_searches`
        self._refused: dict[int, float] = {}  # sessions that could not be suspended, with the time

    # ---- memory

    def reclaim(self, waiting: MemoryWait, is_last: bool) -> bool:
        """Return whether memory becomes free for a node, which fails otherwise if `is_last` is set.

        If searches have taken much time just now, the answer is yes, and the node has to ask again.
        """
        if not self._spill_bytes and self._suspend_lower is SuspendLower.OFF:
            return False
        node, device, now = waiting.node, waiting.device, self._memory.waits.now
        missing = waiting.nbytes - self._memory.ledger.free(device)
        if missing <= 0:
            return True
        until = time_of_searches(self._searched_until, now, self._sessions.values(), is_last)
        if until is None:
            return True
        self._searched_until = until
        waiting.seeks(now, is_last)
        missing -= sum(map(DeviceMemory(device).of, self._spilling.values()))
        sessions = self._with_arrays_for(node, is_last) if self._spill_bytes else []
        share = share_of(sessions)
        if missing > 0:
            missing -= self._spill(sessions, share, device, missing)
        if missing <= 0 or self._is_suspending(device) or self._suspend_one(node, device):
            return True
        # Arrays that are examined in other seconds may spill.
        return is_last and now - waiting.last_since < min(turns_of(sessions, share) - 1, _MAX_TURNS)

    def _with_arrays_for(self, node: QueuedNode[GangRun], is_last: bool) -> list[Session]:
        """Return the sessions whose arrays may spill for the node, lower priorities first."""
        priority = node.tenant.settings.priority
        found = []
        for session in self._sessions.values():
            own = session.tenant.settings.priority
            if own > priority or (own == priority and not is_last) or session.is_suspended or session.is_vault:
                continue
            if session.directory.entries:
                found.append(session)
        return sorted(found, key=lambda each: (each.tenant.settings.priority, each.number))

    def _spill(self, sessions: Sequence[Session], share: int, device: HostDevice, missing: int) -> int:
        """Begin to spill idle arrays with memory on the device. Return the bytes of the device that this will free.

        Args:
          sessions: those whose arrays may spill, in this order.
          share: the number of arrays of each session that are examined.
          device: the device.
          missing: the bytes that are needed.
        """
        space: Counter[int] | None = None
        freed = 0
        memory = DeviceMemory(device)
        for session in sessions:
            idle = sorted(self._idle(session, share, memory), key=lambda each: -memory.of(each[1]))
            if idle and space is None:
                space = self._spill_space()
            chosen = []
            for handle, entry in idle:
                assert space is not None
                if freed >= missing:
                    break
                needed = _by_host(entry)
                if any(space[host] < size for host, size in needed.items()):
                    continue
                space.subtract(needed)
                freed += memory.of(entry)
                chosen.append(handle)
                self._spilling[session.number, handle] = entry
            if chosen:
                self._spiller.spill(session, chosen, partial(self._spilled, session.number, chosen))
        return freed

    def _spilled(self, session: int, handles: list[int], status: Status) -> None:
        for handle in handles:
            self._spilling.pop((session, handle), None)
            if not status.ok:  # for instance, its host has no memory left: an immediate retry would fail as well
                self._stuck[session, handle] = self._memory.waits.now

    def _idle(self, session: Session, share: int, memory: DeviceMemory) -> Iterator[tuple[int, Entry]]:
        now = self._memory.waits.now
        self._stuck = {key: since for key, since in self._stuck.items() if now - since < RETRY_SECONDS}
        for handle, entry in examined(session, share, now):
            if entry.is_idle and entry.spec is not None and entry.spec.dtype not in _UNMOVABLE:
                key = (session.number, handle)
                is_new = key not in self._spilling and key not in self._stuck
                # Spilling an array that shares its memory would free nothing.
                if is_new and memory.of(entry) and all(block.users == 1 for block in entry.blocks):
                    yield handle, entry

    def _spill_space(self) -> Counter[int]:
        """Return how many bytes of each host's memory are left for spilled arrays."""
        space: Counter[int] = Counter({host: self._spill_bytes for host, _ in self._memory.ledger.capacity})
        for session in self._sessions.values():
            for entry in session.directory.entries.values() if session.has_spilled and not session.is_suspended else ():
                if entry.spilled is not None:
                    space.subtract({part.host: part.piece.nbytes for part in entry.spilled.parts})
        for entry in self._spilling.values():
            space.subtract(_by_host(entry))
        return space

    # ---- sessions

    def _is_suspending(self, device: HostDevice) -> bool:
        """Whether a session that holds memory of the device is being suspended."""
        suspended = self._suspensions.being_suspended()
        return any(holds(session, device, share_of(self._sessions)) for session in suspended)

    def _suspend_one(self, node: QueuedNode[GangRun], device: HostDevice) -> bool:
        sessions = self._lower(node.tenant.settings.priority)
        lower = [(self._held(each, share_of(sessions), device), each) for each in sessions]
        lowest = min((each.tenant.settings.priority for held, each in lower if held), default=None)
        among = [(held, each) for held, each in lower if held and each.tenant.settings.priority == lowest]
        return bool(among) and self._suspend(max(among, key=lambda each: each[0])[1], None)

    def _held(self, session: Session, share: int, device: HostDevice) -> int:
        """Return the bytes of the device that the session's arrays hold, of those that are examined."""
        some = examined(session, share, self._memory.waits.now)
        memory = DeviceMemory(device)
        return sum([memory.of(entry) for _, entry in some])

    def _lower(self, priority: int) -> list[Session]:
        """Return the sessions with a lower priority that may be suspended now."""
        if self._suspend_lower is SuspendLower.OFF:
            return []
        now = self._memory.waits.now
        self._refused = {number: since for number, since in self._refused.items() if now - since < RETRY_SECONDS}
        return [
            session
            for session in self._sessions.values()
            if session.tenant.settings.priority < priority
            and not session.is_suspended
            and session.has_client
            and session.number not in self._refused
        ]

    def _suspend(self, session: Session, eviction: _Eviction | None) -> bool:
        """Begin to suspend the session, as a part of an eviction if there is one. Return whether it has begun."""
        to_disk = self._suspend_lower is SuspendLower.DISK
        then = partial(self._suspended, session.number, eviction)
        try:
            self._suspensions.suspend(session, to_disk, then, by_system=True)
        except StatusError as error:
            if error.status.code == Code.RESOURCE_EXHAUSTED:  # it is too large, and looking at it again takes long
                self._refused[session.number] = self._memory.waits.now
            return False
        return True

    def _suspended(self, session: int, eviction: _Eviction | None, status: Status) -> None:
        if not status.ok:
            self._refused[session] = self._memory.waits.now
        if eviction is not None:
            eviction.left.discard(session)
            if not eviction.left:
                eviction.then()

    def evict_for(self, session: Session, choose: Callable[[], Choice], then: Callable[[], None]) -> bool:
        """Suspend the sessions with a lower priority in the place of a slice of the session, and then call `then`.

        Return False if that would not help. `choose()` raises StatusError if the slice fits nowhere.
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
        occupants = [each for each in lower if wanted & _places(each)]
        eviction = _Eviction({each.number for each in occupants}, then)
        begun = [self._suspend(each, eviction) for each in occupants]
        return bool(begun) and all(begun)


def _places(session: Session) -> set[DeviceLocation]:
    devices = session.devices
    return {devices.locations[device] for device in {*devices.used, *devices.sliced}}


def _by_host(entry: Entry) -> dict[int, int]:
    sums: dict[int, int] = {}
    for block in entry.blocks:
        for (host, _), size in block.requirement:
            sums[host] = sums.get(host, 0) + size
    return sums
