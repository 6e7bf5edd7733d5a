"""The simplest kind of transfer: a piece's bytes follow its frame on the socket. It reaches everybody.

Other kinds can be written after this one.
"""

from __future__ import annotations

from atoll.transfers.engine import Contents, Piece, Received, TransferEngine, nothing_to_release
from atoll.transfers.frame_socket import FrameSocket
from atoll.transfers.host_memory import aligned


class SocketPiece(Piece, frozen=True, array_like=True, tag="p"):
    """`nbytes` follow."""


class SocketEngine(TransferEngine):
    """Sends bytes as they are."""

    frames = (SocketPiece,)

    def __init__(self, socket: FrameSocket) -> None:
        self._socket = socket

    def takes(self, contents: Contents) -> bool:
        return True

    def send(self, session: int, feed: int, contents: Contents, more: bool) -> None:
        self._socket.send(SocketPiece(session, feed, contents.nbytes, more), contents.views())

    def handle(self, frame: SocketPiece, descriptor: int | None) -> Received:
        content = aligned(frame.nbytes)
        self._socket.read_into(content.data)
        return content, nothing_to_release
