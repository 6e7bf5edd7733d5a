"""Watch a process that this one must not outlive, or the lease that it grants.

A pidfd identifies the watched process, so a reused pid does no harm, and its end is detected within a millisecond.
Callers end their process with `os._exit`, so threads that hang in native code do no harm.
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

_RENEWER = 0  # the only peer of a `Lease`
_LOOKS = 8  # checks per lease


def open_pid(pid: int) -> int | None:
    """Return a descriptor that becomes readable when process `pid` ends, None if it has ended already."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def watch_in_loop(pid: int, on_end: Callable[[], None]) -> None:
    """Call `on_end` on the running loop when process `pid` has ended."""
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
    """Call `on_end` on a separate thread when process `pid` has ended."""

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
