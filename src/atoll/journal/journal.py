"""A controller's journal: it appends each turn before the turn's decisions leave the process, and recovers from them.

An appended turn survives the process. It survives the machine once the kernel has written it to the disk, which the
journal requests once per second without waiting.

A snapshot supersedes all older events. One is written after every `SNAPSHOT_SECONDS` of CPU time and after
`SNAPSHOT_BYTES`, which bounds the time that a new controller needs to replay the newer events.
"""

from __future__ import annotations

import enum
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from atoll.cluster.state_machine import StateMachine
from atoll.errors import IncompatibleJournalError, JournalError
from atoll.journal.files import ALL, FileCipher, JournalDirectory, ReadableDirectory, read_header
from atoll.journal.persisted_state import NAME
from atoll.journal.records import decode_events, encode_turn, join_records, read_turns
from atoll.journal.segment import JournalSegment
from atoll.journal.snapshots import start_snapshot, wait_for_snapshot
from atoll.journal.successor import Successor
from atoll.protocol.events import AnyEvent, JournalLoad

_log = logging.getLogger(__name__)

SNAPSHOT_SECONDS = 3.0
SNAPSHOT_BYTES = 64 << 20
# After a failure, for instance a full disk.
_RETRY_SECONDS = 10.0
_READS = 5  # of a journal that a controller writes


class JournalState(enum.Enum):
    COMPLETE = enum.auto()  # a snapshot and all later events are on the disk
    BROKEN = enum.auto()  # the disk has rejected something: turns are not appended until the next attempt
    REPAIRING = enum.auto()  # a new snapshot is being written, and later turns are appended
    STOPPED = enum.auto()  # nothing is written anymore


_S = JournalState

# The states that may follow each state. The comments name the methods that cause the transitions.
TRANSITIONS: Mapping[JournalState, frozenset[JournalState]] = {
    # `append`, `begin_or_retry`, or `snapshot` if the directory is missing; `end`, `close`
    _S.COMPLETE: frozenset({_S.BROKEN, _S.STOPPED}),
    # `snapshot`; `end`, `close`
    _S.BROKEN: frozenset({_S.REPAIRING, _S.STOPPED}),
    # `tick`, when the snapshot is complete or has failed; `append`; `end`, `close`
    _S.REPAIRING: frozenset({_S.COMPLETE, _S.BROKEN, _S.STOPPED}),
    _S.STOPPED: frozenset(),
}


