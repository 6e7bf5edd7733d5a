"""Describe a session that is suspended on disk, for a cluster that has no record of it.

The manifest is a JSON document, which every host writes beside its files (`worker.spill_files`). It contains the
virtual devices and their slices, each array with its type and the location of its shards, functions with the hash of
their source and their devices, and the definitions of programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from atoll.ir.program import Program
from atoll.ir.types import ArraySpec
from atoll.state.buffer_directory import SpilledArray
from atoll.state.session import Session


class PartOfArray(msgspec.Struct, frozen=True):
    """The contents of the shards at these positions: the piece with this number, which the manifest of a host lists."""

    piece: int
    host: int
    positions: tuple[int, ...]


class SuspendedArray(msgspec.Struct, frozen=True):
    """A logical buffer. `spec` has virtual devices; `producer` is the program that made it.

    An array that shares all of its memory has no parts. For each shard, `views` has the (handle, position) of another.
    """

    handle: int
    spec: ArraySpec
    parts: tuple[PartOfArray, ...]
    views: tuple[tuple[int, int], ...] = ()
    producer: str = ""


class SuspendedDevice(msgspec.Struct, frozen=True):
    """A virtual device with its attributes, which do not depend on its location."""

    id: int
    island: int
    host: int
    platform: str
    kind: str
    coords: tuple[int, ...]


class SuspendedFunction(msgspec.Struct, frozen=True):
    """A function: the hash of its source, which the session's proxy has, and its virtual devices as
    [replica][partition].
    """

    function: int
    content: str
    assignment: tuple[tuple[int, ...], ...]


class SuspendedSlice(msgspec.Struct, frozen=True):
    number: int
    devices: tuple[int, ...]
    shape: tuple[int, ...]
    exclusive: bool


class SuspendedSession(msgspec.Struct, frozen=True):
    """A session. `errors` maps the handles of failed arrays to messages."""

    number: int
    label: str
    tenant: str
    platform: str
    devices: tuple[SuspendedDevice, ...]
    slices: tuple[SuspendedSlice, ...]
    arrays: tuple[SuspendedArray, ...]
    functions: tuple[SuspendedFunction, ...]
    programs: dict[int, Program]
    errors: dict[int, str]


def manifest_of(session: Session, arrays: Mapping[int, SpilledArray]) -> bytes:
    """Return the manifest of a session as JSON."""
    entries = session.directory.entries
    where = {device.id: device for device in session.devices.virtual}
    found = SuspendedSession(
        session.number,
        session.label,
        session.tenant.name,
        session.platform,
        tuple(
            SuspendedDevice(
                each.id, each.island, each.host, each.info.platform, each.info.kind, tuple(each.info.coords)
            )
            for each in where.values()
        ),
        tuple(
            SuspendedSlice(each.number, each.devices, each.shape, each.exclusive)
            for each in session.devices.slices.values()
        ),
        tuple(
            SuspendedArray(
                handle,
                _spec(entries[handle].spec),
                tuple(PartOfArray(part.piece.number, part.host, part.positions) for part in spilled.parts),
                spilled.views,
                entries[handle].producer,
            )
            for handle, spilled in arrays.items()
        ),
        tuple(
            SuspendedFunction(number, request.content, request.assignment)
            for number, request in session.function_requests.items()
        ),
        dict(session.definitions),
        {handle: entry.error.message for handle, entry in entries.items() if entry.error is not None},
    )
    return msgspec.json.encode(found)


def _spec(spec: ArraySpec | None) -> Any:
    assert spec is not None  # arrays without a spec are not spilled
    return spec
