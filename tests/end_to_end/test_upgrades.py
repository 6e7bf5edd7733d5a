"""Atoll is replaced by a build with a changed struct: a cluster and its suspended session continue."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import atoll
from atoll.journal.files import read_header
from atoll.operate.operator_requests import request_stop
from atoll.protocol import messages as m
from atoll.wire.address import parse_address
from tests.conftest import script_environment
from tests.end_to_end.lost_controller import answers, check, controller
from tests.end_to_end.remote_python import StartPython
from tests.end_to_end.standing_cluster import StandingCluster
from tests.end_to_end.test_persisted_sessions import GRACE_SECONDS
from tests.end_to_end.test_suspending import ask, session_of, train, until_step

pytestmark = pytest.mark.executed  # the processes of a cluster import the installed build

SOURCE = Path(atoll.__file__).resolve().parent


class Builds:
    """Builds of Atoll, one of which is installed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.path = directory / "installed"

    def install(self, version: str, field: str = "") -> None:
        """Install a build of this version, where each buffer has one more field if `field` names it."""
        build = self._directory / version / "atoll"
        shutil.copytree(SOURCE, build, ignore=shutil.ignore_patterns("__pycache__"))
        (build / "_version.py").write_text(f'__version__ = "{version}"\n')
        if field:
            replace(
                build / "state" / "buffer_directory.py",
                "    spilled: SpilledArray | None = None",
                f"    {field}: str = 'unknown'\n    spilled: SpilledArray | None = None",
            )
            dumps = build / "state" / "state_dumps.py"
            replace(dumps, '@dump_of(Entry, "buffer")', '@dump_of(Entry, "buffer", version=2)')
            replace(
                dumps,
                "    spilled: SpilledArray | None = None",
                f"    {field}: str = 'unknown'\n    spilled: SpilledArray | None = None",
            )
            persisted = build / "migration" / "persisted_sessions.py"
            replace(
                persisted, "    error: Status | None\n\n", f"    error: Status | None\n    {field}: str = 'unknown'\n\n"
            )
            replace(persisted, '"persisted sessions", (1, 1)', '"persisted sessions", (2, 1)')
        link = self._directory / "link"
        link.symlink_to(build.parent)
        link.rename(self.path)


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{path} has {text.count(old)} times {old!r}"
    path.write_text(text.replace(old, new))


def writer_of(journal: Path) -> str:
    """The version of Atoll that wrote the newest file of a journal."""
    newest = max(journal.glob("*.events"))
    return read_header(newest.read_bytes(), str(newest))[0].version


def test_a_build_with_a_changed_struct_continues_what_an_earlier_one_did(
    tmp_path: Path, module_directory: Path, program_cache: Path, start_python: StartPython
) -> None:
    builds, directory = Builds(tmp_path), module_directory / "upgrades"
    directory.mkdir(mode=0o700)
    builds.install("1.0.0")
    journal = directory / "journal"

    def start() -> StandingCluster:
        return StandingCluster(
            directory,
            script_environment(directory, program_cache) | {"PYTHONPATH": str(builds.path)},
            islands="2x1x2",
            suspend_directory=str(directory / "spilled"),
            grace_seconds=GRACE_SECONDS,
            journal=str(journal),
        )

    progress = [tmp_path / name / "progress" for name in ("one", "other", "again")]
    for path in progress:
        path.parent.mkdir()
    cluster = start()
    try:
        # A session on disk and the journal of the former build: the next build continues both.
        suspended = start_python(ATOLL_ADDRESS=cluster.address)
        suspended.begin(train, str(progress[0]), 100_000)
        until_step(progress[0], 2)
        session = session_of(cluster, suspended)
        assert ask(cluster, m.SuspendRequest(session, to_disk=True)).endswith("is suspended on disk")
        python = start_python(ATOLL_ADDRESS=cluster.address)
        python.begin(train, str(progress[1]), 100_000)
        until_step(progress[1], 2)
        builds.install("2.0.0", "purpose")
        controller(cluster).kill()
        answers(cluster)
        assert writer_of(journal) == "2.0.0"
        assert "continues in term 2" in cluster.messages()
        check(cluster)
        until_step(progress[1], os.stat(progress[1]).st_size + 2)
        (progress[1].parent / "stop").touch()
        disturbed = python.finish()
        again = start_python(ATOLL_ADDRESS=cluster.address)
        assert disturbed == again.call(train, str(progress[2]), len(disturbed[0]))
        # The whole cluster is replaced: the session that is suspended continues.
        assert [number for number, _ in request_stop(parse_address(cluster.address), "", None).persisted] == [session]
        cluster.wait()
        cluster.stop()
        builds.install("3.0.0", "origin")
        cluster = start()
        assert ask(cluster, m.ResumeRequest(session, (), 60.0)) == f"session {session} continues on island 0"
        until_step(progress[0], os.stat(progress[0]).st_size + 2)
        (progress[0].parent / "stop").touch()
        found = suspended.finish()
        (progress[2].parent / "last").mkdir()
        last = str(progress[2].parent / "last" / "progress")
        assert found == start_python(ATOLL_ADDRESS=cluster.address).call(train, last, len(found[0]))
    finally:
        cluster.stop()
