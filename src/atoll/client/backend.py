"""JAX's client for a cluster: jaxlib's own IFRT proxy client, connected to a proxy that is started for it."""

from __future__ import annotations

import atexit
import ctypes
import os
import time
import weakref
from typing import Any, Protocol

from atoll.client.jax_patches import host_callbacks
from atoll.client.jax_patches import install as install_patches
from atoll.client.log_filter import filtered_stderr
from atoll.client.processes import ClientProcesses
from atoll.client.settings import Settings
from atoll.client.slices import forget_slices
from atoll.client.timer_slack import relaxed

# From this size on, arrays reach the proxy through files in shared memory.
_LARGE_TRANSFER_BYTES = 256 * 1024
_CONNECT_SECONDS = 30
# How long jaxlib's client may take to report that its connection has ended.
_LAST_MESSAGES_SECONDS = 0.2


class Cache(Protocol):
    """Something that is only valid while a client lives."""

    def clear_cache(self) -> None: ...


_caches: weakref.WeakSet[Cache] = weakref.WeakSet()
_chosen: Settings | None = None
_processes: ClientProcesses | None = None


def choose(settings: Settings | None) -> None:
    """What the next client connects to; None: as the environment says."""
    global _chosen
    _chosen = settings


def cluster() -> tuple[str, str] | None:
    """The address of the controller that this process uses, and its token; None where JAX does not run on Atoll."""
    return None if _processes is None else (_processes.controller, _processes.token)


def clear_with_client(cache: Cache) -> None:
    """Has the cache cleared when a client begins or ends. Does not keep the cache alive."""
    _caches.add(cache)


def make_client() -> Any:
    """Starts what is needed and connects. Called by JAX when it makes its backends."""
    global _processes
    settings = _chosen or Settings.from_environment()
    disconnect()
    _processes = ClientProcesses(settings, _users_cache())
    atexit.register(_processes.leave)
    os.environ["IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS"] = "true"
    os.environ["IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION_DIRECTORY"] = str(_processes.transfer_directory)
    os.environ["IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION_THRESHOLD_BYTES"] = str(_LARGE_TRANSFER_BYTES)
    # jaxlib's client reads its environment when it first connects.
    from jax.extend.backend import ifrt_proxy

    install_patches()
    clear_with_client(host_callbacks.TABLE)
    options = ifrt_proxy.ClientConnectionOptions()
    options.connection_timeout_in_seconds = _CONNECT_SECONDS
    with filtered_stderr(), relaxed():
        client = ifrt_proxy.get_client("grpc://" + _processes.proxy_address, options)
    # Its destructor would report the end of the connection as if it were an error. The process's end closes it too.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))
    return client


def losses() -> int:
    """How often this client's cluster has lost hosts, and what was stored on them."""
    processes = _processes
    return processes.losses() if processes is not None else 0


def _users_cache() -> str:
    """The folder in which the user has JAX keep compiled programs, or "": the workers keep them there."""
    import jax

    folder = jax.config.jax_compilation_cache_dir if jax.config.jax_enable_compilation_cache else None
    return str(folder or "")


def disconnect() -> None:
    """Ends this client's processes, if there are any."""
    global _processes
    for cache in list(_caches):
        cache.clear_cache()
    processes, _processes = _processes, None
    if processes is not None:
        atexit.unregister(processes.leave)
        with filtered_stderr():
            forget_slices()
            processes.close()
            time.sleep(_LAST_MESSAGES_SECONDS)
