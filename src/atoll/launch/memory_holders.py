"""Find the sessions whose arrays hold memory of a device, with a bounded number of arrays that are examined.

A session may have a million arrays, and a look at all of them takes seconds. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sized
from itertools import chain, islice

from atoll.cluster.locations import HostDevice
from atoll.protocol import messages as m
from atoll.quantities import human_bytes
from atoll.state.buffer_directory import Entry
from atoll.state.queued_nodes import QueuedNode
from atoll.state.session import GangRun, Session

# Arrays that a search examines: of one session if it is about one, and otherwise of all sessions together.
MAX_EXAMINED = 8192
# Arrays of each session that a search examines in any case.
_MIN_EXAMINED = 32
_NAMED_HOLDERS = 5
# Time for which no search follows a search, per array: about ten times the time that it takes.
_SECONDS_PER_ARRAY = 50e-6
# How far searches may be ahead of that time, so that several searches of few arrays can follow one another. The search
# before a launch fails may be further ahead, so that other searches never delay it for long.
_AHEAD_SECONDS, _LAST_AHEAD_SECONDS = 0.1, 1.0


class DeviceMemory:
    """The bytes of one device that arrays hold. Each requirement is examined once: arrays of a program share it."""

    def __init__(self, device: HostDevice) -> None:
        self._device = device
        self._known: dict[int, int] = {}  # by the identity of the requirement, which lives as long as its block

    def of(self, entry: Entry) -> int:
        """Return the bytes that an array holds."""
        nbytes, known = 0, self._known
        for block in entry.blocks:
            requirement = block.requirement
            found = known.get(id(requirement))
            if found is None:
                found = known[id(requirement)] = sum([size for where, size in requirement if where == self._device])
            nbytes += found
        return nbytes


def share_of(sessions: Sized) -> int:
    """Return how many arrays of each of these sessions a search examines."""
    return max(_MIN_EXAMINED, MAX_EXAMINED // max(1, len(sessions)))


def examined(session: Session, limit: int, now: float) -> Iterator[tuple[int, Entry]]:
    """Yield at most `limit` of the session's arrays, with their handles. Each second, others have their turn."""
    entries = session.directory.entries
    if len(entries) <= limit:
        yield from entries.items()
        return
    first = int(now) % -(-len(entries) // limit) * limit
    yield from islice(entries.items(), first, first + limit)


def turns_of(sessions: Collection[Session], limit: int) -> int:
    """Return the seconds in which `examined` yields all arrays of these sessions."""
    return max([-(-len(session.directory.entries) // limit) for session in sessions], default=0)


def time_of_searches(until: float, now: float, sessions: Iterable[Session], is_last: bool) -> float | None:
    """Return the time until which searches have taken enough of the controller's time, with one more that begins now.

    `until` is that time without it. Return None if the search has to wait. With `is_last`, a launch fails without it.
    """
    if until > now + (_LAST_AHEAD_SECONDS if is_last else _AHEAD_SECONDS):
        return None
    arrays = sum([len(session.directory.entries) for session in sessions])
    return max(until, now) + _SECONDS_PER_ARRAY * min(arrays, MAX_EXAMINED)


def holds(session: Session, device: HostDevice, limit: int = MAX_EXAMINED) -> bool:
    """Return whether an array of the session has memory on the device, or may have: it is not among the first ones."""
    entries, memory = session.directory.entries, DeviceMemory(device)
    return len(entries) > limit or any(map(memory.of, entries.values()))


def holders_of(
    among: Collection[Session], asking: QueuedNode[GangRun], device: HostDevice
) -> tuple[list[m.MemoryHolder], list[str]]:
    """Return the holders of the device's memory among these sessions, and text about the largest ones.

    Holders are programs with tracebacks for the session that asks, and otherwise sessions: users may not read the names
    of other tenants' programs. Of a session with very many arrays, only the oldest and the newest count.
    """
    sums: dict[tuple[str, int], list[int]] = {}
    sessions: list[tuple[int, str]] = []
    memory, share = DeviceMemory(device), share_of(among)
    for session in among:
        mine = session.number == asking.session
        is_named = session.tenant is asking.tenant or asking.tenant.is_operator
        label = (
            session.name
            if is_named or session.is_vault
            else f"session {session.number} of tenant {session.tenant.name}"
        )
        held = 0
        entries, limit = session.directory.entries, MAX_EXAMINED if mine else share
        some = _ends(session, limit)
        for entry in some:
            size = memory.of(entry)
            if size:
                key = (entry.producer, entry.traceback_id) if mine else (label, 0)
                counts = sums.setdefault(key, [0, 0, 0, 0])
                counts[0 if entry.ready else 2] += 1
                counts[1 if entry.ready else 3] += size
                held += size
        if held:
            most = "more than " if len(entries) > limit else ""
            sessions.append((held, f"{label}: {most}{human_bytes(held)}"))
    holders = [m.MemoryHolder(traceback_id, producer, *counts) for (producer, traceback_id), counts in sums.items()]
    holders.sort(key=lambda holder: -(holder.ready_bytes + holder.unready_bytes))
    return holders, [text for _, text in sorted(sessions, reverse=True)[:_NAMED_HOLDERS]]


def _ends(session: Session, limit: int) -> Iterator[Entry]:
    """Yield the session's arrays, or `limit` of them: half of these are the oldest, and half the newest."""
    entries = session.directory.entries
    if len(entries) <= limit:
        return iter(entries.values())
    return chain(islice(entries.values(), limit // 2), islice(reversed(entries.values()), limit // 2))
