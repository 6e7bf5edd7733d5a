"""Tests of reading the end of a log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.errors import ClusterError
from atoll.operate import log_tail
from atoll.operate.log_tail import LogTail
from atoll.telemetry.log_rows import chosen_rows

LINE = "2026-11-26 20:05:55,123 atoll {process}[17] {level} atoll.state: {text}\n"


def line(text: str, process: str = "controller", level: str = "INFO") -> str:
    return LINE.format(text=text, process=process, level=level)


def tail(tmp_path: Path, content: str) -> LogTail:
    (tmp_path / "log").write_text(content)
    return LogTail(tmp_path / "log")


def test_a_record_has_its_time_process_level_and_text(tmp_path: Path) -> None:
    (row,) = tail(tmp_path, line("session 3 opened", "engine", "WARNING")).rows()
    assert (row.time, row.process, row.level) == ("2026-11-26 20:05:55", "engine", "warning")
    assert row.text == "atoll.state: session 3 opened"


def test_lines_that_continue_a_record_belong_to_it(tmp_path: Path) -> None:
    first, second = tail(tmp_path, line("failed") + "  Traceback\n  ValueError\n" + line("next")).rows()
    assert first.text == "atoll.state: failed\n  Traceback\n  ValueError"
    assert second.text == "atoll.state: next"


def test_a_record_in_json_is_shown_as_text(tmp_path: Path) -> None:
    fields = {"time": "2026-11-26T20:05:55.123Z", "level": "info", "process": "controller", "pid": 17}
    (row,) = tail(tmp_path, json.dumps({**fields, "logger": "a", "message": "opened", "session": 3}) + "\n").rows()
    assert row.text == "a: opened (session 3)"
    assert chosen_rows([row], "controller", 3, "info") == [row]


def test_control_characters_of_hostile_names_are_escaped(tmp_path: Path) -> None:
    rows = tail(tmp_path, line("session 1 \x1b[31m\x07") + "\x1b]0;title\x07\n").rows()
    assert all(each.isprintable() or each == "\n" for row in rows for each in row.text)


def test_control_characters_of_a_forged_record_are_escaped(tmp_path: Path) -> None:
    forged = {"time": "2026-11-26T20:05:55Z", "level": "\x1b[31m", "process": "\x1b[32m", "\x07": "\x1b"}
    (row,) = tail(tmp_path, json.dumps(forged) + "\n").rows()
    assert all(text.isprintable() for text in (row.process, row.level, row.text))


def test_a_log_that_could_not_be_read_is_read_again(tmp_path: Path) -> None:
    found = tail(tmp_path, line("one"))
    (tmp_path / "log").unlink()
    (tmp_path / "log").mkdir()
    for _ in range(2):
        with pytest.raises(ClusterError, match="cannot read the log"):
            found.rows()


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_tail, "MAX_BYTES", 1000)
    rows = tail(tmp_path, "".join(line(f"number {number}") for number in range(1000))).rows()
    assert 0 < len(rows) < 20
    assert rows[-1].text.endswith("number 999")
    assert len({row.number for row in rows}) == len(rows)


def test_rows_and_their_texts_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_tail, "MAX_ROWS", 2)
    monkeypatch.setattr(log_tail, "MAX_TEXT", 30)
    rows = tail(tmp_path, line("a") + line("b") + line("c" * 100) + "d" * 100 + "\n").rows()
    assert [len(row.text) for row in rows] == [14, 30]


def test_records_that_are_appended_are_read(tmp_path: Path) -> None:
    found = tail(tmp_path, line("one"))
    assert len(found.rows()) == 1
    with open(tmp_path / "log", "a") as file:
        file.write(line("two"))
    assert len(found.rows()) == 2


def test_a_log_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="cannot read the log"):
        LogTail(tmp_path / "log").rows()


def test_rows_are_chosen_by_process_session_and_level(tmp_path: Path) -> None:
    rows = tail(
        tmp_path,
        line("session 3 opened") + line("session 31 opened", level="ERROR") + line("up", "engine", "WARNING"),
    ).rows()
    assert [row.text for row in chosen_rows(rows, "", 3, "debug")] == ["atoll.state: session 3 opened"]
    assert [row.process for row in chosen_rows(rows, "engine", None, "debug")] == ["engine"]
    assert [row.level for row in chosen_rows(rows, "", None, "warning")] == ["error", "warning"]
