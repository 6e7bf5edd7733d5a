"""Threads that wait for the cluster beside a training. A script that ends waits for them first, for a while.

Python ends a daemon thread where it comes back from C++ while the interpreter ends; in jaxlib that takes the process
along (SIGABRT, "exception not rethrown"). Threads that are none would keep a script for as long as an island is away.
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
    """Runs `work` on a thread of that name."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    _running.add(thread)
    thread.start()


@atexit.register
def _wait() -> None:
    deadline = time.monotonic() + _END_SECONDS
    for thread in list(_running):
        thread.join(max(0.0, deadline - time.monotonic()))
