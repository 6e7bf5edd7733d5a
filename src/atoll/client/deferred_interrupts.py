"""Steps of a start that Ctrl-C must not divide.

Python raises a KeyboardInterrupt between any two operations of the main thread. If it did so between two patches of
JAX, or after a process was started and before this process knows it, a later start in the same notebook would install
patches twice, or leave a cluster running.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Call the script's handler of Ctrl-C at the end of this block, if Ctrl-C was pressed in it.

    Blocks should be short. Only the main thread has interrupts to defer.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    received: list[tuple[Any, ...]] = []
    signal.signal(signal.SIGINT, lambda *arguments: received.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if received:
            handler(*received[-1])
