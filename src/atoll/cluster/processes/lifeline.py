"""Watch a process that this one must not outlive, or the lease that it grants.

A pidfd identifies the watched process, so a reused pid does no harm, and its end is detected within a millisecond.
Scripts may also run on systems without pidfds: there a kqueue, or else a thread that looks ten times per second,
replaces it. Callers end their process with `os._exit`, so threads that hang in native code do no harm.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Any

from atoll.cluster.processes.leases import Leases
from atoll.retries import Retry

_RENEWER = 0  # the only peer of a `Lease`
_LOOKS = 8  # checks per lease
_POLL_SECONDS = 0.1  # between two looks at a process, on systems without pidfds or without a free descriptor


def open_pid(pid: int) -> int | None:
    """Return a descriptor that becomes readable when process `pid` ends, None if it has ended already.

    Raise OSError if no descriptor can be opened.
    """
    try:
        if hasattr(os, "pidfd_open"):
            return os.pidfd_open(pid)
        return _open_kqueue(pid) if hasattr(select, "kqueue") else _open_poll(pid)
    except ProcessLookupError:
        return None


def _open_kqueue(pid: int) -> int:
    """Return a duplicate of a kqueue for the end of a process, as macOS and the BSDs have it."""
    kqueue: Any = getattr(select, "kqueue")()  # noqa: B009  # absent from the stubs for Linux
    event: Any = getattr(select, "kevent")  # noqa: B009
    flags = {name: getattr(select, name) for name in ("KQ_FILTER_PROC", "KQ_EV_ADD", "KQ_NOTE_EXIT")}
    kqueue.control(
        [event(pid, flags["KQ_FILTER_PROC"], flags["KQ_EV_ADD"], flags["KQ_NOTE_EXIT"])], 0
    )  # raises ProcessLookupError
    return os.dup(kqueue.fileno())


def _open_poll(pid: int) -> int:
    """Return the end of a pipe that a thread closes when a process has ended."""
    if _has_ended(pid):
        raise ProcessLookupError(pid)
    readable, writable = os.pipe()

    def look() -> None:
        while not _has_ended(pid):
            time.sleep(_POLL_SECONDS)
        os.close(writable)

    threading.Thread(target=look, name="atoll-lifeline", daemon=True).start()
    return readable


def _has_ended(pid: int) -> bool:
    """Return whether a process has ended. A child that nobody has waited for has ended."""
    with contextlib.suppress(ChildProcessError, AttributeError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def watch_in_loop(pid: int, on_end: Callable[[], None]) -> None:
    """Call `on_end` on the running loop when process `pid` has ended."""
    loop = asyncio.get_running_loop()
    descriptor = None
    try:
        descriptor = open_pid(pid)
    except OSError:  # this process has too many open files
        if not _has_ended(pid):
            loop.call_later(_POLL_SECONDS, watch_in_loop, pid, on_end)
            return
    if descriptor is None:
        loop.call_soon(on_end)
        return

    def ended() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        on_end()

    loop.add_reader(descriptor, ended)


def watch_in_thread(pid: int, on_end: Callable[[], None]) -> None:
    """Call `on_end` on a separate thread when process `pid` has ended."""

    def opened() -> int | None:
        return None if _has_ended(pid) else open_pid(pid)

    def wait() -> None:
        descriptor = Retry(_POLL_SECONDS).call(opened, OSError)  # if this process has too many open files
        if descriptor is not None:
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            while not poller.poll():
                pass
            with contextlib.suppress(OSError):
                os.close(descriptor)
        on_end()

    threading.Thread(target=wait, name="atoll-lifeline", daemon=True).start()


class Lease:
    """A lease that starts with its first renewal, and calls `on_lapse` on a separate thread when it expires.

    If `on_lapse` returns, the lease starts again with the next renewal.
    """

    def __init__(self, on_lapse: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._leases = Leases()
        self._on_lapse = on_lapse
        self._has_begun = False

    def renew(self, seconds: float) -> None:
        """Let the lease run for `seconds` from now on."""
        with self._lock:
            self._leases.seconds, self._leases.period = seconds, seconds / _LOOKS
            self._leases.renew(_RENEWER, time.monotonic())
            begins, self._has_begun = not self._has_begun, True
        if begins:
            threading.Thread(target=self._watch, name="atoll-lease", daemon=True).start()

    def _watch(self) -> None:
        lapsed = False
        while not lapsed:
            time.sleep(self._leases.period)
            with self._lock:
                lapsed = bool(self._leases.expired(time.monotonic()))
                self._has_begun = not lapsed
        self._on_lapse()
