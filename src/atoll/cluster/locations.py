"""Where things are on physical devices: the location of a virtual device, and memory on a host's devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceLocation:
    """The physical device under a virtual one: an island, one of the cluster's hosts, an ordinal among its devices."""

    island: int
    host: int
    ordinal: int


# Virtual devices, by number.
Placement = Mapping[int, DeviceLocation]
# A host and an ordinal among its devices.
HostDevice = tuple[int, int]
# Bytes on devices.
MemoryRequirement = tuple[tuple[HostDevice, int], ...]


def total(requirements: Iterable[MemoryRequirement]) -> MemoryRequirement:
    """The memory that all of these need together."""
    sums: dict[HostDevice, int] = {}
    for requirement in requirements:
        for device, nbytes in requirement:
            sums[device] = sums.get(device, 0) + nbytes
    return tuple(sums.items())
