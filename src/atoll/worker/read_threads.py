"""The threads that read the results of units, and send them to clients and to other hosts."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from atoll.cluster.processes.bugs import run_as_thread, start_in

READ_THREADS = 512
MAX_PER_SESSION = 32  # each may wait for a client that does not read


class _Work(NamedTuple):
    future: Future[Any]
    call: Callable[..., Any]
    arguments: tuple[Any, ...]


class ReadStatistics(NamedTuple):
    """Sessions with work, and their work that was given to the threads or waits for other work of the session."""

    sessions: int
    started: int
    waiting: int


class ReadThreads:
    """Threads for all sessions. A session occupies at most `limit` of them, and its further work waits. Thread-safe.

    So a client that does not receive the data that it has requested delays only its own session.
    """

    def __init__(self, pool: Executor | None = None, limit: int = MAX_PER_SESSION) -> None:
        self._pool = pool or ThreadPoolExecutor(READ_THREADS, "atoll-read")
        self._limit = limit
        self._lock = threading.Lock()
        self._running: dict[int, int] = {}  # by session
        self._waiting: dict[int, deque[_Work]] = {}  # by session

    def of(self, session: int) -> Executor:
        """Return the threads as an executor for the work of a session."""
        return _OfSession(self, session)

    def submit(self, session: int, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call on a thread. Return the future of the result. Never waits."""
        work = _Work(Future(), call, arguments)
        with self._lock:
            if not self._take_thread(session):
                self._waiting.setdefault(session, deque()).append(work)
                return work.future
        start_in(self._pool, self._run, session, work)
        return work.future

    def try_submit(self, session: int, call: Callable[[], None]) -> bool:
        """Call on a thread, and return True. Return False if the session occupies as many as it may.

        An exception of `call` has the same effect as on a separate thread, because it has no future.
        """
        with self._lock:
            if not self._take_thread(session):
                return False
        start_in(self._pool, self._run, session, _Work(Future(), run_as_thread, (call,)))
        return True

    def _take_thread(self, session: int) -> bool:
        """Count one more thread of a session, and return whether it may have it. The caller holds the lock."""
        running = self._running.get(session, 0)
        if running >= self._limit:
            return False
        self._running[session] = running + 1
        return True

    def _run(self, session: int, work: _Work) -> None:
        try:
            result = work.call(*work.arguments)
        except BaseException as error:
            work.future.set_exception(error)
        else:
            work.future.set_result(result)
        del work  # its exception refers to this frame
        with self._lock:
            waiting = self._waiting.get(session)
            if waiting is None:
                self._running[session] -= 1
                if not self._running[session]:
                    del self._running[session]
                return
            following = waiting.popleft()
            if not waiting:
                del self._waiting[session]
        start_in(self._pool, self._run, session, following)  # behind the work of other sessions

    def statistics(self) -> ReadStatistics:
        """Return the counts of work that has not ended."""
        with self._lock:
            return ReadStatistics(
                len(self._running), sum(self._running.values()), sum(map(len, self._waiting.values()))
            )

    def shutdown(self) -> None:
        """Wait for the work that runs. Do not call `submit` afterwards."""
        self._pool.shutdown()


class _OfSession(Executor):
    def __init__(self, threads: ReadThreads, session: int) -> None:
        self._threads = threads
        self._session = session

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._threads.submit(self._session, fn, *args)
