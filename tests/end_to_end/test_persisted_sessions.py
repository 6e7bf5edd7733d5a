"""Tests of sessions that are suspended on disk while their cluster restarts, which their scripts notice as a pause."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from atoll.cluster.settings import GRACE_SECONDS
from atoll.operate.operator_requests import request_operation, request_stop
from atoll.protocol import messages as m
from atoll.wire.address import parse_address
from tests.end_to_end.consecutive_clusters import ConsecutiveClusters
from tests.end_to_end.remote_python import RemotePython, StartPython
from tests.end_to_end.standing_cluster import StandingCluster
from tests.end_to_end.test_suspending import ask, session_of, steps_at, train, until_step
from tests.scripts import script_environment

GRACE = 3.0


class Clusters(ConsecutiveClusters):
    def end(self, all_sessions: bool = False) -> list[int]:
        """End the cluster like `atoll down`, and return the persisted sessions."""
        output = request_stop(parse_address(self.now.address), "", None, all_sessions)
        self.now.wait()
        assert not self.now.directory.exists()
        self.now.stop()
        return [number for number, _ in output.persisted]


@pytest.fixture
def clusters(
    tmp_path_factory: pytest.TempPathFactory, module_directory: Path, program_cache: Path
) -> Iterator[Clusters]:
    made = Clusters(module_directory / tmp_path_factory.mktemp("c").name, program_cache, grace_seconds=GRACE_SECONDS)
    yield made
    made.now.stop()


def suspend(clusters: Clusters, python: RemotePython) -> int:
    session = session_of(clusters.now, python)
    assert ask(clusters.now, m.SuspendRequest(session, to_disk=True)) == f"session {session} is suspended on disk"
    return session


def resume(clusters: Clusters, session: int, *islands: int) -> str:
    address = parse_address(clusters.now.address)
    return request_operation(address, "", m.ResumeRequest(session, islands, 60.0), seconds=90.0)


@pytest.mark.thorough
def test_a_training_goes_on_in_the_next_cluster_and_the_one_after_that(
    clusters: Clusters, start_python: StartPython, tmp_path: Path
) -> None:
    python = start_python(ATOLL_ADDRESS=clusters.now.address)
    progress = tmp_path / "progress"
    python.begin(train, str(progress), 100_000)
    until_step(progress, 3)
    for islands in ((), (1,)):  # on the same island, and on another one
        session = suspend(clusters, python)
        clusters.end()
        at = steps_at(progress)
        time.sleep(1.0)
        assert steps_at(progress) == at, "it waits, though there is no cluster"
        clusters.start_next()
        (row,) = clusters.now.report()["sessions"]
        assert (row["id"], row["state"]) == (session, "suspended on disk")
        assert "continues" in resume(clusters, session, *islands)
        until_step(progress, at + 3)
        assert list(clusters.files.iterdir()) == []
    (tmp_path / "stop").touch()
    disturbed = python.finish()
    (tmp_path / "again").mkdir()
    again = str(tmp_path / "again" / "progress")
    assert disturbed == start_python(ATOLL_ADDRESS=clusters.now.address).call(train, again, len(disturbed[0]))


@pytest.mark.thorough
def test_a_session_goes_on_in_the_next_cluster_unless_all_are_ended(
    clusters: Clusters, start_python: StartPython, tmp_path: Path
) -> None:
    python = start_python(ATOLL_ADDRESS=clusters.now.address)
    undisturbed = python.call(train, str(tmp_path / "first"), 6)
    (tmp_path / "more").mkdir()
    progress = tmp_path / "more" / "progress"
    python.begin(train, str(progress), 6)
    until_step(progress, 1)
    session = suspend(clusters, python)
    assert clusters.end() == [session]
    clusters.start_next()
    assert resume(clusters, session) == f"session {session} continues on island 0"
    assert python.finish() == undisturbed
    suspend(clusters, python)
    assert clusters.end(all_sessions=True) == []
    assert list(clusters.files.iterdir()) == []
    clusters.start_next()
    assert clusters.now.report()["sessions"] == []


def test_a_session_on_disk_continues_after_its_cluster_was_killed(
    clusters: Clusters, start_python: StartPython, tmp_path: Path
) -> None:
    clusters.end()
    clusters.start_next(grace_seconds=GRACE)
    python, other = start_python(ATOLL_ADDRESS=clusters.now.address), start_python(ATOLL_ADDRESS=clusters.now.address)
    progress = [tmp_path / name / "progress" for name in ("kept", "lost", "again")]
    for each in progress:
        each.parent.mkdir()
    for each, path in ((python, progress[0]), (other, progress[1])):
        each.begin(train, str(path), 100_000)
        until_step(path, 2)
    session = suspend(clusters, python)
    assert ask(clusters.now, m.SuspendRequest(session_of(clusters.now, other))).endswith("is suspended in memory")
    at = steps_at(progress[0])
    files = list(clusters.files.rglob("*.piece"))
    clusters.now.kill()
    time.sleep(GRACE + 1.0)  # the waiting time of a script that is not suspended on disk
    clusters.start_next()
    (row,) = clusters.now.report()["sessions"]
    assert (row["id"], row["state"]) == (session, "suspended on disk")
    assert "can be resumed: 1; published versions on disk: 0; removed files of others: 0" in clusters.now.messages()
    assert files
    assert list(clusters.files.rglob("*.piece")) == files
    assert resume(clusters, session) == f"session {session} continues on island 0"
    until_step(progress[0], at + 2)
    assert list(clusters.files.iterdir()) == []
    (progress[0].parent / "stop").touch()
    disturbed = python.finish()
    undisturbed = start_python(ATOLL_ADDRESS=clusters.now.address).call(train, str(progress[2]), len(disturbed[0]))
    assert disturbed == undisturbed
    with pytest.raises(Exception, match=r"cluster|session|controller"):
        other.finish()


@pytest.mark.thorough
def test_files_are_removed_though_the_engine_was_killed_and_no_journal_has_their_session(
    module_directory: Path, program_cache: Path, start_python: StartPython, tmp_path: Path
) -> None:
    spilled = tmp_path / "spilled"
    environment = script_environment(module_directory, program_cache)
    cluster = StandingCluster(module_directory, environment, islands="1x1x2", suspend_directory=str(spilled))
    try:
        python = start_python(ATOLL_ADDRESS=cluster.address)
        python.begin(train, str(tmp_path / "progress"), 100_000)
        until_step(tmp_path / "progress", 1)
        session = session_of(cluster, python)
        assert ask(cluster, m.SuspendRequest(session, to_disk=True)) == f"session {session} is suspended on disk"
        assert list(spilled.rglob("*.piece"))
        processes = list(cluster.processes().values())
        cluster.engine().kill()
        psutil.wait_procs(processes, 60)
        assert list(spilled.iterdir()) == []
        python.close()
    finally:
        cluster.stop()
