"""Arrays that are views: all of their memory belongs to other arrays, whose contents are spilled once."""

from __future__ import annotations

from collections.abc import Mapping

from atoll.cluster.locations import DeviceLocation
from atoll.ir import program as ir
from atoll.ir.types import ArraySpec, shard_shape
from atoll.state.buffer_directory import Entry
from atoll.state.memory_ledger import Block

# A handle and the position of one of its shards.
Shard = tuple[int, int]


def views_of(entries: Mapping[int, Entry], locations: Mapping[int, DeviceLocation]) -> dict[int, tuple[Shard, ...]]:
    """Return the arrays whose memory all belongs to others of these arrays, with the source of each shard.

    No array is a view of a view.
    """
    sharing = []
    for item in entries.items():  # without a call per array, since there may be many
        for shared in item[1].blocks:
            if shared.users > 1:
                sharing.append(item)
                break
    sharing.sort(key=lambda each: (-len(spec_of(each[1]).sharding.devices), each[0]))
    known: dict[tuple[int, DeviceLocation], tuple[Shard, object]] = {}
    views: dict[int, tuple[Shard, ...]] = {}
    for handle, entry in sharing:
        spec = spec_of(entry)
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
    """Return a program that makes an array of shards of others. Its arguments are in the order of `specs`."""
    arguments = list(specs)
    mappings = tuple(
        ir.Mapping(arguments.index(handle), 0, (shard, shard + 1, 1), (position, position + 1, 1))
        for position, (handle, shard) in enumerate(sources)
    )
    node = ir.Rearrange(tuple(range(len(arguments))), (spec,), mappings)
    return ir.single("bring back a view", tuple(specs.values()), node)


def spec_of(entry: Entry) -> ArraySpec:
    """Return the type of an array, which is known for all but errors."""
    assert entry.spec is not None
    return entry.spec


def _block_on(entry: Entry, location: DeviceLocation) -> Block | None:
    """Return the block with the array's memory at this location, or None unless there is exactly one."""
    where = (location.host, location.ordinal)
    found = [block for block in entry.blocks if any(device == where for device, _ in block.requirement)]
    return found[0] if len(found) == 1 else None


def _kind(spec: ArraySpec, position: int) -> object:
    """Return a value that is equal for shards that can be views of each other."""
    shape = shard_shape(spec.sharding, spec.shape, position)
    return spec.dtype, shape, spec.layout, spec.sharding.memory_kind
