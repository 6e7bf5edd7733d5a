"""Snapshots while the controller goes on: a child of its process, which has all as it was, writes them.

The child is a copy of the process at one moment, whose memory is shared until one of the two changes it (as Redis saves
its data). It has this one thread, closes all sockets that it has with the copy, so that nobody waits for it where its
parent ends, ends with its parent, and touches nothing but its file.
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

from atoll.cluster.processes.forking import fork_quietly

_PR_SET_PDEATHSIG = 1
_MOST_DEPTH = 1_000_000  # of Python's calls
_STACK_BYTES = 1 << 30  # of addresses: what is not used takes no memory
_FAILED = 255  # no errno
_NICENESS = 10  # what the cluster computes comes first
_libc = ctypes.CDLL(None)


# What a class may say of how it is pickled, beside `__getstate__`.
_WAYS = ("__new__", "__reduce__", "__reduce_ex__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")


@functools.cache
def _has_attributes_alone(kind: Any) -> bool:
    """Whether an object of this class of Atoll's is its attributes, and nothing else."""
    return (
        kind.__module__.startswith("atoll.")
        and kind.__dictoffset__ != 0
        and all(getattr(kind, way, None) is getattr(object, way, None) for way in _WAYS)
        and not any(each.__dict__.get("__slots__") for each in kind.__mro__)
    )


def _set_attributes(made: Any, state: dict[str, Any]) -> None:
    for name, value in state.items():
        object.__setattr__(made, name, value)


class _OneByOne:
    """What is unpickled gets its attributes one by one. With a dictionary of its own, which it gets else, Python (3.11)
    would read and write them more slowly, for as long as the controller lives.
    """

    def reducer_override(self, value: Any) -> Any:
        kind: Any = type(value)
        if not _has_attributes_alone(kind):
            return NotImplemented
        return object.__new__, (kind,), value.__getstate__(), None, None, _set_attributes


class _Pickler(_OneByOne, pickle.Pickler):
    pass


class _DeepPickler(_OneByOne, pickle._Pickler):
    pass


def pickled(state: Any) -> bytes:
    """The state as bytes."""
    file = BytesIO()
    try:
        _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(state)
    except RecursionError:  # a long chain of objects
        return _pickled_deeply(state)
    return file.getvalue()


def _pickled_deeply(state: Any) -> bytes:
    """The pickler in Python is slower; how deep it goes is a matter of the stack that its thread has."""
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
        raise RuntimeError("what there is to be written cannot be pickled")
    return found[0]


def unpickled(payload: bytes) -> Any:
    """The state that `pickled` has made bytes of: of a file that was authenticated (`journal.files`)."""
    return pickle.loads(payload)


def start_snapshot(state: Callable[[], Any], write: Callable[[bytes], None]) -> int:
    """Has a child call `write` with the bytes of the state as it is now. Returns the child's pid: it is to be reaped.

    It ends with 0 where all went well, with the number of an OSError, or else with `_FAILED`. Raises OSError where
    there is no child to be had.
    """
    parent = os.getpid()
    pid = fork_quietly()  # the child takes no locks of a controller's threads: they write usage, and sync files
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
    """Raises OSError where it fails."""
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if 0 < status < _FAILED:
        raise OSError(status, os.strerror(status))
    if status:
        raise OSError(f"a snapshot of the controller failed (status {status})")
