"""The frames that one end of a resumable connection keeps to send again, and its counts. Pure; can be pickled.

Messages arrive in the order in which they were sent, so counting them on both sides says what is missing after a
socket was lost, and no message needs a number. Those that were sent in pieces, and may be overtaken, are counted apart.

Invariant: what was sent and not acknowledged is kept, in order; what is acknowledged is kept nowhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from atoll.errors import FrameError

# Of what is kept for a peer that is away, or does not acknowledge; as much as may wait in a socket (`MAX_UNSENT`).
MAX_RETAINED = 256 * 1024 * 1024


class Counts(NamedTuple):
    """Of messages on a connection: those sent whole, and those sent in pieces."""

    whole: int = 0
    pieced: int = 0


NONE = Counts()


@dataclass
class RetransmitBuffer:
    """The frames of one end that are not acknowledged. The owner updates `received`, the methods the rest."""

    received: Counts = field(default_factory=Counts)
    acknowledged: Counts = field(default_factory=Counts)  # by the peer
    whole: deque[bytes] = field(default_factory=deque)  # frames after those
    pieced: deque[bytes] = field(default_factory=deque)
    nbytes: int = 0  # of both

    def retain(self, frame: bytes) -> bool:
        """Add a frame that is sent. Return False if the buffer exceeds `MAX_RETAINED`."""
        self.whole.append(frame)
        self.nbytes += len(frame)
        return self.nbytes <= MAX_RETAINED

    def retain_pieced(self, frame: bytes) -> bool:
        """Add a frame that is sent in pieces. Return False if the buffer exceeds `MAX_RETAINED`."""
        self.pieced.append(frame)
        self.nbytes += len(frame)
        return self.nbytes <= MAX_RETAINED

    @property
    def sent(self) -> Counts:
        whole, pieced = self.acknowledged
        return Counts(whole + len(self.whole), pieced + len(self.pieced))

    def acknowledge(self, counts: Counts) -> None:
        """Drop the frames that the peer has. Raise FrameError if the counts are impossible."""
        if not all(
            least <= count <= most for least, count, most in zip(self.acknowledged, counts, self.sent, strict=True)
        ):
            raise FrameError(
                f"the peer says that it has {_text(counts)} of the messages sent to it, of which there were "
                f"{_text(self.sent)}, and it had {_text(self.acknowledged)} before"
            )
        for _ in range(counts.whole - self.acknowledged.whole):
            self.nbytes -= len(self.whole.popleft())
        for _ in range(counts.pieced - self.acknowledged.pieced):
            self.nbytes -= len(self.pieced.popleft())
        self.acknowledged = counts

    def unacknowledged(self, beyond: Counts = NONE) -> Iterator[tuple[bytes, bool]]:
        """Yield the frames after `beyond` in order, each with whether it is sent in pieces.

        Frames in pieces come last: other frames may overtake them, and they must not overtake others.
        """
        for frame in islice(self.whole, max(0, beyond.whole - self.acknowledged.whole), None):
            yield frame, False
        for frame in islice(self.pieced, max(0, beyond.pieced - self.acknowledged.pieced), None):
            yield frame, True


def _text(counts: Counts) -> str:
    return f"{counts.whole} + {counts.pieced}"
