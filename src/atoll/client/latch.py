"""An event for which the script's thread waits, and which another thread sets."""

from __future__ import annotations

import contextlib
import threading

_LOOK_SECONDS = 1.0  # interval at which a thread looks whose wakener was interrupted


class Latch:
    """An event that is set once. Ctrl-C during `wait` harms no other thread.

    If a KeyboardInterrupt arrives while `threading.Event.wait` takes its lock again, Python releases a lock that the
    setting thread holds. That thread then ends with a RuntimeError. A latch uses one lock without such a step: whoever
    gets it releases it for the next.
    """

    __slots__ = ("_closed", "_is_set")

    def __init__(self) -> None:
        self._closed = threading.Lock()
        self._closed.acquire()
        self._is_set = False

    def set(self) -> None:
        """Wake all threads that wait."""
        self._is_set = True
        self._release()

    def is_set(self) -> bool:
        """Return whether `set` was called."""
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until `set` is called, or for `timeout` seconds. Return whether it was called."""
        if timeout is not None:
            if not self._is_set and self._closed.acquire(timeout=timeout):
                self._release()
            return self._is_set
        while not self._is_set:
            # A thread that was interrupted before it released the lock wakes no other one.
            if self._closed.acquire(timeout=_LOOK_SECONDS):
                self._release()
        return True

    def _release(self) -> None:
        with contextlib.suppress(RuntimeError):  # another thread was faster
            self._closed.release()
