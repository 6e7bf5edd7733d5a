"""Tests of the runs of standing clusters: what is stored about them, and how their ends are determined."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from atoll.cluster import cluster_runs
from atoll.cluster.cluster_runs import (
    KEPT_RUNS,
    ClusterRun,
    RunRecord,
    names_of_runs,
    new_run,
    open_log,
    rotate,
    runs_of,
)
from atoll.errors import ClusterError


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATOLL_STATE_DIR", str(tmp_path))
    return tmp_path


def run_at(directory: Path, standby: str = "") -> ClusterRun:
    directory.mkdir(parents=True)
    run = ClusterRun(directory)
    run.begin(RunRecord("one", started=1.0, standby=standby))
    return run


def test_the_log_of_a_run_outlives_the_directory_of_its_cluster(state: Path, tmp_path: Path):
    own = tmp_path / "own"
    own.mkdir()
    file, run = open_log(RunRecord("one"), own)
    assert run is not None
    with file:
        file.write(b"a line\n")
    assert (own / "log").read_text() == "a line\n"
    (own / "log").unlink()
    assert [path.read_text() for path in run.logs] == ["a line\n"]
    assert names_of_runs() == ["one"]


def test_without_a_state_directory_the_log_is_in_the_directory_of_the_cluster(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("ATOLL_STATE_DIR", "off")
    file, run = open_log(RunRecord("one"), tmp_path)
    file.close()
    assert run is None
    assert not (tmp_path / "log").is_symlink()
    assert runs_of("one") == []


def test_the_oldest_runs_are_removed(state: Path):
    for number in range(KEPT_RUNS + 2):
        run_at(state / "logs" / "one" / f"2020010{number}-000000-1")
    latest = new_run(RunRecord("one"))
    kept = runs_of("one")
    assert latest is not None
    assert (len(kept), kept[0].directory) == (KEPT_RUNS, latest.directory)


def test_a_later_run_is_the_latest_also_if_the_clock_was_set_back(state: Path):
    for day in range(KEPT_RUNS):
        run_at(state / "logs" / "one" / f"2999020{day + 1}-235959-99999")
    first, second = new_run(RunRecord("one")), new_run(RunRecord("one"))
    assert first is not None
    assert second is not None
    assert [run.directory for run in runs_of("one")[:2]] == [second.directory, first.directory]
    assert first.directory.name == f"29990206-000000-{os.getpid()}"
    assert len(runs_of("one")) == KEPT_RUNS


def test_runs_of_standbys_displace_only_runs_of_standbys(state: Path):
    cluster = run_at(state / "logs" / "one" / "20200101-000000-1")
    for number in range(KEPT_RUNS):
        run_at(state / "logs" / "one" / f"2020020{number}-000000-1", "tls://two:7000")
    new_run(RunRecord("one", standby="tls://two:7000"))
    kept = runs_of("one")
    assert len(kept) == KEPT_RUNS + 1
    assert kept[-1].directory == cluster.directory


def test_a_run_whose_record_cannot_be_read_is_not_removed(state: Path):
    runs = [run_at(state / "logs" / "one" / f"2020010{number + 1}-000000-1") for number in range(KEPT_RUNS)]
    unreadable = runs[0].record_file
    unreadable.unlink()
    unreadable.symlink_to(unreadable)
    assert new_run(RunRecord("one")) is not None
    assert runs_of("one")[-1].directory == runs[0].directory
    with pytest.raises(ClusterError, match=r"cannot read .*run\.json"):
        _ = runs[0].record
    runs[0].end("it ended")


def test_runs_that_cannot_be_listed_are_not_reported_as_none(state: Path, caplog: pytest.LogCaptureFixture):
    directory = state / "logs" / "one"
    directory.parent.mkdir()
    directory.symlink_to(directory)
    with pytest.raises(ClusterError, match="cannot list the runs"):
        runs_of("one")
    assert new_run(RunRecord("one")) is None
    assert "the log of cluster one will be lost when the cluster ends: cannot list the runs" in caplog.text


def test_on_a_full_disk_a_run_has_no_record_and_leaves_nothing(
    state: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cluster_runs, "write_atomically", full)
    assert new_run(RunRecord("one")) is None
    assert "the log of cluster one will be lost when the cluster ends: [Errno 28] No space left" in caplog.text
    assert runs_of("one") == []


def test_the_first_end_that_is_recorded_stays(tmp_path: Path):
    run = run_at(tmp_path / "run")
    run.end("the controller ended: killed by SIGKILL")
    run.end_unknown("its engine")
    record = run.record
    assert record is not None
    assert (record.reason, record.expected) == ("the controller ended: killed by SIGKILL", False)
    assert run.end_text().endswith(f"ago): the controller ended: killed by SIGKILL; log: {run.log}")


def test_the_end_of_an_engine_that_was_killed_is_that_of_its_last_line(tmp_path: Path):
    run = run_at(tmp_path / "run")
    run.log.touch()
    os.utime(run.log, (100.0, 100.0))
    assert run.end_text() == ""
    run.end_unknown("its engine")
    record = run.record
    assert record is not None
    assert record.ended == 100.0
    assert record.reason.startswith("its engine was killed")


def test_a_log_that_is_too_large_moves_aside_and_keeps_its_last_lines(tmp_path: Path):
    log = tmp_path / "log"
    with open(log, "ab", buffering=0) as writer:
        writer.write(b"".join(b"line %d\n" % number for number in range(100)))
        rotate(log, limit=60)
        assert log.read_bytes() == b""
        assert (tmp_path / "log.1").read_text().splitlines()[-1] == "line 99"
        assert (tmp_path / "log.1").stat().st_size <= 60
        writer.write(b"later\n")
    assert log.read_bytes() == b"later\n", "a process that has the file open continues at its begin"
    rotate(log, limit=60)
    assert log.read_bytes() == b"later\n"
