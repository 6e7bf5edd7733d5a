"""Usage records in SQLite, with one row per account and period.

An account is a program of a session. Periods are seconds for two hours, then minutes, after two days hours, and after a
month days of a whole tenant, which are stored for ten years. If there are more than `MAX_ROWS`, periods become longer
earlier, so the file is bounded.

Ages are measured on a clock in the file, which follows the system's clock, but advances at most `_CATCH_UP` times as
fast as real time. So a system clock that is set far ahead by mistake makes no record old at once. If it is set back,
the records that were written meanwhile are moved to the present.

One process at a time opens a file, and holds SQLite's lock on it. So SQLite's log needs no shared memory, and works on
network file systems.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from atoll.cluster.usage.usage_records import By, Expected, Usage

MAX_ROWS = 500_000
MINUTE, HOUR, DAY = 60, 3600, 86_400
# Length of a period, length that it becomes, and the age at which it does, in seconds.
_TIERS = ((1, MINUTE, 2 * HOUR), (MINUTE, HOUR, 2 * DAY), (HOUR, DAY, 31 * DAY))
_DAYS_KEPT = 3650 * DAY
_MAX_HALVINGS = 16
_CATCH_UP = 10.0  # a cluster that was down for a month ages its records within three days
_MAX_KNOWN = 10_000
_LOCKED_SECONDS = 2.0  # for a controller that was just killed to release its lock

_FORMAT = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS accounts (
  id INTEGER PRIMARY KEY, run INTEGER, tenant TEXT, session INTEGER, label TEXT, program TEXT,
  UNIQUE (run, tenant, session, program));
CREATE TABLE IF NOT EXISTS usage (
  length INTEGER, start INTEGER, account INTEGER,
  device_ns INTEGER, byte_seconds REAL, bytes_moved INTEGER, compile_seconds REAL,
  PRIMARY KEY (length, start, account)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS present (
  length INTEGER, start INTEGER, device_ns INTEGER, PRIMARY KEY (length, start)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS clock (id INTEGER PRIMARY KEY CHECK (id = 1), seconds REAL);
"""
_SUMS = "SUM(device_ns), SUM(byte_seconds), SUM(bytes_moved), SUM(compile_seconds)"
_ADD = """
ON CONFLICT DO UPDATE SET
  device_ns = device_ns + excluded.device_ns, byte_seconds = byte_seconds + excluded.byte_seconds,
  bytes_moved = bytes_moved + excluded.bytes_moved, compile_seconds = compile_seconds + excluded.compile_seconds
"""
_ADD_PRESENT = "ON CONFLICT DO UPDATE SET device_ns = device_ns + excluded.device_ns"
_COLUMNS = {
    By.TENANT: ("tenant",),
    By.SESSION: ("tenant", "run", "session", "label"),
    By.PROGRAM: ("tenant", "program"),
}
# (seconds since 1970, available device time in nanoseconds, usage)
Record = tuple[float, int, Sequence[Usage]]


