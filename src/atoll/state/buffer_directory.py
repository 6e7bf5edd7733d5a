"""The object directory: one entry for each logical buffer of a session, whatever its number of shards.

The memory of an entry can be freed once the client has released its handle and the last gang that needs it has started:
messages to a host arrive in order, so a `Free` sent then arrives after the last use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from atoll.cluster.state_machine import StateMachine
from atoll.errors import OK, Code, Status
from atoll.ir.types import ArraySpec
from atoll.protocol import messages as m
from atoll.state.buffer_blocks import BufferBlocks
from atoll.state.buffer_states import TRANSITIONS, BufferState, HandleState
from atoll.state.queued_nodes import Dependency


class SpilledPart(msgspec.Struct, frozen=True):
    """The contents of equal shards, stored once on one host. `positions` has the positions of these shards."""

    piece: m.SpilledPiece
    host: int
    positions: tuple[int, ...]


class SpilledArray(msgspec.Struct, frozen=True):
    """All shards of a spilled array, as `parts`.

    If other arrays share all of its memory, it has no parts. Then `views` has the shards of these arrays that it
    consists of, and `view_hosts` the hosts that have them in memory.
    """

    parts: tuple[SpilledPart, ...]
    views: tuple[tuple[int, int], ...] = ()  # (handle, position) of shards of other arrays
    view_hosts: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Return the total size of the parts."""
        return sum(part.piece.nbytes for part in self.parts)

    @property
    def in_files(self) -> bool:
        return any(part.piece.path for part in self.parts)

    @property
    def memory_hosts(self) -> tuple[int, ...]:
        """Return the hosts whose loss loses the buffer. Files outlive hosts."""
        return self.view_hosts or tuple(sorted({part.host for part in self.parts if not part.piece.path}))

    def by_host(self) -> Iterator[tuple[int, tuple[m.SpilledPiece, ...]]]:
        """Yield each host with its pieces."""
        for host in sorted({part.host for part in self.parts}):
            yield host, tuple(part.piece for part in self.parts if part.host == host)


class Entry(msgspec.Struct, StateMachine[BufferState], eq=False):
    """A logical buffer. `error` is the reason if it is DOOMED or FAILED."""

    transitions = TRANSITIONS
    hosts: tuple[int, ...]
    nbytes: int
    state: BufferState = BufferState.PENDING
    error: Status | None = None
    handle: HandleState = HandleState.USABLE
    released: bool = False  # by the client
    uses: int = 0  # number of gangs that need the buffer and have not started
    waits: list[int] | None = None  # numbers of the waits for the buffer
    blocks: BufferBlocks = msgspec.field(default_factory=BufferBlocks)  # device memory
    producer: str = ""  # name of the program that returns the buffer
    traceback_id: int = 0  # the client's number for the Python stack of its request
    spec: ArraySpec | None = None  # None for an error from the start and for the completion of a call
    dependency: Dependency[Any] | None = None  # of the launch that makes the buffer, if that has one
    readers: list[Dependency[Any]] | None = None  # of the launches that read the buffer, if they have one
    spilled: SpilledArray | None = None  # the contents while the buffer is not on devices
    is_published: bool = False  # it belongs to a version of published arrays

    @property
    def ready(self) -> bool:
        """Return whether the buffer exists or stands for an error, as its state says: its launch has ended."""
        return self.state >= BufferState.READY

    @property
    def consumed(self) -> bool:
        """Return whether the buffer was CONSUMED or DELETED, so that new launches cannot use it."""
        return self.handle is not HandleState.USABLE

    @property
    def is_idle(self) -> bool:
        """Return whether the buffer is usable and on devices, and no gang that has yet to start needs it."""
        if self.uses > 0 or self.state is not BufferState.READY or self.spec is None:
            return False
        return self.handle is HandleState.USABLE and not self.released

    def _described(self) -> str:
        return f"a buffer of {self.producer!r}"

    def settle(self, error: Status | None) -> None:
        """Handle the end of the buffer's launch, which failed with `error` if there is one. An earlier error stays."""
        self.error = self.error or error
        self.enter(BufferState.READY if self.error is None else BufferState.FAILED)

    def lose(self, error: Status) -> None:
        """Mark the contents as lost. The buffer stands for `error` unless it already stands for another error."""
        self.spilled = None
        if self.state is not BufferState.FAILED:
            self.error = self.error or error
            self.enter(BufferState.FAILED)

    def spill(self, spilled: SpilledArray) -> None:
        """Note that the contents have moved from devices to the memory of hosts or to files."""
        self.spilled, self.hosts, self.error = spilled, (), None
        self.enter(BufferState.SPILLED)

    def restore(self) -> None:
        """Note that a launch is restoring the spilled buffer."""
        self.spilled = None
        self.enter(BufferState.PENDING)

    def consume(self) -> None:
        """Note that a launch takes over the buffer's memory."""
        self.handle = max(self.handle, HandleState.CONSUMED)

    def delete(self) -> None:
        """Note that the client has deleted the buffer."""
        self.handle = HandleState.DELETED


