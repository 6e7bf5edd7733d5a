"""Arrays that share their memory: parts and the whole that they are of. What they hold is spilled once."""

from __future__ import annotations

from collections.abc import Mapping

from atoll.cluster.locations import DeviceLocation
from atoll.ir import program as ir
from atoll.ir.types import ArraySpec, shard_shape
from atoll.scheduling.buffer_directory import Entry
from atoll.scheduling.memory_ledger import Block

# Shard number `position` of an array.
Shard = tuple[int, int]


def views_of(entries: Mapping[int, Entry], locations: Mapping[int, DeviceLocation]) -> dict[int, tuple[Shard, ...]]:
    """Those of these arrays of which others have all the memory: for each of their shards, which shard of another one
    it is. No array is a view of a view.
    """
    sharing = [each for each in entries.items() if any(block.users > 1 for block in each[1].blocks)]
    sharing.sort(key=lambda each: (-len(_spec(each[1]).sharding.devices), each[0]))
    known: dict[tuple[int, DeviceLocation], tuple[Shard, object]] = {}
    views: dict[int, tuple[Shard, ...]] = {}
    for handle, entry in sharing:
        spec = _spec(entry)
        own: dict[tuple[int, DeviceLocation], tuple[Shard, object]] = {}
        sources: list[Shard] = []
        for position, device in enumerate(spec.sharding.devices):
            block = _block_on(entry, locations[device])
            if block is None:
                continue
            key, kind = (id(block), locations[device]), _kind(spec, position)
            own[key] = (handle, position), kind
            source = known.get(key)
            if source is not None and source[1] == kind:
                sources.append(source[0])
        if len(sources) == len(spec.sharding.devices):
            views[handle] = tuple(sources)
        else:
            known.update((key, value) for key, value in own.items() if key not in known)
    return views


def view_program(spec: ArraySpec, sources: tuple[Shard, ...], specs: Mapping[int, ArraySpec]) -> ir.Program:
    """Makes an array of shards of others, whose handles are the program's arguments in their order in `specs`."""
    arguments = list(specs)
    mappings = tuple(
        ir.Mapping(arguments.index(handle), 0, (shard, shard + 1, 1), (position, position + 1, 1))
        for position, (handle, shard) in enumerate(sources)
    )
    node = ir.Rearrange(tuple(range(len(arguments))), (spec,), mappings)
    return ir.single("bring back a view", tuple(specs.values()), node)


def _spec(entry: Entry) -> ArraySpec:
    assert entry.spec is not None
    return entry.spec


def _block_on(entry: Entry, location: DeviceLocation) -> Block | None:
    """The one block of the array's memory that it has there."""
    where = (location.host, location.ordinal)
    found = [block for block in entry.blocks if any(device == where for device, _ in block.requirement)]
    return found[0] if len(found) == 1 else None


def _kind(spec: ArraySpec, position: int) -> object:
    """What shards have in common that may be each other's."""
    shape = shard_shape(spec.sharding, spec.shape, position)
    return spec.dtype, shape, spec.layout, spec.sharding.memory_kind
