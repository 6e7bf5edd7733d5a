"""JAX's client for a cluster: jaxlib's IFRT proxy client, connected to a proxy that this process starts.

This module imports no more than the start of these processes needs. See `jaxlib_client` for the rest.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import time
from typing import TYPE_CHECKING, Any

from atoll.client.client_caches import abandon_client_caches, clear_client_caches
from atoll.client.jaxlib_logging import silenced_jaxlib
from atoll.client.processes import ClientProcesses, ClusterChoice
from atoll.errors import BackendError
from atoll.security.join_token import JoinToken

if TYPE_CHECKING:
    from atoll.client.forks import ForkGuard

_LAST_MESSAGES_SECONDS = 0.2  # time for jaxlib's client to report that its connection has ended


_chosen: ClusterChoice | None = None
_processes: ClientProcesses | None = None
_client: Any = None
_leaving = False  # this process is ending


def choose(choice: ClusterChoice | None) -> None:
    """Set the cluster to which the next client connects. None stands for the environment's."""
    global _chosen
    _chosen = choice


def cluster() -> tuple[str, str, JoinToken | None] | None:
    """Return the controller's address, the token and the join token (if any), or None if JAX does not run on Atoll."""
    return None if _processes is None else (_processes.controller, _processes.token, _processes.join)


def is_embedded() -> bool:
    """Return whether this process has started the cluster on which JAX runs here."""
    return _processes is not None and _processes.is_embedded


def make_client() -> Any:
    """Start the client's processes and connect. JAX calls this when it creates its backends.

    JAX calls this again if an exit handler computes after JAX's own exit handler has dropped the backends. The arrays
    of such a handler belong to the first client, so this returns the first client. Raise BackendError in a process of a
    distributed JAX program.
    """
    global _processes, _client
    if _leaving:
        return _client
    _check_single_process()
    choice = _chosen or ClusterChoice.from_environment()
    disconnect()
    processes = ClientProcesses(choice, _users_cache())
    try:  # to use the time in which the processes start
        from atoll.client import jaxlib_client

        jaxlib_client.prepare()
    except BaseException:
        processes.close()
        raise
    address = processes.wait_until_up()
    _processes = processes
    atexit.register(_leave)
    _client = jaxlib_client.connect(address, processes.transfer_directory, _fork_guard(), losses)
    return _client


def add_local_cpu() -> None:
    """Add the local CPU backend `cpu` to JAX if the user's platforms leave it out.

    Callbacks, dlpack and arrays in this process need it. Call this while JAX creates its backends, after Atoll's.
    """
    import jax
    from jax._src import xla_bridge

    if "cpu" not in str(jax.config.jax_platforms).split(","):
        xla_bridge._backends.setdefault("cpu", xla_bridge._init_backend("cpu"))


def add_platform(client: Any) -> None:
    """Register Atoll's client also under the name of its devices' platform, such as "cuda".

    JAX looks up that name when it lowers for a GPU, and scripts use it in `jax.devices("gpu")` and
    `jit(..., backend="tpu")`. The backend "cpu" is always the script's own CPU, which JAX needs for callbacks; see
    `jax_patches.cpu_devices` for lookups of devices. Call this while JAX creates its backends.
    """
    from jax._src import xla_bridge

    if client.platform != "cpu":
        xla_bridge._backends.setdefault(client._raw_platform, client)


def _check_single_process() -> None:
    from jax._src import distributed

    state = distributed.global_state
    if state.num_processes > 1:
        raise BackendError(
            f"jax.distributed.initialize has made this process {state.process_id} of {state.num_processes}, but with "
            "Atoll one process uses the devices of all hosts. Run the script once, without "
            "jax.distributed.initialize; `atoll up --islands ISLANDSxHOSTSxDEVICES` starts the hosts' processes"
        )


@functools.cache
def _fork_guard() -> ForkGuard:
    from atoll.client.forks import ForkGuard

    return ForkGuard(_abandon)


def _abandon() -> None:
    """Forget the client in a forked child, without ending the processes, directories and channels of the parent."""
    global _processes, _client
    atexit.unregister(_leave)
    _processes = _client = None
    abandon_client_caches()


def _leave() -> None:
    global _leaving
    _leaving = True
    if _processes is not None:
        _processes.leave()


def end_compilations() -> None:
    """Let the compilations under way raise an error, because this process is ending. Does not wait."""
    if _processes is not None:
        _processes.end_compilations()


def losses() -> int:
    """Return how many times the cluster of this client has lost hosts with the arrays that they stored."""
    processes = _processes
    return processes.losses() if processes is not None else 0


def _users_cache() -> str:
    """Return the directory of JAX's compilation cache, or "". The workers store their compiled programs there."""
    import jax

    directory = jax.config.jax_compilation_cache_dir if jax.config.jax_enable_compilation_cache else None
    return str(directory or "")


def delete_arrays(client: Any) -> None:
    """Delete the arrays of a client that JAX does not use any more.

    Each client numbers its arrays from 1, and JAX sends the number of an array to whichever client it uses. The next
    client would use another array in place of one that the script still has.

    The deletion also keeps jaxlib's client from logging a failure for each array that the script drops later.
    """
    for array in client.live_arrays():
        with contextlib.suppress(RuntimeError):  # the connection is lost
            array.delete()


def _keep_executables(client: Any) -> None:
    """Never destroy the executables that the script still has, because jaxlib logs an error if its client has ended.

    Each keeps a few kilobytes of this process.
    """
    for executable in client.live_executables():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(executable))


def disconnect() -> None:
    """End this client's processes, if there are any. Delete its arrays."""
    global _processes, _client
    clear_client_caches()
    client, processes, _processes, _client = _client, _processes, None, None
    if processes is not None:
        from atoll.client.client_slices import forget_slices

        atexit.unregister(_leave)
        with silenced_jaxlib():
            try:
                if client is not None:
                    delete_arrays(client)
                    _keep_executables(client)
                forget_slices()
            finally:  # also after Ctrl-C, since nothing else knows the processes now
                processes.close()
            time.sleep(_LAST_MESSAGES_SECONDS)
