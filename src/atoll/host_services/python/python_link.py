"""The link between a worker and a Python process: messages and contents of arrays, in order, on one channel.

Both ends use this module. Contents are sent in shared memory, as between other processes of one machine. A Python
process can request contents that it reads without a copy, and limits how much of such contents it holds.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from atoll.decodable import decodable
from atoll.errors import FrameError
from atoll.host_services import host_data
from atoll.transfers.channel import DataChannel
from atoll.transfers.host_memory import aligned, lent
from atoll.transfers.shared_memory_engine import SharedMemoryEngine, SharedMemoryPiece
from atoll.transfers.shared_memory_pool import PoolLimits
from atoll.transfers.socket_engine import SocketEngine
from atoll.transfers.transfer_engine import Piece
from atoll.wire.framing import NO_MESSAGE

# The link uses the session number of a piece to distinguish messages, contents, and contents that are not copied.
_MESSAGE, _CONTENTS, _IN_PLACE = 0, 1, 2
# Limit for a message of an untrusted peer, which has numbers of results, or the text of an error. The time to decode
# a message grows with its number of objects, and blocks all threads of the worker.
MAX_MESSAGE_BYTES = 4 << 20
_encode = msgspec.msgpack.Encoder().encode
Bytes = np.ndarray[Any, Any]


class LinkMemory(SharedMemoryEngine):
    """Shared memory of a link: a small pool, because blocks return soon, and blocks that a process has requested."""

    limits = PoolLimits(64 << 20)
    held_session = _IN_PLACE


class PythonLink:
    """One end of a link. Any thread may send; one thread receives. Sending raises OSError if the peer has ended."""

    def __init__(self, sock: socket.socket, incoming: Any) -> None:
        self._channel = DataChannel(sock, (LinkMemory, SocketEngine))
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(decodable(incoming))

    def send(self, message: msgspec.Struct) -> None:
        self._channel.send(_MESSAGE, 0, [_encode(message)])

    def send_array(self, feed: int, array: np.ndarray[Any, Any], in_place: bool = False) -> None:
        """Send the contents of an array as the feed `feed`. Waits while the peer does not read."""
        if array.dtype.kind == "T":
            content: Any = host_data.encode_strings(array)
        else:
            content = host_data.bytes_of(np.ascontiguousarray(array))
        self._channel.send(_IN_PLACE if in_place else _CONTENTS, feed, [content])

    def receive(
        self,
        on_message: Callable[[Any], None],
        on_contents: Callable[[int, Any], None],
        max_bytes: int | None = None,
        memory: Callable[[int], Bytes] = aligned,
    ) -> None:
        """Receive until the peer ends the link.

        Args:
            on_message: Called with each message.
            on_contents: Called with the feed and the contents of each array.
            max_bytes: Maximum size of contents from an untrusted peer, whose messages have `MAX_MESSAGE_BYTES` at most.
                None for a trusted peer, which may send contents that are used without a copy.
            memory: Allocates memory for a copy. Contents are copied because the peer could change them later.

        Raises FrameError if a piece is invalid or larger than `max_bytes`.
        """

        def on_piece(piece: Piece, content: Any, done: Callable[[], None]) -> None:
            if piece.session == _IN_PLACE and max_bytes is None and isinstance(piece, SharedMemoryPiece):
                on_contents(piece.feed, lent(content, piece.nbytes, done))
                return
            try:
                is_message = piece.session not in (_CONTENTS, _IN_PLACE)
                if max_bytes is not None:
                    limit = min(max_bytes, MAX_MESSAGE_BYTES) if is_message else max_bytes
                    if memoryview(content).nbytes > limit:
                        raise FrameError(f"{memoryview(content).nbytes} bytes in one piece, more than {limit}")
                if not is_message:
                    copy = memory(memoryview(content).nbytes)
                    copy[...] = np.frombuffer(content, np.uint8)
                    on_contents(piece.feed, copy)
                    return
                try:
                    message = self._decoder.decode(bytes(content))
                except NO_MESSAGE as error:
                    raise FrameError(f"not a message: {error}") from None
                on_message(message)
            finally:
                done()

        self._channel.receive(on_piece)

    def close(self) -> None:
        self._channel.close()


def view(contents: np.ndarray[Any, Any], dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return received contents as an array. Raise INVALID_ARGUMENT if they have the wrong size."""
    return host_data.view(contents.data if dtype == "string" else contents, dtype, shape, None)
