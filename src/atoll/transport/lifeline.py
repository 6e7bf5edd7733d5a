"""A process that must not outlive another.

The watched process is held by a pidfd, so that a reused pid cannot fool us, and its end is seen within a millisecond
however it ended. Threads that hang in native code do not matter: the end is `os._exit`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import threading
import time
from collections.abc import Callable


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
    """Calls `on_lapse` from a thread of its own once it was not renewed in time. It begins with the first renewal."""

    def __init__(self, on_lapse: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._deadline = 0.0
        self._on_lapse = on_lapse

    def renew(self, seconds: float) -> None:
        """The lease runs for so long from now on."""
        with self._lock:
            first, self._deadline = self._deadline == 0.0, time.monotonic() + seconds
        if first:
            threading.Thread(target=self._watch, args=(seconds,), name="atoll-lease", daemon=True).start()

    def _watch(self, seconds: float) -> None:
        while True:
            before = time.monotonic()
            time.sleep(seconds / 8)
            now = time.monotonic()
            if now - before > seconds / 2:
                with self._lock:  # the machine was away, and the renewals of that time are yet to be read
                    self._deadline = now + seconds
            if now > self._deadline:
                self._on_lapse()
                return
