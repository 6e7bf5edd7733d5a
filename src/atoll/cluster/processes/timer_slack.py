"""Lets the kernel wake jaxlib's client less often.

A thread of jaxlib's IFRT proxy client looks every 50 us for releases of arrays to send on, for as long as the process
lives (`RpcHelper::Batcher` in XLA). With the kernel's usual timer slack that is 8,000 times a second, and 13 % of a
core. Any other request takes the waiting releases along, so nothing is gained by it. A thread inherits the slack of its
maker.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator

SLACK_NANOSECONDS = 2_000_000

# From <linux/prctl.h>.
_PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK = 29, 30


@contextlib.contextmanager
def relaxed() -> Iterator[None]:
    """Threads that are made in this block by this thread sleep up to 2 ms longer than they ask for.

    Sleeps alone: what waits for an event is woken as promptly as ever. Where there is no timer slack, nothing changes.
    """
    if not sys.platform.startswith("linux"):
        yield
        return
    prctl = ctypes.CDLL(None).prctl
    before = prctl(_PR_GET_TIMERSLACK, 0, 0, 0, 0)
    prctl(_PR_SET_TIMERSLACK, SLACK_NANOSECONDS, 0, 0, 0)
    try:
        yield
    finally:
        if before > 0:
            prctl(_PR_SET_TIMERSLACK, before, 0, 0, 0)
