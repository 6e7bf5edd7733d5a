"""Packs small arrays of a tree on their devices, and unpacks them there: see `protocol.tree_forms`.

A pack has arrays of one shape, and all packs of the same shape have the same size, so that devices compile few
functions.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from atoll.client import jax_internals as internals
from atoll.client.client_caches import client_cache
from atoll.client.plugin_programs import submit
from atoll.ir.types import DTYPE_BITS
from atoll.protocol.submission import Deferring, encode
from atoll.protocol.tree_forms import MAX_PACKED, Pack

# Arrays with at most this many bytes per shard are packed.
SMALL_BYTES = 16 << 10
# Fewer arrays of one shape are not packed, because the devices would have to compile functions for them.
FEWEST = 32
_SIZES = (MAX_PACKED, 128, FEWEST)  # of packs
_MIN_BITS = 8

# ---- packing


@dataclass(frozen=True)
class _Kind:
    """The common properties of the arrays of a pack. `mesh` is None for arrays on one device.

    `sharding` is that of their pack, which is cut over the `axes` of the mesh.
    """

    mesh: Mesh | None
    axes: tuple[str, ...]
    cuts: tuple[int, ...]
    spec: Any
    sharding: Any
    dtype: Any
    shape: tuple[int, ...]


def by_type(shardings: Iterable[Any], avals: Iterable[Any]) -> dict[tuple[Any, Any], list[int]]:
    """Return the positions of the arrays of each type. A type is a sharding and an abstract value."""
    found: dict[tuple[Any, Any], list[int]] = defaultdict(list)
    for position, each in enumerate(zip(shardings, avals, strict=True)):
        found[each].append(position)
    return found


def groups(types: Mapping[tuple[Any, Any], Sequence[int]]) -> list[tuple[list[int], int]]:
    """Return the arrays that are worth a pack: for each pack, their positions and its size.

    Args:
      types: the positions of the arrays of each type, as `by_type` returns them.
    """
    found: dict[_Kind, list[int]] = defaultdict(list)
    for (sharding, aval), some in types.items():
        kind = _kind(sharding, aval.dtype, aval.shape)
        if kind is not None:
            found[kind] += some
    for positions in found.values():
        positions.sort()
    return [
        (positions[first : first + count], count)
        for positions in found.values()
        if len(positions) >= FEWEST
        for count in (_size(len(positions)),)
        for first in range(0, len(positions), count)
    ]


def _size(count: int) -> int:
    """Return the size of packs of so many arrays: the largest one that needs padding for at most half of them."""
    return next((size for size in _SIZES if -count % size <= count // 2), FEWEST)


def _kind(sharding: Any, dtype: Any, shape: tuple[int, ...]) -> _Kind | None:
    """Return the kind of arrays of this type, or None if they are not packed.

    Numbers of less than 8 bits are not: XLA ends the process that compiles a concatenation of int2 for a CPU.
    """
    if not _is_in_default_memory(sharding) or DTYPE_BITS.get(dtype.name, 0) < _MIN_BITS:
        return None
    nbytes = math.prod(sharding.shard_shape(shape)) * dtype.itemsize
    if not 0 < nbytes <= SMALL_BYTES:
        return None
    if isinstance(sharding, SingleDeviceSharding):
        return _Kind(None, (), (0,) * len(shape), PartitionSpec(), sharding, dtype, shape)
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    names = _names(sharding.spec, len(shape))
    axes = tuple(itertools.chain.from_iterable(names))
    packed = NamedSharding(sharding.mesh, PartitionSpec(axes or None))
    return _Kind(sharding.mesh, axes, tuple(map(len, names)), sharding.spec, packed, dtype, shape)


def mesh_of(sharding: Any) -> AbstractContextManager[Any]:
    """Use the mesh of the sharding in place of the one that the script may have set, which shard_map would refuse."""
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    if not isinstance(mesh, Mesh):
        mesh = Mesh(np.array(sharding._device_assignment), "all")
    manager: AbstractContextManager[Any] = jax.set_mesh(mesh)
    return manager


def _is_in_default_memory(sharding: Any) -> bool:
    return sharding.memory_kind in (None, sharding._device_assignment[0].default_memory().kind)


def _names(spec: Any, rank: int) -> list[tuple[str, ...]]:
    """Return the axes over which each dimension is cut."""
    names: list[tuple[str, ...]] = [
        () if each is None else (each,) if isinstance(each, str) else tuple(each) for each in spec
    ]
    return names + [()] * (rank - len(names))


def described(sharding: Any, aval: Any, paths: Sequence[str], count: int) -> Pack:
    """Return the description of a pack of `count` arrays of this type, which begins with those of the paths."""
    kind = _kind(sharding, aval.dtype, aval.shape)
    assert kind is not None
    mesh, axes = (), ()
    if kind.mesh is not None:
        mesh = tuple(kind.mesh.devices.shape)
        axes = tuple(map(kind.mesh.axis_names.index, kind.axes))
    return Pack(tuple(paths), count, kind.shape, kind.cuts, mesh, axes)


def pack(leaves: Sequence[Any], count: int) -> Any:
    """Return a pack of `count` arrays, which begins with these arrays of one kind."""
    kind = _kind(leaves[0].sharding, leaves[0].dtype, leaves[0].shape)
    assert kind is not None
    padding = [leaves[0]] * (count - len(leaves))
    return _packing(kind, count)([*leaves, *padding])


@client_cache(256)
def _packing(kind: _Kind, count: int) -> Callable[[list[Any]], Any]:
    """Return a function of `count` arrays. It is compiled, because jit looks at the type of each argument of a call."""

    def atoll_pack(*shards: Any) -> Any:
        return jnp.concatenate([shard.ravel() for shard in shards])

    if kind.mesh is None or not kind.axes:
        jitted = jax.jit(atoll_pack, out_shardings=kind.sharding)
    else:
        out = kind.sharding.spec
        specs = (kind.spec,) * count
        mapped = jax.shard_map(atoll_pack, mesh=kind.mesh, in_specs=specs, out_specs=out, check_vma=False)
        jitted = jax.jit(mapped)
    sharding = kind.sharding if kind.mesh is None else NamedSharding(kind.mesh, kind.spec)
    with mesh_of(sharding), jax.enable_x64(True):  # the arrays may have 64 bits though the script does not use 64 now
        argument = jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=sharding)
        compiled = jitted.lower(*[argument] * count).compile()
    (result,) = jax.tree.leaves(compiled.out_info)
    execute = compiled.runtime_executable().execute_sharded
    handlers = [internals.result_handler(jax.core.ShapedArray(result.shape, result.dtype), kind.sharding, True)]

    def run(arrays: list[Any]) -> Any:
        return execute(arrays).consume_with_handlers(handlers)[0]

    return run


def copied(arrays: Sequence[Any]) -> list[Any]:
    """Return copies of the arrays on their devices."""
    copies: list[Any] = list(arrays)
    found: dict[Any, list[int]] = defaultdict(list)
    for position, each in enumerate(arrays):
        found[tuple(each.sharding._device_assignment)].append(position)
    for positions in found.values():
        some = [arrays[position] for position in positions]
        with mesh_of(some[0].sharding):
            made = _copying(tuple(each.sharding for each in some))(*some)
        for position, each in zip(positions, made, strict=True):
            copies[position] = each
    return copies


@client_cache(256)
def _copying(shardings: tuple[Any, ...]) -> Any:
    def atoll_copy(*xs: Any) -> list[Any]:
        return [jnp.copy(x) for x in xs]

    return jax.jit(atoll_copy, out_shardings=list(shardings))


# ---- unpacking


def target(pack: Pack, sharding: Any) -> Any:
    """Return the sharding with which a pack is read, so that its arrays can be made with `sharding`."""
    same = _same_cut(pack, sharding)
    if same is not None:
        return same
    devices = sharding._device_assignment
    if len(devices) == 1:
        return SingleDeviceSharding(devices[0])
    return NamedSharding(Mesh(np.array(devices), "all"), PartitionSpec())


def _same_cut(pack: Pack, sharding: Any) -> Any:
    """Return the sharding of the pack if its arrays are to be cut as they are in the pack, or None."""
    mesh = getattr(sharding, "mesh", None)
    if not pack.axes or not isinstance(mesh, Mesh) or mesh.devices.shape != pack.mesh:
        return None
    axes = tuple(mesh.axis_names[axis] for axis in pack.axes)
    names = iter(axes)
    cut = [tuple(itertools.islice(names, cuts)) for cuts in pack.cuts]
    if _names(sharding.spec, len(pack.shape)) != cut or not _is_in_default_memory(sharding):
        return None
    return NamedSharding(mesh, PartitionSpec(axes))


def unpack(pack: Pack, packed: Any, shardings: Sequence[Any]) -> list[Any]:
    """Return the arrays of the pack with these shardings. The pack was read with the `target` of the first one."""
    first = shardings[0] if _is_in_default_memory(shardings[0]) else packed.sharding
    unpacking = _unpacking(msgspec.structs.replace(pack, paths=("",)), first, packed.dtype, packed.sharding)
    made = unpacking(packed)
    del made[len(pack.paths) :]
    if shardings.count(first) < len(shardings):
        made = [
            each if sharding == first else jax.device_put(each, sharding)
            for each, sharding in zip(made, shardings, strict=True)
        ]
    return made


@client_cache(256)
def _unpacking(pack: Pack, sharding: Any, dtype: Any, packed_sharding: Any) -> Callable[[Any], list[Any]]:
    """Return a function that returns all arrays of a pack. It does not depend on their paths.

    The devices run it when the script uses one of the arrays.
    """
    size = pack.count * math.prod(pack.shape)
    with mesh_of(packed_sharding), jax.enable_x64(True):  # as in `_packing`
        argument = jax.ShapeDtypeStruct((size,), dtype, sharding=packed_sharding)
        compiled = _unpacking_function(pack, sharding).lower(argument).compile()
    client = next(iter(sharding.device_set)).client
    execute = submit(client, encode(Deferring(compiled.runtime_executable().fingerprint))).execute_sharded
    handlers = [internals.result_handler(jax.core.ShapedArray(pack.shape, dtype), sharding, True)] * pack.count

    def run(packed: Any) -> list[Any]:
        made: list[Any] = execute([packed]).consume_with_handlers(handlers)
        return made

    return run


def _unpacking_function(pack: Pack, sharding: Any) -> Any:
    """Return the function that returns all arrays of a pack, for JAX to compile."""
    same = _same_cut(pack, sharding)

    def atoll_unpack_shards(shard: Any) -> list[Any]:
        return _rows(shard.reshape(pack.count, *pack.shard_shape))

    def atoll_unpack(packed: Any) -> list[Any]:
        parts = packed.reshape(*pack.parts, pack.count, *pack.shard_shape)
        axes = iter(range(len(pack.axes)))
        order = [len(pack.axes)]
        for dimension, cuts in enumerate(pack.cuts):
            order += [*itertools.islice(axes, cuts), len(pack.axes) + 1 + dimension]
        return _rows(parts.transpose(order).reshape(pack.count, *pack.shape))

    if same is None:
        return jax.jit(atoll_unpack, out_shardings=[sharding] * pack.count)
    specs = [sharding.spec] * pack.count
    return jax.jit(
        jax.shard_map(atoll_unpack_shards, mesh=same.mesh, in_specs=(same.spec,), out_specs=specs, check_vma=False)
    )


def _rows(stack: Any) -> list[Any]:
    """Return the rows of an array.

    The barrier hides from XLA that the numbers of the rows are constants. So it compiles one kernel for all rows. The
    XLA of JAX 0.10 compiles one for each all the same, which takes about 10 ms on a CPU.
    """
    numbers = jax.lax.optimization_barrier(tuple(jnp.int32(i) for i in range(stack.shape[0])))
    return [jax.lax.dynamic_index_in_dim(stack, number, keepdims=False) for number in numbers]
