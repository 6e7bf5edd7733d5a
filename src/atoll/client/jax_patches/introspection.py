"""Makes introspection work for Atoll's arrays, devices, modules and executables.

Scripts read addresses of arrays, memory statistics and hardware numbers of devices, cost estimates of modules, and the
compiled modules of executables.

jaxlib supports these only for devices of the script's process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from atoll.client.jax_internals import own_computation
from atoll.client.jax_patches.patch import Patch, Replacement
from atoll.client.plugin_programs import ask, client_of, is_atoll
from atoll.protocol.questions import ADDRESS_CALL, MemoryQuestion


def _worker_pointer(pointer: Callable[..., Any]) -> Callable[..., Any]:
    """Return the address in the worker's memory, for arrays on one CPU device.

    The script cannot read from that address. As with stock JAX, equal addresses mean the same memory: scripts compare
    them to find out whether an array was copied, or whether a donated array's memory was reused.
    """
    import jax

    def unsafe_buffer_pointer(self: Any) -> int:
        client = client_of(self)
        if client is None or not is_atoll(client) or len(self.sharding.device_set) > 1 or client.platform != "cpu":
            return int(pointer(self))
        if self.is_deleted():
            raise jax.errors.JaxRuntimeError(
                "INVALID_ARGUMENT: UnsafeBufferPointer called on deleted or donated buffer"
            )
        with own_computation():
            return int(np.asarray(_address_call()(self)).view(np.uint64)[0])

    return unsafe_buffer_pointer


@cache
def _address_call() -> Any:
    import jax

    return jax.jit(jax.ffi.ffi_call(ADDRESS_CALL, jax.ShapeDtypeStruct((2,), np.uint32)))


def _cluster_memory(stats: Callable[..., Any]) -> Callable[..., Any]:
    """Return the controller's statistics of the device, for all sessions, and those of the platform if it has any."""

    def memory_stats(self: Any) -> Any:
        if not is_atoll(self.client):
            return stats(self)
        return json.loads(ask(self.client, MemoryQuestion(self.id)))

    return memory_stats


def _number_on_host(number: Callable[[Any], int | None]) -> Callable[[Any], int | None]:
    def local_hardware_id(self: Any) -> int | None:
        return int(self.hardware_id) if is_atoll(self.client) else number(self)

    return local_hardware_id


def _local_cpu_cost(analyse: Callable[..., Any]) -> Callable[..., Any]:
    """Estimate costs with the local CPU's client, for `jit(f).lower(x).cost_analysis()` and flax's `tabulate`.

    The estimate is of the program before compilation, so it is the same for every client.
    """
    import jax

    def hlo_module_cost_analysis(client: Any, module: Any) -> Any:
        return analyse(jax.local_devices(backend="cpu")[0].client if is_atoll(client) else client, module)

    return hlo_module_cost_analysis


def _modules_of_text(modules: Callable[..., Any]) -> Callable[..., Any]:
    """Parse the worker's text of the compiled program, which `compiled.as_text()` returns as well."""

    def hlo_modules(self: Any) -> Any:
        if not is_atoll(self.client):
            return modules(self)
        from jaxlib._hlo import hlo_module_from_text

        return [hlo_module_from_text(text) for text in _MODULE.split(self.get_hlo_text()) if text]

    return hlo_modules


# Matches before each module of a text with several.
_MODULE = re.compile(r"^(?=HloModule )", re.MULTILINE)

ADDRESS_PATCH = Patch(
    name="addresses",
    enables="`unsafe_buffer_pointer()` of arrays on CPU devices",
    error="This operation is implemented for a PjRt-compatible backend only",
    changes=(Replacement("jaxlib._jax:ArrayImpl", "unsafe_buffer_pointer", _worker_pointer, ("self",)),),
)
MEMORY_PATCH = Patch(
    name="memory statistics",
    enables="`device.memory_stats()`",
    error="MemoryStats is only supported for addressable PjRt devices",
    changes=(Replacement("jaxlib._jax:Device", "memory_stats", _cluster_memory, ("self",)),),
)
HARDWARE_PATCH = Patch(
    name="hardware numbers",
    enables="`device.local_hardware_id`",
    changes=(Replacement("jaxlib._jax:Device", "local_hardware_id", _number_on_host, ("self",)),),
)
COST_PATCH = Patch(
    name="cost analysis",
    enables="`jax.jit(f).lower(x).cost_analysis()`",
    error="This operation is implemented for a PjRt-compatible backend only",
    changes=(Replacement("jaxlib._jax", "hlo_module_cost_analysis", _local_cpu_cost, ("arg0", "arg1")),),
)
MODULES_PATCH = Patch(
    name="modules of executables",
    enables="`compiled.runtime_executable().hlo_modules()`",
    error="IFRT service does not support LoadedExecutable::GetHloModules()",
    changes=(Replacement("jaxlib._jax:LoadedExecutable", "hlo_modules", _modules_of_text, ("self",)),),
)
