"""Tests of the thread that stores usage and estimates: in order, at its own pace, and despite errors of the disk."""

from __future__ import annotations

import json
import logging
import sqlite3
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from atoll.cluster.directories import usage_file
from atoll.cluster.usage.keeper import FILE_NAME, Keeper, read_estimates, write_estimates
from atoll.cluster.usage.usage_records import MAX_ESTIMATES, By, Estimate, Usage


def row(seconds: float) -> Usage:
    return Usage("ana", 1, "train.py", "step", round(seconds * 1e9))


def report(keeper: Keeper) -> dict[str, Any]:
    answers: Queue[bytes] = Queue()
    keeper.report(By.TENANT, 0.0, None, (), answers.put, lambda reason: answers.put(json.dumps(reason).encode()))
    found: dict[str, Any] = json.loads(answers.get(timeout=20))
    return found


def test_what_was_kept_is_in_the_next_report(tmp_path: Path):
    path = str(tmp_path / "usage.sqlite")
    keeper = Keeper(path)
    keeper.store_usage(4_000_000_000, [row(1)])
    assert report(keeper)["total"]["device_seconds"] == 1.0
    keeper.store_usage(4_000_000_000, [row(2)])
    keeper.close()
    again = Keeper(path)
    found = report(again)
    assert (found["total"]["device_seconds"], found["idle_device_seconds"], found["kept"]) == (3.0, 5.0, True)
    again.close()


def test_without_a_file_it_is_in_memory():
    keeper = Keeper()
    keeper.store_usage(4_000_000_000, [row(1)])
    found = report(keeper)
    assert (found["total"]["device_seconds"], found["kept"]) == (1.0, False)
    keeper.close()


def test_a_directory_that_cannot_be_written_is_a_warning_and_usage_is_in_memory(tmp_path: Path, caplog: Any):
    (tmp_path / "file").write_text("")
    keeper = Keeper(str(tmp_path / "file" / "usage.sqlite"))
    with caplog.at_level(logging.WARNING):
        keeper.store_usage(1, [row(1)])
        assert report(keeper)["total"]["device_seconds"] == 1.0
    keeper.close()
    assert "usage will be lost" in caplog.text


