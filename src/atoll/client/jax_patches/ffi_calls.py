"""Lets programs on a cluster call FFI handlers in shared libraries that the user's process has loaded.

JAX registers handlers with the XLA of this process, but workers run the programs. Before a program with such a custom
call is compiled, this pass finds the library of its handler, sends the file to the proxy once, and adds an option with
the targets to the compile request.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from atoll.client.ffi_handlers import HANDLERS, Library
from atoll.client.jax_patches.compile_pipeline import Compile, CompilePass, CompileRequest
from atoll.client.jax_patches.patch import Patch, Replacement
from atoll.client.plugin_programs import submit
from atoll.errors import StatusError
from atoll.protocol.callbacks import CUSTOM_PARTITIONING
from atoll.protocol.ffi_libraries import LIBRARY_REQUEST, TARGETS_OPTION


class SentLibraries:
    """The libraries that proxies have, by client and hash. The replies keep the clients alive."""

    def __init__(self, send: Callable[[Any, bytes], Any]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._replies: dict[tuple[int, str], Any] = {}

    def send(self, client: Any, libraries: Iterable[Library]) -> None:
        """Send the libraries that the client's proxy does not have. Raise JaxRuntimeError."""
        for each in libraries:
            with self._lock:
                is_sent = (id(client), each.digest) in self._replies
            if not is_sent:
                reply = self._send(client, LIBRARY_REQUEST + each.content)
                with self._lock:
                    self._replies[id(client), each.digest] = reply

    def clear_cache(self) -> None:
        """Forget everything, because the client was closed."""
        with self._lock:
            self._replies.clear()


SENT = SentLibraries(submit)


def _send_libraries(request: CompileRequest, compile_: Compile) -> Any:
    import jax

    platform = request.backend._raw_platform
    users = HANDLERS.names(platform)
    if not users:  # the common case: no need to search the program
        return compile_(request)
    called = _targets_in(request.module)
    # A custom partitioning returns programs later, which may call any of the user's targets.
    wanted = users if CUSTOM_PARTITIONING in called else users & called
    if not wanted:
        return compile_(request)
    try:
        found = HANDLERS.find(platform, sorted(wanted))
    except StatusError as error:
        raise jax.errors.JaxRuntimeError(str(error.status)) from None
    SENT.send(request.backend, {each.library.digest: each.library for each in found.values()}.values())
    targets = [each.target(name, HANDLERS.is_batch_partitionable(name)) for name, each in found.items()]
    return compile_(request.with_option(TARGETS_OPTION, msgspec.json.encode(targets).decode()))


def _targets_in(module: Any) -> set[str]:
    """Return the names of the module's custom calls."""
    from jax._src.lib.mlir import ir

    found: set[str] = set()

    def visit(operation: Any) -> Any:
        if operation.name == "stablehlo.custom_call":
            found.add(operation.attributes["call_target_name"].value)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


def _recording_targets(register: Callable[..., Any]) -> Callable[..., Any]:
    """Record handlers, including those that JAX has not passed to XLA yet."""
    from jax._src.lib import xla_client

    for platform, targets in xla_client._custom_callback.items():
        for name, handlers, version, *_ in targets:
            HANDLERS.record_target(name, handlers, platform, version)

    def register_custom_call_target(
        name: str, fn: Any, platform: str = "cpu", api_version: int = 0, *others: Any, **named: Any
    ) -> None:
        register(name, fn, platform, api_version, *others, **named)
        HANDLERS.record_target(name, fn, platform, api_version)

    return register_custom_call_target


def _recording_types(register: Callable[..., Any]) -> Callable[..., Any]:
    """Record the types of handlers' states, including those that JAX has not passed to XLA yet."""
    from jax._src.lib import xla_client

    for platform, types in xla_client._custom_type_id.items():
        for name, registration in types:
            HANDLERS.record_type(name, registration, platform)

    def register_custom_type(type_name: str, type_id: Any, platform: str = "cpu") -> None:
        register(type_name, type_id, platform)
        HANDLERS.record_type(type_name, type_id, platform)

    return register_custom_type


def _recording_partitionable(register: Callable[..., Any]) -> Callable[..., Any]:
    """Record the targets that XLA may divide, including those that JAX has listed for plug-ins."""
    from jax._src import xla_bridge

    for each in xla_bridge._plugin_callbacks:
        if isinstance(each, functools.partial) and each.func is register and each.args:
            HANDLERS.record_batch_partitionable(each.args[0])

    def register_custom_call_as_batch_partitionable(target_name: str, *others: Any, **named: Any) -> None:
        register(target_name, *others, **named)
        HANDLERS.record_batch_partitionable(target_name)

    return register_custom_call_as_batch_partitionable


PATCH = Patch(
    name="FFI libraries",
    enables="FFI handlers of libraries that the script has loaded: `jax.ffi.register_ffi_target`",
    error="No FFI handler registered for",
    changes=(
        CompilePass("FFI libraries", _send_libraries),
        Replacement(
            "jaxlib.xla_client",
            "register_custom_call_target",
            _recording_targets,
            ("name", "fn", "platform", "api_version"),
        ),
        Replacement(
            "jaxlib.xla_client", "register_custom_type", _recording_types, ("type_name", "type_id", "platform")
        ),
        Replacement(
            "jaxlib.xla_client",
            "register_custom_call_as_batch_partitionable",
            _recording_partitionable,
            ("target_name",),
        ),
    ),
)
