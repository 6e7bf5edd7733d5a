"""Lets an array that is put onto another sharding of devices of the cluster get there without this process.

Where no shard is what a device is to have, `jax.device_put` reads the whole array into the process and sends it out
again, also on stock JAX. On Atoll, both ways are a network away. So on the same devices a compiled computation
reshards, as inside of a jit, and to others a program does; nothing waits for the array.

An array on one device JAX cuts there, into parts that it copies: the device has it twice. Where the parts go to other
islands, a program sends them as they are cut.

What is small goes JAX's way on a CPU: that takes less than the collectives of a computation, which is also to be
compiled first.
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

# From here on, where the devices are CPUs.
CPU_LEAST_BYTES = 4 << 20
# Computations that are kept.
_MOST_KEPT = 1024


def _on_the_cluster(through_the_process: Callable[..., Any]) -> Callable[..., Any]:
    from atoll.client import jax_internals as internals

    internals.leave_out_of_tracebacks(__file__)

    def shard_sharded_device_array_slow_path(x: Any, devices: Sequence[Any], indices: Any, sharding: Any) -> Any:
        indices = tuple(indices)
        if _is_for_the_cluster(x, sharding, indices):
            x._check_if_deleted()
            with internals.set_current_trace(internals.eager_trace), contextlib.suppress(ProgramError):
                if internals.can_compile_resharding(x.aval, x.sharding, sharding):
                    return _compiled(x.aval.update(sharding=None), x.sharding, sharding)(x)
                return _program(sharding)(x)
        return through_the_process(x, devices, indices, sharding)

    return shard_sharded_device_array_slow_path


def _to_another_island(cut_where_it_is: Callable[..., Any]) -> Callable[..., Any]:
    from atoll.client import jax_internals as internals

    def shard_device_array(x: Any, devices: Sequence[Any], indices: Any, sharding: Any) -> Any:
        indices = tuple(indices)
        if _is_for_the_cluster(x, sharding, indices) and _islands(x.sharding).isdisjoint(_islands(sharding)):
            with internals.set_current_trace(internals.eager_trace), contextlib.suppress(ProgramError):
                return _program(sharding)(x)
        return cut_where_it_is(x, devices, indices, sharding)

    return shard_device_array


def _islands(sharding: Any) -> set[int]:
    from atoll.client import jax_internals as internals

    return {device.slice_index for device in internals.devices_of(sharding) or ()}


def _is_for_the_cluster(x: Any, sharding: Any, indices: tuple[Any, ...]) -> bool:
    import jax

    from atoll.client import jax_internals as internals

    source, target = internals.devices_of(x.sharding), internals.devices_of(sharding)
    if source is None or target is None or not all(is_atoll(each[0].client) for each in (source, target)):
        return False
    if source[0].client is not target[0].client:
        return False
    if jax.config.jax_disable_jit or internals.needs_check_special():  # no computation is to run, or each is looked at
        return False
    if x.nbytes < CPU_LEAST_BYTES and target[0].platform == "cpu":
        return False
    # Where shards are what devices are to have, JAX copies these from device to device.
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

    # Through `atoll`, which imports packages above this one at their first use.
    program: Callable[[Any], Any] = importlib.import_module("atoll").program(reshard)
    return program


def _reshard(x: Any) -> Any:
    return x


PATCH = Patch(
    name="resharding",
    lifts="arrays that get another sharding are read into this process, and sent out again",
    replacements=(
        Replacement(
            "jax._src.array",
            "shard_sharded_device_array_slow_path",
            _on_the_cluster,
            ("x", "devices", "indices", "sharding"),
        ),
        Replacement(
            "jax._src.array",
            "shard_device_array",
            _to_another_island,
            ("x", "devices", "indices", "sharding"),
        ),
    ),
)
