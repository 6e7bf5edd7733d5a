"""Where slices go: which virtual devices they take, and on which physical ones these then are (paper, section 4.1).

A slice takes virtual devices of one virtual island that are in no other slice of the session, and puts them on physical
devices of one island: a contiguous sub-mesh first, then where the fewest slices of all sessions are. One to one inside
a slice; many slices share a physical device in time. A virtual device that something was made on, or for, stays at its
location when a slice is made.

Pure: islands and requests in, choices out; the caller carries them out.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from atoll.cluster.locations import DeviceLocation
from atoll.cluster.mesh import Shape, boxes, compact_shapes, is_box, text_of
from atoll.cluster.slice_requests import SliceRequest
from atoll.cluster.virtual_devices import SessionDevices, Slice, VirtualDevice, free_text
from atoll.errors import Code, StatusError, invalid
from atoll.quantities import human_bytes

GPUS = ("gpu", "cuda", "rocm")
# Beside CPUs, which play the others in tests: where there are none of these, devices have no types.
_ACCELERATORS = ("tpu", "gpu")

# By whether the slice is to be exclusive.
_WHY_NOT = ("no free virtual devices can be there", "no devices there are free of other sessions")


@dataclass(frozen=True)
class IslandDevices:
    """An island as slices see it: `locations[i]` is point i of the mesh; `closed` says why nothing new goes there."""

    number: int
    mesh: Shape
    locations: tuple[DeviceLocation, ...]
    kinds: tuple[str, ...]  # what its devices call themselves: platform and kind
    closed: str = ""

    def __str__(self) -> str:
        return f"island {self.number} ({text_of(self.mesh)} {'/'.join(self.kinds)})"

    def is_kind(self, wanted: str) -> bool:
        known = {kind.lower() for kind in self.kinds}
        if wanted.lower() in GPUS:
            return not known.isdisjoint(GPUS)
        return not wanted or wanted.lower() in known


@dataclass(frozen=True)
class Choice:
    """Virtual devices for a slice, and the location of each from now on."""

    devices: tuple[int, ...]
    locations: tuple[DeviceLocation, ...]
    shape: Shape
    meshed: bool
    exclusive: bool = False


class Slices:
    """The virtual devices and slices of all sessions. Decisions read this and the islands that they are given."""

    def __init__(self) -> None:
        self.sessions: dict[int, SessionDevices] = {}

    # ---- sessions and slices

    def open(
        self, session: int, virtual: tuple[VirtualDevice, ...], locations: Mapping[int, DeviceLocation]
    ) -> SessionDevices:
        devices = self.sessions[session] = SessionDevices(virtual, dict(locations), dict(locations))
        devices.closed = partial(self.closed, session)
        return devices

    def close(self, session: int) -> None:
        self.sessions.pop(session, None)

    def closed(self, session: int, location: DeviceLocation) -> str:
        """Why the session may have nothing there: the device is in another's exclusive slice."""
        for other, devices in self.sessions.items():
            for each in devices.slices.values() if other != session and not devices.are_free else ():
                if each.exclusive and any(devices.locations[device] == location for device in each.devices):
                    return (
                        f"device {location.ordinal} of host {location.host} is in slice {each.number} of session "
                        f"{other}, which has it for itself"
                    )
        return ""

    def has_others(self, session: int, location: DeviceLocation) -> bool:
        """Whether another session has something there: a slice, or what was made for the device."""
        return any(
            devices.locations[device] == location
            for other, devices in self.sessions.items()
            if other != session and not devices.are_free
            for device in {*devices.used, *devices.sliced}
        )

    def load(self) -> Counter[DeviceLocation]:
        """How many slices are on each physical device."""
        return Counter(
            devices.locations[device]
            for devices in self.sessions.values()
            if not devices.are_free
            for each in devices.slices.values()
            for device in each.devices
        )

    def add(self, session: int, choice: Choice) -> Slice:
        """Makes the slice that was chosen."""
        devices = self.sessions[session]
        made = Slice(devices.next_slice, choice.devices, choice.shape, choice.meshed, choice.exclusive)
        devices.next_slice += 1
        devices.slices[made.number] = made
        devices.relocate(dict(zip(choice.devices, choice.locations, strict=True)))
        return made

    def release(self, session: int, number: int) -> None:
        """Its devices are in no slice from now on, and stay where they are."""
        self.sessions[session].get(number)
        del self.sessions[session].slices[number]

    # ---- choosing

    def choose(
        self,
        session: int,
        slice_request: SliceRequest,
        islands: Sequence[IslandDevices],
        free_bytes: Callable[[DeviceLocation], int] = lambda location: 1 << 62,
    ) -> Choice:
        """Where a new slice goes. Raises RESOURCE_EXHAUSTED, with what is free, where it fits nowhere."""
        devices = self.sessions[session]
        load = self.load()
        free_devices = _FreeDevices(devices)
        shape = slice_request.shape or (slice_request.count,)
        if slice_request.accelerator and any(each.is_kind(kind) for each in islands for kind in _ACCELERATORS):
            slice_request = replace(slice_request, kind=slice_request.kind or slice_request.accelerator)
        reasons: list[str] = []
        best: tuple[tuple[int, ...], Choice] | None = None
        scattered: tuple[tuple[int, ...], Choice] | None = None
        for island in islands:
            reason = self._unfit(devices, slice_request, island, free_bytes)
            candidates = () if reason else tuple(_candidates(island, slice_request, load))
            if not candidates and not reason:
                reason = (
                    f"it has no sub-mesh {text_of(shape)}"
                    if slice_request.shape
                    else f"it has {len(island.locations)} devices"
                )
            roomy = {
                location
                for location in island.locations
                if free_bytes(location) >= slice_request.memory_per_device
                and not devices.closed(location)
                and not (slice_request.exclusive and self.has_others(session, location))
            }
            for length, points in candidates:
                locations = tuple(island.locations[i] for i in points)
                rank = _rank(load, locations)
                if (best is not None and rank > best[0][:2]) or not roomy.issuperset(locations):
                    continue
                taken = free_devices.take(locations)
                if taken is not None:
                    moved = sum(devices.locations[d] != s for d, s in zip(taken, locations, strict=True))
                    key = (*rank, length, moved, island.number, *points)
                    if best is None or key < best[0]:
                        best = key, Choice(taken, locations, shape, bool(slice_request.shape))
            if not slice_request.shape and not reason and best is None:
                for taken in free_devices.where_they_are(slice_request.count, roomy, load):
                    locations = tuple(devices.locations[device] for device in taken)
                    key = (*_rank(load, locations), island.number, *taken)
                    if scattered is None or key < scattered[0]:
                        scattered = key, Choice(taken, locations, shape, False)
            reasons.append(f"{island}: {reason or _WHY_NOT[slice_request.exclusive]}")
        found = best or scattered
        if found is not None:
            return dataclasses.replace(found[1], exclusive=slice_request.exclusive)
        raise StatusError(
            Code.RESOURCE_EXHAUSTED,
            f"there is no room for {slice_request}: {'; '.join(reasons)}. "
            f"Virtual devices of this session that are in no slice: {free_text(devices)}",
        )

    def _unfit(
        self,
        devices: SessionDevices,
        slice_request: SliceRequest,
        island: IslandDevices,
        free_bytes: Callable[[DeviceLocation], int],
    ) -> str:
        """Why the slice cannot be on the island, whatever its shape; "" where it may be."""
        if island.closed:
            return island.closed
        if not island.is_kind(slice_request.kind):
            return f"it has no {slice_request.kind} devices"
        for other in slice_request.same_island_as:
            if devices.island_of(other) != island.number:
                return f"slice {other} is on island {devices.island_of(other)}"
        for other in slice_request.other_island_than:
            if devices.island_of(other) == island.number:
                return f"slice {other} is on it"
        free = [free_bytes(location) for location in island.locations] if slice_request.memory_per_device else []
        if free and sum(each >= slice_request.memory_per_device for each in free) < slice_request.count:
            return f"{', '.join(human_bytes(max(0, each)) for each in free)} are free on its devices"
        return ""

    # ---- migrating

    def target(
        self, session: int, number: int, island: IslandDevices, wanted: Sequence[DeviceLocation] = ()
    ) -> dict[int, DeviceLocation]:
        """Where the devices of a slice go on an island: to the `wanted` ones in that order, else where least load is.

        Raises INVALID_ARGUMENT or RESOURCE_EXHAUSTED where they do not have the slice's shape.
        """
        devices = self.sessions[session]
        each = devices.get(number)
        if island.closed:
            raise StatusError(Code.FAILED_PRECONDITION, f"nothing can be moved to {island}: {island.closed}")
        if wanted:
            points = [island.locations.index(location) for location in wanted if location in island.locations]
            if len(set(points)) != len(each.devices) or len(wanted) != len(each.devices):
                raise invalid(f"slice {number} needs {len(each.devices)} devices of {island}, each once")
            if each.meshed and not is_box(points, island.mesh, each.shape):
                raise invalid(f"these devices of {island} are no {text_of(each.shape)} mesh in this order")
            return dict(zip(each.devices, wanted, strict=True))
        load = self.load()
        load.subtract(devices.locations[device] for device in each.devices)
        slice_request = SliceRequest(len(each.devices), each.shape if each.meshed else ())
        ranked = (
            (_rank(load, [island.locations[i] for i in points]), length, points)
            for length, points in _candidates(island, slice_request, load)
            if not any(devices.closed(island.locations[i]) for i in points)
        )
        best = min(ranked, default=None)
        if best is None:
            raise StatusError(Code.RESOURCE_EXHAUSTED, f"{island} has no place for {slice_request}")
        return dict(zip(each.devices, (island.locations[i] for i in best[2]), strict=True))


