"""A wait in C code that Ctrl-C ends.

Python calls signal handlers only on the main thread, and not while C code waits there. So another thread runs the C
code, and the main thread waits for that thread in Python.

A daemon thread that returns from C++ while the interpreter shuts down aborts the process
(`client/background_threads.py`). Ctrl-C often also ends what a callback waits for, such as a command. So the exit gives
interrupted waits a short time to end.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable

from atoll.client.latch import Latch
from atoll.host_services.calls.call_threads import Threads

_EXIT_SECONDS = 0.5

_threads = Threads()


class _Wait:
    """A function that runs on another thread."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self._ended = Latch()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._function()
        except BaseException as error:
            self._error = error
        self._ended.set()

    def wait(self) -> None:
        try:
            self._ended.wait()
        finally:
            if not self._ended.is_set():
                _interrupted.add(self)
        if self._error is not None:
            raise self._error

    def wait_at_exit(self, seconds: float) -> None:
        self._ended.wait(seconds)


_interrupted: weakref.WeakSet[_Wait] = weakref.WeakSet()


@atexit.register
def _end() -> None:
    deadline = time.monotonic() + _EXIT_SECONDS
    for each in list(_interrupted):
        each.wait_at_exit(max(0.0, deadline - time.monotonic()))


def wait_interruptibly(function: Callable[[], object]) -> None:
    """Call `function`, which waits, and raise its exception.

    A KeyboardInterrupt on the main thread ends this call at once. `function` then continues on another thread, and its
    exception is ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        function()
        return
    wait = _Wait(function)
    try:
        _threads.run(wait.run)
    except RuntimeError:  # no thread can be started, such as in an exit handler
        function()
        return
    wait.wait()
