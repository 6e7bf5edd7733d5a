"""The object directory: every logical buffer of one session.

One entry a logical buffer, whatever its number of shards: who holds it, whether it is ready, who waits for it,
and how many gangs that have not started yet still need it. An entry's memory may go once the client has released
it and the last of those gangs has started: messages to a host arrive in order, so a `Free` sent then comes after
its last use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from atoll.errors import OK, Code, Status
from atoll.ir.types import ArraySpec
from atoll.protocol import messages as m
from atoll.state.buffer_states import LEGAL, BufferState, HandleState
from atoll.state.memory_ledger import Block
from atoll.state.queued_nodes import Dependency


@dataclass(frozen=True, slots=True)
class SpilledPart:
    """The contents of the shards at these positions, on one host: equal shards are stored once."""

    piece: m.SpilledPiece
    host: int
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SpilledArray:
    """All shards of a spilled array: its parts, or, if other arrays share all of its memory, the shards of these that
    it consists of, and the hosts in whose memory those are.
    """

    parts: tuple[SpilledPart, ...]
    views: tuple[tuple[int, int], ...] = ()  # (handle, position) of others
    view_hosts: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """The size of all parts."""
        return sum(part.piece.nbytes for part in self.parts)

    @property
    def in_files(self) -> bool:
        return any(part.piece.path for part in self.parts)

    @property
    def memory_hosts(self) -> tuple[int, ...]:
        """The hosts whose loss is that of the buffer: files outlive them."""
        return self.view_hosts or tuple(sorted({part.host for part in self.parts if not part.piece.path}))

    def by_host(self) -> Iterator[tuple[int, tuple[m.SpilledPiece, ...]]]:
        """Yield each host with its pieces."""
        for host in sorted({part.host for part in self.parts}):
            yield host, tuple(part.piece for part in self.parts if part.host == host)


@dataclass(slots=True)
class Entry:
    """A logical buffer. `error` says why it is DOOMED or FAILED."""

    hosts: tuple[int, ...]
    nbytes: int
    state: BufferState = BufferState.PENDING
    error: Status | None = None
    handle: HandleState = HandleState.USABLE
    released: bool = False  # by the client
    uses: int = 0  # by gangs that have not started
    waits: list[int] | None = None
    blocks: tuple[Block, ...] = ()  # its memory
    producer: str = ""  # the program that it is a result of
    traceback_id: int = 0  # the client's number for the Python stack of its request
    spec: ArraySpec | None = None  # None: an error from the start, or a call's completion
    dependency: Dependency[Any] | None = None  # of its launch, where it has one
    readers: list[Dependency[Any]] | None = None  # of launches that read it, as far as they have one
    spilled: SpilledArray | None = None  # where it is while it has no memory of devices

    @property
    def ready(self) -> bool:
        """Whether its launch has ended: it exists, or stands for an error."""
        return self.state >= BufferState.READY

    @property
    def consumed(self) -> bool:
        """Whether it was donated or deleted: nothing new may use it."""
        return self.handle is not HandleState.USABLE

    @property
    def is_idle(self) -> bool:
        """Whether it is on devices and usable, and nothing that was launched and has not started needs it."""
        if self.uses > 0 or self.state is not BufferState.READY or self.spec is None:
            return False
        return self.handle is HandleState.USABLE and not self.released

    def enter(self, state: BufferState) -> None:
        """Change the state. An illegal transition is a bug of the controller's."""
        if not LEGAL[self.state] >> state & 1:
            raise AssertionError(f"a buffer of {self.producer!r} is {self.state.name} and cannot become {state.name}")
        self.state = state

    def settle(self, error: Status | None) -> None:
        """Handle the end of its launch. It stands for an error if its launch has failed."""
        self.error = self.error or error
        self.enter(BufferState.READY if self.error is None else BufferState.FAILED)

    def lose(self, error: Status) -> None:
        """Have a buffer that exists stand for an error: its contents are lost."""
        self.spilled = None
        if self.state is not BufferState.FAILED:
            self.error = self.error or error
            self.enter(BufferState.FAILED)

    def spill(self, spilled: SpilledArray) -> None:
        """Note that the contents are in the memory of hosts or in files, and no more on devices."""
        self.spilled, self.hosts, self.error = spilled, (), None
        self.enter(BufferState.SPILLED)

    def restore(self) -> None:
        """Note that a launch makes a spilled buffer again."""
        self.spilled = None
        self.enter(BufferState.PENDING)

    def consume(self) -> None:
        """Note that a launch takes its memory."""
        self.handle = max(self.handle, HandleState.CONSUMED)

    def delete(self) -> None:
        """Note that the client has deleted it."""
        self.handle = HandleState.DELETED


