"""Snapshots of a running controller, written by a forked child.

The child shares its memory with the parent until one of the two changes it (as Redis saves its data). It has only the
forking thread. It closes the sockets it inherited, so that peers notice if the parent ends, ends with its parent, and
touches nothing except its file.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import traceback
from collections.abc import Callable

from atoll.cluster.processes.process_runtime import fork_quietly

_PR_SET_PDEATHSIG = 1
_FAILED = 255  # not an errno
_NICENESS = 10  # yields to the cluster's computations
_libc = ctypes.CDLL(None)


def start_snapshot(state: Callable[[], bytes], write: Callable[[bytes], None]) -> int:
    """Make a child call `write(state())` with the current state, and return the child's pid. The caller reaps it.

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
        write(state())
        status = 0
    except BaseException as error:
        text = traceback.format_exc()
        if isinstance(error, OSError) and error.errno:  # such as a full disk, which is no bug
            status, text = error.errno, f"{error}\n"
        os.write(2, f"atoll: a snapshot failed: {text}".encode())
    finally:
        os._exit(status)


def wait_for_snapshot(child: int) -> None:
    """Wait for the child to exit. Raises OSError if the snapshot failed."""
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if 0 < status < _FAILED:
        raise OSError(status, os.strerror(status))
    if status:
        raise OSError(f"a snapshot of the controller failed (status {status})")
