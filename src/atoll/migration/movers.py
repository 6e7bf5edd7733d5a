"""Movers: bring the arrays of a migrating session to the new places of its devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from atoll.errors import Code, Status, StatusError
from atoll.ir import program as ir
from atoll.ir.types import ArraySpec
from atoll.launch.launches import Launches
from atoll.launch.outbox import Outbox
from atoll.migration.array_spiller import ArraySpiller
from atoll.migration.internal_programs import InternalPrograms
from atoll.migration.rules import Changes, check_memory, is_affected
from atoll.protocol.number_ranges import MIGRATED_DEVICES
from atoll.state.buffer_directory import Entry, SpilledArray
from atoll.state.session import Session

# Added to a virtual device's number for its new place, in the programs that copy arrays there.
_NEW = MIGRATED_DEVICES.start


class Mover(Protocol):
    """Brings the arrays of one session to the new places of its devices. Methods are called in this order."""

    def begin(self, session: Session, changes: Changes) -> None:
        """Begin to make the arrays at the new places. Raises StatusError if they cannot be; `abort` follows."""

    def is_ready(self, session: Session) -> bool:
        """Whether all arrays are at the new places. Raises StatusError if one will not be."""

    def free_old_places(self, session: Session) -> None:
        """Free the arrays at the old places, just before the devices change places. Cannot fail."""

    def take_handles(self, session: Session) -> None:
        """Give the arrays at the new places the client's handles, after the devices have moved. Cannot fail."""

    def abort(self, session: Session, status: Status) -> None:
        """Restore the state before `begin`; called instead of `free_old_places` and `take_handles`."""


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
        self._copies: dict[int, int] = {}  # by the handle of the copied array
        self._kept: dict[int, Entry] = {}  # arrays that the client still has when the devices change places

    def begin(self, session: Session, changes: Changes) -> None:
        entries = [
            (handle, entry, entry.spec)
            for handle, entry in session.directory.entries.items()
            if is_affected(entry, changes) and entry.spec is not None
        ]
        locations = session.devices.locations
        places = {
            **locations,
            **{_NEW + device: location for device, location in {**locations, **changes}.items()},
        }
        for _, _, spec in entries:
            if spec not in self._programs:
                devices = tuple(_NEW + device for device in spec.sharding.devices)
                sharding = msgspec.structs.replace(spec.sharding, devices=devices)
                target = msgspec.structs.replace(spec, sharding=sharding)
                definition = ir.single("move", (spec,), ir.Transfer((0,), (target,)))
                self._programs[spec] = self._internal.make(session, definition, places)
        copies = [self._programs[spec] for _, _, spec in entries]
        check_memory(session, copies, self._launches.reservations.ledger)
        for handle, _, spec in entries:
            copy = self._copies[handle] = self._next_handle()
            self._internal.launch(session, self._programs[spec], handle, copy)

    def is_ready(self, session: Session) -> bool:
        all_ready = True
        for copy in self._copies.values():
            entry = session.directory.entries.get(copy)
            if entry is None:  # only a faulty proxy can name an internal handle
                raise StatusError(Code.CANCELLED, "its proxy has released a copy that is not the client's")
            if entry.error is not None:
                raise entry.error.exception()
            all_ready &= entry.ready
        return all_ready and not session.in_flight

    def free_old_places(self, session: Session) -> None:
        for handle in self._copies:
            entry = session.directory.entries.get(handle)
            if entry is not None and not entry.consumed:  # otherwise the client has released it meanwhile
                self._kept[handle] = entry
                self._launches.buffers.release(session, (handle,), delete=False)
        self._out.flush_frees()  # hosts must drop the old array before another takes its handle

    def take_handles(self, session: Session) -> None:
        views: dict[ArraySpec, int] = {}
        for handle, entry in self._kept.items():
            spec = entry.spec
            assert spec is not None
            if spec not in views:
                whole = (0, len(spec.sharding.devices), 1)
                view = ir.Rearrange((0,), (spec,), (ir.Mapping(0, 0, whole, whole),))
                views[spec] = self._internal.make(session, ir.single("moved", (spec,), view), session.devices.locations)
            self._internal.launch(session, views[spec], self._copies[handle], handle)
            made = session.directory.entries[handle]
            made.producer, made.traceback_id = entry.producer, entry.traceback_id
        for number in views.values():
            self._internal.drop(session, number)
        self._end(session)

    def abort(self, session: Session, status: Status) -> None:
        self._end(session)

    def _end(self, session: Session) -> None:
        self._launches.buffers.release(session, tuple(self._copies.values()), delete=False)
        for number in self._programs.values():
            self._internal.drop(session, number)


class RestoringMover:
    """The `Mover` of a suspended session. Spilled pieces stay until all arrays are restored."""

    def __init__(self, spiller: ArraySpiller) -> None:
        self._spiller = spiller
        self._kept: dict[int, SpilledArray] = {}
        self._left: set[int] = set()
        self._losses: dict[int, int] = {}
        self._failure: Status | None = None

    def begin(self, session: Session, changes: Changes) -> None:
        self._losses = dict(self._spiller.losses)
        for handle, entry in session.directory.entries.items():
            if entry.spilled is not None and entry.error is None:
                self._kept[handle] = entry.spilled
        self._left = set(self._kept)
        places = {**session.devices.locations, **changes}
        self._spiller.restore(session, tuple(self._kept), self._restored, places, keeps=True)

    def _restored(self, handle: int, status: Status) -> None:
        self._left.discard(handle)
        if not status.ok:
            self._failure = self._failure or status

    def is_ready(self, session: Session) -> bool:
        if self._failure is not None:
            raise self._failure.exception()
        return not self._left and not session.in_flight

    def free_old_places(self, session: Session) -> None:
        """Do nothing, since no arrays are at the old places."""

    def take_handles(self, session: Session) -> None:
        for spilled in self._kept.values():
            self._spiller.drop(session, spilled)
        entries = session.directory.entries.values()
        session.has_spilled = any(entry.spilled is not None for entry in entries)

    def abort(self, session: Session, status: Status) -> None:
        self._spiller.restore_failed(session, self._kept, self._losses, status)