class FakeStore:
    """A store that fails with `error`, if it is set."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.seconds: list[int] = []  # stored device time

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error

    def add(self, records: list[tuple[float, int, list[Usage]]]) -> None:
        self._fail()
        self.seconds += [usage.device_ns // 10**9 for _, _, rows in records for usage in rows]

    def report(self, *arguments: Any) -> dict[str, Any]:
        self._fail()
        return {"total": {"device_seconds": sum(self.seconds)}}

    def compact(self, now: float, elapsed: float) -> None:
        self._fail()

    def close(self) -> None:
        pass


def keeping(store: FakeStore) -> Keeper:
    return Keeper(open_store=lambda usage, run: store)  # type: ignore[arg-type, return-value]


def test_what_a_disk_refuses_is_kept_once_it_takes_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("atoll.cluster.usage.keeper.MAX_WAITING", 3)
    store = FakeStore(OSError("full"))
    keeper = keeping(store)
    for seconds in (1, 2, 4, 8):
        keeper.store_usage(0, [row(seconds)])
        assert "full" in str(report(keeper))
    store.error = None
    keeper.store_usage(0, [row(16)])
    report(keeper)
    keeper.close()
    assert store.seconds == [4, 8, 16], "of more than it may keep the oldest go"


def test_estimates_of_several_clusters_are_merged(tmp_path: Path):
    directory = str(tmp_path / "programs")
    assert read_estimates(directory) == ()
    write_estimates(directory, [Estimate("a", 1, 5), Estimate("b", 2, 5)])
    write_estimates(directory, [Estimate("a", 3, 6)])
    assert read_estimates(directory) == (Estimate("b", 2, 5), Estimate("a", 3, 6))
    write_estimates(directory, [Estimate(str(i), i, 1) for i in range(MAX_ESTIMATES)])
    found = read_estimates(directory)
    assert len(found) == MAX_ESTIMATES
    assert found[-1].key == str(MAX_ESTIMATES - 1)
    assert [path.name for path in Path(directory).iterdir()] == [FILE_NAME]


def test_estimates_that_cannot_be_read_now_are_not_replaced(tmp_path: Path) -> None:
    directory = str(tmp_path)
    write_estimates(directory, [Estimate("a", 1, 5)])
    file = tmp_path / FILE_NAME
    kept = file.rename(tmp_path / "kept")
    file.symlink_to(file)
    assert read_estimates(directory) == ()
    with pytest.raises(OSError, match="symbolic links"):
        write_estimates(directory, [Estimate("b", 1, 5)])
    kept.replace(file)
    write_estimates(directory, [Estimate("b", 1, 5)])
    assert [each.key for each in read_estimates(directory)] == ["a", "b"]


@pytest.mark.parametrize("content", [b"", b"[[1]]", b"\xff", b'{"a": 1}'])
def test_a_damaged_file_of_estimates_is_none(tmp_path: Path, content: bytes):
    (tmp_path / FILE_NAME).write_bytes(content)
    assert read_estimates(str(tmp_path)) == ()


def test_where_usage_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("ATOLL_STATE_DIR", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/ana")
    assert usage_file("default") == "/home/ana/.local/state/atoll/usage/default.sqlite"
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert usage_file("default") == "/state/atoll/usage/default.sqlite"
    monkeypatch.setenv("ATOLL_STATE_DIR", "/var/atoll")
    assert usage_file("a") == "/var/atoll/usage/a.sqlite"
    monkeypatch.setenv("ATOLL_STATE_DIR", "off")
    assert usage_file("a") == ""


@pytest.mark.parametrize("starts_damaged", [True, False])
@pytest.mark.parametrize("content", [b"no database" * 1000, b""], ids=["no database", "damaged pages"])
def test_a_damaged_file_is_set_aside_and_usage_is_kept_in_a_new_one(
    tmp_path: Path, caplog: Any, content: bytes, starts_damaged: bool
):
    path = tmp_path / "usage.sqlite"

    def damage() -> None:
        whole = path.read_bytes()
        path.write_bytes(content or whole[:4096] + bytes(range(256)) * ((len(whole) - 4096) // 256))

    keeper = Keeper(str(path))
    keeper.store_usage(1, [row(1)])
    assert report(keeper)["total"]["device_seconds"] == 1.0
    if starts_damaged:
        keeper.close()
        damage()
        keeper = Keeper(str(path))
    else:
        keeper._do(lambda: keeper._opened()._database.execute("PRAGMA wal_checkpoint(TRUNCATE)"))
        report(keeper)
        damage()
        keeper._do(lambda: keeper._opened()._database.execute("PRAGMA shrink_memory"))
    with caplog.at_level(logging.WARNING):
        keeper.store_usage(1, [row(2)])
        assert report(keeper)["total"]["device_seconds"] == 2.0
    keeper.close()
    assert "began a new one" in caplog.text
    (aside,) = (
        each for each in tmp_path.iterdir() if each.name.startswith("usage.sqlite.damaged-") and "-wal" not in each.name
    )
    assert aside.stat().st_size > 4096
    again = Keeper(str(path))
    assert report(again)["total"]["device_seconds"] == 2.0
    again.close()


def test_a_report_that_fails_says_why():
    keeper = keeping(FakeStore(OSError("an input or output error")))
    assert "an input or output error" in str(report(keeper))
    keeper.close()


def test_a_bug_ends_the_thread_with_its_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ended: list[BaseException | None] = []
    monkeypatch.setattr("threading.excepthook", lambda arguments: ended.append(arguments.exc_value))
    keeper = Keeper(estimates=str(tmp_path))
    no_estimate: Any = object()
    keeper.store_estimates([no_estimate])
    keeper.close()
    assert AttributeError in map(type, ended)  # threads of other tests may also end


def test_a_bug_in_a_report_is_reported_and_later_jobs_are_done():
    store = FakeStore(ZeroDivisionError("a bug"))
    keeper = keeping(store)
    assert "ZeroDivisionError: a bug" in str(report(keeper))
    store.error = None
    keeper.store_usage(1, [row(1)])
    assert report(keeper)["total"]["device_seconds"] == 1.0
    keeper.close()


def test_an_error_of_the_file_is_none_of_the_program_and_a_misuse_of_sqlite_is_a_bug():
    store = FakeStore(sqlite3.OperationalError("database or disk is full"))
    keeper = keeping(store)
    assert "UsageFileError: OperationalError: database or disk is full" in str(report(keeper))
    store.error = sqlite3.ProgrammingError("closed")
    assert str(report(keeper)) == "cannot read usage: ProgrammingError: closed"
    keeper.close()
