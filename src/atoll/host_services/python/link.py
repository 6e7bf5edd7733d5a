"""What connects a worker and a Python process: messages and the contents of arrays, in order, on one channel.

Both ends use it. Contents of any size travel in shared memory, as between other processes of one machine.
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
from atoll.transfers.engine import Piece
from atoll.transfers.shared_memory import SharedMemoryEngine
from atoll.transfers.sockets import SocketEngine

# Pieces of a channel name a session; here that tells a message from contents.
_MESSAGE, _CONTENTS = 0, 1
_encode = msgspec.msgpack.Encoder().encode


class PythonLink:
    """One end. Any thread may send, which raises OSError where the peer has ended; one thread receives."""

    def __init__(self, sock: socket.socket, incoming: Any) -> None:
        self._channel = DataChannel(sock, (SharedMemoryEngine, SocketEngine))
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(incoming)

    def send(self, message: msgspec.Struct) -> None:
        self._channel.send(_MESSAGE, 0, [_encode(message)])

    def send_array(self, feed: int, array: np.ndarray[Any, Any]) -> None:
        """Sends the contents of an array under a number; waits while the peer does not read."""
        if array.dtype.kind == "T":
            content: Any = host_data.encode_strings(array)
        else:
            content = host_data.bytes_of(np.ascontiguousarray(array))
        self._channel.send(_CONTENTS, feed, [content])

    def receive(
        self,
        on_message: Callable[[Any], None],
        on_contents: Callable[[int, Any], None],
        max_bytes: int | None = None,
    ) -> None:
        """Reads until the peer ends. Contents are copied first: the peer can write to what it has sent.

        Raises FrameError for what no honest peer sends, and for more than `max_bytes` at a time.
        """

        def on_piece(piece: Piece, content: Any, done: Callable[[], None]) -> None:
            try:
                if max_bytes is not None and memoryview(content).nbytes > max_bytes:
                    raise FrameError(f"{memoryview(content).nbytes} bytes at a time")
                if piece.session == _CONTENTS:
                    on_contents(piece.feed, _copied(content))
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


def _copied(content: Any) -> np.ndarray[Any, Any]:
    view = np.frombuffer(content, np.uint8)
    return host_data.copied(view)


def view(contents: np.ndarray[Any, Any], dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """The array that was sent as these contents. Raises INVALID_ARGUMENT where they are none of its size."""
    return host_data.view(contents.data if dtype == "string" else contents, dtype, shape, None)
