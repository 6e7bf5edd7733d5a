"""A process that must not outlive another.

The watched process is held by a pidfd, so that a reused pid is no mistake, and its end is seen within a millisecond
however it came. Threads that hang in native code do not matter: callers end their process by `os._exit`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import threading
import time
from collections.abc import Callable

from atoll.cluster.processes.leases import Leases

_RENEWER = 0  # the one peer of a `Lease`
_LOOKS = 8  # how often a lease is checked while it runs


def open_pid(pid: int) -> int | None:
    """A descriptor that becomes readable when process `pid` ends; None if it has ended already."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def watch_in_loop(pid: int, on_end: Callable[[], None]) -> None:
    """Calls `on_end` on the running loop once process `pid` has ended."""
    loop = asyncio.get_running_loop()
    descriptor = open_pid(pid)
    if descriptor is None:
        loop.call_soon(on_end)
        return

    def ended() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        on_end()

    loop.add_reader(descriptor, ended)


def watch_in_thread(pid: int, on_end: Callable[[], None]) -> None:
    """Calls `on_end` from a thread of its own once process `pid` has ended."""

    def wait() -> None:
        descriptor = open_pid(pid)
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
    """Calls `on_lapse` from a thread of its own when it is not renewed in time. It starts with the first renewal.

    Where `on_lapse` returns, it starts again with the next.
    """

    def __init__(self, on_lapse: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._leases = Leases()
        self._on_lapse = on_lapse
        self._has_begun = False

    def renew(self, seconds: float) -> None:
        """The lease runs for `seconds` from now on."""
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
