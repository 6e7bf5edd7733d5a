"""What connects a worker and a Python process: messages and the contents of arrays, in order, on one channel.

Both ends use it. Contents of any size travel in shared memory, as between other processes of one machine. A process can
ask for contents that it reads where the worker has written them: it bounds how many it has asked for and still holds.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from atoll.errors import FrameError
from atoll.host_services import host_data
from atoll.transfers.channel import DataChannel
from atoll.transfers.host_memory import aligned, lent
from atoll.transfers.shared_memory_engine import SharedMemoryEngine, SharedMemoryPiece
from atoll.transfers.socket_engine import SocketEngine
from atoll.transfers.transfer_engine import Piece

# Pieces of a channel name a session; here that tells a message from contents, and from those that stay where they are.
_MESSAGE, _CONTENTS, _IN_PLACE = 0, 1, 2
_encode = msgspec.msgpack.Encoder().encode
Bytes = np.ndarray[Any, Any]


class LinkMemory(SharedMemoryEngine):
    """Few blocks for what is on its way, since they are soon back; and those that a process has asked for."""

    pool_bytes = 64 << 20
    held_session = _IN_PLACE


class PythonLink:
    """One end. Any thread may send, which raises OSError where the peer has ended; one thread receives."""

    def __init__(self, sock: socket.socket, incoming: Any) -> None:
        self._channel = DataChannel(sock, (LinkMemory, SocketEngine))
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(incoming)

    def send(self, message: msgspec.Struct) -> None:
        self._channel.send(_MESSAGE, 0, [_encode(message)])

    def send_array(self, feed: int, array: np.ndarray[Any, Any], in_place: bool = False) -> None:
        """Sends the contents of an array under a number; waits while the peer does not read."""
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
        """Reads until the peer ends. Contents are copied first, to `memory(nbytes)`: the peer can write to what it has
        sent. A peer that is trusted, so that there is no `max_bytes`, may send contents that are left where they are.

        Raises FrameError for what no honest peer sends, and for more than `max_bytes` at a time.
        """

        def on_piece(piece: Piece, content: Any, done: Callable[[], None]) -> None:
            if piece.session == _IN_PLACE and max_bytes is None and isinstance(piece, SharedMemoryPiece):
                on_contents(piece.feed, lent(content, piece.nbytes, done))
                return
            try:
                if max_bytes is not None and memoryview(content).nbytes > max_bytes:
                    raise FrameError(f"{memoryview(content).nbytes} bytes at a time")
                if piece.session in (_CONTENTS, _IN_PLACE):
                    copy = memory(memoryview(content).nbytes)
                    copy[...] = np.frombuffer(content, np.uint8)
                    on_contents(piece.feed, copy)
                    return
                try:
                    message = self._decoder.decode(bytes(content))
                except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                    raise FrameError(f"not a message: {error}") from None
                on_message(message)
            finally:
                done()

        self._channel.receive(on_piece)

    def close(self) -> None:
        self._channel.close()


def view(contents: np.ndarray[Any, Any], dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """The array that was sent as these contents. Raises INVALID_ARGUMENT where they are none of its size."""
    return host_data.view(contents.data if dtype == "string" else contents, dtype, shape, None)
