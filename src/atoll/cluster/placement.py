"""Virtual devices and slices: which virtual device of a session sits on which physical one (paper, section 4.1).

A session starts with one virtual device for each physical one, in the same places. A slice takes virtual devices of one
virtual island that are in no other slice of the session, and puts them on physical devices of one island: a contiguous
sub-mesh first, then where the fewest slices of all sessions are. One to one inside a slice; many slices share a
physical device in time. A virtual device that something was made on, or for, stays where it sits when a slice is made.

Pure: islands and wishes in, choices out; the caller makes them true.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from atoll.cluster.locations import DeviceLocation
from atoll.cluster.mesh import Shape, boxes, compact_shapes, is_box, text_of
from atoll.cluster.slices import SliceRequest
from atoll.errors import Code, StatusError, invalid, not_found
from atoll.ir.program import Call, Program
from atoll.protocol.messages import VirtualDevice
from atoll.quantities import human_bytes

_GPUS = ("gpu", "cuda", "rocm")


@dataclass(frozen=True)
class IslandDevices:
    """An island as slices see it. `seats[i]` is at point i of the mesh; `closed` says why nothing new goes there."""

    number: int
    mesh: Shape
    locations: tuple[DeviceLocation, ...]
    kinds: tuple[str, ...]  # what its devices call themselves: platform and kind
    closed: str = ""

    def __str__(self) -> str:
        return f"island {self.number} ({text_of(self.mesh)} {'/'.join(self.kinds)})"

    def is_kind(self, wanted: str) -> bool:
        known = {kind.lower() for kind in self.kinds}
        if wanted.lower() in _GPUS:
            return not known.isdisjoint(_GPUS)
        return not wanted or wanted.lower() in known


@dataclass(frozen=True)
class Slice:
    """Virtual devices of a session, in the order of `shape`; `meshed` where that shape was asked for."""

    number: int
    devices: tuple[int, ...]
    shape: Shape
    meshed: bool


@dataclass
class SessionDevices:
    """The virtual devices of a session, where each sits, and its slices. `used` stay where they are but by a move."""

    virtual: tuple[VirtualDevice, ...]
    locations: dict[int, DeviceLocation]
    first_seats: Mapping[int, DeviceLocation]
    slices: dict[int, Slice] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)
    next_slice: int = 1
    shares: bool = False  # some of them sit on one physical device

    def reseat(self, changes: Mapping[int, DeviceLocation]) -> None:
        """They sit elsewhere from now on."""
        self.locations.update(changes)
        self.shares = len(set(self.locations.values())) < len(self.locations)

    def use(self, name: str, groups: Iterable[tuple[int, ...]]) -> None:
        """Something is made on these devices, or for them; those of a group hold parts of one thing.

        Raises INVALID_ARGUMENT where two of a group sit on one physical device.
        """
        for group in groups:
            if self.shares:
                check_apart(name, self.locations, group)
            self.used.update(device for device in group if device in self.locations)

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
        """The devices in no slice that do not sit where they did at first."""
        sliced = self.sliced
        return {
            device.id: self.locations[device.id]
            for device in self.virtual
            if device.id not in sliced and self.locations[device.id] != self.first_seats[device.id]
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
        """The physical island that the slice sits on."""
        return self.locations[self.get(number).devices[0]].island


@dataclass(frozen=True)
class Choice:
    """Virtual devices for a slice, and where each of them sits from now on."""

    devices: tuple[int, ...]
    locations: tuple[DeviceLocation, ...]
    shape: Shape
    meshed: bool


class Slices:
    """The virtual devices and slices of all sessions. Decisions read this and the islands that they are given."""

    def __init__(self) -> None:
        self.sessions: dict[int, SessionDevices] = {}

    # ---- sessions and slices

    def open(
        self, session: int, virtual: tuple[VirtualDevice, ...], locations: Mapping[int, DeviceLocation]
    ) -> SessionDevices:
        devices = self.sessions[session] = SessionDevices(virtual, dict(locations), dict(locations))
        return devices

    def close(self, session: int) -> None:
        self.sessions.pop(session, None)

    def load(self) -> Counter[DeviceLocation]:
        """How many slices sit on each physical device."""
        return Counter(
            devices.locations[device]
            for devices in self.sessions.values()
            for each in devices.slices.values()
            for device in each.devices
        )

    def add(self, session: int, choice: Choice) -> Slice:
        """The choice comes true."""
        devices = self.sessions[session]
        made = Slice(devices.next_slice, choice.devices, choice.shape, choice.meshed)
        devices.next_slice += 1
        devices.slices[made.number] = made
        devices.reseat(dict(zip(choice.devices, choice.locations, strict=True)))
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
        """Where a new slice goes. Raises RESOURCE_EXHAUSTED, with what is free, where there is no such place."""
        devices = self.sessions[session]
        load = self.load()
        seated = _Seated(devices)
        shape = slice_request.shape or (slice_request.count,)
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
                location for location in island.locations if free_bytes(location) >= slice_request.memory_per_device
            }
            for length, points in candidates:
                locations = tuple(island.locations[i] for i in points)
                rank = _rank(load, locations)
                if (best is not None and rank > best[0][:2]) or not roomy.issuperset(locations):
                    continue
                taken = seated.take(locations)
                if taken is not None:
                    moved = sum(devices.locations[d] != s for d, s in zip(taken, locations, strict=True))
                    key = (*rank, length, moved, island.number, *points)
                    if best is None or key < best[0]:
                        best = key, Choice(taken, locations, shape, bool(slice_request.shape))
            if not slice_request.shape and not reason and best is None:
                for taken in seated.as_they_sit(slice_request.count, roomy, load):
                    locations = tuple(devices.locations[device] for device in taken)
                    key = (*_rank(load, locations), island.number, *taken)
                    if scattered is None or key < scattered[0]:
                        scattered = key, Choice(taken, locations, shape, False)
            reasons.append(f"{island}: {reason or 'no free virtual devices can be there'}")
        found = best or scattered
        if found is not None:
            return found[1]
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

    # ---- moving

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
        )
        best = min(ranked, default=None)
        if best is None:
            raise StatusError(Code.RESOURCE_EXHAUSTED, f"{island} has no place for {slice_request}")
        return dict(zip(each.devices, (island.locations[i] for i in best[2]), strict=True))


class _Seated:
    """The free virtual devices of a session, and for which places they will do."""

    def __init__(self, devices: SessionDevices) -> None:
        self._here: dict[int, dict[DeviceLocation, list[int]]] = {}  # by virtual island
        self._unused: dict[int, list[int]] = {}
        self._seats = devices.locations
        for island, free in devices.free().items():
            here = self._here.setdefault(island, {})
            for device in free:
                here.setdefault(devices.locations[device], []).append(device)
            self._unused[island] = [device for device in free if device not in devices.used]

    def take(self, locations: Sequence[DeviceLocation]) -> tuple[int, ...] | None:
        """Free devices of one virtual island for these places: those that sit there, else some that nothing uses.

        Of the islands that have them, the one of which the fewest devices change places.
        """
        best: tuple[int, tuple[int, ...]] | None = None
        for island, here in sorted(self._here.items()):
            sitting = [here.get(location, [None])[0] for location in locations]
            taken = set(sitting)
            spare = (device for device in self._unused[island] if device not in taken)
            chosen = [next(spare, None) if device is None else device for device in sitting]
            if any(device is None for device in chosen):
                continue
            moved = sum(device is None for device in sitting)
            if best is None or moved < best[0]:
                best = moved, tuple(device for device in chosen if device is not None)
        return best[1] if best is not None else None

    def as_they_sit(
        self, count: int, places: set[DeviceLocation], load: Mapping[DeviceLocation, int]
    ) -> Iterator[tuple[int, ...]]:
        """Free devices of one virtual island that sit on different ones of these places: those with least load."""
        for here in self._here.values():
            chosen = sorted((load[location], devices[0]) for location, devices in here.items() if location in places)
            if len(chosen) >= count:
                yield tuple(sorted(device for _, device in chosen[:count]))


def _rank(load: Mapping[DeviceLocation, int], locations: Sequence[DeviceLocation]) -> tuple[int, int]:
    """How many slices sit there: on all together, and on the one with the most. The least is the best."""
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


def free_text(devices: SessionDevices) -> str:
    """Such as "island 0: 2, 3; island 1: none"."""
    return "; ".join(
        f"island {island}: {', '.join(map(str, free)) or 'none'}" for island, free in sorted(devices.free().items())
    )


def check_apart(name: str, locations: Mapping[int, DeviceLocation], group: Sequence[int], share: str = "share") -> None:
    """Raises INVALID_ARGUMENT where two of these virtual devices sit on one physical device, or would do so."""
    taken: dict[DeviceLocation, int] = {}
    for device in group:
        location = locations.get(device)
        other = device if location is None else taken.setdefault(location, device)
        if other != device and location is not None:
            raise invalid(
                f"{name!r} lies on the virtual devices {other} and {device}, which {share} a physical one "
                f"(device {location.ordinal} of host {location.host}): put it on the devices of one slice"
            )


def groups_of(body: Program) -> Iterator[tuple[int, ...]]:
    """The devices of each array and call of a program."""
    for spec in body.arguments:
        yield spec.sharding.devices
    for node in body.nodes:
        for spec in node.outputs:
            yield spec.sharding.devices
        if isinstance(node, Call):
            yield node.devices
