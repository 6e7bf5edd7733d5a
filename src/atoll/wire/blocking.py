"""A control connection on a blocking socket, for a process whose work is done by threads.

The frames are those of `wire.framing`. Any thread may send, at once and without a detour over an event loop, which
would cost a worker two thread switches a message; one thread receives.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from atoll.errors import AccessError, FrameError
from atoll.wire.address import Address
from atoll.wire.framing import FrameDecoder, frame_header
from atoll.wire.stream import SocketStream, Stream, dial_stream
from atoll.wire.tls.identity import Identity

_READ_SIZE = 64 * 1024


class BlockingConnection:
    """One end of a control connection."""

    def __init__(self, stream: Stream | socket.socket, message_type: Any, *, name: str = "peer") -> None:
        self.name = name
        self._stream: Stream = SocketStream(stream) if isinstance(stream, socket.socket) else stream
        self._decoder = FrameDecoder(message_type)
        self._encode = msgspec.msgpack.Encoder().encode
        self._lock = threading.Lock()

    @classmethod
    def dial(
        cls,
        address: Address,
        message_type: Any,
        *,
        name: str,
        timeout: float = 10.0,
        role: str = "controller",
        identity: Identity | None = None,
    ) -> BlockingConnection:
        """Connects within `timeout` seconds to a process of that role. Raises ConnectError that names the address."""
        return cls(dial_stream(address, role, identity, what=name, timeout=timeout), message_type, name=name)

    def send(self, *messages: Any) -> None:
        """Sends messages together, in order; waits while the peer does not read.

        A lost connection is not an error here: `receive` ends.
        """
        self.send_all(messages)

    def send_all(self, messages: Iterable[Any]) -> None:
        """As `send`."""
        parts: list[bytes] = []
        with self._lock:
            for message in messages:
                body = self._encode(message)
                parts.append(frame_header(len(body)))
                parts.append(body)
            with contextlib.suppress(OSError):
                self._stream.send((b"".join(parts),))

    def receive(self) -> Iterator[Any]:
        """The peer's messages, in order, until it closes; for one thread.

        Raises FrameError for bytes that are none, and AccessError where the peer does not trust this process.
        """
        buffer = memoryview(bytearray(_READ_SIZE))
        while True:
            try:
                count = self._stream.receive_into(buffer)
            except AccessError:
                raise
            except OSError:
                return
            if not count:
                return
            try:
                yield from self._decoder.feed(buffer[:count])
            except FrameError as error:
                raise FrameError(f"{self.name} sent what we do not understand: {error}") from None

    def close(self) -> None:
        self._stream.close()
