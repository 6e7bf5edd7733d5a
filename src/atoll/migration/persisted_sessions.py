"""The record of a session that is suspended on disk when its cluster ends, from which the next cluster restores it.

The record has everything that the controller knows of the session: virtual devices and their locations, slices, buffers
and the files that contain them, functions and programs as they were registered. None of them is compiled, lowered or on
devices. The proxy waits for the next cluster, and sends the sources of its functions when there are hosts.

The record is plain data, which is written to a file and is part of an event. This module is pure.
"""

from __future__ import annotations

import msgspec

from atoll.cluster.locations import DeviceLocation
from atoll.cluster.named_runs import NamedRun
from atoll.cluster.virtual_devices import SessionDevices, Slice, VirtualDevice
from atoll.errors import Code, Details, Kind, Status, failure
from atoll.ir.program import Program
from atoll.ir.types import ArraySpec
from atoll.migration.persisted_arrays import PersistedArrays
from atoll.protocol import messages as m
from atoll.state.buffer_directory import Entry, SpilledArray
from atoll.state.buffer_states import BufferState
from atoll.state.session import Session
from atoll.state.tenants import Tenant
from atoll.state.versions import decode_versioned, encode_versioned

_LOST = failure(
    Code.DATA_LOSS, "its cluster was ended, and only arrays that were spilled to disk are kept", Details(Kind.CONTENTS)
)


class PersistedBuffer(msgspec.Struct, frozen=True):
    """A logical buffer: its spilled parts, or its error."""

    nbytes: int
    producer: str
    traceback_id: int
    consumed: bool
    spec: ArraySpec | None
    spilled: SpilledArray | None
    error: Status | None


class PersistedSession(msgspec.Struct, frozen=True):
    """A suspended session. `connection` is its proxy's. The secret that identifies it to hosts is stored separately."""

    number: int
    connection: int
    pid: int
    label: str
    platform: str
    tenant: str
    by_system: bool  # the cluster suspended it, and resumes it when there is space
    virtual: tuple[VirtualDevice, ...]
    locations: dict[int, DeviceLocation]
    initial_locations: dict[int, DeviceLocation]
    slices: tuple[Slice, ...]
    next_slice: int
    used: tuple[int, ...]
    buffers: dict[int, PersistedBuffer]
    functions: dict[int, m.RegisterFunction]
    definitions: dict[int, Program]
    control_flow: dict[int, m.RegisterSwitch | m.RegisterLoop]
    waits_for_islands: bool
    leaves_islands: bool
    run: NamedRun
    address: str  # of the proxy


class PersistedSessions(msgspec.Struct, frozen=True):
    """All persisted sessions and published arrays of a cluster, and the next free numbers of sessions and pieces."""

    sessions: tuple[PersistedSession, ...]
    next_session: int
    next_piece: int
    arrays: PersistedArrays | None


# Increase the first number if you change one of these structs: see CONTRIBUTING.md.
_TAG, _VERSION = "persisted sessions", (4, 4)


def encode(persisted: PersistedSessions) -> bytes:
    return encode_versioned(_TAG, _VERSION, persisted)


def decode(content: bytes) -> PersistedSessions:
    """Decode persisted sessions. Raises JournalError if this version cannot read them."""
    return decode_versioned(content, _TAG, _VERSION, PersistedSessions)


def can_persist(session: Session) -> bool:
    """Return whether all spilled arrays of the session are in files, since host memory does not outlive its cluster."""
    spilled_arrays = [entry.spilled for entry in session.directory.entries.values() if entry.spilled is not None]
    return not any(each.memory_hosts for each in spilled_arrays)


def persisted_session(session: Session, connection: int, address: str, by_system: bool) -> PersistedSession:
    """Return the record of a suspended session, whose proxy has the `connection` and connects from `address`."""
    devices = session.devices
    return PersistedSession(
        session.number,
        connection,
        session.pid,
        session.label,
        session.platform,
        session.tenant.name,
        by_system,
        devices.virtual,
        dict(devices.locations),
        dict(devices.initial_locations),
        tuple(devices.slices.values()),
        devices.next_slice,
        tuple(sorted(devices.used)),
        {handle: _buffer(entry) for handle, entry in session.directory.entries.items() if not entry.released},
        dict(session.function_requests),
        dict(session.definitions),
        dict(session.control_flow),
        session.waits_for_islands,
        session.leaves_islands,
        session.run,
        address,
    )


def _buffer(entry: Entry) -> PersistedBuffer:
    error = entry.error
    if error is None and entry.spilled is None and not entry.consumed and entry.spec is not None:
        error = _LOST.within(entry.producer)
    return PersistedBuffer(
        entry.nbytes, entry.producer, entry.traceback_id, entry.consumed, entry.spec, entry.spilled, error
    )


def _state(buffer: PersistedBuffer) -> BufferState:
    if buffer.error is not None:
        return BufferState.FAILED
    return BufferState.READY if buffer.spilled is None else BufferState.SPILLED


def restored_session(persisted: PersistedSession, secret: str, tenant: Tenant, devices: SessionDevices) -> Session:
    """Return the suspended session on these `devices`, which belong to a new session. `secret` identifies it to hosts.

    The caller registers its functions and programs with the parts that compile and lower them.
    """
    devices.relocate(persisted.locations)
    devices.slices = {each.number: each for each in persisted.slices}
    devices.next_slice = persisted.next_slice
    devices.used = set(persisted.used)
    devices.are_free = True
    session = Session(
        persisted.number,
        persisted.pid,
        persisted.label,
        secret,
        devices,
        persisted.platform,
        tenant,
        run=persisted.run,
    )
    for handle, each in persisted.buffers.items():
        entry = Entry((), each.nbytes, _state(each), each.error, producer=each.producer)
        if each.consumed:
            entry.consume()
        entry.traceback_id, entry.spec, entry.spilled = each.traceback_id, each.spec, each.spilled
        session.directory.add(handle, entry)
    entries = session.directory.entries.values()
    session.has_spilled = any(entry.spilled is not None for entry in entries)
    session.has_errors = any(entry.error is not None for entry in entries)
    session.function_requests = dict(persisted.functions)
    session.definitions = dict(persisted.definitions)
    session.control_flow = dict(persisted.control_flow)
    session.waits_for_islands = persisted.waits_for_islands
    session.leaves_islands = persisted.leaves_islands
    return session
