"""Threads for calls into clients' Python, both in the client and on waiting hosts. Calls may take any time."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable

# Maximum number of a session's compilations that wait for its client at a time. It is more than one because a callback
# may itself compile a program with callbacks.
MOST_OF_A_SESSION = 4

# Time without work after which a thread ends.
_IDLE_SECONDS = 30.0


class Threads:
    """A pool of daemon threads that grows on demand, so that `run` never waits.

    A thread ends after `idle` seconds without work.
    """

    def __init__(self, idle: float = _IDLE_SECONDS) -> None:
        self._idle_seconds = idle
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0

    def run(self, call: Callable[[], None]) -> None:
        with self._lock:
            is_new = self._idle == 0
            if not is_new:
                self._idle -= 1
        if is_new:
            threading.Thread(target=self._serve, args=(call,), name="atoll-callback", daemon=True).start()
        else:
            self._work.put(call)

    def _serve(self, call: Callable[[], None]) -> None:
        while True:
            call()
            del call
            with self._lock:
                self._idle += 1
            while True:
                try:
                    call = self._work.get(timeout=self._idle_seconds)
                    break
                except queue.Empty:
                    with self._lock:
                        if self._idle > 0:  # otherwise `run` has counted on this thread and is queueing work
                            self._idle -= 1
                            return


class SessionThreads:
    """Runs each session's work on up to `most` threads, in order of submission. Thread-safe; `submit` never waits."""

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
