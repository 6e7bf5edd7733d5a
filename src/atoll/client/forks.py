"""Protects a cluster from forked children of the client's process: a child cannot harm it, and JAX calls raise there.

The child inherits jaxlib's clients with their connection, but not their threads. Without precautions, destructors in
the child would write to the parent's connection ("destruct this array"), a poll in the child would take events of the
parent, and calls that wait for a thread would hang. Therefore, in the child, dead descriptors replace those of the
connection, clients, arrays and executables are never destroyed, and the functions with which JAX uses a client raise
BackendError. JAX arrays in pickles become NumPy arrays.

Invariant: nothing that the child does reaches the cluster, and the child never waits for a client's threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import socket
from collections.abc import Callable, Iterator
from typing import Any

from atoll.client.jax_patches.patch import Replacement
from atoll.errors import BackendError

# The kinds of descriptors that a connection consists of, as named in /proc.
_KINDS = re.compile(r"socket:|anon_inode:\[event(poll|fd)\]")


class ForkGuard:
    """Cuts forked children of this process off from its clients. In each child, `on_fork` runs first."""

    def __init__(self, on_fork: Callable[[], None]) -> None:
        self._on_fork = on_fork
        self._clients: list[Any] = []
        self._descriptors: dict[int, str] = {}
        self._parent = os.getpid()
        os.register_at_fork(after_in_child=self._in_child)

    @contextlib.contextmanager
    def connecting(self) -> Iterator[list[Any]]:
        """Record the descriptors that the block opens as a client's connection. Add the client to the yielded list."""
        before = _descriptors()
        yield self._clients
        self._descriptors |= {number: what for number, what in _descriptors().items() if before.get(number) != what}

    def _in_child(self) -> None:
        from jax._src import xla_bridge

        if not self._clients:
            return
        self._on_fork()
        _cut(self._descriptors)
        _receive_as_numpy()
        for client in (*self._clients, *xla_bridge._backends.values()):
            for each in (client, *client.live_arrays(), *client.live_executables()):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
        _refuse(self._parent)
        self._clients = []


def _descriptors() -> dict[int, str]:
    """Return the descriptors of this process that may belong to a connection; none if the system has no /proc."""
    found = {}
    for name in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            what = os.readlink(f"/proc/self/fd/{name}")
            if _KINDS.match(what):
                found[int(name)] = what
    return found


def _cut(descriptors: dict[int, str]) -> None:
    """Replace the descriptors by dead ones, except for numbers that refer to something else by now."""
    if not descriptors:
        return
    ours, theirs = socket.socketpair()
    theirs.close()
    poller = select.epoll()
    for number, what in _descriptors().items():
        if descriptors.get(number) == what:
            os.dup2(poller.fileno() if "eventpoll" in what else ours.fileno(), number, inheritable=False)
    ours.close()
    poller.close()


# ---- refusals


def _refuse(parent: int) -> None:
    """Make JAX raise BackendError when it compiles, runs, copies, reads or waits."""
    from jax._src.lib import _jax

    def refusing(function: Callable[..., Any]) -> Callable[..., Any]:
        def refused(*arguments: Any, **options: Any) -> Any:
            raise BackendError(_ADVICE.format(parent=parent))

        return refused

    for owner, names in _REFUSED.items():
        for replacement in (Replacement(owner, name, refusing, ()) for name in names):
            if not replacement.difference():
                replacement.apply()
    _jax.PjitFunctionCache.clear_all()  # calls on JAX's C++ path bypass these functions


def _receive_as_numpy() -> None:
    """Make arrays that other processes send to this one NumPy arrays.

    A worker of a forked `multiprocessing.Pool` ends if an argument of a task cannot be read, and its parent waits for
    the task forever. So what makes an array of a pickle must not raise.
    """

    def receiving(function: Callable[..., Any]) -> Callable[..., Any]:
        def receive(make: Callable[..., Any], arguments: Any, state: Any, aval_state: Any) -> Any:
            contents = make(*arguments)
            contents.__setstate__(state)
            return contents

        return receive

    replacement = Replacement("jax._src.array", "_reconstruct_array", receiving, ("fun", "args", "arr_state"))
    if not replacement.difference():
        replacement.apply()


# The functions with which JAX uses a client, by owner. Functions that a version of JAX lacks are skipped.
_REFUSED: dict[str, tuple[str, ...]] = {
    "jaxlib._jax:ArrayImpl": (
        "_arrays",
        "_single_device_array_to_np_array_did_copy",
        "_to_np_array_did_copy",
        "_copy_single_device_array_to_host_async",
        "block_until_ready",
        "is_ready",
        "is_deleted",
        "delete",
    ),
    "jaxlib._jax": ("batched_copy_to_host_async",),
    "jaxlib._jax:Client": ("compile_ifrt_program", "compile_and_load", "deserialize_executable"),
    "jaxlib._jax:LoadedExecutable": ("execute_sharded", "serialize", "cost_analysis", "get_hlo_text", "hlo_modules"),
    "atoll.programs.launch:ProgramLaunch": ("call",),  # has looked up jaxlib's method before the fork
    "jaxlib.xla_client": (
        "batched_device_put",
        "batched_copy_array_to_devices_with_sharding",
        "batched_block_until_ready",
    ),
    "jax._src.compiler": ("backend_compile_and_load",),
    "jax._src.interpreters.pxla:ExecuteReplicated": ("__call__",),
}

_ADVICE = (
    "JAX on Atoll cannot be used in a forked process: the connection to the cluster belongs to its "
    "parent, process {parent}. Pass NumPy arrays to the child, or use multiprocessing's spawn or forkserver method"
)
