"""Locations of virtual devices on physical devices, and memory on physical devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec


class DeviceLocation(msgspec.Struct, frozen=True):
    """The physical device of a virtual device. `host` counts through the cluster, `ordinal` within the host."""

    island: int
    host: int
    ordinal: int


Placement = Mapping[int, DeviceLocation]  # by the number of a virtual device
HostDevice = tuple[int, int]  # a host and an ordinal among its devices
MemoryRequirement = tuple[tuple[HostDevice, int], ...]  # bytes on devices


def total(requirements: Iterable[MemoryRequirement]) -> MemoryRequirement:
    """Return the sum of the requirements."""
    sums: dict[HostDevice, int] = {}
    for requirement in requirements:
        for device, nbytes in requirement:
            sums[device] = sums.get(device, 0) + nbytes
    return tuple(sums.items())
