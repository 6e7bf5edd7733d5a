"""For tests: a GrpcServer on a loop of its own thread, and an HTTP/2 client that can misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import hpack

from atoll.wire.grpc import Call, GrpcServer
from atoll.wire.http2 import frames

T = TypeVar("T")
DEADLINE_SECONDS = 20.0
REQUEST = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/test.Test/Echo"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
]


def echo(call: Call) -> None:
    call.on_message = lambda message: call.send(bytes(message))
    call.on_half_close = lambda: call.finish()


class Serving:
    """A server that listens on a unix socket, in a thread; a context manager."""

    def __init__(
        self,
        methods: Mapping[str, Callable[[Call], None]],
        path: str,
        loop_factory: Any = None,
        **options: Any,
    ):
        self.path = path
        self.address = f"unix:{path}"
        self._loop: asyncio.AbstractEventLoop = (loop_factory or asyncio.new_event_loop)()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._arguments = (methods, options)

    def __enter__(self) -> Serving:
        self._thread.start()
        self.server = self.run(self._listen())
        return self

    def __exit__(self, *details: object) -> None:
        self.run(self.server.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> GrpcServer:
        methods, options = self._arguments
        server = GrpcServer(methods, **options)
        await server.listen_unix(self.path)
        return server

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(DEADLINE_SECONDS)

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """The result of a function called on the loop's thread."""

        async def run() -> T:
            return function(*args)

        return self.run(run())


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return frames.frame_header.pack(len(payload) << 8 | kind, flags, stream) + payload


def message(content: bytes) -> bytes:
    return struct.pack(">BI", 0, len(content)) + content


class Peer:
    """One raw connection. Frames are read as (type, flags, stream, payload)."""

    def __init__(self, path: str, *, greet: bool = True) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(DEADLINE_SECONDS)
        self.socket.connect(path)
        self.encoder = hpack.Encoder()
        self.decoder = hpack.Decoder()
        self._input = b""
        if greet:
            self.send(frames.PREFACE + frames.settings_frame(()))

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *details: object) -> None:
        self.socket.close()

    def send(self, *data: bytes) -> None:
        """Send; a server that has hung up already is no error."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(b"".join(data))

    def headers(self, stream: int, headers: Any = REQUEST, flags: int = frames.END_HEADERS) -> bytes:
        return frame(frames.HEADERS, flags, stream, self.encoder.encode(headers))

    def read(self) -> tuple[int, int, int, bytes] | None:
        """The next frame, or None when the server has closed the connection."""
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
        return head & 0xFF, flags, stream, payload

    def read_until(self, kind: int, stream: int | None = None) -> tuple[int, int, int, bytes]:
        while True:
            got = self.read()
            assert got is not None, f"connection closed before a frame of type {kind}"
            if got[0] == frames.HEADERS and kind != frames.HEADERS:
                self.decoder.decode(got[3])
            if got[0] == kind and (stream is None or got[2] == stream):
                return got

    def goaway_code(self) -> int:
        """The error code with which the server ends the connection, and closes it."""
        code: int = struct.unpack_from(">II", self.read_until(frames.GOAWAY)[3])[1]
        while self.read() is not None:
            pass
        return code

    def reset_code(self, stream: int) -> int:
        return int.from_bytes(self.read_until(frames.RST_STREAM, stream)[3], "big")

    def body(self, stream: int, size: int) -> bytes:
        """The next `size` bytes of a response's body."""
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
        """All frames up to the answer to a second PING: what was sent before is answered and seen.

        The first answer may go ahead of a stream's frames that leave in the same write.
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
    """Whether a new client's call is answered."""
    with Peer(path) as peer:
        peer.send(peer.headers(1), frame(frames.DATA, frames.END_STREAM, 1, message(b"alive")))
        return peer.body(1, 10) == message(b"alive") and peer.trailers(1)["grpc-status"] == "0"
