"""Lets programs on a cluster call back into the user's Python.

JAX passes a program's callables to the compiler, but jaxlib's IFRT proxy client refuses to send them. The patch removes
them from the compile request, keeps them in this process under numbers (`client/jax_patches/client_channel.py`), and
sends the numbers in an option of the request, which the proxy removes again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, replace
from functools import cache, wraps
from typing import Any
from weakref import WeakValueDictionary

import msgspec
import numpy as np

from atoll.client.interruptible_wait import wait_interruptibly
from atoll.client.jax_patches.callback_buffers import on_arrays
from atoll.client.jax_patches.client_channel import ClientChannel
from atoll.client.jax_patches.compile_pipeline import Compile, CompilePass, CompileRequest
from atoll.client.jax_patches.patch import Patch, Replacement
from atoll.client.plugin_programs import is_atoll, submit
from atoll.host_services.calls.callback_operations import (
    BUFFER_CALLBACK,
    aliases,
    callback_index,
    result_types,
)
from atoll.protocol.callbacks import CALLBACKS_OPTION, CHANNELS_OPTION
from atoll.protocol.messages import HostChannels

CLIENT_CHANNEL = ClientChannel(submit)
_WITH_BUFFERS = "jax._src.buffer_callback"


def _number(request: CompileRequest, compile_: Compile) -> Any:
    """Compile without the callables, and send their numbers."""
    if not request.host_callbacks:
        return compile_(request)
    backend, caller = request.backend, Caller()
    callbacks = _on_arrays(request.module, request.host_callbacks)
    if backend.platform == "cpu" and len(request.devices) == 1:
        callbacks = [caller.bind(each) for each in callbacks]
    numbers = CLIENT_CHANNEL.add(backend, callbacks)
    numbered = replace(request, host_callbacks=[]).with_option(CALLBACKS_OPTION, f"{numbers[0]}+{len(numbers)}")
    channels = [each.channels for each in request.host_callbacks if isinstance(each, SendAndReceive)]
    if channels:
        numbered = numbered.with_option(CHANNELS_OPTION, msgspec.json.encode(channels).decode())
    try:
        executable = compile_(numbered)
    except BaseException:
        CLIENT_CHANNEL.remove(numbers)
        raise
    _callers[id(executable)] = caller
    return executable


def _on_arrays(module: Any, host_callbacks: Sequence[Any]) -> list[Any]:
    """Return the callables; wrap those that JAX calls with buffers, so that they take and return arrays."""
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


# On one CPU device, a program with callbacks runs during the call, as in stock JAX: its output appears before the
# script's next output, and the call raises the callbacks' exceptions. On all other devices the call does not wait.
#
# Stock JAX also runs these callbacks on the thread of the caller: they see the meshes, the default device and all other
# settings that the thread has set using `with`, and its context variables, such as that of `numpy.errstate`. With Atoll
# they run on other threads while the caller waits, but get the caller's settings and a copy of its context. If two
# threads call one executable at the same time, the callbacks of both get those of the later caller. Ctrl-C ends the
# call, but not its callback.

# Keyed by the executable's id: executables do not support weak references. The executable's callables keep the callers.
_callers: WeakValueDictionary[int, Caller] = WeakValueDictionary()


def _runs_in_the_call(executable: Any) -> bool:
    if not getattr(executable, "has_host_callbacks", False) or len(executable._local_devices) != 1:
        return False
    (device,) = executable._local_devices
    return device.platform == "cpu" and is_atoll(device.client)


def _recording_settings(add_tokens: Callable[..., Any]) -> Callable[..., Any]:
    """Record the thread's settings and its context before the call."""

    def _add_tokens_to_inputs(executable: Any, input_bufs: Any) -> Any:
        if _runs_in_the_call(executable) and (caller := _callers.get(id(executable.xla_executable))) is not None:
            caller.begin()
        return add_tokens(executable, input_bufs)

    return _add_tokens_to_inputs


def _waiting(handle_tokens: Callable[..., Any]) -> Callable[..., Any]:
    def _handle_token_bufs(executable: Any, token_bufs: Any, sharded_token: Any) -> Any:
        if _runs_in_the_call(executable):
            caller = _callers.get(id(executable.xla_executable))
            context = None if caller is None else caller.context
            try:
                wait_interruptibly(sharded_token.get_token(0).block_until_ready)
            finally:
                if caller is not None:
                    caller.end(context)
        return handle_tokens(executable, token_bufs, sharded_token)

    return _handle_token_bufs


def _without_fast_path(fastpath_data: Callable[..., Any]) -> Callable[..., Any]:
    """Keep these calls off JAX's C++ path, which does not wait."""

    def _get_fastpath_data(executable: Any, out_tree: Any, args_flat: Any, *others: Any, **options: Any) -> Any:
        if _runs_in_the_call(getattr(executable, "unsafe_call", None)):
            return None
        return fastpath_data(executable, out_tree, args_flat, *others, **options)

    return _get_fastpath_data


