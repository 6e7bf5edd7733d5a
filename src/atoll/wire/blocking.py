"""A control connection on a blocking socket, for a process whose work is done by threads.

The same frames as `transport.connection`. Any thread may send, at once and without a detour over an event loop,
which would cost a worker two thread switches a message; one thread receives.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from atoll.errors import ConnectError
from atoll.transfers.channel import dial
from atoll.wire.address import Address
from atoll.wire.connection import MAX_FRAME

_HEADER = struct.Struct("<I")
_READ_SIZE = 64 * 1024


class BlockingConnection:
    """One end of a control connection."""

    def __init__(self, sock: socket.socket, message_type: Any, *, name: str = "peer") -> None:
        self.name = name
        self._socket = sock
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._decode = msgspec.msgpack.Decoder(message_type).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._lock = threading.Lock()

    @classmethod
    def dial(cls, address: Address, message_type: Any, *, name: str, timeout: float = 10.0) -> BlockingConnection:
        """Connects within `timeout` seconds. Raises ConnectError that names the address."""
        return cls(dial(address, timeout), message_type, name=name)

    def send(self, *messages: Any) -> None:
        """Sends messages together, in order; waits while the peer does not read. A lost connection is not an error
        here: whoever receives learns of it."""
        self.send_all(messages)

    def send_all(self, messages: Iterable[Any]) -> None:
        parts: list[bytes] = []
        with self._lock:
            for message in messages:
                body = self._encode(message)
                parts.append(_HEADER.pack(len(body)))
                parts.append(body)
            with contextlib.suppress(OSError):
                self._socket.sendall(b"".join(parts))

    def receive(self) -> Iterator[Any]:
        """The peer's messages, in order, until it closes. Raises ConnectError for bytes that are no message."""
        buffer = bytearray(_READ_SIZE)
        view = memoryview(buffer)
        pending = b""
        while True:
            try:
                count = self._socket.recv_into(view)
            except OSError:
                return
            if not count:
                return
            data = pending + view[:count] if pending else bytes(view[:count])
            position, end = 0, len(data)
            while end - position >= 4:
                (length,) = _HEADER.unpack_from(data, position)
                if length > MAX_FRAME:
                    raise ConnectError(f"{self.name} sent a frame of {length} bytes; the limit is {MAX_FRAME}")
                stop = position + 4 + length
                if stop > end:
                    break
                try:
                    message = self._decode(data[position + 4 : stop])
                except msgspec.MsgspecError as error:
                    raise ConnectError(f"{self.name} sent what we do not understand: {error}") from None
                position = stop
                yield message
            pending = data[position:]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
