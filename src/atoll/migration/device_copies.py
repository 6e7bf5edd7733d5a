"""Arrays that migrate from devices to devices: each is copied under a handle of the controller's own, and the copy then
takes the array's handle.

Copying, and a copy's taking over of a handle, are programs of one transfer and of one view, launched like any others.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from atoll.errors import Code, Status, StatusError
from atoll.ir import program as ir
from atoll.ir.types import ArraySpec
from atoll.migration.controller import Launches, Out
from atoll.migration.internal_programs import InternalPrograms
from atoll.migration.migration import Migration
from atoll.migration.rules import check_memory, is_affected
from atoll.scheduling.buffer_directory import Entry

# Where a device is to be, in the program that copies to it.
_NEW = 1 << 40


class DeviceCopies:
    """The `Mover` of a session that is on devices. `next_handle()` numbers its copies."""

    def __init__(
        self, internal: InternalPrograms, launches: Launches, out: Out, next_handle: Callable[[], int]
    ) -> None:
        self._internal = internal
        self._launches = launches
        self._out = out
        self._next_handle = next_handle
        self._programs: dict[ArraySpec, int] = {}  # that copy
        self._copies: dict[int, int] = {}  # by the handle of what is copied
        self._kept: dict[int, Entry] = {}  # what the client still has when it changes places

    def begin(self, migration: Migration) -> None:
        session = migration.session
        entries = [
            (handle, entry, entry.spec)
            for handle, entry in session.directory.entries.items()
            if is_affected(entry, migration.changes) and entry.spec is not None
        ]
        locations = session.devices.locations
        places = {
            **locations,
            **{_NEW + device: location for device, location in {**locations, **migration.changes}.items()},
        }
        for _, _, spec in entries:
            if spec not in self._programs:
                devices = tuple(_NEW + device for device in spec.sharding.devices)
                sharding = msgspec.structs.replace(spec.sharding, devices=devices)
                target = msgspec.structs.replace(spec, sharding=sharding)
                definition = ir.single("move", (spec,), ir.Transfer((0,), (target,)))
                self._programs[spec] = self._internal.make(session, definition, places)
        copies = [self._programs[spec] for _, _, spec in entries]
        check_memory(session, copies, self._launches.memory.ledger)
        for handle, _, spec in entries:
            copy = self._copies[handle] = self._next_handle()
            self._internal.launch(session, self._programs[spec], handle, copy)

    def are_there(self, migration: Migration) -> bool:
        all_ready = True
        for copy in self._copies.values():
            entry = migration.session.directory.entries.get(copy)
            if entry is None:  # only a proxy that lies can name it
                raise StatusError(Code.CANCELLED, "its proxy has released a copy that is not the client's")
            if entry.error is not None:
                raise StatusError(Code(entry.error.code), entry.error.message)
            all_ready &= entry.ready
        return all_ready and not migration.session.in_flight

    def leave(self, migration: Migration) -> None:
        session = migration.session
        for handle in self._copies:
            entry = session.directory.entries.get(handle)
            if entry is not None and not entry.consumed:  # else the client has released it meanwhile
                self._kept[handle] = entry
                self._launches.release(session, (handle,), delete=False)
        self._out.flush_frees()  # what lies there under the old handle goes before the new comes

    def arrive(self, migration: Migration) -> None:
        session = migration.session
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
        self._end(migration)

    def give_up(self, migration: Migration, status: Status) -> None:
        self._end(migration)

    def _end(self, migration: Migration) -> None:
        self._launches.release(migration.session, tuple(self._copies.values()), delete=False)
        for number in self._programs.values():
            self._internal.drop(migration.session, number)
