"""Threads for calls into clients' Python, both in the client and on waiting hosts. Calls may take any time."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable

# Maximum number of a session's compilations that wait for its client at a time. It is more than one because a callback
# may itself compile a program with callbacks.
MAX_PER_SESSION = 4

# Time without work after which a thread ends.
_IDLE_SECONDS = 30.0


class Threads:
    """A pool of daemon threads that grows on demand, so that `run` never waits.

    A thread ends after `idle` seconds without work. Between `prepare` and `release`, one idle thread remains. Since
    Python 3.12 no thread can be started in exit handlers.
    """

    def __init__(self, idle: float = _IDLE_SECONDS) -> None:
        self._idle_seconds = idle
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # None ends a thread
        self._lock = threading.Lock()
        self._idle = 0  # less the calls that wait for a thread
        self._kept = 0  # idle threads that remain

    @property
    def idle(self) -> int:
        """The number of idle threads, less the calls that wait for a thread."""
        return self._idle

    def prepare(self) -> None:
        """Keep an idle thread, and start it if necessary. Raise RuntimeError if that fails."""
        with self._lock:
            self._kept = 1
            if self._idle <= 0:
                self._start(None)
                self._idle += 1

    def release(self) -> None:
        """Let all threads end, the idle one at once."""
        with self._lock:
            self._kept = 0
            if self._idle > 0:
                self._idle -= 1
                self._work.put(None)

    def run(self, call: Callable[[], None]) -> None:
        """Run `call` on a thread of the pool. Raise RuntimeError if none is idle and none can be started."""
        with self._lock:
            is_new = self._idle <= 0
            if not is_new:
                self._idle -= 1
        if is_new:
            self._start(call)
        else:
            self._work.put(call)

    def run_or_wait(self, call: Callable[[], None]) -> None:
        """Run `call` as `run` does. If no thread can be started, the call waits until one has ended its work.

        Raise RuntimeError if no thread is certain to remain.
        """
        try:
            self.run(call)
        except RuntimeError:
            with self._lock:
                if not self._kept:
                    raise
                self._idle -= 1
            self._work.put(call)

    def _start(self, call: Callable[[], None] | None) -> None:
        threading.Thread(target=self._serve, args=(call,), name="atoll-callback", daemon=True).start()

    def _serve(self, call: Callable[[], None] | None) -> None:
        """Run `call`, or begin as an idle thread."""
        while True:
            if call is not None:
                call()
                with self._lock:
                    self._idle += 1
            call = None
            while True:
                try:
                    call = self._work.get(timeout=self._idle_seconds)
                    break
                except queue.Empty:
                    with self._lock:
                        if self._idle > self._kept:  # otherwise it remains, or `run` is queueing work for it
                            self._idle -= 1
                            return
            if call is None:
                return


class SessionThreads:
    """Runs each session's work on up to `limit` threads, in order of submission. Thread-safe; `submit` never waits."""

    def __init__(self, name: str, limit: int = MAX_PER_SESSION) -> None:
        self._name = name
        self._limit = limit
        self._lock = threading.Lock()
        self._running: dict[int, int] = {}
        self._waiting: dict[int, deque[Callable[[], None]]] = {}

    @property
    def sessions(self) -> frozenset[int]:
        """The sessions whose work runs or waits."""
        with self._lock:
            return frozenset((*self._running, *self._waiting))

    def submit(self, session: int, work: Callable[[], None]) -> None:
        """Run the work soon. Raise RuntimeError, and do not run it, if no thread can be started."""
        with self._lock:
            if self._running.get(session, 0) >= self._limit:
                self._waiting.setdefault(session, deque()).append(work)
                return
            threading.Thread(target=self._run, args=(session, work), name=self._name, daemon=True).start()
            self._running[session] = self._running.get(session, 0) + 1

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
