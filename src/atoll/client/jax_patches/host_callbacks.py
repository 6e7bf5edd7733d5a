"""Lets programs call back into the user's Python.

JAX gives the compiler a program's callables; jaxlib's IFRT proxy client refuses to send them. So they are taken out
just before that, kept in this process under numbers (`transfers/call_tables.py`), and the numbers go along in an option
of the compile request, which the proxy takes out again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from atoll.client.jax_patches.patch import Patch, Replacement
from atoll.client.plugin_programs import is_atoll, submit
from atoll.protocol.compile_options import CALLBACKS_OPTION
from atoll.transfers.call_buffers import on_arrays
from atoll.transfers.call_tables import CallbackTable
from atoll.transfers.custom_calls import BUFFER_CALLBACK, aliases, callback_index, result_types

TABLE = CallbackTable(submit)
_WITH_BUFFERS = "jax._src.buffer_callback"


def _numbering(compile_and_load: Callable[..., Any]) -> Callable[..., Any]:
    def backend_compile_and_load(
        backend: Any, module: Any, executable_devices: Any, options: Any, host_callbacks: Sequence[Any]
    ) -> Any:
        if not host_callbacks or not is_atoll(backend):
            return compile_and_load(backend, module, executable_devices, options, host_callbacks)
        numbers = TABLE.add(backend, _on_arrays(module, host_callbacks))
        before = list(options.env_option_overrides)
        options.env_option_overrides = [*before, (CALLBACKS_OPTION, f"{numbers[0]}+{len(numbers)}")]
        try:
            return compile_and_load(backend, module, executable_devices, options, [])
        except BaseException:
            TABLE.remove(numbers)
            raise
        finally:
            options.env_option_overrides = before

    return backend_compile_and_load


def _on_arrays(module: Any, host_callbacks: Sequence[Any]) -> list[Any]:
    """The callables; those to which JAX gives buffers as such that take and return arrays, as the module says."""
    from jax._src.lib.mlir import ir

    callbacks = list(host_callbacks)

    def visit(operation: Any) -> Any:
        is_call = operation.name == "stablehlo.custom_call"
        if is_call and operation.attributes["call_target_name"].value == BUFFER_CALLBACK:
            index = callback_index(operation)
            callbacks[index] = on_arrays(host_callbacks[index], result_types(operation), aliases(operation))
        return ir.WalkResult.ADVANCE

    if any(getattr(each, "__module__", "") == _WITH_BUFFERS for each in callbacks):  # most modules need no search
        module.operation.walk(visit)
    return callbacks


PATCH = Patch(
    name="host callbacks",
    lifts="Unsupported host callback type",
    replacements=(
        Replacement(
            "jax._src.compiler",
            "backend_compile_and_load",
            _numbering,
            ("backend", "module", "executable_devices", "options", "host_callbacks"),
        ),
    ),
)
