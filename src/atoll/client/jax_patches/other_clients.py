"""Copies arrays between Atoll and the process's other clients, such as the local CPU, through host memory.

Each client of jaxlib copies only among its own devices. JAX's rules for copies do not change: `device_put` copies, and
a jit call copies uncommitted arrays to its devices and refuses committed ones. This patch makes those copies possible.
A copy from Atoll waits for its values, since jaxlib's local arrays cannot be futures. A copy to Atoll does not wait.

JAX's Python code copies with two functions of jaxlib. JAX's C++ fast path for jit calls copies by itself, so calls with
arguments of another client do not use that path. JAX looks up the path by the arguments' shardings, so other calls of
the same function still use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from atoll.client.jax_patches.direct_reads import request_contents, value_of
from atoll.client.jax_patches.patch import Patch, Replacement
from atoll.client.plugin_programs import client_of, is_atoll


def _is_foreign(array: Any, client: Any) -> bool:
    """Return whether the array and `client` belong to different clients, one of which is Atoll's."""
    own = client_of(array)
    return own is not None and own is not client and (is_atoll(own) or is_atoll(client))


def host_copies(array: Any) -> list[np.ndarray[Any, Any]]:
    """Return the values of the shards, in the order of the devices. Equal shards are read once.

    This is a step of a copy between devices, so JAX's guard of transfers to the host does not apply.
    """
    return _reading(array)()


def _indices(sharding: Any, shape: Sequence[int], shards: int) -> Iterable[Any]:
    """Return equal objects for shards that have equal contents."""
    from atoll.client import jax_internals as internals

    if internals.has_partial_sums(sharding, len(shape)):
        return range(shards)
    indices: Iterable[Any] = sharding.addressable_devices_indices_map(shape).values()
    return indices


def _reading(array: Any) -> Callable[[], list[np.ndarray[Any, Any]]]:
    """Start to read the shards of an array; return a function that waits for their values."""
    import jax

    array._check_if_deleted()
    shards = [array.addressable_data(i) for i in range(len(array.sharding._internal_device_list))]
    indices = [str(index) for index in _indices(array.sharding, array.shape, len(shards))]
    first = {index: shard for index, shard in zip(reversed(indices), reversed(shards), strict=True)}
    with jax.transfer_guard("allow"):
        requested = {index: request_contents(shard) for index, shard in first.items()}
        for index, shard in first.items():
            if requested[index] is None:
                shard.copy_to_host_async()

    def value(index: str, shard: Any) -> np.ndarray[Any, Any]:
        contents = requested[index]
        found: np.ndarray[Any, Any] | None = None if contents is None else value_of(shard, contents)
        return shard._single_device_array_to_np_array_did_copy()[0] if found is None else found

    def read() -> list[np.ndarray[Any, Any]]:
        with jax.transfer_guard("allow"):
            values = {index: value(index, shard) for index, shard in first.items()}
        return [values[index] for index in indices]

    return read


# ---- JAX's copies of arrays


def _through_the_host(copy: Callable[..., Any]) -> Callable[..., Any]:
    import jax
    from jax._src.lib import xla_client

    def one(array: Any, devices: Any, sharding: Any, semantics: Any) -> Any:
        try:
            return copy([array], [devices], [sharding], [semantics])[0]  # raises if JAX's transfer guard forbids it
        except Exception as error:
            if not any(text in str(error) for text in _REFUSALS):
                raise
        with jax.transfer_guard("allow"):
            copied = xla_client.batched_device_put(
                array.aval, sharding, host_copies(array), list(devices), array._committed, enable_x64=True
            )
        if semantics == xla_client.ArrayCopySemantics.DONATE_INPUT:
            array.delete()
        return copied

    def batched_copy_array_to_devices_with_sharding(
        arrays: Sequence[Any], device_lists: Sequence[Any], shardings: Sequence[Any], semantics: Sequence[Any]
    ) -> Any:
        each = list(zip(arrays, device_lists, shardings, semantics, strict=True))
        foreign = [i for i, (array, devices, _, _) in enumerate(each) if _is_foreign(array, devices[0].client)]
        if not foreign:
            return copy(arrays, device_lists, shardings, semantics)
        own = [i for i in range(len(each)) if i not in foreign]
        copied = dict(zip(own, copy(*zip(*(each[i] for i in own), strict=True)) if own else (), strict=True))
        copied |= {i: one(*each[i]) for i in foreign}
        return [copied[i] for i in range(len(each))]

    return batched_copy_array_to_devices_with_sharding


# The errors of jaxlib's proxy client, and of its other clients about the proxy client.
_REFUSALS = (
    "CopyArrays only supports devices that are instances of",
    "The destination device is owned by a non-PjRt-compatible client",
)


def _putting(send: Callable[..., Any]) -> Callable[..., Any]:
    def batched_device_put(
        aval: Any, sharding: Any, xs: Sequence[Any], devices: Sequence[Any], *others: Any, **options: Any
    ) -> Any:
        if devices:
            client = devices[0].client
            foreign = {id(x): x for x in xs if _is_foreign(x, client)}  # `xs` repeats a replicated array
            if foreign:
                reading = {number: _reading(x) for number, x in foreign.items()}
                values = {number: read()[0] for number, read in reading.items()}
                xs = [values.get(id(x), x) for x in xs]
        return send(aval, sharding, xs, devices, *others, **options)

    return batched_device_put


# ---- JAX's fast paths


def _any_foreign(arguments: Iterable[Any], executable: Any) -> bool:
    client = executable.client
    # The numbers of a PRNG key are in its `_base_array`.
    return any(_is_foreign(getattr(each, "_base_array", each), client) for each in arguments)


def _only_for_own_arguments(fastpath_data: Callable[..., Any]) -> Callable[..., Any]:
    def _get_fastpath_data(executable: Any, out_tree: Any, args_flat: Any, *others: Any, **options: Any) -> Any:
        data = fastpath_data(executable, out_tree, args_flat, *others, **options)
        if data is None or _any_foreign((*args_flat, *data.const_args), data.xla_executable):
            return None
        return data

    return _get_fastpath_data


def _compiled_for_own_arguments(pjit: Callable[..., Any]) -> Callable[..., Any]:
    """Handle calls of functions that were compiled ahead of time, which have no Python function."""
    import jax

    def make(function_name: Any, fun: Any, cache_miss: Any, *others: Any, **options: Any) -> Any:
        if fun is not None:
            return pjit(function_name, fun, cache_miss, *others, **options)

        def miss(*args: Any, **kwargs: Any) -> Any:
            outputs, data, remove = cache_miss(*args, **kwargs)
            if data is not None and _any_foreign(jax.tree.leaves((args, kwargs)), data.xla_executable):
                data = None
            return outputs, data, remove

        return pjit(function_name, fun, miss, *others, **options)

    return make


PATCH = Patch(
    name="other clients",
    enables="copies of arrays between the cluster and this process's own devices",
    error="CopyArrays only supports devices that are instances of",
    changes=(
        Replacement(
            "jaxlib.xla_client",
            "batched_copy_array_to_devices_with_sharding",
            _through_the_host,
            ("arg0", "arg1", "arg2", "arg3"),
        ),
        Replacement("jaxlib.xla_client", "batched_device_put", _putting, ("aval", "sharding", "xs", "devices")),
        Replacement(
            "jax._src.pjit", "_get_fastpath_data", _only_for_own_arguments, ("executable", "out_tree", "args_flat")
        ),
        Replacement("jaxlib._jax", "pjit", _compiled_for_own_arguments, ("function_name", "fun", "cache_miss")),
    ),
)
