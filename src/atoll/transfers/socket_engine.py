"""The simplest kind of transfer: a piece's bytes follow its frame on the socket. It reaches every peer.

It is a model for other kinds.

The receiver reads the bytes of each piece without an admission, so the size of a piece is limited. Other kinds carry
large pieces of feeds, whose bytes may wait. Calls and their answers cannot wait, and have a larger limit. The receiver
allocates no memory for a large one that it does not expect.
"""

from __future__ import annotations

from functools import partial

from atoll.errors import Code, FrameError, StatusError
from atoll.protocol.number_ranges import is_call
from atoll.transfers.frame_socket import FrameSocket
from atoll.transfers.host_memory import aligned
from atoll.transfers.liveness import Liveness
from atoll.transfers.transfer_engine import (
    Arrivals,
    Contents,
    Group,
    Piece,
    Received,
    TransferEngine,
    nothing_to_release,
)

MAX_BYTES = 1 << 20  # of a piece of a feed
MAX_CALL_BYTES = 8 << 30  # of a call or an answer


class SocketPiece(Piece, frozen=True, array_like=True, tag="p"):
    """The `nbytes` of the piece follow."""

    group: Group = ()


class SocketEngine(TransferEngine):
    """Sends the bytes of pieces along the socket."""

    frames = (SocketPiece,)

    def __init__(self, socket: FrameSocket) -> None:
        self._socket = socket
        self._arrivals: Arrivals | None = None
        self.liveness: Liveness | None = None  # between machines; counts pieces

    def takes(self, contents: Contents) -> bool:
        return True

    def receive_for(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals

    def send(self, session: int, feed: int, contents: Contents, more: bool) -> None:
        if contents.nbytes > _most(feed):
            text = f"a piece of {contents.nbytes} bytes cannot be sent at once: the limit is {_most(feed)} bytes"
            raise StatusError(Code.RESOURCE_EXHAUSTED, text)
        group = contents.group
        note = None
        if self.liveness is not None:
            note = partial(self.liveness.sent, session, *([number for number, _ in group] if group else (feed,)))
        self._socket.send(SocketPiece(session, feed, contents.nbytes, more, group), contents.views(), note=note)

    def handle(self, frame: SocketPiece, descriptor: int | None) -> Received | None:
        if frame.nbytes > _most(frame.feed):
            raise FrameError(
                f"a piece of {frame.nbytes} bytes was sent at once: the limit is {_most(frame.feed)} bytes"
            )
        if frame.nbytes > MAX_BYTES and self._arrivals is not None and not self._arrivals.expects(frame):
            self._drop(frame.nbytes)
            return None
        content = aligned(frame.nbytes)
        self._socket.read_into(content.data)
        if self.liveness is not None:
            self.liveness.received()
        return content, nothing_to_release

    def _drop(self, nbytes: int) -> None:
        part = memoryview(bytearray(MAX_BYTES))
        while nbytes:
            count = min(nbytes, MAX_BYTES)
            self._socket.read_into(part[:count])
            nbytes -= count
        if self.liveness is not None:
            self.liveness.received()


def _most(feed: int) -> int:
    return MAX_CALL_BYTES if is_call(feed) else MAX_BYTES
