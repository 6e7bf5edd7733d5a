"""The frames that one end of a resumable connection keeps for retransmission, and their counts. Pure.

Messages arrive in the order in which they were sent. Counting them on both sides therefore shows which messages are
missing after a socket was lost, and messages need no numbers. Messages in pieces, which others can overtake, have their
own count.

Invariant: the buffer holds exactly the frames that were sent and are not acknowledged, in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import msgspec

from atoll.errors import FrameError


class Counts(NamedTuple):
    """Numbers of messages on a connection, sent whole and in pieces."""

    whole: int = 0
    pieced: int = 0


NONE = Counts()


class RetransmitBuffer(msgspec.Struct):
    """The unacknowledged frames of one end. The owner ends the link if `nbytes` exceeds `limit`."""

    limit: int
    acknowledged: Counts = NONE  # by the peer
    whole: deque[bytes] = msgspec.field(default_factory=deque)
    pieced: deque[bytes] = msgspec.field(default_factory=deque)  # frames of messages in pieces
    nbytes: int = 0  # of all frames

    def restore(self, acknowledged: Counts, whole: Iterable[bytes], pieced: Iterable[bytes]) -> None:
        """Continue an earlier buffer with this content."""
        self.acknowledged = acknowledged
        for frame in whole:
            self.retain(frame)
        for frame in pieced:
            self.retain_pieced(frame)

    def retain(self, frame: bytes) -> None:
        """Add a frame that is sent."""
        self.whole.append(frame)
        self.nbytes += len(frame)

    def retain_pieced(self, frame: bytes) -> None:
        """Add a frame that is sent in pieces."""
        self.pieced.append(frame)
        self.nbytes += len(frame)

    def clear(self) -> None:
        """Drop all frames."""
        self.whole.clear()
        self.pieced.clear()
        self.nbytes = 0

    @property
    def sent(self) -> Counts:
        whole, pieced = self.acknowledged
        return Counts(whole + len(self.whole), pieced + len(self.pieced))

    def acknowledge(self, counts: Counts) -> None:
        """Drop the frames that the peer has. Raise FrameError if the counts are impossible."""
        if not all(
            least <= count <= most for least, count, most in zip(self.acknowledged, counts, self.sent, strict=True)
        ):
            is_older = any(count > most for count, most in zip(counts, self.sent, strict=True))
            older = ": the state here is older than the peer's, as after the restore of an older backup"
            raise FrameError(
                f"the peer acknowledged {_text(counts)} messages, but {_text(self.sent)} were sent and it acknowledged "
                f"{_text(self.acknowledged)} before{older if is_older else ''}"
            )
        for _ in range(counts.whole - self.acknowledged.whole):
            self.nbytes -= len(self.whole.popleft())
        for _ in range(counts.pieced - self.acknowledged.pieced):
            self.nbytes -= len(self.pieced.popleft())
        self.acknowledged = counts

    def unacknowledged(self, beyond: Counts = NONE) -> Iterator[tuple[bytes, bool]]:
        """Yield the frames after `beyond` in order, each with whether it is sent in pieces.

        Messages in pieces come last, because other messages can overtake them but they must not overtake others.
        """
        for frame in islice(self.whole, max(0, beyond.whole - self.acknowledged.whole), None):
            yield frame, False
        for frame in islice(self.pieced, max(0, beyond.pieced - self.acknowledged.pieced), None):
            yield frame, True


def _text(counts: Counts) -> str:
    return f"{counts.whole} + {counts.pieced}"
