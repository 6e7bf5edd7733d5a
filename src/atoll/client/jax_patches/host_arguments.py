"""Makes small host values that are arguments of `jax.jit` or `jnp.asarray` as `jax.device_put` makes small arrays.

For a function on one device, JAX's C++ sends such arguments itself, with jaxlib's client. It calls a Python function of
JAX instead if the argument has a layout. The patch gives these arguments a layout that stands for none.

`jnp.asarray` and `jnp.array` run a jitted function that returns its argument. The patch makes the result without it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from atoll.client.client_caches import client_cache
from atoll.client.jax_patches.patch import Patch, Replacement
from atoll.client.jax_patches.small_writes import made_of
from atoll.client.plugin_programs import is_atoll
from atoll.transfers.shared_slots import SLOT_BYTES

_MAX_TYPES = 512


@dataclass(frozen=True, slots=True)
class _FromHost:
    """The layout of an argument whose values come from this process. JAX's C++ has a separate entry for arrays.

    `name` is the argument's path in the call, as JAX's errors name it.
    """

    name: str


def _is_small(argument: Any) -> bool:
    """Return whether an argument is a small array of NumPy, or a number, or one to which JAX has given a type."""
    if type(argument) is np.ndarray or isinstance(argument, np.generic):
        return bool(argument.nbytes <= SLOT_BYTES)
    if type(argument) in (bool, int, float, complex):
        return True
    from atoll.client import jax_internals as internals

    kind = internals.type_of_literal(argument)
    return kind is not None and kind.size * kind.dtype.itemsize <= SLOT_BYTES


def _marking(fastpath_data: Callable[..., Any]) -> Callable[..., Any]:
    def _get_fastpath_data(
        executable: Any, out_tree: Any, args_flat: Sequence[Any], *others: Any, **options: Any
    ) -> Any:
        from atoll.client import jax_internals as internals

        data = fastpath_data(executable, out_tree, args_flat, *others, **options)
        if data is None or not is_atoll(data.xla_executable.client):
            return data
        arguments = [*data.const_args, *args_flat]
        names = [*itertools.compress(internals.argument_names(executable, len(arguments)), data.kept_var_bitvec)]
        arguments = [*itertools.compress(arguments, data.kept_var_bitvec)]
        before = [*data.in_device_local_layouts]
        if len(arguments) != len(before) or not any(map(_is_small, arguments)):
            return data
        layouts = [
            _FromHost(name) if layout is None and _is_small(argument) else layout
            for layout, argument, name in zip(before, arguments, names, strict=True)
        ]
        return data._replace(in_device_local_layouts=layouts)

    return _get_fastpath_data


def _making(shard_arg: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    def cc_shard_arg(x: Any, sharding: Any, layout: Any) -> Any:
        if not isinstance(layout, _FromHost):
            return shard_arg(x, sharding, layout)
        if not _is_small(x):
            return shard_arg(x, sharding, None)
        try:
            array = _made(x, sharding, committed=True)
        except OverflowError:  # JAX's C++ would call JAX's Python again, which raises this error
            raise OverflowError(
                "An overflow was encountered while parsing an argument to a jitted computation, whose argument path is "
                f"{layout.name}. Got {type(x)} with value {x}"
            ) from None
        return shard_arg(x, sharding, None) if array is None else array

    return cc_shard_arg


def _staging(stage: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def impl(x: Any) -> Any:
        from atoll.client import jax_internals as internals

        device = internals.eager_device() if _is_small(x) else None
        array = None
        if device is not None:
            with contextlib.suppress(OverflowError):  # JAX's own error names the type
                array = _made(x, _sharding_on(device), committed=False)
        return stage(x) if array is None else array

    return impl


def _made(x: Any, sharding: Any, committed: bool) -> Any:
    """Return an array that is the small value `x` on each device, or None if JAX itself has to make it.

    Raise OverflowError if a number is too large for its type.
    """
    from atoll.client import jax_internals as internals

    devices = sharding._device_assignment
    if not is_atoll(devices[0].client):
        return None
    is_array = isinstance(x, np.ndarray | np.generic)
    aval = internals.type_of_literal(x)
    if aval is None:
        kind: Any = (x.dtype, x.shape) if is_array else type(x)
        aval = _type_of(kind, internals.type_settings())
    with np.errstate(over="ignore", invalid="ignore"):  # JAX has warned in the first call
        value = np.asarray(x, aval.dtype)
    return made_of(aval, sharding, [value], devices, committed)


@client_cache(_MAX_TYPES)
def _sharding_on(device: Any) -> Any:
    from jax.sharding import SingleDeviceSharding

    return SingleDeviceSharding(device)


@functools.lru_cache(maxsize=_MAX_TYPES)
def _type_of(kind: Any, settings: Any) -> Any:
    """Return JAX's type of an array, given by dtype and shape, or of a Python number, given by its class."""
    from atoll.client import jax_internals as internals

    return internals.abstractify(kind() if isinstance(kind, type) else np.empty(kind[1], kind[0]))


PATCH = Patch(
    name="arguments from the host",
    enables="calls of `jax.jit`, `jnp.asarray` and `jnp.array` with small NumPy arrays or numbers without a round trip",
    changes=(
        Replacement("jax._src.pjit", "_get_fastpath_data", _marking, ("executable", "out_tree", "args_flat")),
        Replacement(
            "jax._src.interpreters.pxla",
            "cc_shard_arg",
            _making,
            ("x", "sharding", "layout"),
            copies=("jax._src.interpreters.pxla",),
        ),
        Replacement("jax._src.core:stage_p", "impl", _staging, ("x",)),
    ),
)
