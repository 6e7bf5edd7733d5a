"""Tests of journals on disk: reads return what was written by the same version of Atoll, and one controller writes at a
time.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import stat
import time
from pathlib import Path

import pytest

from atoll.cluster.held_directories import is_held
from atoll.errors import IncompatibleJournalError, JournalError
from atoll.journal import files, journal, segment
from atoll.journal.files import TAG_BYTES, FileCipher, JournalDirectory, new_salt
from atoll.journal.journal import TRANSITIONS, Journal, JournalState, recover
from atoll.journal.persisted_state import has_killed_cluster
from atoll.journal.records import encode_event, encode_turn, join_records, read_turns
from atoll.journal.segment import JournalSegment
from atoll.journal.successor import NAME, Successor
from atoll.protocol import events as e
from tests.file_limits import no_more_files
from tests.state_tables import check_table


def turn(number: int) -> list[bytes]:
    return [encode_event(e.TimerEnded(float(number), number)), encode_event(e.Flush(float(number)))]


def timers(directory: JournalDirectory) -> list[int]:
    found = recover(directory)
    assert found is not None
    return [each.timer for turn in found.decoded_turns() for each in turn if isinstance(each, e.TimerEnded)]


def timers_or_none(directory: JournalDirectory) -> list[int] | None:
    return timers(directory) if directory.snapshots() else None


@pytest.fixture(params=["mapped", "written"])
def directory(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JournalDirectory:
    monkeypatch.setattr(segment, "_keeps_room", lambda descriptor: request.param == "mapped")
    return JournalDirectory(tmp_path / "journal")


def used(path: Path) -> int:
    """Return the end of its last turn."""
    content = path.read_bytes()
    _, start = files.read_header(content, str(path))
    return start + max((end for end, _ in read_turns(content[start:])), default=0)


def written(directory: JournalDirectory, count: int, term: int = 1) -> Journal:
    """Return a journal with this many turns after its first snapshot."""
    found = Journal(directory, term, 1, lambda: b"a state")
    found.begin()
    for number in range(count):
        found.append(turn(number))
    return found


def finish_snapshot(found: Journal) -> None:
    until = time.monotonic() + 20.0
    done = found.snapshots
    while found.snapshots == done and time.monotonic() < until:
        found.tick()
        time.sleep(0.01)
    assert found.snapshots == done + 1


def test_what_was_appended_is_read(directory):
    written(directory, 5)
    assert timers(directory) == [0, 1, 2, 3, 4]
    found = recover(directory)
    assert found is not None
    assert (found.payload, found.term, found.cut) == (b"a state", 1, [])


def test_nothing_is_read_where_nothing_was_written(directory):
    assert recover(directory) is None


def test_a_snapshot_by_a_child_makes_what_is_older_go(directory):
    state = [b"old"]
    found = Journal(directory, 1, 1, lambda: state[0])
    found.begin()
    found.append(turn(1))
    state[0] = b"new"
    found.snapshot()
    state[0] = b"newer"
    found.append(turn(2))
    assert timers(directory)[-1:] == [2]
    finish_snapshot(found)
    assert directory.snapshots() == directory.segments() == [2]
    recovered = recover(directory)
    assert recovered is not None
    assert recovered.payload == b"new", "as it was when the snapshot was asked for"
    assert timers(directory) == [2]


def test_a_snapshot_that_fails_costs_nothing_but_room(directory, capfd):
    def state() -> bytes:
        if fails:
            raise ValueError("no state to be had")
        return b"a state"

    fails = False
    found = Journal(directory, 1, 1, state)
    found.begin()
    fails = True
    found.append(turn(1))
    found.snapshot()
    found.append(turn(2))
    until = time.monotonic() + 20.0
    while found._child and time.monotonic() < until:
        found.tick()
        time.sleep(0.01)
    assert found.snapshots == 0
    assert timers(directory) == [1, 2]
    assert "no state to be had" in capfd.readouterr().err


def test_no_snapshot_is_made_in_the_process_itself(directory):
    found = Journal(directory, 1, 1, lambda: str(os.getpid()).encode())
    found.begin()
    recovered = recover(directory)
    assert recovered is not None
    assert recovered.payload != str(os.getpid()).encode()


@pytest.mark.parametrize(
    ("error", "expected"),
    [(OSError(errno.ENOSPC, "no room"), "No space left"), (ValueError("no state to be had"), "a snapshot .* failed")],
)
def test_a_process_whose_first_snapshot_fails_does_not_begin(directory, error, expected, capfd):
    def state() -> bytes:
        raise error

    with pytest.raises(OSError, match=expected):
        Journal(directory, 1, 1, state).begin()
    assert str(error) in capfd.readouterr().err


def test_a_snapshot_is_wanted_after_so_much_cpu_time(directory):
    taken = [1.0]
    found = Journal(directory, 1, 1, lambda: b"a state", lambda: taken[0])
    found.begin()
    found.append(turn(1))
    found.tick()
    assert not found.wants_snapshot
    taken[0] += journal.SNAPSHOT_SECONDS
    found.tick()
    assert found.wants_snapshot
    found.snapshot()
    finish_snapshot(found)
    taken[0] += 1.0
    found.append(turn(2))
    found.tick()
    assert not found.wants_snapshot, "what was taken before it does not count"


def test_a_snapshot_of_what_nobody_changed_is_not_wanted(directory):
    taken = [1.0]
    found = Journal(directory, 1, 1, lambda: b"a state", lambda: taken[0])
    found.begin()
    taken[0] += 100.0
    found.tick()
    assert not found.wants_snapshot


def test_a_later_controller_goes_on_behind_what_is_there(directory):
    written(directory, 3)
    first = recover(directory)
    assert first is not None
    second = Journal(directory, first.term + 1, first.last_number + 1, lambda: "another state")
    second.open_segment()
    second.append(turn(3))
    found = recover(directory)
    assert found is not None
    assert (found.term, found.cut, timers(directory)) == (2, [], [0, 1, 2, 3])


def test_turns_go_on_where_a_map_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(segment, "STEP_BYTES", mmap.PAGESIZE)
    monkeypatch.setattr(segment, "_keeps_room", lambda descriptor: True)
    turns = [encode_turn(bytes([number]) * length) for number, length in enumerate([3000, 1080, 1, 20_000, 5], 1)]
    found = JournalSegment(tmp_path / "segment", b"header")
    for each in turns:
        found.append(each)
        content = (tmp_path / "segment").read_bytes()
        assert content.rstrip(b"\0") == b"header" + b"".join(turns[: turns.index(each) + 1])
        assert len(content) % mmap.PAGESIZE == 0
    found.close()
    assert (tmp_path / "segment").read_bytes() == b"header" + b"".join(turns)


@pytest.mark.parametrize("torn", [1, 7, 30, 63])
def test_what_is_torn_is_cut_off_and_what_comes_later_is_read(directory, torn, caplog):
    written(directory, 3)
    path = directory.segment(1)
    os.truncate(path, used(path) - torn)
    assert timers(directory) == [0, 1][: 2 if torn < 60 else 1]
    assert "cut off" in caplog.text
    later = Journal(directory, 2, 2, lambda: "another state")
    later.open_segment()
    later.append(turn(7))
    assert timers(directory)[-1] == 7


def test_what_follows_a_bit_that_has_changed_is_cut_off_with_later_files(directory, caplog):
    written(directory, 3)
    content = bytearray(directory.segment(1).read_bytes())
    later = Journal(directory, 2, 2, lambda: "another state")
    later.open_segment()
    later.append(turn(9))
    last = len(encode_turn(join_records(turn(2)))) + TAG_BYTES
    content[used(directory.segment(1)) - last - 8] ^= 4  # in the previous segment
    directory.segment(1).write_bytes(content)
    assert timers(directory) == [0]
    assert "removed the later 00000002.events" in caplog.text
    assert directory.segments() == [1]


def test_a_snapshot_that_is_damaged_is_passed_over_for_the_one_before(directory, caplog):
    found = written(directory, 2)
    directory.write_snapshot(2, 1, b"a later state")
    found._number = 2
    found.open_segment()
    found.append(turn(5))
    content = bytearray(directory.snapshot(2).read_bytes())
    content[-3] ^= 1
    directory.snapshot(2).write_bytes(content)
    assert timers(directory) == [0, 1, 5]
    assert "damaged" in caplog.text


def test_where_no_snapshot_can_be_read_that_is_an_error(directory):
    written(directory, 1)
    directory.snapshot(1).write_bytes(b"something else")
    with pytest.raises(JournalError, match="not a journal file"):
        recover(directory)


def test_another_protocol_is_refused_and_nothing_is_removed(directory, monkeypatch):
    written(directory, 1)
    before = {path: path.read_bytes() for path in directory.path.iterdir()}
    monkeypatch.setattr(files, "__version__", "99.0")
    monkeypatch.setattr(files, "PROTOCOL", 999)
    with pytest.raises(IncompatibleJournalError, match=r"this is atoll 99\.0 \(protocol 999\): only a version with"):
        recover(directory)
    assert {path: path.read_bytes() for path in directory.path.iterdir()} == before


def test_another_version_is_read(directory, monkeypatch):
    written(directory, 1)
    monkeypatch.setattr(files, "__version__", "99.0")
    assert timers(directory) == [0]


def test_files_are_their_owners_alone(directory):
    written(directory, 1)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in directory.path.iterdir()}
    assert modes == {0o600}
    directory.close()
    directory.path.chmod(0o750)
    with pytest.raises(JournalError, match="chmod 700"):
        JournalDirectory(directory.path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory to another user")
def test_the_error_for_the_directory_of_another_user_names_chown_and_not_chmod(tmp_path):
    directory = tmp_path / "journal"
    directory.mkdir(mode=0o700)
    os.chown(directory, 4321, -1)
    with pytest.raises(JournalError, match=r"another user \(UID 4321; .*`chown -R 0 "):
        JournalDirectory(directory)


def test_the_error_for_a_file_in_place_of_the_directory_says_so(tmp_path):
    (tmp_path / "journal").touch()
    with pytest.raises(JournalError, match="it is a file: choose a directory"):
        JournalDirectory(tmp_path / "journal")


def test_two_controllers_cannot_have_one_journal(directory):
    with pytest.raises(JournalError, match="in use by another controller"):
        JournalDirectory(directory.path)
    assert is_held(directory.path), "no program cleans it"
    directory.close()
    assert not is_held(directory.path)
    JournalDirectory(directory.path).close()


def test_a_disk_that_takes_no_more_ends_the_journal_and_not_the_cluster(directory, monkeypatch, caplog):
    found = written(directory, 1)

    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        patched.setattr(os, "posix_fallocate", full)
        found.append([b"x" * segment.STEP_BYTES])
        found.append(turn(2))
    assert caplog.text.count("No space left on device") == 1
    assert recover(directory) is None, "it has a hole"
    assert not found.load(standby="").complete
    assert not found.wants_snapshot
    monkeypatch.setattr(journal.time, "monotonic", lambda at=time.monotonic: at() + 60.0)
    assert found.wants_snapshot
    found.snapshot()
    found.append(turn(3))
    assert not found.load(standby="").complete, "nobody can continue before the snapshot is complete"
    finish_snapshot(found)
    assert timers(directory) == [3]
    assert found.load(standby="").complete
    assert found.load(standby="").snapshots == 1
    assert 0 < found.load(standby="").pause < 10


def test_a_snapshot_that_cannot_begin_for_lack_of_files_leaves_the_journal_complete(directory, caplog):
    found = written(directory, 1)
    with no_more_files():
        found.snapshot()
        found.append(turn(1))
        found.tick()
    assert "a snapshot cannot begin: [Errno 24] Too many open files" in caplog.text
    assert found.load(standby="").complete
    assert timers(directory) == [0, 1]
    found.tick()
    found.snapshot()
    found.append(turn(2))
    finish_snapshot(found)
    assert timers(directory) == [2]


def test_a_snapshot_whose_process_cannot_be_started_leaves_the_journal_complete(directory, monkeypatch):
    def fail(*_: object) -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    found = written(directory, 1)
    with monkeypatch.context() as patched:
        patched.setattr(journal, "start_snapshot", fail)
        found.snapshot()
        found.append(turn(1))
    assert found.load(standby="").complete
    assert timers(directory) == [0, 1]


def test_old_files_that_cannot_be_removed_stay_until_the_next_snapshot(directory, caplog):
    found = written(directory, 1)
    found.snapshot()
    until = time.monotonic() + 20.0
    with no_more_files():
        while found.is_snapshotting and time.monotonic() < until:
            found.tick()
            time.sleep(0.01)
    assert "cannot remove old files of the journal" in caplog.text
    assert directory.snapshots() == [1, 2]
    found.snapshot()
    finish_snapshot(found)
    assert directory.snapshots() == [3]


def test_no_snapshot_is_written_behind_missing_events(directory, monkeypatch):
    def state() -> bytes:
        time.sleep(delay)
        return b"a state"

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    delay = 0.0
    found = Journal(directory, 1, 1, state)
    found.begin()
    delay = 0.5
    found.snapshot()
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        patched.setattr(os, "posix_fallocate", full)
        found.append([b"x" * segment.STEP_BYTES])
    time.sleep(1.0)
    assert recover(directory) is None, "events after that snapshot are missing"


def test_a_snapshot_that_the_operating_system_cannot_read_is_not_taken_for_a_damaged_one(directory):
    found = written(directory, 2)
    directory.write_snapshot(2, 1, b"a later state")
    found._number = 2
    found.open_segment()
    found.append(turn(5))
    kept = directory.snapshot(2).rename(directory.path / "kept")
    directory.snapshot(2).symlink_to(directory.snapshot(2))
    with pytest.raises(OSError, match="symbolic links"):
        recover(directory)
    kept.replace(directory.snapshot(2))
    assert timers(directory) == [5]


def test_a_journal_that_cannot_be_listed_is_not_taken_for_an_empty_one(directory):
    written(directory, 2)
    with no_more_files():
        with pytest.raises(OSError, match="Too many open files"):
            recover(directory)
        with pytest.raises(JournalError, match="Too many open files"):
            has_killed_cluster(directory.path)
    assert timers(directory) == [0, 1]


def test_a_directory_that_cannot_be_locked_is_not_said_to_be_in_use(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", fail)
    with pytest.raises(JournalError, match="cannot be locked: No locks available"):
        JournalDirectory(tmp_path / "journal")


def test_a_directory_that_somebody_removed_ends_the_journal_and_not_the_cluster(directory, monkeypatch, caplog):
    found = written(directory, 1)
    found.snapshot()
    while directory.path.exists():  # the process that writes the snapshot may add a file meanwhile
        shutil.rmtree(directory.path, ignore_errors=True)
    until = time.monotonic() + 20.0
    while found.is_snapshotting and time.monotonic() < until:
        found.tick()
        time.sleep(0.01)
    found.append(turn(2))
    found.snapshot()
    assert not found.load(standby="").complete
    assert "cannot write the journal: [Errno 2]" in caplog.text
    directory.path.mkdir(mode=0o700)
    monkeypatch.setattr(journal.time, "monotonic", lambda at=time.monotonic: at() + 60.0)
    assert found.wants_snapshot
    found.snapshot()
    found.append(turn(3))
    finish_snapshot(found)
    assert timers(directory) == [3]


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_journal_stays_if_the_sessions_of_a_cluster_that_ends_cannot_be_written(
    directory, monkeypatch, caplog, is_complete
):
    def full(*arguments: object, **options: object) -> int:
        raise OSError(28, "No space left on device")

    found = written(directory, 2)
    monkeypatch.setattr(files, "write_atomically", full)
    if not is_complete:
        monkeypatch.setattr(os, "write", full)
        monkeypatch.setattr(os, "posix_fallocate", full)
        found.append([b"x" * segment.STEP_BYTES])
    found.end(b"the state of sessions")
    assert timers_or_none(directory) == ([0, 1] if is_complete else None)
    assert "cannot persist suspended sessions" in caplog.text
    assert ("persists them from it" in caplog.text) is is_complete


def test_sessions_are_persisted_if_the_journal_is_complete_or_the_disk_has_space(directory, monkeypatch, caplog):
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    found = written(directory, 1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        patched.setattr(os, "posix_fallocate", full)
        assert found.can_persist(lambda: b"a state")
        found.append([b"x" * segment.STEP_BYTES])
        assert not found.can_persist(lambda: b"a state")
    assert "cannot persist suspended sessions for the next cluster, so they end: [Errno 28]" in caplog.text
    assert found.can_persist(lambda: b"a state")
    assert [path.name for path in directory.path.iterdir()] == ["lock"]


def test_a_cluster_that_ends_leaves_no_journal(directory):
    found = written(directory, 1)
    found.end()
    found.append(turn(1))
    found.tick()
    assert not found.wants_snapshot
    assert [path.name for path in directory.path.iterdir()] == ["lock"]


def test_files_have_nothing_of_their_contents_in_the_clear(directory):
    journal = Journal(directory, 1, 1, lambda: b"a secret of the state")
    journal.begin()
    journal.append([b"a secret of an event" * 3])
    content = b"".join(path.read_bytes() for path in directory.path.iterdir())
    assert content
    assert b"secret" not in content
    assert recover(directory).payload == b"a secret of the state"


def test_a_file_that_was_written_with_another_key_is_not_read(directory, tmp_path, monkeypatch):
    written(directory, 1)
    monkeypatch.setenv("ATOLL_KEY_FILE", str(tmp_path / "another key"))
    other = JournalDirectory(tmp_path / "other")
    other.write_snapshot(1, 1, b"somebody's state")
    directory.snapshot(1).write_bytes(other.snapshot(1).read_bytes())
    with pytest.raises(JournalError, match="another key"):
        recover(directory)


def test_turns_that_change_places_or_files_are_not_read():
    """A part can only be decrypted at the index and in the file for which it was encrypted."""
    key, salt = b"k" * 32, new_salt()
    sealing = FileCipher(key, salt)
    first, second = sealing.seal(b"first"), sealing.seal(b"second", is_last=True)
    opening = FileCipher(key, salt)
    assert (opening.open(first), opening.open(second, is_last=True)) == (b"first", b"second")
    for part in (second, first[:-1], first + b"\0", b""):
        with pytest.raises(JournalError):
            FileCipher(key, salt).open(part)
    with pytest.raises(JournalError):
        opening.open(first)
    with pytest.raises(JournalError):
        FileCipher(key, salt).open(first, is_last=True)
    with pytest.raises(JournalError):
        FileCipher(key, new_salt()).open(first)
    with pytest.raises(JournalError):
        FileCipher(b"o" * 32, salt).open(first)


# ---- the controller that may continue from a copy


def until_named(found: Journal, standby: str) -> None:
    until = time.monotonic() + 20.0
    while not found.names(standby):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_journal_names_the_standby_until_its_cluster_ends(directory):
    found = written(directory, 1)
    assert directory.successor() == found.successor == Successor()
    for standby in ("tls://two:1", "tls://three:1"):
        until_named(found, standby)
        assert directory.successor() == found.successor == Successor(standby)
    assert Journal(directory, 2, 2, lambda: b"").successor == Successor("tls://three:1")
    found.end()
    assert directory.successor() == Successor()


def test_a_journal_that_was_superseded_says_so_until_its_files_are_removed(directory):
    found = written(directory, 1)
    found.names("tls://two:1")
    found.superseded(1000, "")
    found.close()
    assert directory.successor() == Successor("tls://two:1", 1000)
    directory.clear()
    assert directory.successor() == Successor()


def test_a_standby_is_relied_on_although_the_disk_rejects_its_name(directory, caplog):
    found = written(directory, 1)
    (directory.path / NAME).mkdir()
    until_named(found, "tls://two:1")
    assert "cannot record the standby at tls://two:1 in the journal's directory" in caplog.text


def test_a_record_of_a_successor_that_cannot_be_read_counts_as_none(directory):
    (directory.path / NAME).write_bytes(b"{")
    assert directory.successor() == Successor()


def test_the_state_of_a_journal_changes_only_by_the_transitions_of_the_table(directory: JournalDirectory) -> None:
    def make(state: JournalState) -> Journal:
        made = Journal(directory, 1, 1, lambda: b"")
        made.state = state
        return made

    check_table(make, JournalState, TRANSITIONS)
