"""Tests that the cluster after a killed one cleans up: it persists sessions on disk, and removes other files."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import msgspec
import pytest

from atoll.cluster.settings import ClusterSettings
from atoll.cluster.tenant_settings import DEFAULT_TENANT
from atoll.controller_process.controller_options import ControllerOptions
from atoll.controller_process.journal_recovery import JournalRecovery
from atoll.controller_process.killed_clusters import end_killed_cluster
from atoll.controller_process.process_state import ShellDump, encode_snapshot
from atoll.controller_process.shell import ControllerShell, new_controller
from atoll.errors import IncompatibleJournalError, JournalError, SettingsError
from atoll.journal.files import DAMAGED, JournalDirectory
from atoll.journal.persisted_state import NAME, persisted_in
from atoll.journal.successor import Successor
from atoll.protocol import events as e
from atoll.state.buffer_directory import SpilledArray
from tests.controller.test_session_persistence import suspended


def killed(directory: Path, piece: Path, *, has_ended: bool = False, tenant: str = "") -> None:
    """Write the journal of a killed cluster with a session on disk, whose array is in the file `piece`.

    If it `has_ended`, it has handled the request to end, and could not write its sessions. The session belongs to
    `tenant`, or to the default one.
    """
    play = suspended()
    (session,) = play.controller.sessions.values()
    if tenant:
        session.tenant.settings = msgspec.structs.replace(DEFAULT_TENANT, name=tenant)
    entry = session.directory.entries[5]
    assert entry.spilled is not None
    (part,) = entry.spilled.parts
    part = msgspec.structs.replace(part, piece=msgspec.structs.replace(part.piece, path=str(piece)))
    entry.spilled = SpilledArray((part,))
    piece.write_bytes(b"contents")
    if has_ended:
        play.event(e.StopAsked(play.now, True))
    journal = JournalDirectory(directory)
    journal.write_snapshot(1, 3, encode_snapshot(play.controller, ShellDump()))
    journal.close()


def end(directory: Path, persist: bool) -> None:
    async def main() -> None:
        options = ControllerOptions("unix:/none", ClusterSettings("2x1x2"), 0)
        stop = asyncio.Event()
        await end_killed_cluster(str(directory), lambda state: ControllerShell(options, state, stop), persist)

    asyncio.run(main())


@pytest.mark.parametrize("persist", [True, False])
def test_files_of_sessions_that_are_not_persisted_are_removed(tmp_path: Path, persist: bool) -> None:
    piece = tmp_path / "1.piece"
    killed(tmp_path / "journal", piece)
    end(tmp_path / "journal", persist)
    found = persisted_in(tmp_path / "journal")
    assert piece.exists() is persist
    assert (found is not None) is persist
    if found is not None:
        assert (found[0].cluster.sessions, found[1]) == ({1: "default"}, 3)
    assert [path.name for path in (tmp_path / "journal").iterdir() if path.name not in ("lock", NAME)] == []


def test_a_cluster_that_a_standby_has_taken_over_keeps_its_sessions_and_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    piece, journal = tmp_path / "1.piece", tmp_path / "journal"
    killed(journal, piece)
    directory = JournalDirectory(journal)
    directory.write_successor(Successor("tls://two:7000", 1000))
    directory.close()
    end(journal, persist=True)
    assert piece.exists()
    assert [path.name for path in journal.iterdir()] == ["lock"]
    assert "that the controller of term 1000 at tls://two:7000 continues" in caplog.text


def test_sessions_of_a_cluster_that_ended_and_could_not_write_them_are_persisted(tmp_path: Path) -> None:
    piece = tmp_path / "1.piece"
    killed(tmp_path / "journal", piece, has_ended=True)
    end(tmp_path / "journal", persist=True)
    found = persisted_in(tmp_path / "journal")
    assert found is not None
    assert found[0].cluster.sessions == {1: "default"}
    assert piece.exists()


def test_a_journal_that_cannot_be_read_is_set_aside_and_the_log_says_what_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal, aside = tmp_path / "journal", tmp_path / "journal" / DAMAGED
    for cut in (10, 20):  # the files of the second journal replace those of the first one
        killed(journal, tmp_path / "1.piece")
        snapshot = journal / "00000001.snapshot"
        damaged = snapshot.read_bytes()[:-cut]
        snapshot.write_bytes(damaged)
        (journal / f"{cut:08}.events").write_bytes(b"events")
        caplog.clear()
        end(journal, persist=True)
        assert persisted_in(journal) is None
        assert (tmp_path / "1.piece").exists()
        assert sorted(path.name for path in journal.iterdir()) == [DAMAGED, "lock"]
        assert sorted(path.name for path in aside.iterdir()) == ["00000001.snapshot", f"{cut:08}.events"]
        assert (aside / snapshot.name).read_bytes() == damaged
        assert f"cannot be read: {snapshot} is damaged" in caplog.text
        assert f"The journal is now in {aside}" in caplog.text


def test_events_without_a_snapshot_are_set_aside_and_not_overwritten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    killed(tmp_path / "journal", tmp_path / "1.piece")
    (tmp_path / "journal" / "00000001.events").write_bytes(b"events")
    (tmp_path / "journal" / "00000001.snapshot").unlink()
    end(tmp_path / "journal", persist=True)
    aside = tmp_path / "journal" / DAMAGED / "00000001.events"
    assert aside.read_bytes() == b"events"
    assert (tmp_path / "1.piece").exists()
    assert "cannot be read: it has events, and no snapshot of the state before them" in caplog.text


def test_segments_are_removed_before_snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed in between leaves no segments without a snapshot."""
    killed(tmp_path / "journal", tmp_path / "1.piece")
    for number in range(1, 9):
        (tmp_path / "journal" / f"{number:08}.events").write_bytes(b"events")
    removed: list[str] = []
    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda path, **options: (removed.append(path.suffix), unlink(path, **options)))
    JournalDirectory(tmp_path / "journal").clear()
    assert [each for each in removed if each] == [".events"] * 8 + [".snapshot"]


