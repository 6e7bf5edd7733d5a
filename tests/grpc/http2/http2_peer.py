"""HTTP/2 client for tests, which can misbehave."""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import Any

import hpack

from atoll.grpc.http2 import frames

DEADLINE_SECONDS = 20.0
WINDOW = 1 << 20
"""The window of a stream at the server of the tests of HTTP/2."""
REQUEST = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/test.Test/Echo"),
    (":authority", "localhost"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
]


def request(path: str, *more: tuple[str, str]) -> list[tuple[str, str]]:
    return [(name, path if name == ":path" else value) for name, value in REQUEST] + list(more)


KEEP = request("/test.Test/Keep")
"""A request for the method that replies nothing."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return frames.frame_header.pack(len(payload) << 8 | kind, flags, stream) + payload


def message(content: bytes) -> bytes:
    return struct.pack(">BI", 0, len(content)) + content


class Peer:
    """Raw connection. Frames are read as (type, flags, stream, payload). SETTINGS and PING are acknowledged.

    Without `greet`, the test sends the preface and the first frames itself.
    """

    def __init__(self, path: str, *, greet: bool = True) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(DEADLINE_SECONDS)
        self.socket.connect(path)
        self.encoder = hpack.Encoder()
        self.decoder = hpack.Decoder()
        self._input = b""
        self._acknowledges = greet
        if greet:
            self.send(frames.PREFACE + frames.settings_frame(()))

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *details: object) -> None:
        self.socket.close()

    def send(self, *data: bytes) -> None:
        """Send bytes, and ignore the error if the server has closed the connection."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(b"".join(data))

    def headers(self, stream: int, headers: Any = REQUEST, flags: int = frames.END_HEADERS) -> bytes:
        return frame(frames.HEADERS, flags, stream, self.encoder.encode(headers))

    def read(self) -> tuple[int, int, int, bytes] | None:
        """Return the next frame, or None after the server has closed the connection."""
        while len(self._input) < 9 or len(self._input) < 9 + (frames.frame_header.unpack_from(self._input)[0] >> 8):
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._input += data
        head, flags, stream = frames.frame_header.unpack_from(self._input)
        end = 9 + (head >> 8)
        payload, self._input = self._input[9:end], self._input[end:]
        kind = head & 0xFF
        if self._acknowledges and kind in (frames.SETTINGS, frames.PING) and not flags & frames.ACK:
            self.send(frame(kind, frames.ACK, 0, payload if kind == frames.PING else b""))
        return kind, flags, stream, payload

    def read_until(self, kind: int, stream: int | None = None) -> tuple[int, int, int, bytes]:
        while True:
            got = self.read()
            assert got is not None, f"connection closed before a frame of type {kind}"
            if got[0] == frames.HEADERS and kind != frames.HEADERS:
                self.decoder.decode(got[3])
            if got[0] == kind and (stream is None or got[2] == stream):
                return got

    def goaway_code(self) -> int:
        """Return the error code with which the server ends the connection, after it was closed."""
        code: int = struct.unpack_from(">II", self.read_until(frames.GOAWAY)[3])[1]
        while self.read() is not None:
            pass
        return code

    def reset_code(self, stream: int) -> int:
        return int.from_bytes(self.read_until(frames.RST_STREAM, stream)[3], "big")

    def body(self, stream: int, size: int) -> bytes:
        """Return the next `size` bytes of a response's body."""
        body = bytearray()
        while len(body) < size:
            body += self.read_until(frames.DATA, stream)[3]
        return bytes(body)

    def trailers(self, stream: int) -> dict[str, str]:
        while True:
            _, flags, _, block = self.read_until(frames.HEADERS, stream)
            headers = dict(self.decoder.decode(block))
            if flags & frames.END_STREAM:
                return headers

    def sync(self) -> list[tuple[int, int, int, bytes]]:
        """Return all frames up to the reply to a second PING, by which time the server has handled all earlier frames.

        The reply to the first PING may precede frames of streams that are sent by the same write.
        """
        seen = []
        for payload in (b"1st sync", b"2nd sync"):
            self.send(frame(frames.PING, 0, 0, payload))
            while True:
                got = self.read()
                assert got is not None, "connection closed before the answer to PING"
                if got[0] == frames.PING and got[3] == payload:
                    break
                seen.append(got)
        return seen


def served(path: str) -> bool:
    """Return whether the server replies to a call of a new client."""
    with Peer(path) as peer:
        peer.send(peer.headers(1), frame(frames.DATA, frames.END_STREAM, 1, message(b"alive")))
        return peer.body(1, 10) == message(b"alive") and peer.trailers(1)["grpc-status"] == "0"
