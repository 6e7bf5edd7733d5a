"""Tests of usage records in SQLite: sums of periods, old records, and access to the file."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from atoll.cluster.usage.usage_records import By, Expected, Usage
from atoll.cluster.usage.usage_store import DAY, HOUR, MINUTE, UsageStore

NOW = 1_800_000_000.0 // DAY * DAY


@pytest.fixture
def open_store() -> Iterator[Callable[[str, int], UsageStore]]:
    """Open the store of a file and a run, and close it at the end of the test."""
    with ExitStack() as stores:
        yield lambda path, run: stores.enter_context(closing(UsageStore(path, run)))


@pytest.fixture
def store(open_store: Callable[[str, int], UsageStore]) -> UsageStore:
    """Return a store in memory."""
    return open_store("", 7)


def used(tenant: str = "ana", session: int = 1, program: str = "step", seconds: float = 1.0) -> Usage:
    return Usage(tenant, session, f"{tenant}.py", program, round(seconds * 1e9), 100.0, 10, 0.5)


def test_a_period_in_which_more_was_taken_back_than_used_shows_no_usage(store: UsageStore):
    store.add([(NOW, 8_000_000_000, [used(seconds=3)]), (NOW + 5, 8_000_000_000, [used(seconds=-2)])])
    assert store.report(By.TENANT, 0)["total"]["device_seconds"] == 1.0
    recent = store.report(By.TENANT, NOW + 3)
    assert [row["device_seconds"] for row in recent["rows"]] == [0.0]
    assert recent["idle_device_seconds"] == 8.0


def test_usage_is_summed_up_by_tenant_session_and_program(store: UsageStore):
    store.add(
        [
            (NOW, 8_000_000_000, [used(), used(program="init", seconds=0.5)]),
            (NOW + 1, 8_000_000_000, [used(session=2), used("ben", 3, seconds=2)]),
        ]
    )
    by_tenant = store.report(By.TENANT, 0)
    assert [(row["tenant"], row["device_seconds"]) for row in by_tenant["rows"]] == [("ana", 2.5), ("ben", 2.0)]
    assert by_tenant["total"] == {
        "device_seconds": 4.5,
        "memory_byte_seconds": 400.0,
        "bytes_moved": 40,
        "compile_seconds": 2.0,
    }
    assert (by_tenant["present_device_seconds"], by_tenant["idle_device_seconds"]) == (16.0, 11.5)
    by_session = store.report(By.SESSION, 0)["rows"]
    assert sorted((row["run"], row["session"], row["label"], row["device_seconds"]) for row in by_session) == [
        (7, 1, "ana.py", 1.5),
        (7, 2, "ana.py", 1.0),
        (7, 3, "ben.py", 2.0),
    ]
    by_program = store.report(By.PROGRAM, 0, expected=[Expected("ana", "step", 1_500_000)])["rows"]
    assert [(row["tenant"], row["program"], row["device_seconds"], row["expected_ms"]) for row in by_program] == [
        ("ana", "step", 2.0, 1.5),
        ("ben", "step", 2.0, None),
        ("ana", "init", 0.5, None),
    ]


def test_a_tenant_sees_its_own_alone_and_nothing_of_what_there_was(store: UsageStore):
    store.add([(NOW, 8_000_000_000, [used(), used("ben")])])
    report = store.report(By.SESSION, 0, "ben")
    assert [row["tenant"] for row in report["rows"]] == ["ben"]
    assert report["total"]["device_seconds"] == 1.0
    assert "idle_device_seconds" not in report


def test_only_what_was_used_since_then_counts(store: UsageStore):
    store.add([(NOW - 100, 1_000_000_000, [used()]), (NOW - 10, 1_000_000_000, [used(seconds=3)])])
    report = store.report(By.TENANT, NOW - 60)
    assert (report["total"]["device_seconds"], report["present_device_seconds"]) == (3.0, 1.0)


def test_a_file_is_read_by_the_next_run_and_its_sessions_are_others(
    open_store: Callable[[str, int], UsageStore], tmp_path: Path
):
    path = str(tmp_path / "state" / "usage" / "default.sqlite")
    for run in (7, 8):
        store = open_store(path, run)
        store.add([(NOW + run, 1_000_000_000, [used()])])
        store.close()
    store = open_store(path, 9)
    assert [(row["run"], row["session"]) for row in store.report(By.SESSION, 0)["rows"]] == [(7, 1), (8, 1)]


def test_one_process_has_a_file_at_a_time(
    open_store: Callable[[str, int], UsageStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("atoll.cluster.usage.usage_store._LOCKED_SECONDS", 0.0)
    path = str(tmp_path / "usage.sqlite")
    first = open_store(path, 7)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        UsageStore(path, 8)
    first.close()
    open_store(path, 8)


def test_periods_become_longer_with_age_and_nothing_is_lost(store: UsageStore):
    ages = [*range(100), 3 * HOUR, 3 * HOUR + 1, 3 * DAY, 3 * DAY + MINUTE, 40 * DAY, 40 * DAY + HOUR]
    store.add([(NOW - 1 - age, 2_000_000_000, [used(), used("ben", 2)]) for age in ages])
    before = store.report(By.TENANT, 0)
    store.compact(NOW)
    after = store.report(By.TENANT, 0)
    assert after == before
    lengths = dict(
        store._database.execute("SELECT length, COUNT(DISTINCT start) FROM usage GROUP BY length").fetchall()
    )
    assert lengths[1] == 100
    assert lengths[MINUTE] in (1, 2), "two seconds that follow one another"
    assert lengths[HOUR] in (1, 2)
    assert lengths[DAY] in (1, 2)
    sessions = store.report(By.SESSION, 0)["rows"]
    assert {row["session"] for row in sessions if row["run"] == 0} == {0}, "days are those of whole tenants"
    store.compact(NOW)
    assert store.report(By.TENANT, 0) == before, "again changes nothing"


def test_the_file_is_bounded_whatever_happens(store: UsageStore):
    store.add([(NOW - i, 1_000_000_000, [used(session=i, program=f"p{i}")]) for i in range(2000)])
    total = store.report(By.TENANT, 0)["total"]
    store.compact(NOW, limit=50)
    rows = store._database.execute("SELECT COUNT(*) FROM usage").fetchone()[0]
    assert rows <= 50
    assert store.report(By.TENANT, 0)["total"] == total, "one tenant needs few rows"
    accounts = store._database.execute("SELECT COUNT(*) FROM accounts").fetchone()[0]
    assert accounts <= 50
    store.add([(NOW - i * DAY, 1_000_000_000, [used(tenant=f"t{i}")]) for i in range(100)])
    store.compact(NOW, limit=50)
    kept = {row["tenant"] for row in store.report(By.TENANT, 0)["rows"]}
    assert len(kept) <= 50
    assert "t0" in kept, "the newest stay"


def test_what_cannot_be_kept_leaves_no_half(store: UsageStore):
    with pytest.raises(OverflowError):
        store.add([(NOW, 1, [used()]), (NOW, 1, [Usage("a", 1, "l", "p", 1 << 70)])])
    assert store.report(By.TENANT, 0)["rows"] == []


def test_a_file_of_a_later_format_is_left_alone(tmp_path: Path):
    path = str(tmp_path / "usage.sqlite")
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(sqlite3.DatabaseError, match="format 99"):
        UsageStore(path, 1)


def rows(store: UsageStore) -> list[tuple[str, str, float]]:
    return sorted((r["tenant"], r["program"], r["device_seconds"]) for r in store.report(By.PROGRAM, 0)["rows"])


@pytest.mark.parametrize("jump", [DAY * 90, DAY * 365 * 30])
def test_a_clock_that_is_set_far_ahead_and_back_costs_no_record(
    open_store: Callable[[str, int], UsageStore], jump: int, tmp_path: Path
):
    """Records of programs are neither merged by tenant nor deleted, neither in this run nor in the next one."""
    file = str(tmp_path / "usage")
    store = open_store(file, 7)
    store.add([(NOW, 8_000_000_000, [used(), used(program="init")])])
    store.compact(NOW, elapsed=0.0)
    for minute in range(3):
        store.add([(NOW + jump + 60 * minute, 8_000_000_000, [used()])])
        store.compact(NOW + jump + 60 * minute, elapsed=60.0)
    store.close()
    store = open_store(file, 8)
    store.compact(NOW + jump + 240, elapsed=0.0)
    assert rows(store) == [("ana", "init", 1.0), ("ana", "step", 4.0)]
    store.compact(NOW + 300, elapsed=60.0)
    assert rows(store) == [("ana", "init", 1.0), ("ana", "step", 4.0)]
    recent = store.report(By.TENANT, NOW + 301 + MINUTE)
    assert recent["rows"] == [], "nothing is left in the future"
    assert store.report(By.TENANT, 0)["present_device_seconds"] == 32.0


def test_a_clock_that_stays_ahead_ages_the_records_in_the_end(store: UsageStore):
    store.add([(NOW, 8_000_000_000, [used()])])
    store.compact(NOW)
    later = NOW + 90 * DAY
    for _ in range(10):
        store.compact(later, elapsed=DAY)
    assert rows(store) == [("ana", "", 1.0)]


def test_a_bound_on_rows_holds_after_a_jump(store: UsageStore):
    store.compact(NOW)
    for second in range(300):
        store.add([(NOW + 90 * DAY + second, 8_000_000_000, [used()])])
    store.compact(NOW + 90 * DAY + 300, limit=50, elapsed=60.0)
    assert sum(seconds for _, _, seconds in rows(store)) == 300.0