class _FreeDevices:
    """The free virtual devices of a session, by their locations."""

    def __init__(self, devices: SessionDevices) -> None:
        self._here: dict[int, dict[DeviceLocation, list[int]]] = {}  # by virtual island
        self._unused: dict[int, list[int]] = {}
        for island, free in devices.free().items():
            here = self._here.setdefault(island, {})
            for device in free:
                here.setdefault(devices.locations[device], []).append(device)
            self._unused[island] = [device for device in free if device not in devices.used]

    def take(self, locations: Sequence[DeviceLocation]) -> tuple[int, ...] | None:
        """Free devices of one virtual island for these locations: those that are there, else some that nothing uses.

        Of the islands that have them, the one of which the fewest devices change location.
        """
        best: tuple[int, tuple[int, ...]] | None = None
        for island, here in sorted(self._here.items()):
            present = [here.get(location, [None])[0] for location in locations]
            taken = set(present)
            spare = (device for device in self._unused[island] if device not in taken)
            chosen = [next(spare, None) if device is None else device for device in present]
            if any(device is None for device in chosen):
                continue
            moved = sum(device is None for device in present)
            if best is None or moved < best[0]:
                best = moved, tuple(device for device in chosen if device is not None)
        return best[1] if best is not None else None

    def where_they_are(
        self, count: int, allowed: set[DeviceLocation], load: Mapping[DeviceLocation, int]
    ) -> Iterator[tuple[int, ...]]:
        """Free devices of one virtual island that are at different ones of these locations: those with least load."""
        for here in self._here.values():
            chosen = sorted((load[location], devices[0]) for location, devices in here.items() if location in allowed)
            if len(chosen) >= count:
                yield tuple(sorted(device for _, device in chosen[:count]))


def _rank(load: Mapping[DeviceLocation, int], locations: Sequence[DeviceLocation]) -> tuple[int, int]:
    """How many slices are there: on all together, and on the one with the most. The least is the best."""
    loads = [load[location] for location in locations]
    return sum(loads), max(loads)


def _candidates(
    island: IslandDevices, slice_request: SliceRequest, load: Mapping[DeviceLocation, int]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The points of an island's mesh that such a slice can be on, each with how far it stretches.

    Without a shape any box will do, and where there is none of that size, any devices.
    """
    shapes = [slice_request.shape] if slice_request.shape else compact_shapes(island.mesh, slice_request.count)
    for shape in shapes:
        yield from ((sum(shape), points) for points in boxes(island.mesh, shape))
    if not shapes and slice_request.count <= len(island.locations):
        points = sorted(range(len(island.locations)), key=lambda i: (load[island.locations[i]], i))
        yield 0, tuple(sorted(points[: slice_request.count]))
