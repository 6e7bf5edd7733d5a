"""The record of the published arrays that are in files when their cluster ends, from which the next one restores them.

This module is plain data. `migration.persisted_sessions` writes it to a file, beside suspended sessions.
"""

from __future__ import annotations

import msgspec

from atoll.cluster.locations import DeviceLocation
from atoll.ir.types import ArraySpec
from atoll.named_arrays.version_records import PublishedArray
from atoll.state.buffer_directory import SpilledArray


class StoredArray(msgspec.Struct, frozen=True):
    """An array of a version in files: its type when it was written, and its contents."""

    spec: ArraySpec
    platform: str
    spilled: SpilledArray


class PersistedVersion(msgspec.Struct, frozen=True):
    """A complete version. `keep` and `next_number` are those of its name."""

    tenant: str
    name: str
    number: int
    session: int
    handles: tuple[int, ...]
    paths: tuple[str, ...]
    structure: bytes
    keep: int
    next_number: int
    replicas: int
    arrays: tuple[PublishedArray, ...]
    stored: tuple[StoredArray, ...]
    directories: tuple[int, ...]  # their numbers


class PersistedArrays(msgspec.Struct, frozen=True):
    """All versions in files, the places of the devices that their types name, and the first number of new names.

    `lineage` identifies the directories of this cluster and of the clusters that continue it.
    """

    versions: tuple[PersistedVersion, ...]
    places: dict[str, dict[int, DeviceLocation]]  # by tenant
    first_number: int
    lineage: str