# Arrays that the waits of a session wait for. An array counts once for each wait.
MAX_AWAITED = 1 << 18

# Placeholder for a value of a launch whose entry is not made yet, or not at all, or was dropped.
NO_ENTRY = Entry((), 0)


class _Wait(msgspec.Struct):
    pending: int
    status: Status = OK


class BufferDirectory(msgspec.Struct):
    """The buffers of one session, by handle."""

    entries: dict[int, Entry] = msgspec.field(default_factory=dict)
    waits: dict[int, _Wait] = msgspec.field(default_factory=dict)
    nbytes: int = 0  # of the buffers that do not stand for errors
    awaited: int = 0  # number of pending buffers of all waits

    def add(self, handle: int, entry: Entry) -> None:
        self.entries[handle] = entry
        self.nbytes += entry.nbytes

    def problem(self, handle: int) -> Status | None:
        """Return the reason why the handle cannot be used as an argument, or None."""
        entry = self.entries.get(handle)
        if entry is None or entry.released:
            return _unknown(handle)
        if entry.error is not None:
            return entry.error
        if entry.consumed:
            return Status(Code.INVALID_ARGUMENT, f"array {handle} has been deleted or donated and cannot be used again")
        return None

    def first_problem(self, handles: Iterable[int]) -> Status | None:
        """Return the first `problem` of several handles. Without a call per handle, since launches have many."""
        entries, usable = self.entries, HandleState.USABLE
        for handle in handles:
            entry = entries.get(handle)
            if entry is None or entry.released or entry.error is not None or entry.handle is not usable:
                return self.problem(handle)
        return None

    def fail(self, handles: tuple[int, ...], error: Status) -> None:
        """Mark pending buffers of a failed launch, so that new launches cannot use them."""
        for handle in handles:
            entry = self.entries.get(handle)
            if entry is not None and entry.state is BufferState.PENDING:
                entry.error = error
                entry.enter(BufferState.DOOMED)

    def settle(self, handle: int, error: Status | None) -> list[tuple[int, Status]]:
        """Handle the end of the buffer's launch. Return the waits that have ended, with their outcomes."""
        entry = self.entries.get(handle)
        if entry is None or entry.ready:
            return []
        entry.settle(error)
        if entry.state is BufferState.FAILED:
            self._discount(entry)
        if entry.waits is None:
            return []
        waits, entry.waits = entry.waits, None
        if entry.released and entry.uses <= 0:
            self._forget(handle, entry)
        return self._settle_waits(waits, entry.error)

    def make_ready(self, handles: Iterable[int]) -> list[int]:
        """Make the buffers ready whose launch has ended. Return those to pass to `settle`, since more is to be done.

        Without a call per buffer, since launches have many.
        """
        entries, pending, ready, left = self.entries, BufferState.PENDING, BufferState.READY, []
        for handle in handles:
            entry = entries.get(handle)
            if entry is None or entry.state >= ready:
                continue
            if entry.state is pending and entry.error is None and entry.waits is None:
                entry.state = ready
            else:
                left.append(handle)
        return left

    def lose(self, entry: Entry, error: Status) -> None:
        """Mark the contents of a buffer as lost: see `Entry.lose`."""
        entry.lose(error)
        self._discount(entry)

    def lose_all(self, entries: Iterable[Entry], error: Status) -> None:
        """Mark the contents of READY buffers as lost: as `lose`, for 10^5 of them in one turn of the controller."""
        nbytes, lost = 0, BufferState.FAILED
        for entry in entries:
            assert entry.state is BufferState.READY
            entry.state, entry.error = lost, entry.error or error
            nbytes += entry.nbytes
            entry.nbytes = 0
        self.nbytes -= nbytes

    def _discount(self, entry: Entry) -> None:
        self.nbytes -= entry.nbytes
        entry.nbytes = 0

    def _settle_waits(self, waits: list[int], error: Status | None) -> list[tuple[int, Status]]:
        ended = []
        for number in waits:
            wait = self.waits.get(number)
            if wait is None:
                continue
            wait.pending -= 1
            self.awaited -= 1
            if error is not None and wait.status.ok:
                wait.status = error
            if wait.pending == 0:
                del self.waits[number]
                ended.append((number, wait.status))
        return ended

    def wait(self, number: int, handles: tuple[int, ...]) -> Status | None:
        """Begin a wait for all handles. If no buffer is pending, return the outcome at once, and otherwise None.

        The outcome is the error that was known first, if there is one.
        """
        status = OK
        pending: list[Entry] = []
        for handle in handles if len(handles) < 2 else dict.fromkeys(handles):
            entry = self.entries.get(handle)
            error = _unknown(handle) if entry is None else entry.error
            if error is not None:
                status = error if status.ok else status
            elif entry is not None and not entry.ready:
                pending.append(entry)
        if not pending:
            return status
        if self.awaited + len(pending) > MAX_AWAITED:
            return Status(Code.RESOURCE_EXHAUSTED, f"the waits of this session are for {self.awaited} arrays already")
        self.awaited += len(pending)
        self.waits[number] = _Wait(len(pending), status)
        for entry in pending:
            if entry.waits is None:
                entry.waits = []
            entry.waits.append(number)
        return None

    def take(self, handle: int) -> Entry:
        """Remove and return an idle buffer, which another directory takes over."""
        entry = self.entries[handle]
        self._forget(handle, entry)
        return entry

    def replace(self, handle: int, source: int) -> Entry:
        """Give a pending buffer the memory of the complete buffer `source`, which ends. Return the former."""
        made, entry = self.take(source), self.entries[handle]
        entry.hosts, entry.blocks, entry.nbytes = made.hosts, made.blocks, made.nbytes
        self.nbytes += made.nbytes
        return entry

    def release_all(self, handles: Iterable[int]) -> list[tuple[int, Entry]]:
        """Note that the client has released these handles. Return the buffers that nothing needs any more.

        Without a call per buffer, since clients release many at once.
        """
        entries, found, nbytes = self.entries, [], 0
        for handle in handles:
            entry = entries.get(handle)
            if entry is None:
                continue
            entry.released = True
            if entry.uses > 0:
                continue
            if entry.waits is None:  # otherwise `settle` forgets the entry after it has ended these waits
                del entries[handle]
                nbytes += entry.nbytes
            found.append((handle, entry))
        self.nbytes -= nbytes
        return found

    def unneeded(self, handles: Iterable[int]) -> tuple[Sequence[tuple[int, Entry]], Sequence[tuple[int, Entry]]]:
        """Note that a gang that needed these buffers has started. Return those to be freed, and those to be deleted.

        Without a call per buffer, since gangs have many. A buffer can be there several times.
        """
        entries, deleted, nbytes = self.entries, HandleState.DELETED, 0
        freed: dict[int, Entry] = {}
        to_delete: dict[int, Entry] = {}
        for handle in handles:
            entry = entries.get(handle)
            if entry is None:
                continue
            uses = entry.uses = entry.uses - 1
            if uses > 0:
                continue
            if entry.handle is deleted:
                to_delete[handle] = entry
            elif entry.released:
                if entry.waits is None:  # otherwise `settle` forgets the entry after it has ended these waits
                    del entries[handle]
                    nbytes += entry.nbytes
                freed[handle] = entry
        self.nbytes -= nbytes
        return [*freed.items()] if freed else (), [*to_delete.items()] if to_delete else ()

    def collect(self, handle: int, entry: Entry) -> Entry | None:
        """Forget a buffer that was released and that no gang needs, and return it. Otherwise return None."""
        if not entry.released or entry.uses > 0:
            return None
        if entry.waits is None:  # otherwise `settle` forgets the entry after it has ended these waits
            self._forget(handle, entry)
        return entry

    def _forget(self, handle: int, entry: Entry) -> None:
        if self.entries.pop(handle, None) is not None:
            self.nbytes -= entry.nbytes


def _unknown(handle: int) -> Status:
    return Status(Code.NOT_FOUND, f"array {handle} does not exist in this session")