# The thread-local part of JAX's configuration: (setting, value).
Settings = tuple[tuple[Any, Any], ...]


@cache
def _all_settings() -> tuple[Any, ...]:
    from jax._src import config

    every = (each for each in vars(config).values() if isinstance(each, config.config_ext.Config))
    return tuple(each for each in every if each is not config.thread_guard)  # it names the thread that sets it


def settings() -> Settings:
    """Return the settings of this thread."""
    from jax._src import config

    unset = config.config_ext.unset
    own = ((each, each.get_local()) for each in _all_settings())
    return tuple((each, value) for each, value in own if value is not unset)


@contextlib.contextmanager
def within(chosen: Settings) -> Iterator[None]:
    """Apply `chosen` to this thread during the block."""
    before = [(each, _set(each, value)) for each, value in chosen]
    try:
        yield
    finally:
        for each, value in reversed(before):
            _set(each, value)


def _set(setting: Any, value: Any) -> Any:
    """Set `setting` for this thread; return its previous value."""
    from jax._src import config

    before = setting.swap_local(value)
    if (hook := getattr(setting, "_update_thread_local_hook", None)) is not None:
        hook(None if value is config.config_ext.unset else value)
    return before


class Caller:
    """The settings and the context of the thread that called an executable last.

    The context keeps the objects of its variables alive, so it is dropped when the call ends.
    """

    def __init__(self) -> None:
        self.settings: Settings = ()
        self.context: Context | None = None

    def begin(self) -> None:
        """Record those of this thread, which is about to call the executable."""
        self.settings, self.context = settings(), copy_context()

    def end(self, context: Context | None) -> None:
        """Drop `context` unless a later call has recorded another one."""
        if self.context is context:
            self.context = None

    def bind(self, callback: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(callback)
        def call(*arguments: Any) -> Any:
            chosen, context = self.settings, self.context
            with within(chosen) if chosen else contextlib.nullcontext():
                # One context cannot be entered by two callbacks at the same time.
                return callback(*arguments) if context is None else context.copy().run(callback, *arguments)

        return call


@dataclass(frozen=True)
class SendAndReceive:
    """A callable with its channels, which JAX holds until the program is compiled.

    Calls convert the results to `dtypes`, because a callable without results returns a Python number.
    """

    callback: Callable[..., Any]
    channels: HostChannels
    dtypes: tuple[Any, ...]

    def __call__(self, *arguments: Any) -> tuple[np.ndarray[Any, Any], ...]:
        return tuple(map(np.asarray, self.callback(*arguments), self.dtypes))


def _with_channels(make: Callable[..., Any]) -> Callable[..., Any]:
    """Support callbacks of programs for TPUs. Untested on a TPU.

    For TPUs, JAX lowers a callback to sends and receives and has the client make one callable of them, which jaxlib's
    IFRT proxy client refuses. This makes a callable that `backend_compile_and_load` above removes from the request.
    """

    def make_python_callback_from_host_send_and_recv(
        client: Any, callable: Any, operands: Any, results: Any, sends: Any, receives: Any, *others: Any
    ) -> Any:
        if not is_atoll(client):
            return make(client, callable, operands, results, sends, receives, *others)
        dtypes = tuple(each.numpy_dtype() for each in results)
        return SendAndReceive(callable, HostChannels(tuple(sends), tuple(receives)), dtypes)

    return make_python_callback_from_host_send_and_recv


PATCH = Patch(
    name="host callbacks",
    enables="callbacks into Python: `jax.pure_callback`, `io_callback`, `jax.debug.print`",
    error="Unsupported host callback type",
    changes=(
        CompilePass("host callbacks", _number),
        Replacement(
            "jax._src.interpreters.pxla:ExecuteReplicated",
            "_add_tokens_to_inputs",
            _recording_settings,
            ("self", "input_bufs"),
        ),
        Replacement(
            "jax._src.interpreters.pxla:ExecuteReplicated",
            "_handle_token_bufs",
            _waiting,
            ("self", "token_bufs", "sharded_token"),
        ),
        Replacement("jax._src.pjit", "_get_fastpath_data", _without_fast_path, ("executable", "out_tree", "args_flat")),
    ),
)

_EXPECTED = ("self", "callable", "operand_shapes", "result_shapes", "send_channel_ids", "recv_channel_ids")
SEND_AND_RECEIVE_PATCH = Patch(
    name="send and receive",
    enables="callbacks into Python on TPUs",
    changes=(
        Replacement("jaxlib._jax:Client", "make_python_callback_from_host_send_and_recv", _with_channels, _EXPECTED),
    ),
)
