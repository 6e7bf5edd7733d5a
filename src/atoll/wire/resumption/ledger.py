"""What one end of a resumable connection has sent, and received. Pure; plain data that can be pickled.

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
class Ledger:
    """Of one end. `received` is for its owner to add to; the rest is for the methods."""

    received: Counts = field(default_factory=Counts)
    acknowledged: Counts = field(default_factory=Counts)  # by the peer
    whole: deque[bytes] = field(default_factory=deque)  # frames after those
    pieced: deque[bytes] = field(default_factory=deque)
    nbytes: int = 0  # of both

    def keep(self, frame: bytes) -> bool:
        """It is sent. False where more is kept than may be."""
        self.whole.append(frame)
        self.nbytes += len(frame)
        return self.nbytes <= MAX_RETAINED

    def keep_pieced(self, frame: bytes) -> bool:
        """The same for one that is sent in pieces."""
        self.pieced.append(frame)
        self.nbytes += len(frame)
        return self.nbytes <= MAX_RETAINED

    @property
    def sent(self) -> Counts:
        whole, pieced = self.acknowledged
        return Counts(whole + len(self.whole), pieced + len(self.pieced))

    def acknowledge(self, counts: Counts) -> None:
        """The peer has so many messages. Raises FrameError where that cannot be."""
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
        """What is to be sent again, in order, and whether in pieces; but for so many that were the first of all.

        Those in pieces come last: they may be overtaken, and must not overtake.
        """
        for frame in islice(self.whole, max(0, beyond.whole - self.acknowledged.whole), None):
            yield frame, False
        for frame in islice(self.pieced, max(0, beyond.pieced - self.acknowledged.pieced), None):
            yield frame, True


def _text(counts: Counts) -> str:
    return f"{counts.whole} + {counts.pieced}"