class UsageStore:
    """The usage file of a cluster at `path`, or a store in memory if that is "".

    `run` is the second since 1970 in which the cluster started. It distinguishes sessions of this run of the cluster
    from those of earlier runs. The constructor and the methods raise sqlite3.Error if the file is locked or cannot be
    written.
    """

    def __init__(self, path: str, run: int) -> None:
        self._run = run
        self._accounts: dict[tuple[str, int, str], int] = {}
        if path:
            Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._database = sqlite3.connect(path or ":memory:", timeout=_LOCKED_SECONDS, isolation_level=None)
        try:
            for pragma in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = NORMAL"):
                self._database.execute(f"PRAGMA {pragma}")
            (version,) = self._database.execute("PRAGMA user_version").fetchone()
            if version not in (0, _FORMAT):
                raise sqlite3.DatabaseError(f"it is of a later version of Atoll (format {version})")
            self._database.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_FORMAT}; COMMIT;")
        except BaseException:
            self._database.close()
            raise

    def close(self) -> None:
        self._database.close()

    def add(self, records: Iterable[Record]) -> None:
        """Store the records, all or none."""
        execute, many = self._database.execute, self._database.executemany
        execute("BEGIN IMMEDIATE")
        try:
            for when, present, rows in records:
                start = int(when)
                execute(f"INSERT INTO present VALUES (1, ?, ?) {_ADD_PRESENT}", (start, present))
                many(
                    f"INSERT INTO usage VALUES (1, ?, ?, ?, ?, ?, ?) {_ADD}",
                    [
                        (start, self._account(r), r.device_ns, r.byte_seconds, r.bytes_moved, r.compile_seconds)
                        for r in rows
                    ],
                )
            execute("COMMIT")
        except BaseException:
            self._accounts.clear()
            if self._database.in_transaction:
                execute("ROLLBACK")
            raise

    def _account(self, row: Usage) -> int:
        key = (row.tenant, row.session, row.program)
        number = self._accounts.get(key)
        if number is None:
            number = self._find(self._run, row.tenant, row.session, row.label, row.program)
            if len(self._accounts) >= _MAX_KNOWN:
                self._accounts.clear()
            self._accounts[key] = number
        return number

    def _find(self, run: int, tenant: str, session: int, label: str, program: str) -> int:
        where = "run = ? AND tenant = ? AND session = ? AND program = ?"
        found = self._database.execute(f"SELECT id FROM accounts WHERE {where}", (run, tenant, session, program))
        row = found.fetchone()
        if row is not None:
            return int(row[0])
        made = self._database.execute(
            "INSERT INTO accounts (run, tenant, session, label, program) VALUES (?, ?, ?, ?, ?)",
            (run, tenant, session, label, program),
        )
        assert made.lastrowid is not None
        return made.lastrowid

    # ---- reports

    def report(
        self, by: By, since: float, tenant: str | None = None, expected: Iterable[Expected] = ()
    ) -> dict[str, Any]:
        """Return the usage since `since`, in seconds since 1970: the total, and rows by decreasing device time.

        With a `tenant`, report only its usage, and not the available device time, which would disclose the usage of
        others. A period that ends after `since` counts as a whole.
        """
        columns = _COLUMNS[by]
        where, values = "start + length > ?", [since]
        if tenant is not None:
            where, values = f"{where} AND tenant = ?", [since, tenant]  # type: ignore[list-item]
        rows = self._database.execute(
            f"SELECT {', '.join(columns)}, {_SUMS} FROM usage JOIN accounts ON account = id WHERE {where} "
            f"GROUP BY {', '.join(columns)} ORDER BY SUM(device_ns) DESC",
            values,
        ).fetchall()
        found = [dict(zip(columns, row, strict=False)) | _amounts(row[-4:]) for row in rows]
        if by is By.PROGRAM:
            times = {(each.tenant, each.program): each.nanoseconds for each in expected}
            for each in found:
                nanoseconds = times.get((each["tenant"], each["program"]))
                each["expected_ms"] = None if nanoseconds is None else round(nanoseconds / 1e6, 3)
        total = {name: sum(each[name] for each in found) for name in _amounts((0,) * 4)}
        report: dict[str, Any] = {"by": str(by), "since": since, "rows": found, "total": total}
        if tenant is None:
            (present,) = self._database.execute(
                "SELECT COALESCE(SUM(device_ns), 0) FROM present WHERE start + length > ?", (since,)
            ).fetchone()
            report["present_device_seconds"] = present / 1e9
            report["idle_device_seconds"] = present / 1e9 - total["device_seconds"]
        return report

    # ---- compaction

    def compact(self, now: float, limit: int = MAX_ROWS, elapsed: float = math.inf) -> None:
        """Merge old periods into longer ones, and delete the oldest. Call this from time to time.

        Args:
          now: the system's clock, in seconds since 1970.
          limit: maximum number of rows.
          elapsed: real seconds since the last call.
        """
        self._database.execute("BEGIN IMMEDIATE")
        try:
            self._move_from_future(int(now))
            aged = self._advance_clock(now, elapsed)
            for halvings in range(_MAX_HALVINGS):
                for length, longer, age in _TIERS:
                    before = int((now if halvings else aged) - age / 2**halvings)
                    self._fold(length, longer, before if halvings else before // longer * longer)
                if self._count() <= limit:
                    break
            for table in ("usage", "present"):
                self._database.execute(f"DELETE FROM {table} WHERE start < ?", (int(aged) - _DAYS_KEPT,))
            excess = self._count() - limit
            if excess > 0:
                self._database.execute(
                    "DELETE FROM usage WHERE (length, start, account) IN "
                    "(SELECT length, start, account FROM usage ORDER BY start LIMIT ?)",
                    (excess,),
                )
            self._database.execute("DELETE FROM accounts WHERE id NOT IN (SELECT account FROM usage)")
            self._database.execute("COMMIT")
        except BaseException:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise
        finally:
            self._accounts.clear()

    def _advance_clock(self, now: float, elapsed: float) -> float:
        """Advance the clock of ages toward `now`, and return it."""
        stored = self._database.execute("SELECT seconds FROM clock").fetchone()
        aged = now if stored is None else min(now, stored[0] + _CATCH_UP * elapsed)
        self._database.execute("INSERT OR REPLACE INTO clock VALUES (1, ?)", (aged,))
        return aged

    def _move_from_future(self, now: int) -> None:
        """Move the records that were written before the system's clock was set back to the present."""
        future = (now, now + MINUTE)
        self._database.execute(
            f"INSERT INTO usage SELECT length, ? / length * length, account, {_SUMS} "
            f"FROM usage WHERE start > ? GROUP BY 1, 3 {_ADD}",
            future,
        )
        self._database.execute(
            f"INSERT INTO present SELECT length, ? / length * length, SUM(device_ns) FROM present "
            f"WHERE start > ? GROUP BY 1 {_ADD_PRESENT}",
            future,
        )
        for table in ("usage", "present"):
            self._database.execute(f"DELETE FROM {table} WHERE start > ?", (now + MINUTE,))

    def _count(self) -> int:
        (usage,) = self._database.execute("SELECT COUNT(*) FROM usage").fetchone()
        return int(usage)

    def _fold(self, length: int, longer: int, before: int) -> None:
        """Merge the periods of a length that started before `before` into longer ones, days of all of a tenant."""
        old = (length, before)
        account = "account"
        if longer == DAY:
            tenants = self._database.execute(
                "SELECT DISTINCT tenant FROM usage JOIN accounts ON account = id WHERE length = ? AND start < ?", old
            )
            for (tenant,) in tenants.fetchall():
                self._find(0, tenant, 0, "", "")
            account = (
                "(SELECT whole.id FROM accounts AS whole JOIN accounts AS part ON whole.tenant = part.tenant "
                "WHERE part.id = account AND whole.run = 0 AND whole.session = 0 AND whole.program = '')"
            )
        self._database.execute(
            f"INSERT INTO usage SELECT {longer}, start / {longer} * {longer}, {account}, {_SUMS} "
            f"FROM usage WHERE length = ? AND start < ? GROUP BY 2, 3 {_ADD}",
            old,
        )
        self._database.execute(
            f"INSERT INTO present SELECT {longer}, start / {longer} * {longer}, SUM(device_ns) FROM present "
            f"WHERE length = ? AND start < ? GROUP BY 2 {_ADD_PRESENT}",
            old,
        )
        for table in ("usage", "present"):
            self._database.execute(f"DELETE FROM {table} WHERE length = ? AND start < ?", old)


def _amounts(sums: Sequence[float]) -> dict[str, float]:
    device_ns, byte_seconds, moved, compiled = sums
    return {
        "device_seconds": max(0, device_ns) / 1e9,  # a period may take back more than was used in it
        "memory_byte_seconds": byte_seconds,
        "bytes_moved": moved,
        "compile_seconds": compiled,
    }
