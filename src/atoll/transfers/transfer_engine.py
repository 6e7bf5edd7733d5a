"""The interface between a channel and its kinds of transfer.

A `TransferEngine` is one way to send the bytes of a piece to another data port: along the socket, through shared
memory, or by passing a file's descriptor. A channel has one engine of each kind in `transfers.transfer_kinds` that
reaches its peer, and passes each piece to the first engine that takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Protocol

import msgspec

from atoll.errors import Status
from atoll.transfers.frame_socket import FrameSocket


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A piece of a feed.

    Each kind of transfer announces its pieces with a tagged subclass, which adds how to find the bytes.
    """

    session: int
    feed: int
    nbytes: int
    more: bool = False  # whether further pieces of the same feed will follow


# Several feeds that one piece carries, between hosts: the number and the size of each. The bytes of each feed begin at
# the next multiple of `GROUP_ALIGNMENT`.
MAX_GROUP = 4096  # feeds in one piece
Group = Annotated[tuple[tuple[int, int], ...], msgspec.Meta(max_length=MAX_GROUP)]
GROUP_ALIGNMENT = 64


def group_of(piece: Piece) -> Group:
    """Return the feeds of a piece that carries several, or () if it carries one."""
    group: Group = getattr(piece, "group", ())
    return group


def group_bytes(group: Group) -> int:
    """Return the size of a piece that carries these feeds."""
    last = group[-1][1] if group else 0
    return sum([-(-nbytes // GROUP_ALIGNMENT) * GROUP_ALIGNMENT for _, nbytes in group[:-1]]) + last


class Contents(Protocol):
    """The bytes of a piece before they are sent (`transfers.piece_contents`). An engine uses one of these methods."""

    nbytes: int
    launch: int  # the same for all feeds of one launch; 0 if unknown
    in_parts: bool  # whether the receiver may receive the first part while others are under way
    together: int  # bytes of all pieces that the receiver reads together; 0 if it reads this one by itself
    group: Group  # the feeds of a piece that carries several; () for one feed

    def views(self) -> Sequence[memoryview]:
        """Return the bytes as consecutive views. Raise StatusError if they cannot be obtained."""

    def slice(self, start: int, stop: int) -> Sequence[memoryview]:
        """Return the bytes from `start` to `stop`. Several threads may call this at a time. Raise StatusError."""

    def write_into(self, target: memoryview) -> None:
        """Write the bytes into `target`, which has exactly `nbytes`. Raise StatusError if they cannot be obtained."""


# The received bytes, which may be overwritten unless they are a memoryview, and a function to call once they are read.
Received = tuple[Any, Callable[[], None]]


def nothing_to_release() -> None:
    """Do nothing: the function to call once memory that the receiver owns has been read."""


class Arrivals(Protocol):
    """The receiver of a channel's pieces. Called on any thread; nothing blocks."""

    def expects(self, piece: Piece) -> bool:
        """Return whether something waits for a large call or answer. Otherwise its bytes are dropped as they arrive."""

    def admit(self, piece: Piece, launch: int, grant: Callable[[], None], refuse: Callable[[Status], None]) -> None:
        """Call `grant` once an announced piece may arrive, now or later. `take`, `fail` or `withdraw` follows.

        If the piece may never arrive, call `refuse` instead; `fail` follows.
        """

    def withdraw(self, piece: Piece) -> None:
        """Forget a piece that was passed to `admit` and will not arrive."""

    def take(self, piece: Piece, content: Any, done: Callable[[], None]) -> None:
        """Take a piece that has arrived, and call `done` once its content has been read.

        The pieces of one feed arrive in order. Raise StatusError to end the channel.
        """

    def fail(self, piece: Piece, status: Status) -> None:
        """Handle a piece that failed. Raise StatusError to end the channel."""


class TransferEngine(Protocol):
    """One kind of transfer on one channel, made with the channel's FrameSocket.

    Kinds derive from this class and implement at least `takes`, `send` and `handle`.
    """

    # The frames that peers send for this kind. Tags are unique among all kinds.
    frames: ClassVar[tuple[type[msgspec.Struct], ...]]

    def __init__(self, socket: FrameSocket) -> None: ...

    @classmethod
    def reaches(cls, socket: FrameSocket) -> bool:
        """Return whether this kind works with the peer at the other end. Must not block."""
        return True

    def takes(self, contents: Contents) -> bool:
        """Return whether this kind should send the contents. Called for each piece, so it must be fast."""
        ...

    def send(self, session: int, feed: int, contents: Contents, more: bool) -> None:
        """Send one piece. Several threads may call this at a time.

        Block while the peer does not read. The contents have been read on return. Raise OSError (such as TimeoutError)
        if the peer cannot be reached, or an error of the contents; then nothing was sent.
        """
        ...

    def handle(self, frame: Any, descriptor: int | None) -> Received | None:
        """Handle one of the kind's frames, and return the bytes of its piece, or None if it has none.

        Called only on the channel's receiving thread, in the order of the frames. Block only while the piece's bytes
        arrive. The caller closes the frame's descriptor afterwards. Do not trust the peer: raise FrameError if it
        violates the protocol, which ends the channel, StatusError if this piece fails, and EOFError if the connection
        ended inside the piece.
        """
        ...

    def receive_for(self, arrivals: Arrivals) -> None:
        """Prepare for frames. Kinds that receive pieces outside of `handle` pass them to `arrivals`, on any thread."""

    def trim(self) -> None:
        """Free memory that is kept for later pieces, because the channel is idle. Called on the receiving thread."""
        return

    def statistics(self) -> Any:
        """Return a record of the memory that is kept, for operators and tests, or None."""
        return None

    def close(self) -> None:
        """Free everything. Called once, on any thread, while other threads may be inside `send`."""
