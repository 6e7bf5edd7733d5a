"""What a journal knows of the controller that wrote it: its newest snapshot, and the events after that.

Invariant: what is read is what was written, up to a place; from there on nothing is read. That place is where a write
was torn, or a bit has changed, and what is behind it is cut off, so that nobody reads on there later.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from atoll.errors import JournalError
from atoll.journal.files import Directory, read_header
from atoll.journal.records import decode_events, read_turns
from atoll.protocol.events import AnyEvent

_log = logging.getLogger(__name__)


@dataclass
class Recovered:
    """A snapshot's bytes, and the turns after it. `term` is that of the last controller that wrote anything."""

    payload: bytes
    term: int
    last_number: int  # of the files there are
    turns: list[bytes] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)  # what was cut off, for people

    def decoded_turns(self) -> Iterator[list[AnyEvent]]:
        """The events of each turn, in order."""
        for turn in self.turns:
            yield list(decode_events(turn))


def recover(directory: Directory) -> Recovered | None:
    """What is there; None where there is nothing. Raises JournalError where no snapshot can be read."""
    newest_first = directory.snapshots()[::-1]
    if not newest_first:
        return None
    errors = []
    for number in newest_first:
        try:
            found, payload = directory.read_snapshot(number)
        except (JournalError, OSError) as error:
            errors.append(str(error))
            continue
        segments = [each for each in directory.segments() if each >= number]
        last = max([*newest_first, *segments])
        recovered = Recovered(payload, found.term, last, cut=errors)
        _read_segments(directory, segments, recovered)
        for each in recovered.cut:
            _log.warning("%s", each)
        return recovered
    raise JournalError("; ".join(errors))


def _read_segments(directory: Directory, segments: list[int], recovered: Recovered) -> None:
    for index, number in enumerate(segments):
        path = directory.segment(number)
        content = path.read_bytes()
        try:
            found, position = read_header(content, str(path))
        except JournalError as error:
            _drop(directory, segments[index:], str(error), recovered)
            return
        recovered.term = max(recovered.term, found.term)
        start, cipher = position, directory.cipher_of(found)
        for end, turn in read_turns(memoryview(content)[start:]):
            try:
                recovered.turns.append(cipher.open(turn))
            except JournalError:
                break
            position = start + end
        # Behind the last turn there are zeros, where the segment was not closed, and nothing else.
        lost = len(content[position:].rstrip(b"\0"))
        if lost:
            os.truncate(path, position)
            text = f"{path} is whole up to byte {position}: the {lost} bytes after that are cut off"
            _drop(directory, segments[index + 1 :], text, recovered)
            return


def _drop(directory: Directory, segments: list[int], text: str, recovered: Recovered) -> None:
    """What comes after something that is missing says nothing."""
    for number in segments:
        directory.segment(number).unlink(missing_ok=True)
    names = ", ".join(directory.segment(number).name for number in segments)
    recovered.cut.append(text + (f"; {names} went with it" if segments else ""))
