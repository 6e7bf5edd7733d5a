"""Let the kernel wake jaxlib's client less often.

A thread of jaxlib's IFRT proxy client checks every 50 us for releases of arrays to send, for as long as the process
lives (`RpcHelper::Batcher` in XLA). With the kernel's default timer slack, it wakes 8,000 times per second and uses
13 % of a core. With a slack of 2 ms, it wakes 500 times and uses 2 %; with 20 ms, 50 times and 0.2 %. Any other request
also sends the waiting releases. If a client sends no request, its arrays are released up to 20 ms later. A thread
inherits the slack of the thread that creates it.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import time
from collections.abc import Iterator

SLACK_NANOSECONDS = 20_000_000
_CALL_SECONDS = 0.002  # of a call for which another thread waits

# From <linux/prctl.h>.
_PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK = 29, 30


@contextlib.contextmanager
def relaxed() -> Iterator[None]:
    """Let the threads that this thread creates in this block sleep up to 20 ms longer than they ask for.

    A thread that waits for an event wakes as promptly as before. If the platform has no timer slack, do nothing.
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


def measure_clock() -> None:
    """Let jaxlib measure the CPU's clock now, which takes 4 ms, instead of in `relaxed`, where it takes 40 ms.

    The library absl does this once per process, between two sleeps, when a thread first waits for another in it. One of
    JAX's caches lets a thread wait for another that computes the same entry.
    """
    from jax._src.util import weakref_lru_cache

    class Key:
        pass

    is_computing = threading.Event()

    def compute(key: Key) -> None:
        is_computing.set()
        time.sleep(_CALL_SECONDS)

    cached, key = weakref_lru_cache(compute), Key()
    other = threading.Thread(target=cached, args=(key,), name="atoll-clock", daemon=True)
    with contextlib.suppress(RuntimeError):  # an exit handler can start no thread since Python 3.12
        other.start()
        is_computing.wait()
        cached(key)
        other.join()
