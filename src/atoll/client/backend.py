"""JAX's client for a cluster: jaxlib's own IFRT proxy client, connected to a proxy that is started for it."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import time
import weakref
from typing import Any, Protocol

from atoll.client.client_settings import Settings
from atoll.client.client_slices import forget_slices
from atoll.client.forks import ForkGuard
from atoll.client.jax_patches import host_callbacks
from atoll.client.jax_patches import install as install_patches
from atoll.client.log_filter import filtered_stderr
from atoll.client.processes import ClientProcesses
from atoll.cluster.processes.timer_slack import relaxed
from atoll.errors import BackendError
from atoll.security.join_token import JoinToken

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
_client: Any = None
_leaving = False  # this process is ending


def choose(settings: Settings | None) -> None:
    """What the next client connects to; None: as the environment says."""
    global _chosen
    _chosen = settings


def cluster() -> tuple[str, str, JoinToken | None] | None:
    """The address of the controller that this process uses, its token, and the join token where there is one.

    None where JAX does not run on Atoll.
    """
    return None if _processes is None else (_processes.controller, _processes.token, _processes.join)


def clear_with_client(cache: Cache) -> None:
    """Has the cache cleared when a client begins or ends. Does not keep the cache alive."""
    _caches.add(cache)


def make_client() -> Any:
    """Starts what is needed and connects. Called by JAX when it makes its backends.

    JAX does so again where an exit handler computes after JAX's own has dropped the backends. The arrays of such a
    handler are of the first client, so it gets that one. Raises BackendError in one of several processes of a
    distributed JAX.
    """
    global _processes, _client
    if _leaving:
        return _client
    _check_alone()
    settings = _chosen or Settings.from_environment()
    disconnect()
    _processes = ClientProcesses(settings, _users_cache())
    atexit.register(_leave)
    os.environ["IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS"] = "true"
    os.environ["IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION_DIRECTORY"] = str(_processes.transfer_directory)
    os.environ["IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION_THRESHOLD_BYTES"] = str(_LARGE_TRANSFER_BYTES)
    # jaxlib's client reads its environment when it first connects.
    from jax.extend.backend import ifrt_proxy

    install_patches()
    clear_with_client(host_callbacks.TABLE)
    options = ifrt_proxy.ClientConnectionOptions()
    options.connection_timeout_in_seconds = _CONNECT_SECONDS
    with filtered_stderr(), relaxed(), _fork_guard().connecting() as clients:
        client = ifrt_proxy.get_client("grpc://" + _processes.proxy_address, options)
        clients.append(client)
    # Its destructor would report the end of the connection as if it were an error. The process's end closes it too.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))
    _client = client
    return client


def add_local_cpu() -> None:
    """Gives JAX its local CPU as `cpu` beside Atoll, where the user's platforms leave it out.

    Callbacks, dlpack and what stays at home need it. Called while JAX makes its backends, once Atoll's is made.
    """
    import jax
    from jax._src import xla_bridge

    if "cpu" not in str(jax.config.jax_platforms).split(","):
        xla_bridge._backends.setdefault("cpu", xla_bridge._init_backend("cpu"))


def add_platform(client: Any) -> None:
    """Register Atoll's client also under the name of its devices' platform, such as "cuda".

    JAX looks a platform up by that name where it lowers for a GPU, and scripts do in `jax.devices("gpu")` and
    `jit(..., backend="tpu")`. CPU devices keep to "atoll", since "cpu" is the script's own. Called while JAX makes its
    backends.
    """
    from jax._src import xla_bridge

    if client.platform != "cpu":
        xla_bridge._backends.setdefault(client._raw_platform, client)


def _check_alone() -> None:
    from jax._src import distributed

    state = distributed.global_state
    if state.num_processes > 1:
        raise BackendError(
            f"jax.distributed.initialize has made this process {state.process_id} of {state.num_processes}, and Atoll "
            "has one controller: one process of yours uses the devices of all hosts. Run the script once, without "
            "jax.distributed.initialize; `atoll up --islands ISLANDSxHOSTSxDEVICES` starts the hosts' processes"
        )


@functools.cache
def _fork_guard() -> ForkGuard:
    return ForkGuard(_abandon)


def _abandon() -> None:
    """In a child made by fork: processes, directories and channels are its parent's, and nothing here may end them."""
    global _processes, _client
    atexit.unregister(_leave)
    _processes = _client = None
    _caches.clear()  # to clear them would shut down sockets of the parent


def _leave() -> None:
    global _leaving
    _leaving = True
    if _processes is not None:
        _processes.leave()


def losses() -> int:
    """How often this client's cluster has failed hosts, and what was stored on them."""
    processes = _processes
    return processes.losses() if processes is not None else 0


def _users_cache() -> str:
    """The directory in which the user has JAX keep compiled programs, or "": the workers keep them there."""
    import jax

    directory = jax.config.jax_compilation_cache_dir if jax.config.jax_enable_compilation_cache else None
    return str(directory or "")


def disconnect() -> None:
    """Ends this client's processes, if there are any."""
    global _processes, _client
    for cache in list(_caches):
        cache.clear_cache()
    processes, _processes, _client = _processes, None, None
    if processes is not None:
        atexit.unregister(_leave)
        with filtered_stderr():
            forget_slices()
            processes.close()
            time.sleep(_LAST_MESSAGES_SECONDS)
