"""Lets executables be serialized and loaded: `jax.experimental.serialize_executable`, JAX's persistent cache.

The serialized form is what the executable was compiled from: its program, options and devices, which the proxy keeps.
So loading compiles again, on whatever cluster there is then; the workers' own cache may have the result. It is portable
between clusters and versions of XLA, as far as StableHLO is. A program whose callbacks are functions of this process
cannot be loaded elsewhere; JAX does not serialize those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from atoll.client.jax_patches.patch import Patch, Replacement
from atoll.client.plugin_programs import ask, is_atoll
from atoll.errors import BackendError
from atoll.protocol.questions import CompiledSource, SourceQuestion

_MAGIC = b"atoll.executable\0"


def _source_of(executable: Any) -> bytes:
    return _MAGIC + ask(executable.client, SourceQuestion(executable.fingerprint))


def _executables_source(serialize: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self: _source_of(self) if is_atoll(self.client) else serialize(self)


def _clients_source(serialize: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, executable: _source_of(executable) if is_atoll(self) else serialize(self, executable)


def _compiling(deserialize: Callable[..., Any]) -> Callable[..., Any]:
    def deserialize_executable(
        self: Any, serialized: bytes, executable_devices: Any, compile_options: Any = None, host_callbacks: Any = ()
    ) -> Any:
        if not is_atoll(self):
            callbacks = (host_callbacks,) if host_callbacks else ()  # one form of the original takes none
            return deserialize(self, serialized, executable_devices, compile_options, *callbacks)
        if not serialized.startswith(_MAGIC):
            raise BackendError("this executable was not serialized on Atoll: compile and serialize the function here")
        source = msgspec.msgpack.decode(serialized[len(_MAGIC) :], type=CompiledSource)
        return _compile(self, source, executable_devices, compile_options, host_callbacks)

    return deserialize_executable


def _compile(client: Any, source: CompiledSource, devices: Any, compile_options: Any, host_callbacks: Any) -> Any:
    """With `compile_options`, as JAX's cache gives them, for these devices; else for those that the source names."""
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import _jax, xla_client
    from jax._src.lib.mlir import ir

    if compile_options is None:
        devices = _devices_of(source, devices)
        compile_options = xla_client.CompileOptions.ParseFromString(source.options)
        assignment = np.array(source.assignment, np.int32)
        compile_options.device_assignment = xla_client.DeviceAssignment.create(assignment)
    context = mlir.make_ir_context()
    with context:
        module = _jax.mlir.deserialize_portable_artifact(source.program, context)
        if "sym_name" not in module.operation.attributes:  # JAX asks for it
            module.operation.attributes["sym_name"] = ir.StringAttr.get("program")
        return compiler.backend_compile_and_load(client, module, devices, compile_options, host_callbacks)


def _devices_of(source: CompiledSource, devices: Any) -> Any:
    from jax._src.lib import xla_client

    by_number = {device.id: device for device in devices}
    numbers = [device for row in source.assignment for device in row]
    missing = sorted(set(numbers) - set(by_number))
    if missing:
        raise BackendError(f"this executable was compiled for devices {numbers}, and devices {missing} are not there")
    return xla_client.DeviceList(tuple(by_number[number] for number in numbers))


class _Serializing:
    """A client as JAX's cache sees it. The server denies that executables can be serialized: by itself, it cannot."""

    supports_executable_serialization = True

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def _used_on_atoll(is_used: Callable[..., Any]) -> Callable[..., Any]:
    return lambda backend: is_used(_Serializing(backend) if is_atoll(backend) else backend)


PATCH = Patch(
    name="serialized executables",
    lifts="IFRT service executable does not support Serialize",
    replacements=(
        Replacement("jaxlib._jax:LoadedExecutable", "serialize", _executables_source, ("self",)),
        Replacement("jax._src.compilation_cache", "is_cache_used", _used_on_atoll, ("backend",)),
        Replacement("jaxlib._jax:Client", "serialize_executable", _clients_source, ("self", "arg")),
        Replacement(
            "jaxlib._jax:Client", "deserialize_executable", _compiling, ("self", "serialized", "executable_devices")
        ),
    ),
)