def test_a_journal_that_the_operating_system_cannot_read_stays(tmp_path: Path) -> None:
    killed(tmp_path / "journal", tmp_path / "1.piece")
    snapshot = tmp_path / "journal" / "00000001.snapshot"
    kept = snapshot.rename(tmp_path / "kept")
    snapshot.symlink_to(snapshot)
    with pytest.raises(JournalError, match=r"cannot be read now: .*symbolic links.*Its files are kept"):
        end(tmp_path / "journal", persist=True)
    kept.replace(snapshot)
    end(tmp_path / "journal", persist=True)
    found = persisted_in(tmp_path / "journal")
    assert found is not None
    assert found[0].cluster.sessions == {1: "default"}


def test_persisted_sessions_that_cannot_be_examined_are_not_replaced(tmp_path: Path) -> None:
    killed(tmp_path / "journal", tmp_path / "1.piece")
    persisted = tmp_path / "journal" / NAME
    persisted.symlink_to(persisted)
    for act in (lambda: end(tmp_path / "journal", persist=True), lambda: persisted_in(tmp_path / "journal")):
        with pytest.raises(JournalError, match="symbolic links"):
            act()
    assert persisted.is_symlink()
    assert (tmp_path / "journal" / "00000001.snapshot").exists()


def test_a_journal_of_another_key_is_not_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed(tmp_path / "journal", tmp_path / "1.piece")
    before = {path: path.read_bytes() for path in (tmp_path / "journal").iterdir()}
    monkeypatch.setenv("ATOLL_KEY_FILE", str(tmp_path / "new key"))
    with pytest.raises(IncompatibleJournalError, match="restore that file"):
        end(tmp_path / "journal", persist=True)
    assert {path: path.read_bytes() for path in (tmp_path / "journal").iterdir()} == before


def test_the_file_of_a_cluster_that_was_killed_before_it_had_begun_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    killed(tmp_path / "journal", tmp_path / "1.piece")
    (tmp_path / "journal" / NAME).write_bytes(b"of the cluster before")
    end(tmp_path / "journal", persist=True)
    assert (tmp_path / "journal" / NAME).read_bytes() == b"of the cluster before"
    assert "killed while it started or ended; its suspended sessions are in" in caplog.text


def test_the_journal_stays_if_the_sessions_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    killed(tmp_path / "journal", tmp_path / "1.piece")
    monkeypatch.setattr("atoll.journal.files.write_atomically", full)
    before = {path.name for path in (tmp_path / "journal").iterdir()}
    with pytest.raises(JournalError, match="cannot persist suspended sessions"):
        end(tmp_path / "journal", persist=True)
    assert {path.name for path in (tmp_path / "journal").iterdir()} == before
    assert (tmp_path / "1.piece").exists()


def test_a_cluster_that_cannot_be_ended_now_is_not_said_to_be_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    killed(tmp_path / "journal", tmp_path / "1.piece")
    for cannot, named in ((ControllerShell, "stop"), (JournalDirectory, "clear")):
        with monkeypatch.context() as patched:
            patched.setattr(cannot, named, fail)
            with pytest.raises(JournalError, match=r"cannot be (ended|removed) now: .*Read-only.*Its files are kept"):
                end(tmp_path / "journal", persist=True)
        assert (tmp_path / "journal" / "00000001.snapshot").exists()
    end(tmp_path / "journal", persist=True)
    assert persisted_in(tmp_path / "journal") is not None


def begin_next(path: Path) -> None:
    """Begin the next cluster with the journal, and end it."""

    async def main() -> None:
        options = ControllerOptions("unix:/none", ClusterSettings("2x1x2"), 0)
        recovery = JournalRecovery(str(path), restarts=False)
        shell = ControllerShell(options, recovery.state(lambda: new_controller(options)), asyncio.Event())
        try:
            recovery.begin(shell)
            shell.stop(persist=False)
        finally:
            shell.keeper.close()
            if shell.journal is not None:
                shell.journal.close()  # as the end of the process, which holds the directory

    asyncio.run(main())


def test_the_log_says_what_the_next_cluster_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    killed(tmp_path / "journal", tmp_path / "1.piece")
    end(tmp_path / "journal", persist=True)
    caplog.clear()
    begin_next(tmp_path / "journal")
    lines = [each.message for each in caplog.records if "previous cluster" in each.message]
    assert lines == [
        "restored the suspended session 1 of the previous cluster; `atoll resume SESSION` continues a session"
    ]


def test_a_cluster_that_lacks_a_tenant_of_the_killed_one_does_not_start_and_removes_nothing(tmp_path: Path) -> None:
    killed(tmp_path / "journal", tmp_path / "1.piece", tenant="gone")
    end(tmp_path / "journal", persist=True)
    with pytest.raises(
        SettingsError, match=r"the suspended session 1 is persisted in .*this cluster has no tenant gone"
    ):
        begin_next(tmp_path / "journal")
    end(tmp_path / "journal", persist=True)  # of the start that failed
    assert (tmp_path / "1.piece").exists()
    found = persisted_in(tmp_path / "journal")
    assert found is not None
    assert found[0].cluster.sessions == {1: "gone"}
