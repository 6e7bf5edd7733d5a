"""The virtual devices of a session, with their physical devices and slices (paper, section 4.1).

A session starts with one virtual device per physical device. The virtual devices of a slice are on different physical
devices. Virtual devices of different slices may share a physical device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from atoll.cluster.locations import DeviceLocation
from atoll.cluster.mesh import Shape
from atoll.errors import Code, StatusError, invalid, not_found


class DeviceInfo(msgspec.Struct, frozen=True, array_like=True):
    """A physical device as its worker describes it."""

    ordinal: int
    kind: str
    platform: str  # as the platform names itself, such as "cuda" for JAX's "gpu"
    memories: tuple[str, ...]  # kinds, the default first
    default_memory: str
    coords: tuple[int, ...]
    core_on_chip: int
    local_hardware_id: int
    memory_bytes: int
    attributes: tuple[tuple[str, int | str], ...] = ()  # specific to the platform, by JAX's names


class VirtualDevice(msgspec.Struct, frozen=True, array_like=True):
    """A device as a session sees it."""

    id: int
    island: int
    host: int
    info: DeviceInfo


class Slice(msgspec.Struct, frozen=True):
    """A slice of a session, whose virtual devices are in the row-major order of `shape`."""

    number: int
    devices: tuple[int, ...]
    shape: Shape
    meshed: bool  # whether the client asked for this shape
    exclusive: bool = False  # no other session gets its devices


class SessionDevices(msgspec.Struct):
    """The virtual devices of a session, their locations, and its slices.

    Devices in `used` change their location only by migration.
    """

    virtual: tuple[VirtualDevice, ...]
    locations: dict[int, DeviceLocation]
    initial_locations: Mapping[int, DeviceLocation]
    slices: dict[int, Slice] = msgspec.field(default_factory=dict)
    used: set[int] = msgspec.field(default_factory=set)
    next_slice: int = 1
    shares: bool = False  # whether virtual devices share a physical device
    are_free: bool = False  # the session is suspended, so others may use the physical devices of its slices
    # Returns why the session may not use a location, such as another session's exclusive slice; "" if it may.
    closed: Callable[[DeviceLocation], str] = lambda location: ""

    def location(self, device: int) -> DeviceLocation:
        """Return the location of a device. Raise INVALID_ARGUMENT if the session does not have it."""
        location = self.locations.get(device)
        if location is None:
            raise invalid(f"device {device} does not exist")
        return location

    def relocate(self, changes: Mapping[int, DeviceLocation]) -> None:
        """Change the locations of devices."""
        self.locations.update(changes)
        self.shares = len(set(self.locations.values())) < len(self.locations)

    def use(self, name: str, groups: Iterable[tuple[int, ...]]) -> None:
        """Mark devices as used by `name`. Each group has the devices of one array or function.

        Raise INVALID_ARGUMENT if two devices of a group are on the same physical device, and FAILED_PRECONDITION if one
        is in another session's exclusive slice.
        """
        for group in groups:
            self.check_open(name, group)
            if self.shares:
                check_apart(name, self.locations, group)
            self.used.update(device for device in group if device in self.locations)

    def check_open(self, name: str, group: Iterable[int]) -> None:
        """Raise FAILED_PRECONDITION if one of these devices is in another session's exclusive slice."""
        for device in group:
            location = self.locations.get(device)
            reason = self.closed(location) if location is not None else ""
            if reason:
                raise StatusError(Code.FAILED_PRECONDITION, f"{name!r} cannot be on virtual device {device}: {reason}")

    @property
    def sliced(self) -> set[int]:
        return {device for each in self.slices.values() for device in each.devices}

    def elsewhere(self) -> dict[int, DeviceLocation]:
        """Return the locations of devices that are in no slice and not at their initial locations."""
        if self.locations == self.initial_locations:  # the usual case, since reports call this for each session
            return {}
        sliced = self.sliced
        return {
            device.id: self.locations[device.id]
            for device in self.virtual
            if device.id not in sliced and self.locations[device.id] != self.initial_locations[device.id]
        }

    def free(self) -> dict[int, list[int]]:
        """Return the virtual devices that are in no slice, by virtual island."""
        sliced = self.sliced
        found: dict[int, list[int]] = {}
        for device in self.virtual:
            free = found.setdefault(device.island, [])
            if device.id not in sliced:
                free.append(device.id)
        return found

    def get(self, number: int) -> Slice:
        each = self.slices.get(number)
        if each is None:
            raise not_found(f"slice {number} does not exist in this session")
        return each

    def island_of(self, number: int) -> int:
        """Return the physical island of the slice."""
        return self.locations[self.get(number).devices[0]].island


def free_text(devices: SessionDevices) -> str:
    """Return the devices in no slice as text such as "island 0: 2, 3; island 1: none"."""
    return "; ".join(
        f"island {island}: {', '.join(map(str, free)) or 'none'}" for island, free in sorted(devices.free().items())
    )


def check_apart(name: str, locations: Mapping[int, DeviceLocation], group: Sequence[int], share: str = "share") -> None:
    """Raise INVALID_ARGUMENT if two of these virtual devices are on the same physical device.

    `share` is the verb in the message, such as "would share" for planned locations.
    """
    taken: dict[DeviceLocation, int] = {}
    for device in group:
        location = locations.get(device)
        other = device if location is None else taken.setdefault(location, device)
        if other != device and location is not None:
            raise invalid(
                f"{name!r} lies on the virtual devices {other} and {device}, which {share} a physical one "
                f"(device {location.ordinal} of host {location.host}): put it on the devices of one slice"
            )
