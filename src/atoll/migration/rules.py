"""Rules for where sessions may go: which changes a migration may make, and what a resumed session needs there."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping

import msgspec

from atoll.cluster.lifecycle import IslandState
from atoll.cluster.locations import DeviceLocation, HostDevice, MemoryRequirement, total
from atoll.cluster.resources import ResourceManager
from atoll.cluster.slice_placement import Slices
from atoll.cluster.virtual_devices import check_apart
from atoll.errors import Code, StatusError, not_found, unimplemented
from atoll.ir import program as ir
from atoll.ir.types import DTYPE_BITS, ArraySpec, Opaque, shard_shape
from atoll.launch.reservations import Reservations
from atoll.quantities import human_bytes
from atoll.state.buffer_directory import Entry
from atoll.state.memory_ledger import MemoryLedger
from atoll.state.programs import RegisteredProgram, device_groups
from atoll.state.session import Session

# The new locations of virtual devices.
Changes = Mapping[int, DeviceLocation]

# Limits for a session that is moved or suspended: its arrays, their shards, and the shards on one host. The controller
# handles all arrays in a few turns, and a host reports its shards in one message.
MAX_MOVED_ARRAYS = 1 << 16
MAX_MOVED_SHARDS = 1 << 20
MAX_MOVED_ON_HOST = 1 << 18


def check_size(session: Session) -> None:
    """Raise RESOURCE_EXHAUSTED if the session has too much to be moved or suspended."""
    entries, locations = session.directory.entries, session.devices.locations
    if len(entries) > MAX_MOVED_ARRAYS:
        raise _too_large(session, MAX_MOVED_ARRAYS, "arrays")
    shards, on_hosts = 0, Counter[int]()
    # By identity, since Python computes the hash of a tuple at each use. Arrays of one program share a tuple.
    placed = [entry.spec.sharding.devices for entry in entries.values() if entry.spec is not None]
    counts, by_identity = Counter(map(id, placed)), dict(zip(map(id, placed), placed, strict=True))
    for identity, count in counts.items():
        devices = by_identity[identity]
        shards += count * len(devices)
        if shards > MAX_MOVED_SHARDS:
            raise _too_large(session, MAX_MOVED_SHARDS, "shards of arrays")
        for device in devices:
            if device in locations:
                on_hosts[locations[device].host] += count
    if max(on_hosts.values(), default=0) > MAX_MOVED_ON_HOST:
        raise _too_large(session, MAX_MOVED_ON_HOST, "shards of arrays on one host")


def _too_large(session: Session, most: int, what: str) -> StatusError:
    text = f"{session.name} cannot be moved or suspended while it has more than {most:,} {what}"
    return StatusError(Code.RESOURCE_EXHAUSTED, text)


def check_changes(
    session: Session, wanted: Changes, resources: ResourceManager, may_stay: bool = False
) -> tuple[Changes, set[int]]:
    """Return the part of `wanted` that is a change, and the islands it affects.

    With `may_stay`, `wanted` may change nothing, and the islands are all that it names. Raises FAILED_PRECONDITION
    if the devices of a function on one island would be separated, or if devices cannot be there, and UNIMPLEMENTED if
    arrays cannot be copied.
    """
    locations = session.devices.locations
    changes = {device: location for device, location in wanted.items() if locations[device] != location}
    if not changes and not may_stay:
        raise StatusError(Code.FAILED_PRECONDITION, "the devices are there already")
    if may_stay:
        islands = {location.island for location in wanted.values()}
    else:
        islands = {location.island for location in changes.values()} | {locations[device].island for device in changes}
    targets = {location.island for location in (wanted if may_stay else changes).values()}
    for island in sorted(islands):
        record, state = resources.islands[island], resources.islands[island].state
        just_restarted = island in session.unacknowledged_failures or session.number in record.needs_recompile
        is_leaving = island in targets and state is IslandState.DRAINING
        if just_restarted or is_leaving or not record.works:
            reason = "has just restarted" if state is IslandState.READY else f"is {state}"
            raise StatusError(Code.FAILED_PRECONDITION, f"island {island} {reason}")
    reasons = {session.devices.closed(location) for location in (wanted if may_stay else changes).values()} - {""}
    if reasons:
        raise StatusError(Code.FAILED_PRECONDITION, min(reasons))
    after = {**locations, **changes}

    def check_together(what: str, devices: Collection[int]) -> None:
        is_spanning = len({locations[device].island for device in devices if device in locations}) > 1
        if not is_spanning:
            _check_together(what, devices, changes, after)

    for definition in session.definitions.values():
        for group in device_groups(definition):
            if not changes.keys().isdisjoint(group):
                check_apart(definition.name, after, group, "would share")
        for node in definition.nodes:
            if isinstance(node, ir.Call):
                check_together(f"{definition.name!r}", node.devices)
    for request in session.function_requests.values():
        devices = [device for row in request.assignment for device in row]
        check_together("a compiled function", devices)
        if not changes.keys().isdisjoint(devices):
            check_apart("a compiled function", after, devices, "would share")
    checked: set[int] = set()  # devices of arrays, by identity: arrays of one program share a tuple
    for handle, entry in session.directory.entries.items():
        if is_affected(entry, changes):
            assert entry.spec is not None
            devices_of_array = entry.spec.sharding.devices
            if id(devices_of_array) not in checked:
                check_apart(f"array {handle}", after, devices_of_array, "would share")
                checked.add(id(devices_of_array))
            if isinstance(entry.spec.sharding.tiling, Opaque) or entry.spec.dtype in ("token", "opaque"):
                raise unimplemented(f"array {handle}, made by {entry.producer!r}, is of a kind that cannot be moved")
    return changes, islands


def has_arrays(session: Session, island: int) -> bool:
    """Whether the island has arrays that the session may still use."""
    there = {device: location for device, location in session.devices.locations.items() if location.island == island}
    return any(is_affected(entry, there) for entry in session.directory.entries.values())


def is_affected(entry: Entry, changes: Changes) -> bool:
    """Whether the array is on devices that change places."""
    return (
        entry.spec is not None
        and not entry.consumed
        and entry.error is None
        and not changes.keys().isdisjoint(entry.spec.sharding.devices)
    )


def memory_of(session: Session, number: int) -> MemoryRequirement:
    """Return the memory that a launch of this program needs."""
    program = session.programs[number]
    assert isinstance(program, RegisteredProgram)
    requirements: list[MemoryRequirement] = []
    for gang in program.gangs:
        requirements.extend(each.requirement for each in gang.makes)
        requirements.append(gang.scratch)
    return total(requirements)


def check_memory(needed: MemoryRequirement, ledger: MemoryLedger) -> None:
    """Raise RESOURCE_EXHAUSTED if this memory is not free now."""
    lacking = ledger.lacking(needed)
    if lacking is not None:
        raise MemoryLackedError(lacking, dict(needed)[lacking], ledger)


class MemoryLackedError(StatusError):
    """The error for copies that need more bytes of a device than are free there."""

    def __init__(self, device: HostDevice, nbytes: int, ledger: MemoryLedger) -> None:
        super().__init__(
            Code.RESOURCE_EXHAUSTED,
            f"its arrays need {human_bytes(nbytes)} on device {device[1]} of host {device[0]}, "
            f"where only {human_bytes(max(0, ledger.free(device)))} are free",
        )
        self.device = device
        self.nbytes = nbytes


def _check_together(what: str, devices: Collection[int], changes: Changes, after: Mapping[int, DeviceLocation]) -> None:
    islands = sorted({after[device].island for device in devices if device in after})
    if len(islands) > 1 and not changes.keys().isdisjoint(devices):
        outside = sorted(device for device in devices if device not in changes)
        raise StatusError(
            Code.FAILED_PRECONDITION,
            f"{what} runs on virtual devices that move and on others ({', '.join(map(str, outside))}): it would span "
            f"the islands {', '.join(map(str, islands))}",
        )


class MemoryNeed(msgspec.Struct, frozen=True):
    """The bytes that a suspended session's arrays need on each of its virtual devices."""

    by_device: dict[int, int] = msgspec.field(default_factory=dict)

    @classmethod
    def of(cls, session: Session) -> MemoryNeed:
        """Return the need of the session's spilled arrays."""
        found: dict[int, int] = {}
        counts: dict[int, tuple[ArraySpec, int]] = {}  # by identity: arrays of one program often share their type
        for entry in session.directory.entries.values():
            # A view shares the memory of other arrays.
            if entry.spilled is not None and not entry.spilled.views and entry.spec is not None and entry.error is None:
                counts[id(entry.spec)] = entry.spec, counts.get(id(entry.spec), (entry.spec, 0))[1] + 1
        for spec, count in counts.values():
            for position, device in enumerate(spec.sharding.devices):
                shape = shard_shape(spec.sharding, spec.shape, position)
                nbytes = math.prod(shape) * DTYPE_BITS[spec.dtype] // 8
                found[device] = found.get(device, 0) + count * nbytes
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
        """Return what prevents the session from resuming at these places and which sessions hold it, or ""."""
        for island in sorted({location.island for location in places.values()}):
            record = resources.islands[island]
            if not record.works or record.state is IslandState.DRAINING:
                return f"island {island}, which is {record.state}"
            if island in session.unacknowledged_failures:
                return (
                    f"island {island}, which has just restarted, and for its script ({session.label or session.pid}) "
                    f"to connect again. If the script has ended, run `atoll end-session {session.number}`"
                )
            if session.number in record.needs_recompile:
                return f"island {island}, which has just restarted, and for its functions to be compiled there"
        exclusive = _exclusive(session)
        for device, location in places.items():
            reason = session.devices.closed(location)
            if reason:
                return f"device {resources.number_of(location)}: {reason}"
            if device in exclusive and slices.has_others(session.number, location):
                return f"device {resources.number_of(location)}, which other sessions use"
        wanted: dict[HostDevice, int] = {}
        for device, nbytes in self.by_device.items():
            where = places[device]
            wanted[where.host, where.ordinal] = wanted.get((where.host, where.ordinal), 0) + nbytes
        lacking = memory.ledger.lacking(tuple(wanted.items()))
        if lacking is None:
            return ""
        text = f"{human_bytes(wanted[lacking])} on device {resources.topology.number_of(*lacking)}, where only "
        text += f"{human_bytes(max(0, memory.ledger.free(lacking)))} are free"
        holders = memory.waits.holders(lacking)
        return text + (f"; the rest is held by {', '.join(holders)}" if holders else "")


