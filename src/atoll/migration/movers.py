"""Movers: bring the arrays of a migrating session to the new places of its devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Protocol

import msgspec

from atoll.cluster.locations import HostDevice
from atoll.errors import Code, Status, StatusError
from atoll.ir import program as ir
from atoll.ir.types import ArraySpec
from atoll.launch.launches import Launches
from atoll.launch.outbox import Outbox
from atoll.migration.array_spiller import MAX_TOGETHER, ArraySpiller
from atoll.migration.internal_programs import InternalPrograms
from atoll.migration.rules import Changes, check_memory, is_affected, memory_of
from atoll.protocol.number_ranges import MIGRATED_DEVICES
from atoll.state.buffer_directory import Entry, SpilledArray
from atoll.state.buffer_states import BufferState
from atoll.state.session import Session
from atoll.state.stepped_work import taken

# Added to a virtual device's number for its new place, in the programs that copy arrays there.
_NEW = MIGRATED_DEVICES.start
# Arrays that are handled at once: those whose programs are made, and those whose copies or views are launched.
_PROGRAMS_AT_ONCE = 4
_MAX_AT_ONCE = 8


class Mover(Protocol):
    """Brings the arrays of one session to the new places of its devices. Methods are called in this order.

    A session may have 65,536 arrays. `proceed` and `take` are called in each flush until they return False, and handle
    some of the arrays each time.
    """

    def begin(self, session: Session, changes: Changes) -> None:
        """Begin to make the arrays at the new places. Raises StatusError if they cannot be; `abort` follows."""

    def proceed(self, session: Session, changes: Changes) -> bool:
        """Begin to make some more arrays, and return whether others are left. Raises StatusError as `begin`."""

    def is_ready(self, session: Session) -> bool:
        """Whether all arrays are at the new places. Raises StatusError if one will not be."""

    def begin_to_take(self, session: Session) -> None:
        """Note the arrays at the old places, just before the devices change places. Cannot fail."""

    def take(self, session: Session) -> bool:
        """Free some arrays at the old places, and give those at the new places the client's handles. Cannot fail.

        Return whether others are left.
        """

    def abort(self, session: Session, status: Status) -> None:
        """Restore the state before `begin`; called instead of `begin_to_take` and `take`."""


class CopyingMover:
    """The `Mover` of a session whose arrays are on devices. `next_handle()` returns the handle of a copy.

    Each array is copied under an internal handle, and the copy then takes the array's handle. The controller launches
    ordinary programs for both, one with a transfer and one with a view.
    """

    def __init__(
        self, internal: InternalPrograms, launches: Launches, outbox: Outbox, next_handle: Callable[[], int]
    ) -> None:
        self._internal = internal
        self._launches = launches
        self._out = outbox
        self._next_handle = next_handle
        self._programs: dict[ArraySpec, int] = {}  # programs that copy
        self._unsized: list[int] = []  # arrays whose programs are not made yet, the next one last
        self._needed: dict[HostDevice, int] = {}  # bytes of the copies whose programs are made
        self._left: list[int] = []  # arrays that are not being copied yet, the next one last
        self._copies: dict[int, int] = {}  # by the handle of the copied array
        self._kept: dict[int, Entry] = {}  # arrays that the client still has when the devices change places
        self._views: dict[ArraySpec, int] = {}  # programs that make views of copies

    def begin(self, session: Session, changes: Changes) -> None:
        entries = session.directory.entries.items()
        self._left = [handle for handle, entry in entries if is_affected(entry, changes)]
        self._left.reverse()
        self._unsized = self._left.copy()

    def proceed(self, session: Session, changes: Changes) -> bool:
        if self._unsized:
            self._make_programs(session, changes)
            if not self._unsized:
                check_memory(tuple(self._needed.items()), self._launches.reservations.ledger)
        else:
            for handle, spec in self._next(session, changes, self._left, _MAX_AT_ONCE):
                if spec in self._programs:  # only a faulty proxy changes the array meanwhile
                    copy = self._copies[handle] = self._next_handle()
                    self._internal.launch(session, self._programs[spec], handle, copy)
        return bool(self._unsized or self._left)

    def _next(
        self, session: Session, changes: Changes, handles: list[int], count: int
    ) -> Iterator[tuple[int, ArraySpec]]:
        """Take some of these handles, and yield those whose arrays still have to be copied, with their types."""
        for _ in range(min(len(handles), count)):
            handle = handles.pop()
            entry = session.directory.entries.get(handle)
            if entry is not None and entry.spec is not None and is_affected(entry, changes):
                yield handle, entry.spec

    def _make_programs(self, session: Session, changes: Changes) -> None:
        locations = session.devices.locations
        after = {**locations, **changes}
        places = {**locations, **{_NEW + device: location for device, location in after.items()}}
        for _, spec in self._next(session, changes, self._unsized, _PROGRAMS_AT_ONCE):
            if spec not in self._programs:
                devices = tuple(_NEW + device for device in spec.sharding.devices)
                sharding = msgspec.structs.replace(spec.sharding, devices=devices)
                target = msgspec.structs.replace(spec, sharding=sharding)
                definition = ir.single("move", (spec,), ir.Transfer((0,), (target,)))
                self._programs[spec] = self._internal.make(session, definition, places)
            for device, nbytes in memory_of(session, self._programs[spec]):
                self._needed[device] = self._needed.get(device, 0) + nbytes

    def is_ready(self, session: Session) -> bool:
        if session.in_flight and not session.has_errors:  # there may be many copies
            return False
        for copy in self._copies.values():
            entry = session.directory.entries.get(copy)
            if entry is None:  # only a faulty proxy can name an internal handle
                raise StatusError(Code.CANCELLED, "its proxy has released a copy that is not the client's")
            if entry.error is not None:
                raise entry.error.exception()
        return not session.in_flight

    def begin_to_take(self, session: Session) -> None:
        for handle in self._copies:
            entry = session.directory.entries.get(handle)
            if entry is not None and not entry.consumed:  # otherwise the client has released it meanwhile
                self._kept[handle] = entry

    def take(self, session: Session) -> bool:
        entries = session.directory.entries
        some = {handle: self._copies.pop(handle) for handle in list(islice(self._copies, _MAX_AT_ONCE))}
        kept = {handle: self._kept.pop(handle) for handle in some if handle in self._kept}
        # A faulty proxy can have replaced an array by another one.
        kept = {handle: entry for handle, entry in kept.items() if entries.get(handle) is entry}
        self._launches.buffers.release(session, tuple(kept), delete=False)
        self._out.flush_frees()  # hosts must drop the old array before another takes its handle
        for handle, entry in kept.items():
            spec = entry.spec
            if handle not in entries and spec is not None:  # otherwise a faulty proxy has launched something with it
                self._internal.launch(session, self._view(session, spec), some[handle], handle)
                made = entries[handle]
                made.producer, made.traceback_id = entry.producer, entry.traceback_id
        self._launches.buffers.release(session, tuple(some.values()), delete=False)
        if not self._copies:
            self._drop_programs(session)
        return bool(self._copies)

    def _view(self, session: Session, spec: ArraySpec) -> int:
        if spec not in self._views:
            whole = (0, len(spec.sharding.devices), 1)
            view = ir.Rearrange((0,), (spec,), (ir.Mapping(0, 0, whole, whole),))
            definition = ir.single("moved", (spec,), view)
            self._views[spec] = self._internal.make(session, definition, session.devices.locations)
        return self._views[spec]

    def abort(self, session: Session, status: Status) -> None:
        self._launches.buffers.release(session, tuple(self._copies.values()), delete=False)
        self._drop_programs(session)

    def _drop_programs(self, session: Session) -> None:
        for number in (*self._programs.values(), *self._views.values()):
            self._internal.drop(session, number)


class RestoringMover:
    """The `Mover` of a suspended session. Spilled pieces stay until all arrays are restored."""

    def __init__(self, spiller: ArraySpiller) -> None:
        self._spiller = spiller
        self._kept: dict[int, SpilledArray] = {}
        self._next: list[int] = []  # arrays that are not being restored yet, the next one last
        self._left: set[int] = set()
        self._losses: dict[int, int] = {}
        self._failure: Status | None = None

    def begin(self, session: Session, changes: Changes) -> None:
        self._losses = dict(self._spiller.losses)
        for handle, entry in session.directory.entries.items():
            if entry.spilled is not None and entry.error is None:
                self._kept[handle] = entry.spilled
        self._left = set(self._kept)
        views = [handle for handle, spilled in self._kept.items() if spilled.views]  # after the arrays that they view
        self._next = [handle for handle, spilled in self._kept.items() if not spilled.views] + views
        self._next.reverse()

    def proceed(self, session: Session, changes: Changes) -> bool:
        places = {**session.devices.locations, **changes}
        some = taken(self._next, MAX_TOGETHER)
        entries = session.directory.entries
        there = [each for each in some if each in entries and entries[each].state is BufferState.SPILLED]
        self._left.difference_update(set(some).difference(there))  # a faulty proxy has used or released the others
        self._spiller.restore(session, there, self._restored, places, keeps=True)
        return bool(self._next)

    def _restored(self, handle: int, status: Status) -> None:
        self._left.discard(handle)
        if not status.ok:
            self._failure = self._failure or status

    def is_ready(self, session: Session) -> bool:
        if self._failure is not None:
            raise self._failure.exception()
        return not self._left and not session.in_flight

    def begin_to_take(self, session: Session) -> None:
        """Do nothing, since no arrays are at the old places."""

    def take(self, session: Session) -> bool:
        for handle in list(islice(self._kept, MAX_TOGETHER)):
            self._spiller.drop(session, self._kept.pop(handle))
        if not self._kept:
            entries = session.directory.entries.values()
            session.has_spilled = any(entry.spilled is not None for entry in entries)
        return bool(self._kept)

    def abort(self, session: Session, status: Status) -> None:
        self._spiller.restore_failed(session, self._kept, self._losses, status)
