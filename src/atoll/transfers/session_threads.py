"""Threads for work that waits for a session's client: a few of each session, and never those of others."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

# Compilations of a session that may wait for its client at once: a callback may compile such a program itself.
MOST_OF_A_SESSION = 4


class SessionThreads:
    """Runs the work of each session in the order in which it comes. `submit` never waits. For any thread."""

    def __init__(self, name: str, most: int = MOST_OF_A_SESSION) -> None:
        self._name = name
        self._most = most
        self._lock = threading.Lock()
        self._running: dict[int, int] = {}
        self._waiting: dict[int, deque[Callable[[], None]]] = {}

    def submit(self, session: int, work: Callable[[], None]) -> None:
        with self._lock:
            if self._running.get(session, 0) >= self._most:
                self._waiting.setdefault(session, deque()).append(work)
                return
            self._running[session] = self._running.get(session, 0) + 1
        threading.Thread(target=self._run, args=(session, work), name=self._name, daemon=True).start()

    def _run(self, session: int, work: Callable[[], None] | None) -> None:
        while work is not None:
            work()
            with self._lock:
                waiting = self._waiting.get(session)
                work = waiting.popleft() if waiting else None
                if not waiting:
                    self._waiting.pop(session, None)
                if work is None:
                    self._running[session] -= 1
                    if not self._running[session]:
                        del self._running[session]
