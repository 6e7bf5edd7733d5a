"""What may migrate where: the rules that a migration of virtual devices keeps to, without doing anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from atoll.cluster.lifecycle import IslandState
from atoll.cluster.locations import DeviceLocation, MemoryRequirement, total
from atoll.cluster.resources import ResourceManager
from atoll.cluster.virtual_devices import check_apart
from atoll.errors import Code, StatusError, unimplemented
from atoll.ir import program as ir
from atoll.ir.types import Opaque
from atoll.quantities import human_bytes
from atoll.scheduling.buffer_directory import Entry
from atoll.scheduling.memory_ledger import MemoryLedger
from atoll.scheduling.programs import RegisteredProgram, device_groups
from atoll.scheduling.session import Session

# Where virtual devices go.
Changes = Mapping[int, DeviceLocation]


def check_changes(
    session: Session, wanted: Changes, resources: ResourceManager, can_persist: bool = False
) -> tuple[Changes, set[int]]:
    """What of `wanted` is a change, and the islands that it is about: with `can_persist`, where all of it is to be.

    Raises FAILED_PRECONDITION for what would be torn apart or cannot be there, UNIMPLEMENTED for arrays that cannot
    be copied.
    """
    locations = session.devices.locations
    changes = {device: location for device, location in wanted.items() if locations[device] != location}
    if not changes and not can_persist:
        raise StatusError(Code.FAILED_PRECONDITION, "they are there already")
    if can_persist:
        islands = {location.island for location in wanted.values()}
    else:
        islands = {location.island for location in changes.values()} | {locations[device].island for device in changes}
    for island in sorted(islands):
        if (
            not resources.islands[island].works
            or island in session.unacknowledged_failures
            or island in session.needs_recompile
        ):
            state = resources.islands[island].state
            reason = "has just come back" if state is IslandState.READY else f"is {state}"
            raise StatusError(Code.FAILED_PRECONDITION, f"island {island} {reason}")
    reasons = {session.devices.closed(location) for location in (wanted if can_persist else changes).values()} - {""}
    if reasons:
        raise StatusError(Code.FAILED_PRECONDITION, min(reasons))
    after = {**locations, **changes}
    for definition in session.definitions.values():
        for group in device_groups(definition):
            if not changes.keys().isdisjoint(group):
                check_apart(definition.name, after, group, "would share")
        for node in definition.nodes:
            if isinstance(node, ir.Call):
                _check_together(f"{definition.name!r}", node.devices, changes, after)
    for request in session.function_requests.values():
        devices = [device for row in request.assignment for device in row]
        _check_together("a compiled function", devices, changes, after)
        if not changes.keys().isdisjoint(devices):
            check_apart("a compiled function", after, devices, "would share")
    for handle, entry in session.directory.entries.items():
        if is_affected(entry, changes):
            assert entry.spec is not None
            check_apart(f"array {handle}", after, entry.spec.sharding.devices, "would share")
            if isinstance(entry.spec.sharding.tiling, Opaque) or entry.spec.dtype in ("token", "opaque"):
                raise unimplemented(f"array {handle}, made by {entry.producer!r}, is of a kind that cannot be moved")
    return changes, islands


def has_arrays(session: Session, island: int) -> bool:
    """Whether something that the session may still use is on the island."""
    there = {device: location for device, location in session.devices.locations.items() if location.island == island}
    return any(is_affected(entry, there) for entry in session.directory.entries.values())


def is_affected(entry: Entry, changes: Changes) -> bool:
    """Whether an array is on devices that change places."""
    return (
        entry.spec is not None
        and not entry.consumed
        and entry.error is None
        and not changes.keys().isdisjoint(entry.spec.sharding.devices)
    )


def check_memory(session: Session, programs: Iterable[int], ledger: MemoryLedger) -> None:
    """Raises RESOURCE_EXHAUSTED where not all copies fit at once: nobody shall wait for them in vain."""
    requirements: list[MemoryRequirement] = []
    for number in programs:
        program = session.programs[number]
        assert isinstance(program, RegisteredProgram)
        for gang in program.gangs:
            requirements.extend(each.requirement for each in gang.makes)
            requirements.append(gang.scratch)
    wanted = total(requirements)
    lacking = ledger.lacking(wanted)
    if lacking is not None:
        raise StatusError(
            Code.RESOURCE_EXHAUSTED,
            f"its arrays need {human_bytes(dict(wanted)[lacking])} on device {lacking[1]} of host {lacking[0]}, "
            f"where {human_bytes(max(0, ledger.free(lacking)))} are free",
        )


def _check_together(what: str, devices: Iterable[int], changes: Changes, after: Mapping[int, DeviceLocation]) -> None:
    devices = list(devices)
    islands = sorted({after[device].island for device in devices if device in after})
    if len(islands) > 1 and not changes.keys().isdisjoint(devices):
        outside = sorted(device for device in devices if device not in changes)
        raise StatusError(
            Code.FAILED_PRECONDITION,
            f"{what} runs on virtual devices that move and on others ({', '.join(map(str, outside))}): it would lie on "
            f"the islands {', '.join(map(str, islands))}",
        )
