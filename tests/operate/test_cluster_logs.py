"""Tests that `atoll logs` shows the log of a run without a cluster."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from atoll.cluster.cluster_runs import ClusterRun, RunRecord
from atoll.errors import ClusterError
from atoll.operate.cluster_logs import (
    chosen_name,
    lines_of,
    records_of,
    run_of,
    run_that_is_not_kept,
    runs_report,
    runs_text,
)
from atoll.operate.cluster_registry import ClusterRecord

LOG = """\
2026-01-01 10:00:00,000 atoll engine[1] INFO atoll.engines: starts
2026-01-01 10:00:01,000 atoll worker[2] ERROR atoll.worker: a bug
Traceback (most recent call last):
2026-01-01 10:00:02,000 atoll controller[3] INFO atoll.controller: ready \x1b[2J
"""


def at(text: str) -> float:
    return time.mktime(time.strptime(text, "%Y-%m-%d %H:%M:%S"))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterRun:
    monkeypatch.setenv("ATOLL_STATE_DIR", str(tmp_path))
    directory = tmp_path / "logs" / "lab" / "20260101-100000-1"
    directory.mkdir(parents=True)
    run = ClusterRun(directory)
    first, rest = LOG.split("\n", 1)
    (directory / "log.1").write_text(first + "\n")
    (directory / "log").write_text(rest)
    run.begin(RunRecord("lab", islands="1x1x2", version="0.1.0", started=at("2026-01-01 10:00:00")))
    return run


def test_a_log_is_shown_with_what_was_rotated_and_without_control_characters(run: ClusterRun):
    lines = list(lines_of(run))
    assert [line.split(": ")[-1] for line in lines[:3]] == ["starts", "a bug", "Traceback (most recent call last):"]
    assert "\x1b" not in lines[3]


def test_lines_without_a_time_belong_to_the_line_before(run: ClusterRun):
    assert [line.split(": ")[-1] for line in lines_of(run, process="worker")] == [
        "a bug",
        "Traceback (most recent call last):",
    ]
    assert len(list(lines_of(run, since=at("2026-01-01 10:00:01")))) == 3
    assert list(lines_of(run, since=at("2026-01-01 10:00:01"), process="engine")) == []


def test_the_records_of_a_log_are_objects_whose_messages_have_the_lines_that_continue_them(run: ClusterRun):
    first, second, third = records_of(run)
    assert first == {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(at("2026-01-01 10:00:00"))),
        "level": "info",
        "process": "engine",
        "pid": 1,
        "logger": "atoll.engines",
        "message": "starts",
    }
    assert (second["level"], second["message"]) == ("error", "a bug\nTraceback (most recent call last):")
    assert third["process"] == "controller"
    assert list(records_of(run, process="worker")) == [second]
    assert list(records_of(run, since=at("2026-01-01 10:00:02"))) == [third]


def test_a_record_in_json_keeps_its_fields_and_lines_before_the_first_record_are_one_object(run: ClusterRun):
    fields = {"time": "2026-01-01T10:00:00.125Z", "level": "info", "process": "controller", "pid": 17}
    fields |= {"logger": "a", "message": "opened", "session": 3}
    (run.directory / "log.1").unlink()
    run.log.write_text(f"cut\noff\n{json.dumps(fields)}\n")
    assert list(records_of(run)) == [{"message": "cut\noff"}, fields]
    run.log.write_text("")
    assert list(records_of(run)) == []


def test_the_runs_as_json_have_their_numbers_logs_and_ends(run: ClusterRun):
    run.end("an operator ended it", expected=True)
    (found,) = runs_report("lab")
    assert (found["run"], found["log"], found["name"]) == (0, str(run.log), "lab")
    assert (found["reason"], found["expected"]) == ("an operator ended it", True)


def test_the_runs_are_listed_with_their_ends(run: ClusterRun):
    assert runs_text("lab") == [f"0  started 2026-01-01 10:00:00, atoll 0.1.0, 1x1x2: runs; {run.log}"]
    run.end("the controller ended: killed by SIGKILL")
    assert "ago): the controller ended: killed by SIGKILL; " in runs_text("lab")[0]


def test_the_runs_of_a_standby_name_its_controller(run: ClusterRun) -> None:
    run.begin(RunRecord("lab", version="0.1.0", started=at("2026-01-01 10:00:00"), standby="tls://two:7000"))
    assert "atoll 0.1.0, standby of tls://two:7000: runs" in runs_text("lab")[0]
    run.end("an operator ended it")
    assert run.end_text().startswith("standby lab ended at ")


def test_a_log_that_does_not_exist_is_an_error_that_names_those_that_do(run: ClusterRun):
    assert run_of("lab").directory == run.directory
    with pytest.raises(ClusterError, match=r"no log of a cluster other .* there are logs of lab"):
        run_of("other")
    with pytest.raises(ClusterError, match="has 1 run"):
        run_of("lab", 1)


def test_without_a_name_the_log_is_that_of_the_only_cluster_or_of_the_one_that_started_last(run: ClusterRun) -> None:
    later = run.directory.parent.parent / "former" / "20260101-110000-2"
    later.mkdir(parents=True)
    assert chosen_name(["lab"]) == "lab"
    assert chosen_name(["default", "lab"]) == "default"
    assert chosen_name([]) == "former"
    with pytest.raises(ClusterError, match=r"choose one with --name \(former, lab\)"):
        chosen_name(["former", "lab"])


def test_without_any_log_there_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_STATE_DIR", str(tmp_path))
    assert chosen_name([]) == ""
    with pytest.raises(ClusterError, match=r"no log of a cluster default on this machine$"):
        run_of(chosen_name([]))


def test_the_log_of_a_cluster_that_cannot_keep_it_is_shown_while_it_runs(run: ClusterRun, tmp_path: Path) -> None:
    def record(name: str, kept: str = "") -> ClusterRecord:
        return ClusterRecord(name, "unix:/a", "1x1x2", "null", str(tmp_path / name), pid=1, began=1, run=kept)

    running = [record("lab"), record("kept", "a directory"), record("foreground")]
    for name in ("lab", "kept"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log").write_text("it starts\n")
    found = run_that_is_not_kept("lab", running)
    assert found is not None
    assert list(lines_of(found)) == ["it starts"]
    assert [run_that_is_not_kept(name, running) for name in ("kept", "foreground", "other")] == [None, None, None]
