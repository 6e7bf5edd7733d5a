"""The virtual devices of a session: on which physical device each is, and in which slice (paper, section 4.1).

A session starts with one virtual device for each physical one, at its location. Inside a slice they are on different
physical devices, always; those of different slices may share one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from atoll.cluster.locations import DeviceLocation
from atoll.cluster.mesh import Shape
from atoll.errors import Code, StatusError, invalid, not_found


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


@dataclass(frozen=True)
class Slice:
    """Virtual devices of a session, in the order of `shape`; `meshed` where that shape was asked for."""

    number: int
    devices: tuple[int, ...]
    shape: Shape
    meshed: bool
    exclusive: bool = False  # nobody else's sessions get its devices


@dataclass
class SessionDevices:
    """The virtual devices of a session, their locations, and its slices.

    Those in `used` change location by migration only.
    """

    virtual: tuple[VirtualDevice, ...]
    locations: dict[int, DeviceLocation]
    initial_locations: Mapping[int, DeviceLocation]
    slices: dict[int, Slice] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)
    next_slice: int = 1
    shares: bool = False  # some of them are on one physical device
    are_free: bool = False  # its session is suspended: others may have the physical devices, whatever slices it has
    # Why the session may have nothing at a location: another's exclusive slice is there. "" where it may.
    closed: Callable[[DeviceLocation], str] = lambda location: ""

    def relocate(self, changes: Mapping[int, DeviceLocation]) -> None:
        """These devices are at other locations from now on."""
        self.locations.update(changes)
        self.shares = len(set(self.locations.values())) < len(self.locations)

    def use(self, name: str, groups: Iterable[tuple[int, ...]]) -> None:
        """Something is made on these devices, or for them: each group holds the parts of one array or function.

        Raises INVALID_ARGUMENT where two of a group are on one physical device, FAILED_PRECONDITION where one is in
        another session's exclusive slice.
        """
        for group in groups:
            self.check_open(name, group)
            if self.shares:
                check_apart(name, self.locations, group)
            self.used.update(device for device in group if device in self.locations)

    def check_open(self, name: str, group: Iterable[int]) -> None:
        """Raises FAILED_PRECONDITION where another session has one of these devices for itself."""
        for device in group:
            location = self.locations.get(device)
            reason = self.closed(location) if location is not None else ""
            if reason:
                raise StatusError(Code.FAILED_PRECONDITION, f"{name!r} cannot be on virtual device {device}: {reason}")

    def scattered(self, group: Sequence[int]) -> str:
        """Why no function can run on these devices together: they are not on one island."""
        islands = sorted({self.locations[device].island for device in group})
        text = f"the computation's devices lie on {len(islands)} islands"
        home = {device.id: device.island for device in self.virtual}
        if len({home[device] for device in group}) == 1:
            return (
                f"{text} at present, {', '.join(map(str, islands))}, though their slice_index is the same: virtual "
                "devices of different slices may be put on different islands. Use the devices of one slice in a mesh, "
                "and move arrays between slices with jax.device_put"
            )
        return (
            f"{text}; a mesh must lie inside one island (jax.Device.slice_index tells which), and arrays move between "
            "islands with jax.device_put"
        )

    @property
    def sliced(self) -> set[int]:
        return {device for each in self.slices.values() for device in each.devices}

    def elsewhere(self) -> dict[int, DeviceLocation]:
        """The devices in no slice that are not at their initial locations."""
        if self.locations == self.initial_locations:  # as almost always, and found at once: reports ask each session
            return {}
        sliced = self.sliced
        return {
            device.id: self.locations[device.id]
            for device in self.virtual
            if device.id not in sliced and self.locations[device.id] != self.initial_locations[device.id]
        }

    def free(self) -> dict[int, list[int]]:
        """The virtual devices that are in no slice, by virtual island."""
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
        """The physical island that the slice is on."""
        return self.locations[self.get(number).devices[0]].island


def free_text(devices: SessionDevices) -> str:
    """Such as "island 0: 2, 3; island 1: none"."""
    return "; ".join(
        f"island {island}: {', '.join(map(str, free)) or 'none'}" for island, free in sorted(devices.free().items())
    )


def check_apart(name: str, locations: Mapping[int, DeviceLocation], group: Sequence[int], share: str = "share") -> None:
    """Raises INVALID_ARGUMENT where two of these virtual devices are on one physical device.

    `share` is the verb for that: "would share" where it is a plan.
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
