"""The room that a suspended session needs to go on: devices, and memory on them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from atoll.cluster.locations import DeviceLocation, HostDevice
from atoll.cluster.resources import ResourceManager
from atoll.cluster.slice_placement import Slices
from atoll.errors import Code, StatusError, not_found
from atoll.ir.types import DTYPE_BITS, shard_shape
from atoll.migration.rules import Changes
from atoll.quantities import human_bytes
from atoll.scheduling.reservations import Reservations
from atoll.scheduling.session import Session


@dataclass(frozen=True)
class MemoryNeed:
    """The bytes that a session's arrays need on each of its virtual devices."""

    by_device: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, session: Session) -> MemoryNeed:
        """For what the session has spilled."""
        found: dict[int, int] = {}
        for entry in session.directory.entries.values():
            # A view has the memory of others.
            if entry.spilled is not None and not entry.spilled.views and entry.spec is not None and entry.error is None:
                sharding = entry.spec.sharding
                for position, device in enumerate(sharding.devices):
                    shape = shard_shape(sharding, entry.spec.shape, position)
                    nbytes = math.prod(shape) * DTYPE_BITS[entry.spec.dtype] // 8
                    found[device] = found.get(device, 0) + nbytes
        return cls(found)

    @property
    def nbytes(self) -> int:
        return sum(self.by_device.values())

    def lacking(
        self,
        session: Session,
        places: Changes,
        resources: ResourceManager,
        slices: Slices,
        memory: Reservations,
    ) -> str:
        """What keeps the session from going on at these places, and who has it; "" where nothing does."""
        for island in sorted({location.island for location in places.values()}):
            if not resources.islands[island].works:
                return f"island {island}, which is {resources.islands[island].state}"
            if island in session.unacknowledged_failures or island in session.needs_recompile:
                return f"island {island}, which has just come back"
        for device, location in places.items():
            reason = session.devices.closed(location)
            if reason:
                return f"device {resources.number_of(location)}: {reason}"
            if device in _exclusive(session) and slices.has_others(session.number, location):
                return f"device {resources.number_of(location)}, on which other sessions are"
        wanted: dict[HostDevice, int] = {}
        for device, nbytes in self.by_device.items():
            where = places[device]
            wanted[where.host, where.ordinal] = wanted.get((where.host, where.ordinal), 0) + nbytes
        lacking = memory.ledger.lacking(tuple(wanted.items()))
        if lacking is None:
            return ""
        text = f"{human_bytes(wanted[lacking])} on device {resources.topology.number_of(*lacking)}, where "
        text += f"{human_bytes(max(0, memory.ledger.free(lacking)))} are free"
        holders = memory.waits.holders(lacking)
        return text + (f"; {', '.join(holders)} hold the rest" if holders else "")


def _exclusive(session: Session) -> set[int]:
    return {device for each in session.devices.slices.values() if each.exclusive for device in each.devices}


def homes(session: Session) -> dict[int, DeviceLocation]:
    """Where the devices are on which the session has something: arrays, functions, slices."""
    devices = session.devices
    return {device: devices.locations[device] for device in sorted(devices.used | devices.sliced)}


def places_on(session: Session, islands: tuple[int, ...], resources: ResourceManager) -> dict[int, DeviceLocation]:
    """Where they are on these islands, one for each that they are on now, point by point.

    Raises FAILED_PRECONDITION where the islands are not like those, NOT_FOUND where one does not exist.
    """
    here = homes(session)
    sources = sorted({location.island for location in here.values()})
    if len(islands) != len(sources):
        text = f"session {session.number} is on {_islands(sources)}: say where on as many islands, in that order"
        raise StatusError(Code.FAILED_PRECONDITION, text)
    there: dict[DeviceLocation, DeviceLocation] = {}
    for source, target in zip(sources, islands, strict=True):
        if target not in resources.islands or not resources.islands[target].was_ready:
            raise not_found(f"island {target} does not exist (atoll status lists them)")
        before, after = resources.devices(source), resources.devices_for(target, session.platform)
        if after.closed:
            raise StatusError(Code.FAILED_PRECONDITION, f"island {target}: {after.closed}")
        if (before.mesh, before.kinds) != (after.mesh, after.kinds):
            raise StatusError(Code.FAILED_PRECONDITION, f"{after} is not like {before}")
        there.update(zip(before.locations, after.locations, strict=True))
    return {device: there[location] for device, location in here.items()}


def _islands(numbers: list[int]) -> str:
    return f"the islands {', '.join(map(str, numbers))}" if len(numbers) != 1 else f"island {numbers[0]}"
