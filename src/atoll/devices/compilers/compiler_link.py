"""Messages between a worker and a compiler process, in both directions: a length of 8 bytes, then msgpack.

The worker trusts nothing that it receives: it bounds the length, and msgspec checks the structure.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import Any, Generic, TypeVar

import msgspec

from atoll.errors import FrameError

_LENGTH = struct.Struct("<Q")
_encode = msgspec.msgpack.Encoder().encode
# XLA's serialized executables have 2 GiB at most, as all of protobuf's messages.
MOST_BYTES = (1 << 31) + (1 << 20)

Incoming = TypeVar("Incoming")


class Link(Generic[Incoming]):
    """One end. One thread at a time sends, and one receives."""

    def __init__(self, sock: socket.socket, incoming: Any, most: int = MOST_BYTES) -> None:
        self._socket = sock
        self._decoder: msgspec.msgpack.Decoder[Incoming] = msgspec.msgpack.Decoder(incoming)
        self._most = most

    def send(self, message: msgspec.Struct) -> None:
        """Raises OSError if the peer has ended."""
        body = _encode(message)
        self._socket.settimeout(None)
        self._socket.sendall(_LENGTH.pack(len(body)))
        self._socket.sendall(body)

    def receive(self, deadline: float | None = None) -> Incoming:
        """Return the next message.

        Raises EOFError if the peer has ended, TimeoutError at the deadline, which is a time of `time.monotonic()`, and
        FrameError for bytes that are no message.
        """
        length: int = _LENGTH.unpack(self._read(_LENGTH.size, deadline))[0]
        if length > self._most:
            raise FrameError(f"a message of {length} bytes is over the limit of {self._most}")
        try:
            return self._decoder.decode(self._read(length, deadline))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise FrameError(f"not a message: {error}") from None

    def _read(self, count: int, deadline: float | None) -> bytearray:
        content = bytearray(count)
        view = memoryview(content)
        while view:
            remaining = None if deadline is None else max(1e-3, deadline - time.monotonic())
            self._socket.settimeout(remaining)
            try:
                got = self._socket.recv_into(view)
            except ConnectionError:
                got = 0
            except TimeoutError:
                if deadline is not None and time.monotonic() >= deadline:
                    raise
                continue
            if not got:
                raise EOFError
            view = view[got:]
        return content

    def close(self) -> None:
        self._socket.close()
