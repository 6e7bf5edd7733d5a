"""Relays a host's connection to the coordination service of a world, and ends what waits for the service.

XLA ends a process whose connection to the service ends, or whose service reports an error. But a closed world needs no
service, and the service ends with its host. So the client's end of the relay remains open until the client closes it.

A device that has just begun its first collective asks the service for the addresses of other devices, and waits for the
answers. When the world is closed, the relay resets these requests, so that the collective fails. It recognizes them by
their HTTP/2 headers, and does not reset requests whose failure ends the process.

A client that registers waits until all clients have registered, and ends the process if this fails or takes too long.
If the world is closed before, the relay answers this request itself.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import BinaryIO

from atoll.grpc.http2 import frames
from atoll.grpc.http2.frames import ErrorCode
from atoll.grpc.http2.headers import HeaderBlocks
from atoll.grpc.http2.http2_limits import Limits
from atoll.wire.address import parse_address
from atoll.wire.sockets import dial

# Methods of the service that XLA calls all the time. It ends the process if one fails.
_VITAL = (b"/Heartbeat", b"/PollForError")
_REGISTRATION = b"/RegisterTask"
# Header blocks (RFC 7541) of the answer to a registration, which do not change the client's table of headers:
# ":status: 200", "content-type: application/grpc", and "grpc-status: 0".
_HEADERS = b"\x88\x0f\x10\x10application/grpc"
_TRAILERS = b"\x00\x0bgrpc-status\x010"
_EMPTY_MESSAGE = bytes(5)


class WorldRelay:
    """A relay for one client, whose threads start at once.

    Args:
        service: The address of the coordination service.
        timeout: Seconds for connecting to the service.
    """

    def __init__(self, service: str, timeout: float) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        name = f"atoll-world-{os.getpid()}-{secrets.token_hex(8)}"
        self._listener.bind(f"\0{name}")
        self._listener.listen(1)
        self.address = f"unix-abstract:{name}"
        """The address for XLA's client."""
        self._there = dial(parse_address(service), what="the first host of the world", timeout=timeout)
        self._there.settimeout(None)
        self._lock = threading.Lock()  # for writing to the client, and for the fields below
        self._waiting: dict[int, float] = {}  # streams of requests that may be reset, and since when they wait
        self._registration = 0  # stream of the request that registers the client
        self._is_closed = False
        self._is_cut = False  # the service has ended
        self._here: socket.socket | None = None
        self._has_begun = False  # the client has received the first frame, without which it sends no requests
        threading.Thread(target=self._run, name="atoll-world", daemon=True).start()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    @property
    def has_requests(self) -> bool:
        """Whether requests wait for an answer."""
        return bool(self._waiting)

    def reset_late(self, seconds: float) -> None:
        """Reset the requests that have waited for longer, or cannot be answered because the service has ended."""
        with self._lock:
            now = time.monotonic()
            late = [stream for stream, since in self._waiting.items() if self._is_cut or now - since > seconds]
            for stream in late:
                del self._waiting[stream]
                self._reset(stream)

    def close(self) -> None:
        """Stop relaying, and reset the requests that wait for an answer, and all later ones. Any thread.

        A registration that waits succeeds.
        """
        with self._lock:
            self._is_closed = True
            self._begin()
            for stream in self._waiting:
                self._refuse(stream)
            self._waiting.clear()
        with suppress(OSError):
            self._there.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        """Relay the first connection until XLA's client ends it."""
        with self._listener:
            here, _ = self._listener.accept()
        with self._lock:
            self._here = here
            if self._is_closed:
                self._begin()
        threading.Thread(target=self._relay_answers, args=(here,), name="atoll-world", daemon=True).start()
        with here, self._there:
            self._relay_requests(here)

    def _begin(self) -> None:
        """Send the client of a closed world the first frame, if the service has not."""
        if self._here is not None and not self._has_begun:
            self._has_begun = True
            with suppress(OSError):
                self._here.sendall(frames.settings_frame(()))

    def _relay_requests(self, here: socket.socket) -> None:
        """Relay what the client sends, and note its requests. Drop it when the service has ended."""
        blocks = HeaderBlocks(Limits())
        with suppress(OSError), here.makefile("rb") as source:
            preface = source.read(len(frames.PREFACE))
            with suppress(OSError):
                self._there.sendall(preface)
            for frame, kind, flags, stream in _frames(source):
                payload = frame[frames.HEADER_BYTES :]
                headers = None
                if kind == frames.HEADERS:
                    headers = blocks.begin(flags, stream, payload)
                elif kind == frames.CONTINUATION:
                    headers = blocks.extend(flags, payload)
                with suppress(OSError):
                    self._there.sendall(frame)
                path = b"" if headers is None else dict(headers).get(b":path", b"")
                if headers is not None and not path.endswith(_VITAL):
                    self._note(stream, is_registration=path.endswith(_REGISTRATION))
                elif kind == frames.RST_STREAM:
                    with self._lock:
                        self._waiting.pop(stream, None)

    def _note(self, stream: int, is_registration: bool) -> None:
        with self._lock:
            if is_registration:
                self._registration = stream
            if self._is_closed:
                self._refuse(stream)
            else:
                self._waiting[stream] = time.monotonic()

    def _refuse(self, stream: int) -> None:
        """Reset a request of a closed world, or answer it if it is the registration."""
        if stream != self._registration:
            self._reset(stream)
        elif self._here is not None:
            message = frames.frame_header.pack(len(_EMPTY_MESSAGE) << 8 | frames.DATA, 0, stream) + _EMPTY_MESSAGE
            with suppress(OSError):
                self._here.sendall(
                    frames.header_frames(stream, _HEADERS, frames.DEFAULT_MAX_FRAME, end_stream=False)
                    + message
                    + frames.header_frames(stream, _TRAILERS, frames.DEFAULT_MAX_FRAME, end_stream=True)
                )

    def _reset(self, stream: int) -> None:
        if self._here is not None:
            with suppress(OSError):
                self._here.sendall(frames.rst_stream(stream, ErrorCode.CANCEL))

    def _relay_answers(self, here: socket.socket) -> None:
        """Relay what the service sends, frame by frame, until the relay is closed or the service ends."""
        self._relay_frames(here)
        self._is_cut = True

    def _relay_frames(self, here: socket.socket) -> None:
        with suppress(OSError), self._there.makefile("rb") as source:
            for frame, kind, flags, stream in _frames(source):
                with self._lock:
                    if self._is_closed:
                        return
                    self._has_begun = True
                    here.sendall(frame)
                    if kind == frames.RST_STREAM or (kind == frames.HEADERS and flags & frames.END_STREAM):
                        self._waiting.pop(stream, None)


def _frames(source: BinaryIO) -> Iterator[tuple[bytes, int, int, int]]:
    """Yield the frames of a stream of bytes until it ends: (frame, type, flags, number of the HTTP/2 stream)."""
    while len(head := source.read(frames.HEADER_BYTES)) == frames.HEADER_BYTES:
        word, flags, stream = frames.frame_header.unpack(head)
        length, kind = word >> 8, word & 0xFF
        payload = source.read(length)
        if len(payload) < length:
            return
        yield head + payload, kind, flags, stream
