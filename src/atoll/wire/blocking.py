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

from atoll.errors import FrameError
from atoll.wire.address import Address
from atoll.wire.framing import FrameDecoder, frame_header
from atoll.wire.sockets import dial, send_without_delay

_READ_SIZE = 64 * 1024


class BlockingConnection:
    """One end of a control connection."""

    def __init__(self, sock: socket.socket, message_type: Any, *, name: str = "peer") -> None:
        self.name = name
        self._socket = sock
        send_without_delay(sock)
        self._decoder = FrameDecoder(message_type)
        self._encode = msgspec.msgpack.Encoder().encode
        self._lock = threading.Lock()

    @classmethod
    def dial(cls, address: Address, message_type: Any, *, name: str, timeout: float = 10.0) -> BlockingConnection:
        """Connects within `timeout` seconds. Raises ConnectError that names the address."""
        return cls(dial(address, what=name, timeout=timeout), message_type, name=name)

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
                self._socket.sendall(b"".join(parts))

    def receive(self) -> Iterator[Any]:
        """The peer's messages, in order, until it closes; for one thread. Raises FrameError for bytes that are none."""
        buffer = memoryview(bytearray(_READ_SIZE))
        while True:
            try:
                count = self._socket.recv_into(buffer)
            except OSError:
                return
            if not count:
                return
            try:
                yield from self._decoder.feed(buffer[:count])
            except FrameError as error:
                raise FrameError(f"{self.name} sent what we do not understand: {error}") from None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
