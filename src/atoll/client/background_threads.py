"""Threads that wait for the cluster in the background, with JAX's settings of the threads that start them.

A script waits up to `_END_SECONDS` for them when it exits. Python kills a daemon thread that returns from C++ during
interpreter shutdown, and in jaxlib this aborts the process (SIGABRT, "exception not rethrown"). A non-daemon thread
would block the exit for as long as an island is unavailable.

At the exit nobody needs a compilation any more, so threads that compile are interrupted: an exception is raised in
their Python code, and the proxy answers their compile requests with an error.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from atoll.client import backend
from atoll.client.thread_settings import ThreadSettings

_END_SECONDS = 10.0
_PAUSE_SECONDS = 0.05  # between two interruptions, since a thread may begin another compilation after the first one
_running: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_compiling: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def start(name: str, work: Callable[[], None]) -> None:
    """Call `work` on a new thread. Raise RuntimeError if no thread can be started, such as in an exit handler."""
    _start(name, work)


def start_compiling(name: str, work: Callable[[], None]) -> None:
    """Call `work` on a new thread that is interrupted when the script exits. Raise RuntimeError like `start`."""
    _compiling.add(_start(name, work))


def _start(name: str, work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=ThreadSettings.current().applied()(work), name=name, daemon=True)
    thread.start()
    _running.add(thread)
    return thread


@atexit.register
def _end() -> None:
    deadline = time.monotonic() + _END_SECONDS
    while (now := time.monotonic()) < deadline and (alive := [each for each in _running if each.is_alive()]):
        interrupted = [each for each in alive if each in _compiling]
        for each in interrupted:
            _interrupt(each)
        if interrupted:
            backend.end_compilations()
        alive[0].join(_PAUSE_SECONDS if interrupted else deadline - now)


def _interrupt(thread: threading.Thread) -> None:
    """Raise SystemExit in the Python code of a thread, which ends it without a message."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))


class CompilingThreads:
    """Up to `limit` threads that compile.

    Unlike those of a `ThreadPoolExecutor`, which a script waits for before its exit handlers, they can be interrupted.
    """

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._name = name
        self._count = 0
        self._idle = threading.Semaphore(0)
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Call `work` on one of the threads, or on this thread if no thread can be started."""
        future: Future[Any] = Future()
        if self._count == self._limit or self._idle.acquire(blocking=False):
            self._work.put((future, work))
            return future
        self._work.put((future, work))
        try:
            start_compiling(self._name, self._run)
            self._count += 1
        except RuntimeError:
            if not self._count:
                self._run_next()
        return future

    def close(self) -> None:
        """Let the threads end after the work that was submitted."""
        for _ in range(self._count):
            self._work.put(None)

    def _run(self) -> None:
        while self._run_next():
            self._idle.release()

    def _run_next(self) -> bool:
        """Do the next work. Return False at the end that `close` has requested."""
        taken = self._work.get()
        if taken is None:
            return False
        future, work = taken
        try:
            future.set_result(work())
        except SystemExit as interruption:
            self._fail(future, interruption)
            raise
        except BaseException as error:
            future.set_exception(error)
        return True

    def _fail(self, future: Future[Any], interruption: SystemExit) -> None:
        """Let all who wait for work continue, because the script exits."""
        future.set_exception(interruption)
        while not self._work.empty():
            if left := self._work.get():
                left[0].set_exception(interruption)