class Journal(StateMachine[JournalState]):
    """Appends to the newest segment of a directory. For one thread; call `tick` once per second.

    `state()` returns the encoded state. It is called in a copy of this process and does no I/O. `cpu_time()`
    returns the CPU time of this process in seconds.
    """

    transitions = TRANSITIONS

    def __init__(
        self,
        directory: JournalDirectory,
        term: int,
        number: int,
        state: Callable[[], bytes],
        cpu_time: Callable[[], float] = time.process_time,
    ) -> None:
        self.term = term
        self.state = JournalState.COMPLETE  # once it has begun
        self.snapshots = 0  # finished ones
        self._directory = directory
        self._encoded_state = state
        self._number = number
        self._segment: JournalSegment | None = None
        self._cipher: FileCipher | None = None  # for the segment's turns
        self._cpu_time = cpu_time
        self._events = self._bytes = 0  # since the last snapshot began
        # CPU time at which the last snapshot began. 0 counts the time of a replay as well: a controller that is killed
        # soon after a replay then restarts faster.
        self._began = 0.0
        self._is_due = False
        self._synced = True
        self._syncing: threading.Thread | None = None
        self._child = 0  # pid of the process that writes a snapshot
        self._retry = 0.0  # monotonic time of the next attempt after a failure
        self._written_at = time.monotonic()  # when the last snapshot was complete
        self._pause = 0.0  # seconds for which the last fork took this process
        self._successor = directory.successor()  # as recorded in the directory
        self._naming: threading.Thread | None = None  # writes the record

    @property
    def wants_snapshot(self) -> bool:
        """Whether to call `snapshot` as soon as all decided actions are done."""
        if self.state is JournalState.BROKEN:
            return not self._child and time.monotonic() >= self._retry
        if self.state is JournalState.STOPPED:
            return False
        return (self._is_due or self._bytes >= SNAPSHOT_BYTES) and not self._child

    @property
    def is_broken(self) -> bool:
        """Whether no process can continue from the journal, because events or a first complete snapshot are missing."""
        return self.state is not JournalState.COMPLETE

    @property
    def is_snapshotting(self) -> bool:
        return bool(self._child)

    @property
    def number(self) -> int:
        """The number of the last snapshot that was begun."""
        return self._number

    def load(self, standby: str) -> JournalLoad:
        """Return the state of the journal for reports, with the address of the standby that follows, or ""."""
        age = time.monotonic() - self._written_at
        return JournalLoad(not self.is_broken, self.snapshots, age, self._bytes, standby, pause=self._pause)

    def payload(self, number: int) -> Iterator[tuple[bytes, bool]]:
        """Yield the parts of a snapshot, and whether each is the last.

        The first step raises JournalError, or OSError if the snapshot does not exist or is unfinished.
        """
        return self._directory.payload_of(number)

    @property
    def successor(self) -> Successor:
        """The controller that may have continued from a copy of this journal; an empty record if none may."""
        return self._successor

    def names(self, standby: str) -> bool:
        """Return whether the directory names this standby. Otherwise, begin to write its address there.

        If the disk rejects that, the standby counts as named: it does not depend on this machine's disk.
        """
        if self._naming is not None and self._naming.is_alive():
            return False
        if self._successor.address == standby:
            return True
        self._successor = Successor(standby)
        self._naming = threading.Thread(
            target=self._write_successor, args=(self._successor,), name="successor", daemon=True
        )
        self._naming.start()
        return False

    def superseded(self, term: int, address: str) -> None:
        """Record that another controller has taken over in `term`, so that no process continues from this journal.

        It is at `address`, or at that of the record if that is "".
        """
        if self._naming is not None:
            self._naming.join()
        self._successor = Successor(address or self._successor.address, term)
        self._write_successor(self._successor)

    def _write_successor(self, successor: Successor) -> None:
        try:
            self._directory.write_successor(successor)
        except OSError as error:
            _log.warning("cannot record %s in the journal's directory: %s", successor, error)

    def begin(self) -> None:
        """Write the first snapshot of this process, before other work depends on it. Raises OSError.

        A child writes it, as it does later snapshots.
        """
        wait_for_snapshot(self._start_snapshot(self._number))
        self._directory.forget_before(self._number)
        self._began = self._cpu_time()
        self.open_segment()

    def begin_or_retry(self) -> None:
        """Begin in place of the files that an earlier controller left in the directory.

        If the disk rejects the first snapshot, the cluster continues without a journal until a later one succeeds.
        """
        try:
            self._directory.clear()
            self._successor = Successor()
            self.begin()
        except OSError as error:
            self._fail(error)

    def open_segment(self, events: int = 0) -> None:
        """Begin a segment after the existing ones, `events` after the last snapshot. Raises OSError."""
        self._events = events
        self._switch_to(*self._directory.open_segment(self._number, self.term))

    def _switch_to(self, segment: JournalSegment | None, cipher: FileCipher | None = None) -> None:
        """Close the current segment and append to this one from now on."""
        if self._segment is not None:
            self._segment.close()
        self._segment, self._cipher = segment, cipher

    def append(self, turn: Sequence[bytes]) -> None:
        """Append the records of a turn. They survive the process when this returns.

        If the disk rejects them, the journal logs the error, and the cluster continues without a journal until a
        snapshot succeeds: a controller that ends before that cannot be restarted.
        """
        if self.state is JournalState.BROKEN or self.state is JournalState.STOPPED:
            return
        assert self._segment is not None
        assert self._cipher is not None
        data = encode_turn(self._cipher.seal(join_records(turn)))
        try:
            self._segment.append(data)
        except OSError as error:
            self._fail(error)
            return
        self._synced = False
        self._events += len(turn)
        self._bytes += len(data)

    def snapshot(self) -> None:
        """Make a child write the current state, and continue in a new segment.

        If that fails, the journal stays complete, and a later snapshot is attempted.
        """
        self._events = self._bytes = 0
        self._began, self._is_due = self._cpu_time(), False
        number, was_broken = self._number + 1, self.state is JournalState.BROKEN
        try:
            self._switch_to(*self._directory.open_segment(number, self.term))
            self._number = number
            if was_broken:
                self.enter(JournalState.REPAIRING)
            self._child = self._start_snapshot(number)
        except OSError as error:
            if was_broken or isinstance(error, FileNotFoundError):  # somebody has removed the directory
                self._fail(error)
            else:
                _log.warning("a snapshot cannot begin: %s: the journal grows until one succeeds", error)

    def _start_snapshot(self, number: int) -> int:
        began = time.monotonic()
        child = start_snapshot(
            self._encoded_state, lambda payload: self._directory.write_snapshot(number, self.term, payload)
        )
        self._pause = time.monotonic() - began
        return child

    def tick(self) -> None:
        """Reap a child that has ended, check if a snapshot is due, and sync the segment to the disk."""
        if self._child:
            self._reap(os.WNOHANG)
        self._is_due = self._events > 0 and self._cpu_time() - self._began >= SNAPSHOT_SECONDS
        is_appending = self.state in (JournalState.COMPLETE, JournalState.REPAIRING)
        if not self._synced and is_appending and (self._syncing is None or not self._syncing.is_alive()):
            assert self._segment is not None
            try:
                own = os.dup(self._segment.descriptor)
            except OSError:  # this process has too many open files, and the next call tries again
                return
            self._synced = True
            self._syncing = threading.Thread(target=_sync, args=(own,), name="journal", daemon=True)
            self._syncing.start()

    def can_persist(self, state: Callable[[], bytes]) -> bool:
        """Return whether the next cluster would get persisted sessions. If not, log why.

        A complete journal has them. If it is broken, the disk needs space for them: less than for the whole `state()`.
        """
        if not self.is_broken:
            return True
        try:
            self._directory.check_space(len(state()))
        except OSError as error:
            _log.error("cannot persist suspended sessions for the next cluster, so they end: %s", error)
            return False
        return True

    def end(self, persisted: bytes = b"") -> None:
        """End the journal of a cluster that ends, except for the state of its `persisted` sessions.

        If the disk rejects that state, a complete journal stays: from it, the next cluster gets the sessions.
        """
        is_complete = not self.is_broken
        self._stop()
        try:
            if persisted:
                self._directory.write_persisted(NAME, self.term, persisted)
            self._forget_before(ALL)
            self._directory.forget_successor()
        except OSError as error:
            then = ". The next cluster with this journal persists them from it" if is_complete else ""
            _log.error("cannot persist suspended sessions for the next cluster: %s%s", error, then)
        self._directory.close()

    def close(self) -> None:
        """Stop writing, and keep the files, because another controller continues from them."""
        self._stop()
        self._directory.close()

    def _stop(self) -> None:
        """Drop all later appends, and kill the child that writes a snapshot."""
        if self.state is not JournalState.STOPPED:
            self.enter(JournalState.STOPPED)
        self._kill_child()
        self._switch_to(None)

    def _kill_child(self) -> None:
        if self._child:
            os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)
            self._child = 0

    def statistics(self) -> dict[str, int]:
        return {"term": self.term, "events": self._events, "bytes": self._bytes, "snapshots": self.snapshots}

    def _reap(self, options: int) -> None:
        pid, status = os.waitpid(self._child, options)
        if not pid:
            return
        self._child = 0
        if status:
            _log.warning("a snapshot failed (status %d): the journal grows until one succeeds", status)
            if self.state is JournalState.REPAIRING:
                self.enter(JournalState.BROKEN)
                self._retry = time.monotonic() + _RETRY_SECONDS
        else:
            self.snapshots += 1
            if self.state is JournalState.REPAIRING:
                self.enter(JournalState.COMPLETE)
            self._written_at = time.monotonic()
            self._forget_before(self._number)

    def _fail(self, error: OSError) -> None:
        if self.state is not JournalState.BROKEN:
            _log.error("cannot write the journal: %s: a controller that ends now cannot be restarted", error)
            self._kill_child()
            self._switch_to(None)  # frees the space of the segment
            self.enter(JournalState.BROKEN)
        self._forget_before(ALL)  # events would be missing between its files; each attempt tries to remove them
        self._retry = time.monotonic() + _RETRY_SECONDS

    def _forget_before(self, number: int) -> None:
        """Remove the files before this snapshot. The cluster continues if the disk does not remove them."""
        try:
            self._directory.forget_before(number)
        except OSError as error:  # such as too many open files, a read-only file system, or a missing directory
            _log.warning("cannot remove old files of the journal: %s", error)


def _sync(descriptor: int) -> None:
    try:
        os.fdatasync(descriptor)
    except OSError as error:
        _log.warning("cannot sync the journal to its disk: %s", error)
    finally:
        os.close(descriptor)


class Recovered(msgspec.Struct):
    """The payload of the newest snapshot and the turns after it.

    `term` is that of the last controller that wrote, and `version` that of Atoll at the snapshot.
    """

    payload: bytes
    term: int
    version: str
    last_number: int  # of all files
    turns: list[bytes] = msgspec.field(default_factory=list)
    cut: list[str] = msgspec.field(default_factory=list)  # damage that was found, for the log
    torn: list[tuple[Path, int]] = msgspec.field(default_factory=list)  # files, and the position after their last turn
    unreadable: list[Path] = msgspec.field(default_factory=list)  # segments after a gap

    def decoded_turns(self) -> Iterator[list[AnyEvent]]:
        """Yield the events of each turn in order."""
        for turn in self.turns:
            yield list(decode_events(turn))


def recover(directory: JournalDirectory) -> Recovered | None:
    """Return the newest readable snapshot and the turns after it, or None if there are no snapshots.

    Reads only what was written: at the first torn write or changed bit, the segment is truncated and later segments are
    removed, so that nothing after the gap is ever read. Raises JournalError if no snapshot is intact. Without changing
    a file, raises OSError if the operating system cannot read one, which may be intact, and IncompatibleJournalError if
    one is of another protocol or was encrypted with another key.
    """
    found = _read(directory)
    if found is None:
        return None
    for each in found.cut:
        _log.warning("%s", each)
    for path, position in found.torn:
        os.truncate(path, position)
    for path in found.unreadable:
        path.unlink(missing_ok=True)
    return found


def read_journal(directory: ReadableDirectory) -> Recovered | None:
    """Return the same as `recover`, without changing a file, also while a controller writes the journal.

    Raises JournalError if no snapshot is intact, and OSError if the operating system cannot read a file.
    """
    for left in reversed(range(_READS)):
        try:
            return _read(directory)
        except IncompatibleJournalError:
            raise
        except FileNotFoundError as error:  # the controller has written a newer snapshot and removed the file
            if not left:
                raise JournalError(f"the journal in {directory.path} changes too fast to be read: {error}") from None
    return None


def _read(directory: ReadableDirectory) -> Recovered | None:
    newest_first = directory.snapshots()[::-1]
    if not newest_first:
        return None
    errors = []
    for number in newest_first:
        try:
            found, payload = directory.read_snapshot(number)
        except IncompatibleJournalError:
            raise
        except JournalError as error:
            errors.append(str(error))
            continue
        segments = [each for each in directory.segments() if each >= number]
        last = max([*newest_first, *segments])
        recovered = Recovered(payload, found.term, found.version, last, cut=errors)
        _read_segments(directory, segments, recovered)
        return recovered
    raise JournalError("; ".join(errors))


def _read_segments(directory: ReadableDirectory, segments: list[int], recovered: Recovered) -> None:
    for index, number in enumerate(segments):
        path = directory.segment(number)
        content = path.read_bytes()
        try:
            found, position = read_header(content, str(path))
        except IncompatibleJournalError:
            raise
        except JournalError as error:
            _drop(directory, segments[index:], str(error), recovered)
            return
        recovered.term = max(recovered.term, found.term)
        start, cipher = position, directory.cipher_of(number, found)
        for end, turn in read_turns(memoryview(content)[start:]):
            try:
                recovered.turns.append(cipher.open(turn))
            except JournalError:
                break
            position = start + end
        # A segment that was not closed has zeros after the last turn, and nothing else.
        lost = len(content[position:].rstrip(b"\0"))
        if lost:
            recovered.torn.append((path, position))
            text = f"{path} is complete up to byte {position}: the {lost} bytes after that are cut off"
            _drop(directory, segments[index + 1 :], text, recovered)
            return


def _drop(directory: ReadableDirectory, segments: list[int], text: str, recovered: Recovered) -> None:
    """Record that the segments after a gap are of no use, since they depend on the lost events."""
    recovered.unreadable += [directory.segment(number) for number in segments]
    names = ", ".join(directory.segment(number).name for number in segments)
    recovered.cut.append(text + (f"; removed the later {names}" if segments else ""))
