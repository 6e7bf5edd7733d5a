"""Keep all files of a journal while its cluster works, and compare the states that they contain.

A snapshot contains the state of the process that wrote it. The replay of the journal from the snapshot before must end
in that state, and so must the copy that a standby had when it took over.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from atoll.controller_process.process_state import ProcessState, ShellDump, decode_snapshot
from atoll.journal.files import ReadableDirectory
from atoll.journal.journal import Recovered, read_journal
from atoll.wire.resumption.link_record import LinkRecord
from tests.controller.dumps import check_same, handled_events

_PAUSE_SECONDS = 0.01
_KINDS = (".snapshot", ".events")


class JournalArchive:
    """Hard links to all files that a journal has had, since a controller removes a file when a snapshot
    supersedes it.
    """

    def __init__(self, journal: Path, directory: Path) -> None:
        directory.mkdir(mode=0o700)
        self._journal = journal
        self._directory = ReadableDirectory(directory)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._keep_all, name="journal archive", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Keep the current files of the journal, but none that are written later."""
        self._is_over.set()
        self._thread.join()
        self._keep()

    def check_snapshots(self) -> int:
        """Compare each snapshot with the replay from the previous one, and remove that one.

        Return the number of snapshots.
        """
        compared = 0
        for before, after in itertools.pairwise(self._directory.snapshots()):
            segments = [each for each in self._directory.segments() if before <= each < after]
            if segments == list(range(before, after)):  # otherwise a file was removed before it was linked
                state, turns = self._replay(before, segments)
                for _ in turns:
                    pass
                check_same_state(self._directory.read_snapshot(after)[1], state)
                compared += 1
            for each in segments:
                self._directory.segment(each).unlink()
            self._directory.snapshot(before).unlink()
        return compared

    def check_continued(self, standby: JournalArchive) -> int:
        """Compare the first snapshot of a standby that took over with the states after the controller's last turns.

        Return the number of events that the controller had handled after that turn. Call this method before
        `check_snapshots` of the standby's archive.
        """
        found = standby._directory
        payload = found.read_snapshot(found.snapshots()[0])[1]
        continued, _ = decode_snapshot(payload)
        newest = self._directory.snapshots()[-1]
        state, turns = self._replay(newest, [each for each in self._directory.segments() if each >= newest])
        while handled_events(state.controller) < handled_events(continued):
            next(turns)
        check_same_state(payload, state)
        same = handled_events(state.controller)
        for _ in turns:
            pass
        return handled_events(state.controller) - same

    def _keep_all(self) -> None:
        while not self._is_over.wait(_PAUSE_SECONDS):
            self._keep()

    def _keep(self) -> None:
        for path in self._journal.iterdir() if self._journal.exists() else ():
            if path.suffix in _KINDS:
                with contextlib.suppress(FileExistsError, FileNotFoundError):
                    os.link(path, self._directory.path / path.name)

    def _replay(self, snapshot: int, segments: list[int]) -> tuple[ProcessState, Iterator[None]]:
        """Return the state of a snapshot, and an iterator that replays the turns of these segments in it."""
        found = self._recovered(snapshot, segments)
        state = ProcessState(*decode_snapshot(found.payload), found.term)
        return state, (state.replay(turn) for turn in found.decoded_turns())

    def _recovered(self, snapshot: int, segments: list[int]) -> Recovered:
        with tempfile.TemporaryDirectory(dir=self._directory.path) as name:
            only = ReadableDirectory(name)
            os.link(self._directory.snapshot(snapshot), only.snapshot(snapshot))
            for each in segments:
                os.link(self._directory.segment(each), only.segment(each))
            found = read_journal(only)
        assert found is not None
        return found


def check_same_state(payload: bytes, replayed: ProcessState) -> None:
    """Check that the process that wrote a snapshot had the state of this replay, with the same messages to peers."""
    controller, shell = decode_snapshot(payload)
    check_same(controller, replayed.controller)
    _check_same_connections(shell, replayed)


def _check_same_connections(shell: ShellDump, replayed: ProcessState) -> None:
    assert shell.next == replayed.next
    assert shell.others == replayed.others
    assert shell.timers.keys() == replayed.timers.keys()
    links = {link.number: link for link in shell.links}
    assert links.keys() == replayed.links.keys()
    for number, link in links.items():
        _check_same_link(link, replayed.links[number].record())


def _check_same_link(link: LinkRecord, again: LinkRecord) -> None:
    assert (link.role, link.name, link.patience) == (again.role, again.name, again.patience)
    assert link.received == again.received, link.name
    # The two have received different acknowledgments, so that one has more frames. The last ones are equal.
    for kind, one, other in (("whole", link.whole, again.whole), ("pieced", link.pieced, again.pieced)):
        sent = [getattr(each.acknowledged, kind) + len(getattr(each, kind)) for each in (link, again)]
        assert sent[0] == sent[1], f"{kind} messages to {link.name}"
        count = min(len(one), len(other))
        assert one[len(one) - count :] == other[len(other) - count :], f"{kind} messages to {link.name}"
