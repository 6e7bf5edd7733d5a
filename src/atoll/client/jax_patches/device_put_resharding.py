"""Reshards arrays on the cluster in `jax.device_put`, instead of through this process.

If the shards of the new sharding differ from the existing ones, `jax.device_put` reads the whole array into the process
and sends it again, also in stock JAX. With Atoll, both directions cross a network. Therefore a compiled computation
reshards on the same devices, as in a jit, and a program reshards to other devices. Both return before the array exists.

JAX splits an array on one device there, and then copies the parts, so the device holds the array twice. If the parts go
to another island, a program sends them directly.

On CPUs, single small arrays still use JAX's own path, which is faster than to compile and run a computation. Atoll
reshards them on the cluster if a transfer guard forbids that path. It also does so if they have 64 bits while the
script has switched 64 bits off, because that path would truncate their contents.

Several arrays of a tree, of any size, that go to other devices or from one device to several are one program. Several
arrays of a tree that have the same type and stay on their devices are worth a compilation, also if they are small.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from atoll.client.client_caches import client_cache
from atoll.client.jax_patches.patch import Patch, Replacement
from atoll.client.plugin_programs import is_atoll
from atoll.errors import ProgramError

CPU_MIN_BYTES = 4 << 20  # smallest array that is resharded on the cluster, if its devices are CPUs
MIN_ARRAYS = 4  # of a tree, for which a computation or a program is faster than JAX's own path for each small array
MAX_ARRAYS = 512  # of one program
_MAX_KEPT = 1024  # computations


def _on_the_cluster(through_the_process: Callable[..., Any]) -> Callable[..., Any]:
    from atoll.client import jax_internals as internals

    def shard_sharded_device_array_slow_path(x: Any, devices: Sequence[Any], indices: Any, sharding: Any) -> Any:
        indices = tuple(indices)
        if _should_reshard(x, sharding, indices):
            x._check_if_deleted()
            with internals.set_current_trace(internals.eager_trace), contextlib.suppress(ProgramError):
                if internals.can_compile_resharding(x.aval, x.sharding, sharding):
                    return _computation(x, sharding)(x)
                return _program(sharding)(x)
        return through_the_process(x, devices, indices, sharding)

    return shard_sharded_device_array_slow_path


def _to_other_islands(cut_where_it_is: Callable[..., Any]) -> Callable[..., Any]:
    from atoll.client import jax_internals as internals

    def shard_device_array(x: Any, devices: Sequence[Any], indices: Any, sharding: Any) -> Any:
        indices = tuple(indices)
        if _should_reshard(x, sharding, indices) and _islands(x.sharding).isdisjoint(_islands(sharding)):
            with internals.set_current_trace(internals.eager_trace), contextlib.suppress(ProgramError):
                return _program(sharding)(x)
        return cut_where_it_is(x, devices, indices, sharding)

    return shard_device_array


def _together(one_by_one: Callable[..., Any]) -> Callable[..., Any]:
    from atoll.client import jax_internals as internals

    def _array_shard_arg(
        xs: Sequence[Any], shardings: Sequence[Any], layouts: Sequence[Any], copy_semantics: Sequence[Any]
    ) -> list[Any]:
        made: dict[int, Any] = {}
        if internals.CopySemantics.DONATE_INPUT in copy_semantics:
            copy_semantics = [*map(_without_donation_to_itself, xs, shardings, copy_semantics)]
        if len(xs) >= MIN_ARRAYS:
            chosen, alike = _divided(xs, shardings, layouts)
            for positions in alike:
                with internals.set_current_trace(internals.eager_trace), contextlib.suppress(ProgramError):
                    reshard = _computation(xs[positions[0]], shardings[positions[0]])
                    made |= {i: reshard(xs[i]) for i in positions}
            for first in range(0, len(chosen), MAX_ARRAYS):
                batch = chosen[first : first + MAX_ARRAYS]
                if len(batch) >= MIN_ARRAYS:
                    with internals.set_current_trace(internals.eager_trace), contextlib.suppress(ProgramError):
                        program = _tree_program(tuple([shardings[i] for i in batch]))
                        made |= zip(batch, program(*[xs[i] for i in batch]), strict=True)
        rest = [i for i in range(len(xs)) if i not in made]
        if rest:
            others = ([each[i] for i in rest] for each in (xs, shardings, layouts, copy_semantics))
            made |= zip(rest, one_by_one(*others), strict=True)
        return [made[i] for i in range(len(xs))]

    return _array_shard_arg


def _without_donation_to_itself(x: Any, sharding: Any, semantics: Any) -> Any:
    """Return the semantics with which PjRt copies `x` to this sharding: it donates no array to its own devices.

    jaxlib's proxy client deletes each array that is donated, so `jax.device_put(x, x.sharding, donate=True)` would
    delete `x`, unlike in stock JAX.
    """
    from atoll.client import jax_internals as internals

    kinds = internals.CopySemantics
    if semantics != kinds.DONATE_INPUT or x.sharding.memory_kind != sharding.memory_kind:
        return semantics
    devices = internals.devices_of(sharding)
    if devices is None or not is_atoll(devices[0].client) or devices != internals.devices_of(x.sharding):
        return semantics
    return kinds.REUSE_INPUT


def _divided(xs: Sequence[Any], shardings: Sequence[Any], layouts: Sequence[Any]) -> tuple[list[int], list[list[int]]]:
    """Return the positions of arrays that one program moves, and of those that stay on their devices in other shards.

    The latter are in groups of arrays of one type that are worth a compilation. All arrays of one type with the same
    target are decided at once, since a tree may have thousands.
    """
    from atoll.client import jax_internals as internals

    kinds: dict[tuple[Any, Any], list[int]] = {}
    for i, (x, sharding) in enumerate(zip(xs, shardings, strict=True)):
        x._check_if_deleted()
        if layouts[i] is None:
            kinds.setdefault((internals.type_of(x), sharding), []).append(i)
    leaving: list[int] = []
    staying: list[list[int]] = []
    for (_, sharding), positions in kinds.items():
        x = xs[positions[0]]
        if _leaves(x, sharding):
            leaving += positions
        elif len(positions) >= MIN_ARRAYS and _changes_on_its_devices(x, sharding):
            staying.append(positions)
    return sorted(leaving), staying


def _changes_on_its_devices(x: Any, sharding: Any) -> bool:
    """Return whether a computation can give an array other shards on the devices that it has."""
    from atoll.client import jax_internals as internals

    if x.sharding == sharding or not _may_reshard(x, sharding):
        return False
    if not internals.can_compile_resharding(x.aval, x.sharding, sharding):
        return False
    return _has_other_shards(x, sharding.devices_indices_map(x.shape).values())


def _leaves(x: Any, sharding: Any) -> bool:
    """Return whether an array goes to other devices in other shards, so that JAX would read or cut it by itself."""
    from atoll.client import jax_internals as internals

    target = internals.devices_of(sharding)
    source = x.sharding
    if target is None or not is_atoll(target[0].client) or source.device_set == sharding.device_set:
        return False
    if not _may_reshard(x, sharding) or internals.has_partial_sums(sharding, x.ndim):
        return False
    if source.num_devices == 1 < sharding.num_devices:
        return True
    return _has_other_shards(x, sharding.devices_indices_map(x.shape).values())


def _islands(sharding: Any) -> set[int]:
    from atoll.client import jax_internals as internals

    return {device.slice_index for device in internals.devices_of(sharding) or ()}


def _should_reshard(x: Any, sharding: Any, indices: tuple[Any, ...]) -> bool:
    from atoll.client import jax_internals as internals

    target = internals.devices_of(sharding)
    if target is None or not _may_reshard(x, sharding):
        return False
    is_small = x.nbytes < CPU_MIN_BYTES and target[0].platform == "cpu"
    if is_small and not internals.forbids_transfers() and internals.is_canonical(x.dtype):
        return False
    return _has_other_shards(x, indices)


def _may_reshard(x: Any, sharding: Any) -> bool:
    """Return whether both shardings are of one cluster of Atoll, and the user does not forbid or check computations.

    JAX refuses to give an array of partial sums another sharding.
    """
    import jax

    from atoll.client import jax_internals as internals

    source, target = internals.devices_of(x.sharding), internals.devices_of(sharding)
    if source is None or target is None or not all(is_atoll(each[0].client) for each in (source, target)):
        return False
    if source[0].client is not target[0].client:
        return False
    if jax.config.jax_disable_jit or internals.needs_check_special() or internals.forbids_computations():
        return False
    return not internals.has_partial_sums(x.sharding, x.ndim)


def _has_other_shards(x: Any, indices: Iterable[Any]) -> bool:
    """Return whether some of the new shards do not exist. JAX copies existing shards from device to device."""
    here = set(map(str, x.sharding.devices_indices_map(x.shape).values()))
    return not here.issuperset(map(str, indices))


def _computation(x: Any, target: Any) -> Callable[[Any], Any]:
    """Return the computation that gives arrays of the type of `x` another sharding on the same devices."""
    return _compiled(x.aval.update(sharding=None), x.sharding, target)


@client_cache(_MAX_KEPT)
def _compiled(aval: Any, source: Any, target: Any) -> Callable[[Any], Any]:
    import jax

    from atoll.client import jax_internals as internals

    jitted = jax.jit(_reshard, in_shardings=internals.by_tiles(source, aval.ndim), out_shardings=target)
    with jax.enable_x64(True):  # otherwise JAX makes the computation for 32 bits if the script does not use 64 now
        compiled: Callable[[Any], Any] = jitted.lower(jax.ShapeDtypeStruct(aval.shape, aval.dtype)).compile()
    return compiled


@client_cache(_MAX_KEPT)
def _program(target: Any) -> Callable[[Any], Any]:
    import jax

    def reshard(x: Any) -> Any:
        return jax.device_put(x, target)

    # `atoll` imports packages above this one at their first use.
    program: Callable[[Any], Any] = importlib.import_module("atoll").program(reshard)
    return program


@client_cache(_MAX_KEPT)
def _tree_program(targets: tuple[Any, ...]) -> Callable[..., Sequence[Any]]:
    import jax

    def reshard(*xs: Any) -> tuple[Any, ...]:
        return tuple(jax.device_put(x, target) for x, target in zip(xs, targets, strict=True))

    program: Callable[..., Sequence[Any]] = importlib.import_module("atoll").program(reshard)
    return program


def _reshard(x: Any) -> Any:
    return x


PATCH = Patch(
    name="resharding",
    enables="`jax.device_put` to another sharding without reading the array into this process",
    changes=(
        Replacement(
            "jax._src.array",
            "shard_sharded_device_array_slow_path",
            _on_the_cluster,
            ("x", "devices", "indices", "sharding"),
        ),
        Replacement("jax._src.array", "shard_device_array", _to_other_islands, ("x", "devices", "indices", "sharding")),
    ),
)

TREE_PATCH = Patch(
    name="resharding of trees",
    enables="`jax.device_put` of a tree of arrays to other shards without one wait per array",
    changes=(
        Replacement(
            "jax._src.array",
            "_array_shard_arg",
            _together,
            ("xs", "shardings", "layouts", "copy_semantics"),
            copies=("jax._src.array",),
        ),
    ),
)
