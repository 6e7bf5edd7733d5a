"""Snapshots of a running controller, written by a forked child.

The child shares its memory with the parent until one of the two changes it (as Redis saves its data). It has only the
forking thread. It closes the sockets it inherited, so that peers notice if the parent ends, ends with its parent, and
touches nothing except its file.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from io import BytesIO
from typing import Any

from atoll.cluster.processes.process_runtime import fork_quietly

_PR_SET_PDEATHSIG = 1
_MOST_DEPTH = 1_000_000  # of Python calls
_STACK_BYTES = 1 << 30  # of address space; unused pages take no memory
_FAILED = 255  # not an errno
_NICENESS = 10  # yields to the cluster's computations
_libc = ctypes.CDLL(None)


# Methods besides `__getstate__` with which a class customizes its pickling.
_PICKLE_METHODS = ("__new__", "__reduce__", "__reduce_ex__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")


@functools.cache
def _has_only_attributes(kind: Any) -> bool:
    """Whether objects of this class are of Atoll and consist only of the attributes in their dictionary."""
    return (
        kind.__module__.startswith("atoll.")
        and kind.__dictoffset__ != 0
        and all(getattr(kind, each, None) is getattr(object, each, None) for each in _PICKLE_METHODS)
        and not any(each.__dict__.get("__slots__") for each in kind.__mro__)
    )


def _set_attributes(made: Any, state: dict[str, Any]) -> None:
    for name, value in state.items():
        object.__setattr__(made, name, value)


class _AttributesMixin:
    """Mixin of picklers that restore attributes one by one.

    By default, unpickling gives an object a separate dictionary, with which Python 3.11 accesses its attributes more
    slowly for as long as the controller lives.
    """

    def reducer_override(self, value: Any) -> Any:
        kind: Any = type(value)
        if not _has_only_attributes(kind):
            return NotImplemented
        return object.__new__, (kind,), value.__getstate__(), None, None, _set_attributes


class _Pickler(_AttributesMixin, pickle.Pickler):
    pass


class _DeepPickler(_AttributesMixin, pickle._Pickler):
    pass


def pickled(state: Any) -> bytes:
    """Return the state as bytes."""
    file = BytesIO()
    try:
        _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(state)
    except RecursionError:  # a long chain of objects
        return _pickled_deeply(state)
    return file.getvalue()


def _pickled_deeply(state: Any) -> bytes:
    """Pickle with the slower pickler in Python, whose depth is limited only by the stack of its thread."""
    found: list[bytes] = []

    def work() -> None:
        file = BytesIO()
        _DeepPickler(file, pickle.HIGHEST_PROTOCOL).dump(state)
        found.append(file.getvalue())

    limit, size = sys.getrecursionlimit(), threading.stack_size(_STACK_BYTES)
    sys.setrecursionlimit(_MOST_DEPTH)
    try:
        thread = threading.Thread(target=work, name="snapshot")
        thread.start()
        thread.join()
    finally:
        sys.setrecursionlimit(limit)
        threading.stack_size(size)
    if not found:
        raise RuntimeError("cannot pickle the state of the controller")
    return found[0]


def unpickled(payload: bytes) -> Any:
    """Return the state that `pickled` converted. The payload must be from an authenticated file (`journal.files`)."""
    return pickle.loads(payload)


def start_snapshot(state: Callable[[], Any], write: Callable[[bytes], None]) -> int:
    """Make a child call `write` with the bytes of the current state, and return the child's pid. The caller reaps it.

    The child exits with 0 if it succeeds, with the errno of an OSError, or with `_FAILED`. Raises OSError if the fork
    fails.
    """
    parent = os.getpid()
    pid = fork_quietly()  # the child takes no locks of the controller's threads, which write usage and sync files
    if pid:
        return pid
    status = _FAILED
    try:
        gc.disable()
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(status)
        os.nice(_NICENESS)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        write(pickled(state()))
        status = 0
    except BaseException as error:
        status = getattr(error, "errno", None) or _FAILED
        os.write(2, f"atoll: a snapshot failed: {traceback.format_exc()}".encode())
    finally:
        os._exit(status)


def wait_for_snapshot(child: int) -> None:
    """Wait for the child to exit. Raises OSError if the snapshot failed."""
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if 0 < status < _FAILED:
        raise OSError(status, os.strerror(status))
    if status:
        raise OSError(f"a snapshot of the controller failed (status {status})")
