"""Threads that wait for the cluster in the background. A script waits up to `_END_SECONDS` for them when it exits.

Python kills a daemon thread that returns from C++ during interpreter shutdown, and in jaxlib this aborts the process
(SIGABRT, "exception not rethrown"). A non-daemon thread would block the exit for as long as an island is unavailable.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable

_END_SECONDS = 10.0
_running: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def start(name: str, work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work, name=name, daemon=True)
    _running.add(thread)
    thread.start()


@atexit.register
def _wait() -> None:
    deadline = time.monotonic() + _END_SECONDS
    for thread in list(_running):
        thread.join(max(0.0, deadline - time.monotonic()))
