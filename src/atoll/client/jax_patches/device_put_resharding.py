"""Reshards arrays on the cluster in `jax.device_put`, instead of through this process.

If the shards of the new sharding differ from the existing ones, `jax.device_put` reads the whole array into the process
and sends it again, also in stock JAX. With Atoll, both directions cross a network. Therefore a compiled computation
reshards on the same devices, as in a jit, and a program reshards to other devices. Both return before the array exists.

JAX splits an array on one device there, and then copies the parts, so the device holds the array twice. If the parts go
to another island, a program sends them directly.

On CPUs, small arrays still use JAX's own path, which is faster than to compile and run a computation. If a transfer
guard forbids that path, Atoll reshards them on the cluster.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from atoll.client.jax_patches.patch import Patch, Replacement
from atoll.client.plugin_programs import is_atoll
from atoll.errors import ProgramError

CPU_LEAST_BYTES = 4 << 20  # smallest array that is resharded on the cluster, if its devices are CPUs
_MOST_KEPT = 1024  # computations


def _on_the_cluster(through_the_process: Callable[..., Any]) -> Callable[..., Any]:
    from atoll.client import jax_internals as internals

    internals.leave_out_of_tracebacks(__file__)

    def shard_sharded_device_array_slow_path(x: Any, devices: Sequence[Any], indices: Any, sharding: Any) -> Any:
        indices = tuple(indices)
        if _should_reshard(x, sharding, indices):
            x._check_if_deleted()
            with internals.set_current_trace(internals.eager_trace), contextlib.suppress(ProgramError):
                if internals.can_compile_resharding(x.aval, x.sharding, sharding):
                    return _compiled(x.aval.update(sharding=None), x.sharding, sharding)(x)
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


def _islands(sharding: Any) -> set[int]:
    from atoll.client import jax_internals as internals

    return {device.slice_index for device in internals.devices_of(sharding) or ()}


def _should_reshard(x: Any, sharding: Any, indices: tuple[Any, ...]) -> bool:
    import jax

    from atoll.client import jax_internals as internals

    source, target = internals.devices_of(x.sharding), internals.devices_of(sharding)
    if source is None or target is None or not all(is_atoll(each[0].client) for each in (source, target)):
        return False
    if source[0].client is not target[0].client:
        return False
    if jax.config.jax_disable_jit or internals.needs_check_special():  # the user forbids or checks computations
        return False
    if x.nbytes < CPU_LEAST_BYTES and target[0].platform == "cpu" and not internals.forbids_transfers():
        return False
    # If existing shards are those of the new sharding, JAX copies them from device to device.
    here = set(map(str, x.sharding.devices_indices_map(x.shape).values()))
    return not here.issuperset(map(str, indices))


@functools.lru_cache(maxsize=_MOST_KEPT)
def _compiled(aval: Any, source: Any, target: Any) -> Callable[[Any], Any]:
    import jax

    from atoll.client import jax_internals as internals

    jitted = jax.jit(_reshard, in_shardings=internals.by_tiles(source, aval.ndim), out_shardings=target)
    compiled: Callable[[Any], Any] = jitted.lower(jax.ShapeDtypeStruct(aval.shape, aval.dtype)).compile()
    return compiled


@functools.lru_cache(maxsize=_MOST_KEPT)
def _program(target: Any) -> Callable[[Any], Any]:
    import jax

    def reshard(x: Any) -> Any:
        return jax.device_put(x, target)

    # `atoll` imports packages above this one at their first use.
    program: Callable[[Any], Any] = importlib.import_module("atoll").program(reshard)
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
