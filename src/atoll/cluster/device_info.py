"""Devices as their workers describe them, and as sessions see them."""

from __future__ import annotations

import msgspec


class DeviceInfo(msgspec.Struct, frozen=True, array_like=True):
    """A physical device as its worker describes it.

    `platform` is the platform's own name, such as "cuda", which JAX calls "gpu". `memories` are (kind, ...) with the
    default first. `attributes` are those of the device that its platform has and others lack, by JAX's names.
    """

    ordinal: int
    kind: str
    platform: str
    memories: tuple[str, ...]
    default_memory: str
    coords: tuple[int, ...]
    core_on_chip: int
    local_hardware_id: int
    memory_bytes: int
    attributes: tuple[tuple[str, int | str], ...] = ()


class VirtualDevice(msgspec.Struct, frozen=True, array_like=True):
    """A device as a session sees it."""

    id: int
    island: int
    host: int
    info: DeviceInfo
