"""Lets programs call back into the user's Python.

JAX gives the compiler a program's callables; jaxlib's IFRT proxy client refuses to send them. So they are taken out
just before that, kept in this process under numbers (`host_services/calls/callback_table.py`), and the numbers go along
in an option of the compile request, which the proxy takes out again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from atoll.client.jax_patches.patch import Patch, Replacement
from atoll.client.jax_patches.user_contexts import Caller, settings
from atoll.client.plugin_programs import is_atoll, submit
from atoll.host_services.calls.callback_buffers import on_arrays
from atoll.host_services.calls.callback_table import CallbackTable
from atoll.host_services.calls.hlo_host_transfers import SendAndReceive
from atoll.host_services.calls.python_custom_calls import BUFFER_CALLBACK, aliases, callback_index, result_types
from atoll.protocol.compile_options import CALLBACKS_OPTION, CHANNELS_OPTION

TABLE = CallbackTable(submit)
_WITH_BUFFERS = "jax._src.buffer_callback"


def _numbering(compile_and_load: Callable[..., Any]) -> Callable[..., Any]:
    def backend_compile_and_load(
        backend: Any, module: Any, executable_devices: Any, options: Any, host_callbacks: Sequence[Any]
    ) -> Any:
        if not host_callbacks or not is_atoll(backend):
            return compile_and_load(backend, module, executable_devices, options, host_callbacks)
        callbacks, caller = _on_arrays(module, host_callbacks), Caller()
        if backend.platform == "cpu" and len(executable_devices) == 1:
            callbacks = [caller.bind(each) for each in callbacks]
        numbers = TABLE.add(backend, callbacks)
        before = list(options.env_option_overrides)
        options.env_option_overrides = [
            *before,
            (CALLBACKS_OPTION, f"{numbers[0]}+{len(numbers)}"),
            *_channels(host_callbacks),
        ]
        try:
            executable = compile_and_load(backend, module, executable_devices, options, [])
            _callers[id(executable)] = caller
            return executable
        except BaseException:
            TABLE.remove(numbers)
            raise
        finally:
            options.env_option_overrides = before

    return backend_compile_and_load


def _channels(host_callbacks: Sequence[Any]) -> list[tuple[str, str]]:
    """On TPUs, the option with the channels of each."""
    channels = [each.channels for each in host_callbacks if isinstance(each, SendAndReceive)]
    return [(CHANNELS_OPTION, msgspec.json.encode(channels).decode())] if channels else []


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


# On one CPU device a program with callbacks runs inside of the call, as in stock JAX: what it prints comes before what
# the script prints next, and what a callback raises is raised there. On all other devices the script goes on meanwhile.


# By the executable, which cannot be referenced weakly; its callables keep them.
_callers: WeakValueDictionary[int, Caller] = WeakValueDictionary()


def _runs_in_the_call(executable: Any) -> bool:
    if not getattr(executable, "has_host_callbacks", False) or len(executable._local_devices) != 1:
        return False
    (device,) = executable._local_devices
    return device.platform == "cpu" and is_atoll(device.client)


def _with_settings(add_tokens: Callable[..., Any]) -> Callable[..., Any]:
    """Before the call."""

    def _add_tokens_to_inputs(executable: Any, input_bufs: Any) -> Any:
        if _runs_in_the_call(executable) and (caller := _callers.get(id(executable.xla_executable))) is not None:
            caller.settings = settings()
        return add_tokens(executable, input_bufs)

    return _add_tokens_to_inputs


def _waiting(handle_tokens: Callable[..., Any]) -> Callable[..., Any]:
    def _handle_token_bufs(executable: Any, token_bufs: Any, sharded_token: Any) -> Any:
        if _runs_in_the_call(executable):
            sharded_token.get_token(0).block_until_ready()
        return handle_tokens(executable, token_bufs, sharded_token)

    return _handle_token_bufs


def _not_past_the_wait(fastpath_data: Callable[..., Any]) -> Callable[..., Any]:
    """JAX's C++ path for calls does not wait."""

    def _get_fastpath_data(executable: Any, out_tree: Any, args_flat: Any, *others: Any, **options: Any) -> Any:
        if _runs_in_the_call(getattr(executable, "unsafe_call", None)):
            return None
        return fastpath_data(executable, out_tree, args_flat, *others, **options)

    return _get_fastpath_data


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
        Replacement(
            "jax._src.interpreters.pxla:ExecuteReplicated",
            "_add_tokens_to_inputs",
            _with_settings,
            ("self", "input_bufs"),
        ),
        Replacement(
            "jax._src.interpreters.pxla:ExecuteReplicated",
            "_handle_token_bufs",
            _waiting,
            ("self", "token_bufs", "sharded_token"),
        ),
        Replacement("jax._src.pjit", "_get_fastpath_data", _not_past_the_wait, ("executable", "out_tree", "args_flat")),
    ),
)
