"""Large messages in pieces, so that small ones need not wait for them. No I/O.

Invariant: pieces of two messages never mix. A sender cuts one large message after the other, so a receiver keeps at
most one that is not complete.
"""

from __future__ import annotations

from collections import deque

from atoll.errors import FrameError

# Of a piece. It is what a small message waits for, on the sender's side, where the link is slow.
PIECE_BYTES = 16 * 1024


class PieceQueue:
    """Large messages that wait to be sent, in order. `nbytes` of them are left."""

    def __init__(self) -> None:
        self._messages: deque[memoryview] = deque()
        self._position = 0  # in the first of them
        self.nbytes = 0

    def put(self, content: memoryview) -> None:
        """Bytes that are kept, not copied: one message may be in the queues of many connections."""
        self._messages.append(content)
        self.nbytes += len(content)

    def take(self) -> tuple[memoryview, bool]:
        """The next piece, and whether it is the last of its message; where there is one."""
        message = self._messages[0]
        piece = message[self._position : self._position + PIECE_BYTES]
        self._position += len(piece)
        self.nbytes -= len(piece)
        is_last = self._position == len(message)
        if is_last:
            self._messages.popleft()
            self._position = 0
        return piece, is_last

    def clear(self) -> None:
        self._messages.clear()
        self._position = self.nbytes = 0


class PieceBuffer:
    """Puts messages together. After an error it is of no use any more."""

    def __init__(self) -> None:
        self._content = bytearray()

    def add(self, piece: bytes | memoryview, is_last: bool, limit: int) -> bytearray | None:
        """Return the message if this was its last piece.

        Raises FrameError for a piece that no sender cuts, and if the message has more than `limit` bytes.
        """
        if not piece:
            raise FrameError("a piece of a message has no bytes")
        if len(self._content) + len(piece) > limit:
            raise FrameError(f"a message in pieces is over the limit of {limit} bytes")
        self._content += piece
        if not is_last:
            return None
        content, self._content = self._content, bytearray()
        return content

    @property
    def nbytes(self) -> int:
        """Of a message whose rest has not arrived."""
        return len(self._content)
