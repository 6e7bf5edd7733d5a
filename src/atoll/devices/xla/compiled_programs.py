"""Compiled programs on disk, as a worker uses them: JAX's persistent cache, and programs of compiler processes.

Both have entries per tenant, which are verified before they are read (`program_cache`).
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import msgspec
from jax._src import compilation_cache
from jax._src.compilation_cache_interface import CacheInterface
from jax._src.lib import xla_client as xc

from atoll.cluster.environment_variables import CACHE_BYTES, TENANT_CACHE_BYTES, XLA_FLAGS
from atoll.decodable import decodable
from atoll.devices.compilers.compiler_messages import CompiledProgram, CompileProgram
from atoll.devices.xla.program_cache import MAX_BYTES, MAX_TENANT_BYTES, ProgramCache, Seal
from atoll.errors import AccessError
from atoll.security.user_key import user_key

_log = logging.getLogger(__name__)
_VERSION = b"compiled program 1"
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(decodable(CompiledProgram)).decode

_tenant: contextvars.ContextVar[str] = contextvars.ContextVar("atoll_tenant", default="")


class Programs(Protocol):
    """Contents by key and tenant, on disk. `get` only returns what `put` has stored."""

    def get(self, key: str, tenant: str = "") -> bytes | None: ...

    def put(self, key: str, content: bytes, tenant: str = "") -> None: ...


class _RemotePrograms:
    """The entries of a cache at a URL, which JAX reads and writes with `etils`. Its size is not bounded."""

    def __init__(self, url: str, key: bytes) -> None:
        found: Any = _file_cache(url)
        self._files = found[0]
        self._seal = Seal(key)

    def get(self, key: str, tenant: str = "") -> bytes | None:
        entry = self._files.get(self._name(key, tenant))
        return None if entry is None else self._seal.open(tenant, key, entry)

    def put(self, key: str, content: bytes, tenant: str = "") -> None:
        self._files.put(self._name(key, tenant), self._seal.close(tenant, key, content))

    def _name(self, key: str, tenant: str) -> str:
        return f"atoll-{self._seal.name}-{tenant.encode().hex()}-{key}"


class JaxCache(CacheInterface):  # type: ignore[misc]
    """JAX's cache in this process, with the entries of the tenant for which the calling thread compiles."""

    def __init__(self, programs: Programs, directory: str) -> None:
        self._programs = programs
        self._path = Path(directory)  # JAX logs it

    def get(self, key: str) -> bytes | None:
        return self._programs.get(key, _tenant.get())

    def put(self, key: str, value: bytes) -> None:
        self._programs.put(key, value, _tenant.get())


@contextlib.contextmanager
def compiling_for(tenant: str) -> Iterator[None]:
    """Make this thread use the entries of `tenant`."""
    token = _tenant.set(tenant)
    try:
        yield
    finally:
        _tenant.reset(token)


def open_programs(directory: str) -> Programs | None:
    """Return the cache in `directory`; None if `directory` is empty or the key cannot be read."""
    if not directory:
        return None
    try:
        key = user_key("programs")
        if "://" in directory:
            return _RemotePrograms(directory, key)
        limits = CACHE_BYTES.get() or MAX_BYTES, TENANT_CACHE_BYTES.get() or MAX_TENANT_BYTES
        return ProgramCache(directory, key, *limits)
    except (AccessError, OSError) as error:
        _log.warning("compiled programs are not stored on disk: %s", error)
        return None


_file_cache = compilation_cache.get_file_cache


def use_programs(programs: Programs | None, directory: str) -> None:
    """Make JAX in this process store everything that it compiles in `programs`; None disables its cache."""
    jax.config.update("jax_enable_compilation_cache", programs is not None)
    if programs is None:
        return
    cache = JaxCache(programs, directory)
    compilation_cache.get_file_cache = lambda path: (cache, path)
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def check_in_use(client: Any) -> None:
    """Raise RuntimeError if JAX uses another cache, whose entries are not verified."""
    cache = compilation_cache._get_cache(client)
    if cache is not None and not isinstance(cache, JaxCache):
        raise RuntimeError(f"JAX {jax.__version__} does not use Atoll's cache of compiled programs")


class CompiledPrograms:
    """The programs in `programs` that compiler processes have compiled for these devices.

    Keys are hashes of the request, so programs are not parsed.
    """

    def __init__(self, programs: Programs | None, devices: Sequence[Any]) -> None:
        self._programs = programs
        self._machine = _described(devices) if programs is not None else b""

    def find(self, request: CompileProgram, tenant: str) -> CompiledProgram | None:
        """Return the program if it was compiled for this tenant before, on a machine like this one."""
        if self._programs is None or request.callbacks or request.keys:  # the program belongs to one session
            return None
        content = self._programs.get(self._key(request), tenant)
        return None if content is None else _decode(content)

    def keep(self, request: CompileProgram, tenant: str, program: CompiledProgram) -> None:
        """Store a compiled program."""
        if self._programs is not None and not (request.callbacks or request.keys):
            self._programs.put(self._key(request), _encode(program), tenant)

    def _key(self, request: CompileProgram) -> str:
        digest = hashlib.sha256(_VERSION)
        shape = f"{request.replicas} {request.partitions} {request.platform}".encode()
        more = [*map(str.encode, request.fragment or ())]
        if request.targets:  # their names depend on the content of libraries
            more.append(_encode(request.targets))
        for part in (self._machine, shape, request.options, request.program, *more):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return digest.hexdigest()


def _described(devices: Sequence[Any]) -> bytes:
    """Return a description of everything that a program's code depends on, besides the program and its options."""
    try:
        topology = str(xc.get_topology_for_devices(list(devices)).fingerprint())
    except jax.errors.JaxRuntimeError:
        topology = " ".join(device.device_kind for device in devices)
    versions = f"{jax.__version__} {jax.lib.__version__} {devices[0].client.platform_version}"
    return f"{versions} {topology} {XLA_FLAGS.text()}".encode()