def _exclusive(session: Session) -> set[int]:
    return {device for each in session.devices.slices.values() if each.exclusive for device in each.devices}


def current_places(session: Session) -> dict[int, DeviceLocation]:
    """Return the locations of the devices that the session's arrays, functions or slices use."""
    devices = session.devices
    return {device: devices.locations[device] for device in sorted(devices.used | devices.sliced)}


def places_on(session: Session, islands: tuple[int, ...], resources: ResourceManager) -> dict[int, DeviceLocation]:
    """Return the locations of these devices on other islands, one for each current island, with equal coordinates.

    Raises FAILED_PRECONDITION if the islands differ in number or shape, and NOT_FOUND if one does not exist.
    """
    here = current_places(session)
    sources = sorted({location.island for location in here.values()})
    if len(islands) != len(sources):
        text = f"session {session.number} is on {_islands(sources)}: name as many islands, in that order"
        raise StatusError(Code.FAILED_PRECONDITION, text)
    there: dict[DeviceLocation, DeviceLocation] = {}
    for source, target in zip(sources, islands, strict=True):
        if target not in resources.islands or not resources.islands[target].was_ready:
            raise not_found(f"island {target} does not exist (atoll status lists them)")
        before, after = resources.devices(source), resources.devices_for(target, session.platform)
        if after.closed:
            raise StatusError(Code.FAILED_PRECONDITION, f"island {target}: {after.closed}")
        if (before.mesh, before.kinds) != (after.mesh, after.kinds):
            raise StatusError(Code.FAILED_PRECONDITION, f"{after} differs from {before}")
        there.update(zip(before.locations, after.locations, strict=True))
    return {device: there[location] for device, location in here.items()}


def _islands(numbers: list[int]) -> str:
    return f"the islands {', '.join(map(str, numbers))}" if len(numbers) != 1 else f"island {numbers[0]}"
