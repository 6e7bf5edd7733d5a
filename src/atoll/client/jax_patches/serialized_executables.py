"""Supports serialized executables: `jax.experimental.serialize_executable` and JAX's persistent cache.

The serialized form consists of the program, options and devices from which the executable was compiled. The proxy keeps
them. Loading compiles again, on the current cluster; the workers' own cache may have the result. The form is as
portable between clusters and versions of XLA as StableHLO. It does not contain the callables of a program with
callbacks: JAX's cache passes those of the function that it compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from atoll.client.jax_patches.patch import Patch, Replacement
from atoll.client.plugin_programs import ask, is_atoll
from atoll.decodable import decodable
from atoll.errors import BackendError
from atoll.protocol.questions import CompiledSource, SourceQuestion
from atoll.quantities import counted

_MAGIC = b"atoll.executable\0"


def _source_of(executable: Any) -> bytes:
    return _MAGIC + ask(executable.client, SourceQuestion(executable.fingerprint))


def _serializing(serialize: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self: _source_of(self) if is_atoll(self.client) else serialize(self)


def _serializing_executable(serialize: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, executable: _source_of(executable) if is_atoll(self) else serialize(self, executable)


def _compiling(deserialize: Callable[..., Any]) -> Callable[..., Any]:
    def deserialize_executable(
        self: Any, serialized: bytes, executable_devices: Any, compile_options: Any = None, host_callbacks: Any = ()
    ) -> Any:
        if not is_atoll(self):
            callbacks = (host_callbacks,) if host_callbacks else ()  # an overload of the original takes none
            return deserialize(self, serialized, executable_devices, compile_options, *callbacks)
        if not serialized.startswith(_MAGIC):
            raise BackendError("this executable was not serialized on Atoll: compile and serialize it on Atoll")
        source = msgspec.msgpack.decode(serialized[len(_MAGIC) :], type=decodable(CompiledSource))
        return _compile(self, source, executable_devices, compile_options, host_callbacks)

    return deserialize_executable


def _compile(client: Any, source: CompiledSource, devices: Any, compile_options: Any, host_callbacks: Any) -> Any:
    """Compile `source` for `devices` with `compile_options`, as JAX's cache passes them.

    If `compile_options` is None, use the options and the device numbers of the source.
    """
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import _jax, xla_client
    from jax._src.lib.mlir import ir

    if len(host_callbacks) < source.callbacks:
        raise BackendError(
            f"this executable calls {counted(source.callbacks, 'function')} of the process that compiled it, which its "
            "serialized form does not contain: compile the function in this process"
        )
    if compile_options is None:
        devices = _devices_of(source, devices)
        compile_options = xla_client.CompileOptions.ParseFromString(source.options)
        assignment = np.array(source.assignment, np.int32)
        compile_options.device_assignment = xla_client.DeviceAssignment.create(assignment)
    context = mlir.make_ir_context()
    with context:
        module = _jax.mlir.deserialize_portable_artifact(source.program, context)
        if "sym_name" not in module.operation.attributes:  # JAX reads it
            module.operation.attributes["sym_name"] = ir.StringAttr.get("program")
        return compiler.backend_compile_and_load(client, module, devices, compile_options, host_callbacks)


def _devices_of(source: CompiledSource, devices: Any) -> Any:
    from jax._src.lib import xla_client

    by_number = {device.id: device for device in devices}
    numbers = [device for row in source.assignment for device in row]
    if not set(numbers) <= set(by_number):
        raise BackendError(
            f"this executable was compiled for devices {numbers}, and cannot be loaded for devices {sorted(by_number)}"
            ": compile the function for the latter"
        )
    return xla_client.DeviceList(tuple(by_number[number] for number in numbers))


class _Serializing:
    """A client that reports support for serialization to JAX's cache. The server itself reports that it has none."""

    supports_executable_serialization = True

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def _used_on_atoll(is_used: Callable[..., Any]) -> Callable[..., Any]:
    return lambda backend: is_used(_Serializing(backend) if is_atoll(backend) else backend)


def _of_kinds(hash_config: Callable[..., Any]) -> Callable[..., Any]:
    """Hash the kinds of Atoll's devices for a key of the cache, as JAX does for clients without topologies.

    JAX also logs the missing topology for each compilation, which a script with `logging.INFO` would print.
    """

    def _hash_accelerator_config(hash_obj: Any, accelerators: Any) -> None:
        from jax._src import cache_key

        if is_atoll(accelerators.flat[0].client):
            cache_key._hash_devices(hash_obj, accelerators)
        else:
            hash_config(hash_obj, accelerators)

    return _hash_accelerator_config


PATCH = Patch(
    name="serialized executables",
    enables="`jax.experimental.serialize_executable` and JAX's persistent compilation cache",
    error="the underlying serialization format is not stable",
    changes=(
        Replacement("jaxlib._jax:LoadedExecutable", "serialize", _serializing, ("self",)),
        Replacement("jax._src.compilation_cache", "is_cache_used", _used_on_atoll, ("backend",)),
        Replacement("jax._src.cache_key", "_hash_accelerator_config", _of_kinds, ("hash_obj", "accelerators")),
        Replacement("jaxlib._jax:Client", "serialize_executable", _serializing_executable, ("self", "arg")),
        Replacement(
            "jaxlib._jax:Client", "deserialize_executable", _compiling, ("self", "serialized", "executable_devices")
        ),
    ),
)
