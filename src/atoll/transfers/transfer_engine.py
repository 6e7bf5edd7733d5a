"""The seam of the data plane: how the bytes of one piece travel between two data ports.

A `TransferEngine` is one way for them: along the socket, through shared memory, by a file's descriptor. A channel has
one engine of each kind that reaches its peer (`transfers.transfer_kinds` has the table), and gives each piece to the
first that takes it. A new kind is one file with its engine and its frames, and one line in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import msgspec

from atoll.errors import Status
from atoll.transfers.frame_socket import FrameSocket


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """`nbytes` of a feed; `more` where further pieces of the same feed will follow.

    Each kind announces its pieces by a frame of its own, a tagged subclass that adds how the bytes are found.
    """

    session: int
    feed: int
    nbytes: int
    more: bool = False


class Contents(Protocol):
    """The bytes of a piece before they are sent (`transfers.piece_contents`). An engine uses one of these methods."""

    nbytes: int
    # Feeds of one launch have the same number here; 0: not known.
    launch: int
    # The receiver may be handed the contents in several pieces, the first while others are on their way.
    in_parts: bool
    # The bytes of all pieces that the receiver reads when all are there; 0: it is read alone.
    together: int

    def views(self) -> Sequence[memoryview]:
        """The bytes, one view after the other. Raises StatusError where they cannot be had."""

    def slice(self, start: int, stop: int) -> Sequence[memoryview]:
        """The bytes from `start` to `stop`. Any thread, several at a time. Raises StatusError."""

    def write_into(self, target: memoryview) -> None:
        """Writes them into `target`, which has exactly `nbytes`. Raises StatusError where they cannot be had."""


# The received bytes (they may be written over unless they are a memoryview), and what to call when they have been read.
Received = tuple[Any, Callable[[], None]]


def nothing_to_release() -> None:
    """What a receiver calls for memory that is its own."""


class Arrivals(Protocol):
    """What takes the pieces that come on a channel. For any thread; nothing here blocks."""

    def admit(self, piece: Piece, launch: int, grant: Callable[[], None]) -> None:
        """Calls `grant` once the bytes of an announced piece may come, now or later: `take`, `fail` or `withdraw`
        follows.
        """

    def withdraw(self, piece: Piece) -> None:
        """A piece that was announced to `admit` will not come."""

    def take(self, piece: Piece, content: Any, done: Callable[[], None]) -> None:
        """A piece has come; `done` is to be called when its content has been read. Pieces of one feed come in order.

        Raises StatusError where this ends the channel.
        """

    def fail(self, piece: Piece, status: Status) -> None:
        """A piece cannot be had. Raises StatusError where this ends the channel."""


class TransferEngine(Protocol):
    """One kind of transfer, on one channel; made with the channel's FrameSocket.

    Kinds derive from this class and implement at least `takes`, `send` and `handle`.
    """

    # The frames that peers send for this kind; their tags are different from those of all others.
    frames: ClassVar[tuple[type[msgspec.Struct], ...]]

    def __init__(self, socket: FrameSocket) -> None: ...

    @classmethod
    def reaches(cls, socket: FrameSocket) -> bool:
        """Whether this kind can be used towards the peer at the other end. Does not block."""
        return True

    def takes(self, contents: Contents) -> bool:
        """Whether it is the way for these contents. Asked for each piece, on any thread: quick, no side effects."""
        ...

    def send(self, session: int, feed: int, contents: Contents, more: bool) -> None:
        """Sends one piece; on any thread, several at a time.

        May block as long as the peer does not read. The contents have been read when it returns. Raises OSError
        (TimeoutError is one) where the peer cannot be reached, and whatever the contents raise: then nothing was sent.
        """
        ...

    def handle(self, frame: Any, descriptor: int | None) -> Received | None:
        """Receives one of the kind's frames: the bytes of a piece, or None for a frame without any.

        Only on the channel's receiving thread, in the order in which frames were sent; it blocks while the piece's
        bytes arrive, and for nothing else. The descriptor that came with the frame is closed by the caller afterwards.
        Nothing that the peer says is trusted: raises FrameError for what no honest peer sends, which ends the channel;
        StatusError where this one piece cannot be had; EOFError where the connection ended inside of the piece.
        """
        ...

    def receive_for(self, arrivals: Arrivals) -> None:
        """Frames follow. Kinds whose pieces come while others are handled give them to `arrivals`, on any thread."""

    def trim(self) -> None:
        """Frees memory that is kept for later pieces: the channel is idle. On the receiving thread."""

    def statistics(self) -> Any:
        """A record of what is kept, for operators and tests; None where nothing is."""
        return None

    def close(self) -> None:
        """Frees everything; the channel has ended. Once, on any thread, also while others are inside `send`."""
