"""The thread that writes usage and estimates to files, and reads them: a slow disk holds up nobody else.

What is given to it is in the files within moments; a process that is killed loses what it had not been given yet, and
what a slow disk had not taken.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

import msgspec

from atoll.cluster.usage.estimates_file import read_estimates, write_estimates
from atoll.cluster.usage.usage_records import By, Estimate, Expected, Usage

if TYPE_CHECKING:
    from atoll.cluster.usage.usage_store import Record, UsageStore

COMPACT_SECONDS = 60.0
# Seconds of usage that wait for a disk; beyond that the oldest are lost.
MOST_WAITING = 3600
_END_SECONDS = 5.0
_DAMAGE = (11, 26)  # SQLITE_CORRUPT and SQLITE_NOTADB: this process imports sqlite3 only when it needs it

_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)


class Keeper:
    """Keeps usage in the file `usage`, in memory with "", and estimates in the directory `estimates`, nowhere with "".

    The thread starts when there is something to do.
    """

    def __init__(self, usage: str = "", estimates: str = "") -> None:
        self._usage = usage
        self._estimates = estimates
        self._run = int(time.time())
        self._waiting: deque[Record] = deque(maxlen=MOST_WAITING)
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._store: UsageStore | None = None
        self._next_compaction = 0.0
        self._failed = ""

    def read_estimates(self) -> tuple[Estimate, ...]:
        """What was learnt before. Blocks for as long as it takes to read a file."""
        return read_estimates(self._estimates) if self._estimates else ()

    def store_usage(self, present_ns: int, rows: Sequence[Usage]) -> None:
        """This was used until now, of so much device time that there was."""
        self._waiting.append((time.time(), present_ns, rows))
        self._do(self._write)

    def store_estimates(self, learnt: Sequence[Estimate]) -> None:
        if self._estimates:
            self._do(lambda: self._write_estimates(learnt))

    def report(
        self,
        by: By,
        seconds: float,
        tenant: str | None,
        expected: Sequence[Expected],
        done: Callable[[bytes], None],
        failed: Callable[[str], None],
    ) -> None:
        """Calls `done(JSON)`, from the thread, with what was used in the last `seconds`; 0: ever.

        Calls `failed(reason)` in its place if the file cannot be read.
        """

        def answer() -> None:
            try:
                content = self._report(by, seconds, tenant, expected)
            except Exception as error:
                failed(f"usage cannot be read: {type(error).__name__}: {error}")
                raise
            done(content)

        self._do(answer)

    def close(self) -> None:
        """Returns once all is written, or the disk is too slow for that."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(_END_SECONDS)

    # ---- the thread

    def _do(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="usage", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
                self._failed = ""
            except Exception as error:  # a disk that is full, say: what is kept is for people, and nothing rests on it
                if str(error) != self._failed:  # said once
                    _log.warning("usage or estimates cannot be kept: %s: %s", type(error).__name__, error)
                self._failed = str(error)
        if self._store is not None:
            self._store.close()

    def _opened(self) -> UsageStore:
        if self._store is None:
            import sqlite3

            from atoll.cluster.usage.usage_store import UsageStore

            try:
                self._store = UsageStore(self._usage, self._run)
            except (sqlite3.Error, OSError) as error:
                if _is_damage(error):
                    raise
                _log.warning("usage is not kept when this cluster ends: %s: %s", self._usage, error)
                self._store = UsageStore("", self._run)
        return self._store

    def _with_store(self, use: Callable[[UsageStore], _Result]) -> _Result:
        """Return what `use(store)` returns. A damaged file is set aside for people to look at, and a new one begun."""
        try:
            return use(self._opened())
        except Exception as error:
            if not _is_damage(error):
                raise
            self._set_aside(error)
        return use(self._opened())

    def _set_aside(self, error: Exception) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None
        aside = f"{self._usage}.damaged-{int(time.time())}"
        _log.warning("a new file of usage begins, and the old one is %s now: %s", aside, error)
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.replace(self._usage + suffix, aside + suffix)

    def _write(self) -> None:
        waiting = self._waiting
        records = [waiting.popleft() for _ in range(len(waiting))]
        if not records:
            return
        try:
            self._with_store(lambda store: store.add(records))
        except Exception:
            room = MOST_WAITING - len(waiting)
            waiting.extendleft(reversed(records[max(0, len(records) - room) :]))  # for the next time
            raise
        if time.monotonic() >= self._next_compaction:
            self._next_compaction = time.monotonic() + COMPACT_SECONDS
            self._with_store(lambda store: store.compact(time.time()))

    def _write_estimates(self, learnt: Sequence[Estimate]) -> None:
        write_estimates(self._estimates, learnt)

    def _report(self, by: By, seconds: float, tenant: str | None, expected: Sequence[Expected]) -> bytes:
        now = time.time()
        since = now - seconds if seconds else 0.0
        report = self._with_store(lambda store: store.report(by, since, tenant, expected))
        return msgspec.json.encode(report | {"now": now, "kept": bool(self._usage)})


def _is_damage(error: Exception) -> bool:
    """Whether SQLite says that the file is damaged or no database, rather than locked, full or not readable."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGE
