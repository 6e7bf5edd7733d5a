"""A controller's journal as it is written: one append for each turn, before anything that was decided leaves.

What was appended survives the process, however it ends. It survives its machine where the kernel has written it, which
it is asked to once a second: nothing waits for that.

With a snapshot older events are of no use. There is one after each `SNAPSHOT_SECONDS` of CPU time, and after
`SNAPSHOT_BYTES`: to replay what is newer takes a new controller no longer than it took this one.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from atoll.journal.cipher import FileCipher
from atoll.journal.files import Directory
from atoll.journal.persisted_state import NAME
from atoll.journal.records import encode_turn, join_records
from atoll.journal.segment import Segment
from atoll.journal.snapshots import start_snapshot, wait_for_snapshot

_log = logging.getLogger(__name__)

SNAPSHOT_SECONDS = 3.0
SNAPSHOT_BYTES = 64 << 20
# After a failure, of a disk that is full, say.
_RETRY_SECONDS = 10.0


class Journal:
    """Appends to the directory's newest segment. For one thread; `tick` is to be called once a second.

    `state()` is what a snapshot has: it is called in a copy of this process, and does no I/O. `cpu_time()` is
    what this process has taken, in seconds.
    """

    def __init__(
        self,
        directory: Directory,
        term: int,
        number: int,
        state: Callable[[], Any],
        cpu_time: Callable[[], float] = time.process_time,
    ) -> None:
        self.term = term
        self.snapshots = 0  # that were finished
        self._directory = directory
        self._state = state
        self._number = number
        self._segment: Segment | None = None
        self._cipher: FileCipher | None = None  # of its turns
        self._cpu_time = cpu_time
        self._events = self._bytes = 0  # since the last snapshot was begun
        # A process that begins with a replay has taken what that took: killed again, it is back sooner.
        self._began = 0.0  # the last snapshot, by the CPU time
        self._is_due = False
        self._synced = True
        self._syncing: threading.Thread | None = None
        self._child = 0  # which writes a snapshot
        self._retry = 0.0  # when, by the monotonic clock: what was handled since a failure is not in the journal
        self._is_broken = False

    @property
    def wants_snapshot(self) -> bool:
        """Whether `snapshot` is to be called, as soon as all is done that was decided."""
        if self._is_broken:
            return not self._child and time.monotonic() >= self._retry
        return (self._is_due or self._bytes >= SNAPSHOT_BYTES) and not self._child

    @property
    def is_broken(self) -> bool:
        """Whether events are missing in it, so that no process can continue from it."""
        return self._is_broken

    @property
    def is_snapshotting(self) -> bool:
        return bool(self._child)

    @property
    def number(self) -> int:
        """Of the last snapshot that was begun."""
        return self._number

    def payload(self, number: int) -> Iterator[tuple[bytes, bool]]:
        """Yield the parts of a snapshot, and whether each is the last.

        Raises JournalError, and OSError where it is not there, or not yet, when the first is asked for.
        """
        return self._directory.payload_of(number)

    def begin(self) -> None:
        """Writes the first snapshot of this process, while nothing waits yet. Raises OSError.

        In a child, as the others: Python (3.11) reads and writes the attributes of objects that it has pickled once
        more slowly ever after, which was a tenth of the CPU time of a controller.
        """
        wait_for_snapshot(self._start_snapshot(self._number))
        self._directory.forget_before(self._number)
        self._began = self._cpu_time()
        self.go_on()

    def go_on(self, events: int = 0) -> None:
        """Begins a segment, after what is there already: so many events since the last snapshot. Raises OSError."""
        self._events = events
        self._turn_to(*self._directory.open_segment(self._number, self.term))

    def _turn_to(self, segment: Segment | None, cipher: FileCipher | None = None) -> None:
        """Turns are appended to this one from now on."""
        if self._segment is not None:
            self._segment.close()
        self._segment, self._cipher = segment, cipher

    def append(self, turn: Sequence[bytes]) -> None:
        """A turn's records: when this returns, they survive the process.

        Where the disk does not take them, that is said, and the cluster goes on without a journal until a snapshot
        succeeds: a controller that ends meanwhile cannot be started again.
        """
        if self._is_broken:
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
        """Has a child write what is now, and goes on in a new segment."""
        self._events = self._bytes = 0
        self._began, self._is_due = self._cpu_time(), False
        number = self._number + 1
        try:
            self._turn_to(*self._directory.open_segment(number, self.term))
            self._number = number
            self._is_broken = False
            self._child = self._start_snapshot(number)
        except OSError as error:
            self._fail(error)

    def _start_snapshot(self, number: int) -> int:
        return start_snapshot(self._state, lambda payload: self._directory.write_snapshot(number, self.term, payload))

    def tick(self) -> None:
        """Looks for a child that has ended, whether a snapshot is due, and has the kernel write what it has."""
        if self._child:
            self._reap(os.WNOHANG)
        self._is_due = self._events > 0 and self._cpu_time() - self._began >= SNAPSHOT_SECONDS
        if not self._synced and not self._is_broken and (self._syncing is None or not self._syncing.is_alive()):
            self._synced = True
            assert self._segment is not None
            own = os.dup(self._segment.descriptor)
            self._syncing = threading.Thread(target=_sync, args=(own,), name="journal", daemon=True)
            self._syncing.start()

    def end(self, persisted: bytes = b"") -> None:
        """End the journal of a cluster that ends, except for the state of its `persisted` sessions.

        What is appended from now on is dropped.
        """
        self._is_broken, self._retry = True, math.inf
        if self._child:
            os.kill(self._child, 9)
            self._reap(0)
        self._turn_to(None)
        if persisted:
            try:
                self._directory.write_persisted(NAME, self.term, persisted)
            except OSError as error:
                _log.error("suspended sessions cannot be persisted for the next cluster: %s", error)
        self._directory.clear()
        self._directory.close()

    def close(self) -> None:
        """Another controller goes on: nothing is written any more, and nothing removed."""
        self._is_broken, self._retry = True, math.inf
        if self._child:
            os.kill(self._child, 9)
            os.waitpid(self._child, 0)
            self._child = 0
        self._turn_to(None)
        self._directory.close()

    def statistics(self) -> dict[str, int]:
        return {"term": self.term, "events": self._events, "bytes": self._bytes, "snapshots": self.snapshots}

    def _reap(self, options: int) -> None:
        pid, status = os.waitpid(self._child, options)
        if not pid:
            return
        self._child = 0
        if status:
            _log.warning(
                "a snapshot of the controller failed (status %d): its journal grows until one succeeds", status
            )
            if not self._directory.snapshots():
                self._is_broken = True
                self._retry = time.monotonic() + _RETRY_SECONDS
        else:
            self.snapshots += 1
            self._directory.forget_before(self._number)

    def _fail(self, error: OSError) -> None:
        if not self._is_broken:
            _log.error("the journal cannot be written: %s: a controller that ends now is not started again", error)
            self._directory.clear()  # it would have a hole
            self._turn_to(None)  # what it has of the disk can be had again
        self._is_broken = True
        self._retry = time.monotonic() + _RETRY_SECONDS


def _sync(descriptor: int) -> None:
    try:
        os.fdatasync(descriptor)
    except OSError as error:
        _log.warning("the journal may not be on its disk yet: %s", error)
    finally:
        os.close(descriptor)
