"""Lets `jax.jit` and JAX's transformations take programs (`atoll.program`) that are on several meshes of a cluster.

XLA compiles a computation for one set of devices. If JAX finds several sets of devices in a computation that contains a
program, this patch makes a program of the whole computation and runs it. JAX compiles all other computations as usual,
or refuses them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from atoll.client.client_caches import client_cache
from atoll.client.jax_patches.patch import Patch, Replacement
from atoll.client.plugin_programs import is_atoll

_MAX_KEPT = 256  # programs; JAX keeps no fewer traces


def _running_as_program(run: Callable[..., Any]) -> Callable[..., Any]:
    from jax._src import stages

    from atoll.client import jax_internals as internals

    def _pjit_call_impl_python(*args: Any, **params: Any) -> Any:
        try:
            return run(*args, **params)
        except stages.DeviceAssignmentMismatchError as error:
            (mismatches,) = error.args
            on_atoll = all(is_atoll(device.client) for each in mismatches for device in each.da)
            if not (on_atoll and internals.has_program(params["jaxpr"])):
                raise
            program = _program(
                params["jaxpr"],
                params["name"],
                tuple(params["in_shardings"]),
                tuple(params["out_shardings"]),
                tuple(i for i, donated in enumerate(params["donated_invars"]) if donated),
            )
            return program(*args), None, None, []

    return _pjit_call_impl_python


@client_cache(_MAX_KEPT)
def _program(
    jaxpr: Any, name: str, in_shardings: tuple[Any, ...], out_shardings: tuple[Any, ...], donated: tuple[int, ...]
) -> Any:
    from atoll.client import jax_internals as internals

    call = internals.as_function(jaxpr, name)

    def run(*arguments: Any) -> list[Any]:
        return _put(call(*_put(arguments, in_shardings)), out_shardings)

    run.__name__ = run.__qualname__ = name
    # `atoll` imports packages above this one at their first use.
    return importlib.import_module("atoll").program(run, donate_argnums=donated)


def _put(arrays: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """Put the arrays onto the shardings that the user's jit specifies."""
    import jax

    from atoll.client import jax_internals as internals

    return [
        array if internals.devices_of(sharding) is None else jax.device_put(array, sharding)
        for array, sharding in zip(arrays, shardings, strict=True)
    ]


PATCH = Patch(
    name="jit over several meshes",
    enables="`jax.jit` of programs over several meshes",
    error="Received incompatible devices for jitted computation",
    changes=(Replacement("jax._src.pjit", "_pjit_call_impl_python", _running_as_program, ("args", "jaxpr")),),
)
