"""Read requests from standard input, each of which asks an honest client for its measurements."""

from __future__ import annotations

import sys
import threading


def read_requests() -> tuple[threading.Event, threading.Event]:
    """Return two events: one that is set at each line of standard input, and one at its end."""
    asked, over = threading.Event(), threading.Event()

    def read() -> None:
        for _ in sys.stdin:
            asked.set()
        over.set()

    threading.Thread(target=read, daemon=True).start()
    return asked, over
