"""Choose the virtual and physical devices of slices (paper, section 4.1).

A slice takes virtual devices of one virtual island that are in no other slice of the session, and puts each on another
physical device of one island. A contiguous sub-mesh is preferred, then devices with the fewest slices of all sessions.
Slices share physical devices in time. A used virtual device stays at its location.

Pure: the functions choose, and the caller applies the choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial

import msgspec
from msgspec.structs import replace

from atoll.cluster.locations import DeviceLocation
from atoll.cluster.mesh import Shape, boxes, compact_shapes, is_box, text_of
from atoll.cluster.slice_requests import SliceRequest
from atoll.cluster.virtual_devices import SessionDevices, Slice, VirtualDevice, free_text
from atoll.errors import Code, Details, Kind, StatusError, failed, invalid
from atoll.quantities import counted, human_bytes, noun_for

GPUS = ("gpu", "cuda", "rocm")
# A cluster without these has only CPUs, which stand for any accelerator, as in tests.
_ACCELERATORS = ("tpu", "gpu")

_AVOIDED = 1 << 32  # the load of a device that is only used if no other one fits
# Reasons why a slice does not fit on an island whose devices are of the right number and kind.
_NONE_LEFT = "too few devices of this session are unused"
_IN_USE = "other sessions use its devices"


class IslandDevices(msgspec.Struct, frozen=True):
    """The devices of an island."""

    number: int
    mesh: Shape
    locations: tuple[DeviceLocation, ...]  # of the points of the mesh
    kinds: tuple[str, ...]  # platforms and kinds of its devices, as these report them
    closed: str = ""  # why no new slice can use the island

    def __str__(self) -> str:
        return f"island {self.number} ({text_of(self.mesh)} {'/'.join(self.kinds)})"

    def is_kind(self, wanted: str) -> bool:
        known = {kind.lower() for kind in self.kinds}
        if wanted.lower() in GPUS:
            return not known.isdisjoint(GPUS)
        return not wanted or wanted.lower() in known


class Choice(msgspec.Struct, frozen=True):
    """The virtual devices of a new slice, and their locations."""

    devices: tuple[int, ...]
    locations: tuple[DeviceLocation, ...]
    shape: Shape
    meshed: bool
    exclusive: bool = False


class Slices:
    """The virtual devices and slices of all sessions."""

    def __init__(self) -> None:
        self.sessions: dict[int, SessionDevices] = {}

    # ---- sessions and slices

    def open(
        self, session: int, virtual: tuple[VirtualDevice, ...], locations: Mapping[int, DeviceLocation]
    ) -> SessionDevices:
        devices = self.sessions[session] = SessionDevices(
            virtual, dict(locations), dict(locations), closed=partial(self.closed, session)
        )
        return devices

    def close(self, session: int) -> None:
        self.sessions.pop(session, None)

    def closed(self, session: int, location: DeviceLocation) -> str:
        """Return why the session may not use a device: it is in another session's exclusive slice. "" if it may."""
        for other, devices in self.sessions.items():
            for each in devices.slices.values() if other != session and not devices.are_free else ():
                if each.exclusive and any(devices.locations[device] == location for device in each.devices):
                    return (
                        f"device {location.ordinal} of host {location.host} is in slice {each.number} of session "
                        f"{other}, which uses it exclusively"
                    )
        return ""

    def has_others(self, session: int, location: DeviceLocation) -> bool:
        """Return whether another session uses the device or has it in a slice."""
        return any(
            devices.locations[device] == location
            for other, devices in self.sessions.items()
            if other != session and not devices.are_free
            for device in {*devices.used, *devices.sliced}
        )

    def load(self) -> Counter[DeviceLocation]:
        """Return the number of slices on each physical device."""
        return Counter(
            devices.locations[device]
            for devices in self.sessions.values()
            if not devices.are_free
            for each in devices.slices.values()
            for device in each.devices
        )

    def add(self, session: int, choice: Choice) -> Slice:
        """Add the slice that was chosen."""
        devices = self.sessions[session]
        made = Slice(devices.next_slice, choice.devices, choice.shape, choice.meshed, choice.exclusive)
        devices.next_slice += 1
        devices.slices[made.number] = made
        devices.relocate(dict(zip(choice.devices, choice.locations, strict=True)))
        return made

    def release(self, session: int, number: int) -> None:
        """Remove the slice. Its devices keep their locations."""
        self.sessions[session].get(number)
        del self.sessions[session].slices[number]

    # ---- choosing

    def choose(
        self,
        session: int,
        slice_request: SliceRequest,
        islands: Sequence[IslandDevices],
        free_bytes: Callable[[DeviceLocation], int] = lambda location: 1 << 62,
        avoided: Container[int] = (),
    ) -> Choice:
        """Choose the devices of a new slice, on one of the `avoided` islands only if no other one fits.

        Raise RESOURCE_EXHAUSTED, with the free devices, if it does not fit.
        """
        devices = self.sessions[session]
        load = self.load()
        for island in islands:
            if island.number in avoided:
                load.update(dict.fromkeys(island.locations, _AVOIDED))
        free_devices = _FreeDevices(devices)
        shape = slice_request.shape or (slice_request.count,)
        if slice_request.accelerator and any(each.is_kind(kind) for each in islands for kind in _ACCELERATORS):
            slice_request = replace(slice_request, kind=slice_request.kind or slice_request.accelerator)
        _check_islands(devices, slice_request, islands)
        reasons: list[tuple[IslandDevices, str]] = []
        best: tuple[tuple[int, ...], Choice] | None = None
        scattered: tuple[tuple[int, ...], Choice] | None = None
        for island in islands:
            reason = self._unfit(devices, slice_request, island, free_bytes)
            candidates = () if reason else tuple(_candidates(island, slice_request, load))
            if not candidates and not reason:
                reason = (
                    f"it has no sub-mesh {text_of(shape)}"
                    if slice_request.shape
                    else f"it has {counted(len(island.locations), 'device')}"
                )
            shared = {
                location
                for location in island.locations
                if slice_request.exclusive and self.has_others(session, location)
            }
            roomy = {
                location
                for location in island.locations
                if free_bytes(location) >= slice_request.memory_per_device
                and not devices.closed(location)
                and location not in shared
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
            reasons.append((island, reason or (_IN_USE if shared else _NONE_LEFT)))
        found = best or scattered
        if found is not None:
            return msgspec.structs.replace(found[1], exclusive=slice_request.exclusive)
        raise failed(
            Code.RESOURCE_EXHAUSTED,
            f"cannot place {slice_request} on one island: {'; '.join(f'{island}: {why}' for island, why in reasons)}. "
            f"Devices of this session that are in no slice: {free_text(devices)}. "
            f"{_advice(reasons, slice_request.count, len(devices.locations))}",
            Details(Kind.LIMIT, limit="devices", retriable=True),
        )

    def _unfit(
        self,
        devices: SessionDevices,
        slice_request: SliceRequest,
        island: IslandDevices,
        free_bytes: Callable[[DeviceLocation], int],
    ) -> str:
        """Return why the slice cannot be on the island with any shape; "" if it can."""
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
        """Choose the new locations of a slice on an island: `wanted` in that order, or those with the least load.

        Raise INVALID_ARGUMENT or RESOURCE_EXHAUSTED if the locations do not have the slice's shape.
        """
        devices = self.sessions[session]
        each = devices.get(number)
        if island.closed:
            raise StatusError(Code.FAILED_PRECONDITION, f"nothing can be moved to {island}: {island.closed}")
        if wanted:
            points = [island.locations.index(location) for location in wanted if location in island.locations]
            if len(set(points)) != len(each.devices) or len(wanted) != len(each.devices):
                raise invalid(f"slice {number} needs {counted(len(each.devices), 'device')} of {island}, each once")
            if each.meshed and not is_box(points, island.mesh, each.shape):
                raise invalid(f"these devices of {island} do not form a {text_of(each.shape)} mesh in this order")
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
            raise StatusError(Code.RESOURCE_EXHAUSTED, f"{island} has no devices for {slice_request}")
        return dict(zip(each.devices, (island.locations[i] for i in best[2]), strict=True))


def _check_islands(devices: SessionDevices, slice_request: SliceRequest, islands: Sequence[IslandDevices]) -> None:
    """Raise FAILED_PRECONDITION if slices exclude each island, so that no waiting and no release can help."""
    excluded = {devices.island_of(other) for other in slice_request.other_island_than}
    if excluded and excluded.issuperset(each.number for each in islands):
        count = counted(len(islands), "island")
        slices = noun_for(len(slice_request.other_island_than), "slice")
        others = ", ".join(map(str, slice_request.other_island_than))
        raise StatusError(
            Code.FAILED_PRECONDITION,
            f"cannot place {slice_request} on another island than {slices} {others}: this cluster has {count}. Start "
            "it with more islands, the first number of ATOLL_ISLANDS or --islands",
        )


def _advice(reasons: Sequence[tuple[IslandDevices, str]], count: int, total: int) -> str:
    """Return what to do if a slice fits on no island.

    Args:
        reasons: Why the slice does not fit, for each island.
        count: The devices of the slice.
        total: The devices of the session.
    """
    causes = {why for _, why in reasons}
    if _IN_USE in causes:
        return "Omit exclusive=True, or wait until the other sessions have ended"
    if _NONE_LEFT in causes and count > total:  # when the session began, others had exclusive devices
        return f"Request at most {counted(total, 'device')}, or start the script again when other sessions have ended"
    if _NONE_LEFT in causes:
        return "Release a slice of this session with slice.release(), or request fewer devices"
    if any(island.closed for island, _ in reasons):
        return "Try again when all islands are ready, or request a slice that a ready island can have"
    return "Request a slice that one of the islands can have"


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
        """Return free devices of one virtual island for these locations, None if no virtual island has enough.

        Prefer devices that are at the locations; others must be unused. Use the virtual island of which the fewest
        devices change location.
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
        """Yield, per virtual island, `count` free devices at different `allowed` locations with the least load."""
        for here in self._here.values():
            chosen = sorted((load[location], devices[0]) for location, devices in here.items() if location in allowed)
            if len(chosen) >= count:
                yield tuple(sorted(device for _, device in chosen[:count]))


def _rank(load: Mapping[DeviceLocation, int], locations: Sequence[DeviceLocation]) -> tuple[int, int]:
    """Return the number of slices on all these devices, and on the one with the most. Lower is better."""
    loads = [load[location] for location in locations]
    return sum(loads), max(loads)


def _candidates(
    island: IslandDevices, slice_request: SliceRequest, load: Mapping[DeviceLocation, int]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the points of an island's mesh for a slice, with the sum of the box's sides (0 if it is not a box).

    Without a shape, the slice can use any box of its size or, if the mesh has no such box, any devices.
    """
    shapes = [slice_request.shape] if slice_request.shape else compact_shapes(island.mesh, slice_request.count)
    for shape in shapes:
        yield from ((sum(shape), points) for points in boxes(island.mesh, shape))
    if not shapes and slice_request.count <= len(island.locations):
        points = sorted(range(len(island.locations)), key=lambda i: (load[island.locations[i]], i))
        yield 0, tuple(sorted(points[: slice_request.count]))