# In place of those that nobody has asked for.
NO_ENTRY = Entry((), 0)


@dataclass(slots=True)
class _Wait:
    pending: int
    status: Status = OK


@dataclass
class Directory:
    """The buffers of one session, by handle."""

    entries: dict[int, Entry] = field(default_factory=dict)
    waits: dict[int, _Wait] = field(default_factory=dict)
    nbytes: int = 0

    def add(self, handle: int, entry: Entry) -> None:
        self.entries[handle] = entry
        self.nbytes += entry.nbytes

    def problem(self, handle: int) -> Status | None:
        """Why this handle cannot be used as an argument, or None."""
        entry = self.entries.get(handle)
        if entry is None or entry.released:
            return Status(Code.NOT_FOUND, f"array {handle} does not exist in this session")
        if entry.error is not None:
            return entry.error
        if entry.consumed:
            return Status(Code.INVALID_ARGUMENT, f"array {handle} has been deleted or donated and cannot be used again")
        return None

    def fail(self, handles: tuple[int, ...], error: Status) -> None:
        """The buffers will be errors once their launch has ended: nothing new may use them."""
        for handle in handles:
            entry = self.entries.get(handle)
            if entry is not None and entry.state is BufferState.PENDING:
                entry.error = error
                entry.enter(BufferState.DOOMED)

    def settle(self, handle: int, error: Status | None) -> list[tuple[int, Status]]:
        """The buffer is ready, or an error. Returns the waits that this ends."""
        entry = self.entries.get(handle)
        if entry is None or entry.ready:
            return []
        entry.settle(error)
        if entry.waits is None:
            return []
        waits, entry.waits = entry.waits, None
        if entry.released and entry.uses <= 0:
            self._forget(handle, entry)
        return self._settle_waits(waits, entry.error)

    def _settle_waits(self, waits: list[int], error: Status | None) -> list[tuple[int, Status]]:
        ended = []
        for number in waits:
            wait = self.waits.get(number)
            if wait is None:
                continue
            wait.pending -= 1
            if error is not None and wait.status.ok:
                wait.status = error
            if wait.pending == 0:
                del self.waits[number]
                ended.append((number, wait.status))
        return ended

    def wait(self, number: int, handles: tuple[int, ...]) -> Status | None:
        """Waits for all handles; returns the outcome at once where nothing is pending.

        With errors among them the first to be known wins, once all have settled.
        """
        pending = 0
        status = OK
        waiting: list[Entry] = []
        for handle in handles:
            entry = self.entries.get(handle)
            if entry is None:
                status = (
                    status
                    if not status.ok
                    else Status(Code.NOT_FOUND, f"array {handle} does not exist in this session")
                )
            elif entry.error is not None:
                status = status if not status.ok else entry.error
            elif not entry.ready:
                pending += 1
                waiting.append(entry)
        if not pending:
            return status
        self.waits[number] = _Wait(pending, status)
        for entry in waiting:
            if entry.waits is None:
                entry.waits = []
            entry.waits.append(number)
        return None

    def release(self, handle: int) -> Entry | None:
        """The client releases the handle. Returns the entry if nothing needs it any more."""
        entry = self.entries.get(handle)
        if entry is None:
            return None
        entry.released = True
        return self._collect(handle, entry)

    def used(self, handle: int) -> Entry | None:
        """A gang that needed the buffer has started. Returns the entry if nothing needs it any more."""
        entry = self.entries.get(handle)
        if entry is None:
            return None
        entry.uses -= 1
        return self._collect(handle, entry)

    def _collect(self, handle: int, entry: Entry) -> Entry | None:
        if not entry.released or entry.uses > 0:
            return None
        if entry.waits is None:  # else `settle` forgets it, once it has ended these waits
            self._forget(handle, entry)
        return entry

    def _forget(self, handle: int, entry: Entry) -> None:
        if self.entries.pop(handle, None) is not None:
            self.nbytes -= entry.nbytes
