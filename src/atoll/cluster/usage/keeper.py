"""Store usage and duration estimates in files, on a separate thread so that a slow disk delays nothing else.

If the process is killed, records that are not written yet are lost.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

import msgspec

from atoll.atomic_files import write_atomically
from atoll.cluster.usage.usage_records import MAX_ESTIMATES, By, Estimate, Expected, Usage
from atoll.decodable import decodable
from atoll.missing import MISSING

if TYPE_CHECKING:
    from atoll.cluster.usage.usage_store import Record, UsageStore

COMPACT_SECONDS = 60.0
MAX_WAITING = 3600  # records, one per second, that wait for a disk; then the oldest are dropped
_END_SECONDS = 5.0
_DAMAGE = (11, 26)  # SQLITE_CORRUPT and SQLITE_NOTADB: this process imports sqlite3 only when it needs it

# The file of estimates in the directory of compiled programs. All clusters that use the directory share it. Each writes
# a merged file and renames it, so readers always find a complete file.
FILE_NAME = "atoll-estimates.json"
_MAX_BYTES = 16 << 20
_decode = msgspec.json.Decoder(decodable(tuple[Estimate, ...])).decode

_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)


class UsageFileError(OSError):
    """SQLite cannot use the file, for example because the disk is full, or because of `is_damage`."""

    def __init__(self, message: str, is_damage: bool) -> None:
        super().__init__(message)
        self.is_damage = is_damage


def _usage_store(usage: str, run: int) -> UsageStore:
    from atoll.cluster.usage.usage_store import UsageStore

    return UsageStore(usage, run)


class Keeper:
    """Stores usage in the file `usage`, or in memory if that is "", and estimates in the directory `estimates`, if any.

    `open_store(usage, run)` opens a file, or "" for memory, on the thread. The thread starts with the first job. A bug
    ends it with the exception.
    """

    def __init__(
        self, usage: str = "", estimates: str = "", open_store: Callable[[str, int], UsageStore] = _usage_store
    ) -> None:
        self._open_store = open_store
        self._usage = usage
        self._estimates = estimates
        self._run = int(time.time())
        self._waiting: deque[Record] = deque(maxlen=MAX_WAITING)
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._store: UsageStore | None = None
        self._compacted = 0.0  # monotonic time of the last compaction; 0 before the first
        self._failed = ""

    def read_estimates(self) -> tuple[Estimate, ...]:
        """Return the stored estimates. This blocks while it reads a file."""
        return read_estimates(self._estimates) if self._estimates else ()

    def store_usage(self, present_ns: int, rows: Sequence[Usage]) -> None:
        """Store what was used until now, and the device time that was available, in nanoseconds."""
        self._waiting.append((time.time(), present_ns, rows))
        self._do(self._write)

    def store_estimates(self, learnt: Sequence[Estimate]) -> None:
        if self._estimates:
            self._do(lambda: write_estimates(self._estimates, learnt))

    def report(
        self,
        by: By,
        seconds: float,
        tenant: str | None,
        expected: Sequence[Expected],
        done: Callable[[bytes], None],
        failed: Callable[[str], None],
    ) -> None:
        """Call `done(JSON)` on the thread with the usage of the last `seconds`, or of all time if that is 0.

        If that fails, call `failed(reason)` instead.
        """

        def answer() -> None:
            try:
                content = self._report(by, seconds, tenant, expected)
            except Exception as error:
                _log.warning("cannot read usage", exc_info=error)
                failed(f"cannot read usage: {type(error).__name__}: {error}")
            else:
                done(content)

        self._do(answer)

    def close(self) -> None:
        """Return when everything is written, or after a few seconds if the disk is too slow."""
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
            except OSError as error:  # for example, a full disk; nothing depends on the records
                if str(error) != self._failed:  # log each reason once
                    _log.warning("cannot store usage or estimates: %s: %s", type(error).__name__, error)
                self._failed = str(error)
        if self._store is not None:
            self._store.close()

    def _opened(self) -> UsageStore:
        if self._store is None:
            import sqlite3

            try:
                self._store = self._open_store(self._usage, self._run)
            except (sqlite3.Error, OSError) as error:
                if _is_damage(error):
                    raise
                _log.warning("usage will be lost when this cluster ends: %s: %s", self._usage, error)
                self._store = self._open_store("", self._run)
        return self._store

    def _with_store(self, use: Callable[[UsageStore], _Result]) -> _Result:
        """Return `use(store)`. Rename a damaged file, for an operator to inspect, and begin a new one.

        Raises OSError if the file cannot be used for another reason.
        """
        try:
            return self._used(use)
        except UsageFileError as error:
            if not error.is_damage:
                raise
            self._set_aside(error)
        return self._used(use)

    def _used(self, use: Callable[[UsageStore], _Result]) -> _Result:
        import sqlite3

        try:
            return use(self._opened())
        except sqlite3.ProgrammingError:  # a bug
            raise
        except sqlite3.Error as error:
            raise UsageFileError(f"{type(error).__name__}: {error}", _is_damage(error)) from error

    def _set_aside(self, error: Exception) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None
        aside = f"{self._usage}.damaged-{int(time.time())}"
        _log.warning("the usage file is damaged: renamed it to %s, and began a new one: %s", aside, error)
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
            room = MAX_WAITING - len(waiting)
            waiting.extendleft(reversed(records[max(0, len(records) - room) :]))  # to retry with the next job
            raise
        now = time.monotonic()
        if now >= self._compacted + COMPACT_SECONDS or not self._compacted:
            elapsed = now - (self._compacted or now)
            self._compacted = now
            self._with_store(lambda store: store.compact(time.time(), elapsed=elapsed))

    def _report(self, by: By, seconds: float, tenant: str | None, expected: Sequence[Expected]) -> bytes:
        now = time.time()
        since = now - seconds if seconds else 0.0
        report = self._with_store(lambda store: store.report(by, since, tenant, expected))
        return msgspec.json.encode(report | {"now": now, "kept": bool(self._usage)})


def _is_damage(error: Exception) -> bool:
    """Return whether SQLite reports that the file is damaged or no database, rather than locked or unreadable."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGE


def read_estimates(directory: str) -> tuple[Estimate, ...]:
    """Return the estimates of a directory, the newest last; () if its file is missing, damaged or unreadable."""
    try:
        return _estimates(directory)
    except OSError:
        return ()


def _estimates(directory: str) -> tuple[Estimate, ...]:
    """Return the same as `read_estimates`. Raise OSError if the file is unreadable."""
    try:
        with open(Path(directory) / FILE_NAME, "rb") as file:
            return _decode(file.read(_MAX_BYTES))[-MAX_ESTIMATES:]
    except (*MISSING, msgspec.MsgspecError):
        return ()


def write_estimates(directory: str, learnt: Sequence[Estimate]) -> None:
    """Merge new estimates into the directory's file. Raise OSError, also if the file exists and cannot be read."""
    merged = {each.key: each for each in _estimates(directory)}
    for each in learnt:
        merged.pop(each.key, None)
        merged[each.key] = each
    os.makedirs(directory, exist_ok=True)
    content = msgspec.json.encode(list(merged.values())[-MAX_ESTIMATES:])
    write_atomically(Path(directory) / FILE_NAME, content, mode=0o666)
