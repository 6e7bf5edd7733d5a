"""Finds devices that can compile a function in place of lost devices."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from atoll.cluster.virtual_devices import VirtualDevice

Assignment = tuple[tuple[int, ...], ...]  # virtual devices by [replica][partition]


def replace_islands(
    assignment: Assignment, devices: Sequence[VirtualDevice], lost: Collection[int]
) -> Assignment | None:
    """Return the assignment with its devices on lost islands replaced by devices of islands that it does not use.

    A replacement has the same position in an island with the same hosts and kinds of devices. Return None if the
    assignment uses no lost island, or if no such islands are left. `devices` are all devices of the session.
    """
    by_island: dict[int, list[VirtualDevice]] = {}
    for device in devices:
        by_island.setdefault(device.island, []).append(device)
    island_of = {device.id: device.island for device in devices}
    used = {island_of.get(device, -1) for partitions in assignment for device in partitions}
    if used.isdisjoint(lost):
        return None
    free = sorted(by_island.keys() - used - set(lost))
    replaced: dict[int, int] = {}
    for island in sorted(used & set(lost)):
        shape = _shape(by_island.get(island, []))
        other = next((each for each in free if _shape(by_island[each]) == shape), None)
        if other is None:
            return None
        free.remove(other)
        replaced |= {old.id: new.id for old, new in zip(by_island[island], by_island[other], strict=True)}
    return tuple(tuple(replaced.get(device, device) for device in partitions) for partitions in assignment)


def _shape(devices: Sequence[VirtualDevice]) -> list[tuple[int, str, str]]:
    first = min((device.host for device in devices), default=0)
    return [(device.host - first, device.info.platform, device.info.kind) for device in devices]
