"""The simplest kind of transfer: a piece's bytes follow its frame on the socket. It reaches every peer.

It is a model for other kinds.
"""

from __future__ import annotations

from functools import partial

from atoll.transfers.frame_socket import FrameSocket
from atoll.transfers.host_memory import aligned
from atoll.transfers.liveness import Liveness
from atoll.transfers.transfer_engine import Contents, Piece, Received, TransferEngine, nothing_to_release


class SocketPiece(Piece, frozen=True, array_like=True, tag="p"):
    """The `nbytes` of the piece follow."""


class SocketEngine(TransferEngine):
    """Sends the bytes of pieces along the socket."""

    frames = (SocketPiece,)

    def __init__(self, socket: FrameSocket) -> None:
        self._socket = socket
        self.liveness: Liveness | None = None  # between machines; counts pieces

    def takes(self, contents: Contents) -> bool:
        return True

    def send(self, session: int, feed: int, contents: Contents, more: bool) -> None:
        note = None if self.liveness is None else partial(self.liveness.sent, session, feed)
        self._socket.send(SocketPiece(session, feed, contents.nbytes, more), contents.views(), note=note)

    def handle(self, frame: SocketPiece, descriptor: int | None) -> Received:
        content = aligned(frame.nbytes)
        self._socket.read_into(content.data)
        if self.liveness is not None:
            self.liveness.received()
        return content, nothing_to_release
