"""Relays a host's connection to the coordination service of a world, and ends what waits for the service.

XLA ends a process whose connection to the service ends, or whose service reports an error. But a closed world needs no
service, and the service ends with its host. So the client's end of the relay remains open until the client closes it.

A device that has just begun its first collective asks the service for the addresses of other devices, and waits for the
answers. When the world is closed, the relay resets these requests, so that the collective fails. It recognizes them by
their HTTP/2 headers, and does not reset requests whose failure ends the process.
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
        self._lock = threading.Lock()  # for writing to the client, and for the two fields below
        self._waiting: dict[int, float] = {}  # streams of requests that may be reset, and since when they wait
        self._is_closed = False
        self._is_cut = False  # the service has ended
        self._here: socket.socket | None = None
        threading.Thread(target=self._run, name="atoll-world", daemon=True).start()

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
        """Stop relaying, and reset the requests that wait for an answer, and all later ones. Any thread."""
        with self._lock:
            self._is_closed = True
            for stream in self._waiting:
                self._reset(stream)
            self._waiting.clear()
        with suppress(OSError):
            self._there.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        """Relay the first connection until XLA's client ends it."""
        with self._listener:
            here, _ = self._listener.accept()
        self._here = here
        threading.Thread(target=self._relay_answers, args=(here,), name="atoll-world", daemon=True).start()
        with here, self._there:
            self._relay_requests(here)

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
                if headers is not None and not dict(headers).get(b":path", b"").endswith(_VITAL):
                    self._note(stream)
                elif kind == frames.RST_STREAM:
                    with self._lock:
                        self._waiting.pop(stream, None)

    def _note(self, stream: int) -> None:
        with self._lock:
            if self._is_closed:
                self._reset(stream)
            else:
                self._waiting[stream] = time.monotonic()

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
