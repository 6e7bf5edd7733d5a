"""JAX's persistent compilation cache in a worker, with entries per tenant that are verified before JAX reads them."""

from __future__ import annotations

import contextlib
import contextvars
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import jax
from jax._src import compilation_cache
from jax._src.compilation_cache_interface import CacheInterface

from atoll.devices.xla.program_cache import ProgramCache, Seal
from atoll.errors import AccessError
from atoll.security.user_key import user_key

_log = logging.getLogger(__name__)

_tenant: contextvars.ContextVar[str] = contextvars.ContextVar("atoll_tenant", default="")


class Programs(Protocol):
    """Contents by key and tenant, on disk. `get` returns nothing that was not stored by `put`."""

    def get(self, key: str, tenant: str = "") -> bytes | None: ...

    def put(self, key: str, content: bytes, tenant: str = "") -> None: ...


class _RemotePrograms:
    """The entries of a cache at a URL, which JAX reads and writes with `etils`. JAX's own cache has no bound there."""

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
    """JAX's cache in this process. It has the entries of the tenant for which the thread compiles."""

    def __init__(self, programs: Programs, directory: str) -> None:
        self._programs = programs
        self._path = Path(directory)  # JAX logs it

    def get(self, key: str) -> bytes | None:
        return self._programs.get(key, _tenant.get())

    def put(self, key: str, value: bytes) -> None:
        self._programs.put(key, value, _tenant.get())


@contextlib.contextmanager
def compiling_for(tenant: str) -> Iterator[None]:
    """Let this thread use the entries of `tenant`."""
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
        return _RemotePrograms(directory, key) if "://" in directory else ProgramCache(directory, key)
    except (AccessError, OSError) as error:
        _log.warning("compiled programs are not kept on disk: %s", error)
        return None


_file_cache = compilation_cache.get_file_cache


def use_programs(programs: Programs | None, directory: str) -> None:
    """Have JAX in this process keep all that it compiles there, or keep nothing on disk."""
    jax.config.update("jax_enable_compilation_cache", programs is not None)
    if programs is None:
        return
    cache = JaxCache(programs, directory)
    compilation_cache.get_file_cache = lambda path: (cache, path)
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def check_in_use(client: Any) -> None:
    """Raise RuntimeError if JAX would read entries that are not verified."""
    cache = compilation_cache._get_cache(client)
    if cache is not None and not isinstance(cache, JaxCache):
        raise RuntimeError(f"JAX {jax.__version__} does not use the cache of compiled programs that Atoll gives it")
