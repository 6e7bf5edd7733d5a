"""Frames on a blocking socket, each with the bytes or the descriptor that belong to it.

A frame is as in `wire.framing`: a length and a tagged msgpack struct. What follows it is its kind's matter: bytes are
read from the socket straight into the memory that they are for. A descriptor travels with the first byte of its frame.

Invariant: frames and their payloads are written whole, whichever threads send.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import sys
import termios
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from atoll.errors import FrameError
from atoll.wire.byte_stream import SocketStream, Stream
from atoll.wire.framing import HEADER_BYTES, NO_MESSAGE, frame_header, frame_length

MAX_HEADER = 1 << 20
_BUFFER_BYTES = 1 << 20
# Payloads up to this size are joined with their frame: one system call costs more than the copy.
_SMALL_FRAME = 64  # bytes at most of a frame that only has numbers
_JOINED_BYTES = 64 * 1024
_BYTES_ACKED = 120  # where `struct tcp_info` has it

_encode = msgspec.msgpack.Encoder().encode


def _encoded(frame: msgspec.Struct) -> bytes:
    body = _encode(frame)
    return frame_header(len(body)) + body


class FrameSocket:
    """One end of a connection. Any thread may send; one thread reads. Raises OSError where the socket fails."""

    def __init__(self, stream: Stream | socket.socket) -> None:
        self._stream: Stream = SocketStream(stream) if isinstance(stream, socket.socket) else stream
        # Beneath it: for its options and, where it is a unix socket, for descriptors.
        sock = self._socket = self._stream.socket
        # A unix socket: the peer is on this machine, and can be given descriptors.
        self.is_unix = sock.family == socket.AF_UNIX
        if self.is_unix:
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        # Half of it is the kernel's own bookkeeping.
        self._send_buffer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        self._send_lock = threading.Lock()
        self.frames_out = self.bytes_out = 0
        self.frames_in = self.bytes_in = 0

    @property
    def peer_role(self) -> str:
        """As `Stream.peer_role`."""
        return self._stream.peer_role

    def secure(self) -> None:
        """Shakes hands, where that is yet to be done: see `Stream.secure`."""
        self._stream.secure()

    # ---- sending

    def send(
        self,
        frame: msgspec.Struct,
        payload: Sequence[memoryview] = (),
        descriptor: int | None = None,
        note: Callable[[], None] | None = None,
    ) -> None:
        """Sends a frame and what follows it; waits while the peer does not read.

        `note` is called before the first byte is written, for all frames in the order in which they are.
        """
        head = _encoded(frame)
        with self._send_lock:
            if note is not None:
                note()
            self._write(head, payload, descriptor)

    def send_nowait(self, frame: msgspec.Struct) -> bool:
        """Sends a frame where that waits neither for the peer nor for another thread; False where it would."""
        if not self._send_lock.acquire(blocking=False):
            return False
        try:
            if not self._has_room(HEADER_BYTES + _SMALL_FRAME):
                return False
            self._write(_encoded(frame))
            return True
        finally:
            self._send_lock.release()

    def _write(self, head: bytes, payload: Sequence[memoryview] = (), descriptor: int | None = None) -> None:
        """The caller has the lock."""
        nbytes = sum([part.nbytes for part in payload])  # a list is quicker here than a generator
        self.frames_out += 1
        self.bytes_out += len(head) + nbytes
        if descriptor is not None:
            socket.send_fds(self._socket, [head[:1]], [descriptor])
            head = head[1:]
        if nbytes < _JOINED_BYTES:
            self._stream.send((b"".join((head, *payload)),))
        else:
            self._stream.send((head, *payload))

    def can_send_nowait(self, nbytes: int) -> bool:
        """Whether sending so much would wait neither for the peer nor for another thread."""
        return not self._send_lock.locked() and self._has_room(nbytes)

    def _has_room(self, nbytes: int) -> bool:
        """Whether what the socket still holds leaves room enough."""
        try:
            held = struct.unpack("i", fcntl.ioctl(self._socket, termios.TIOCOUTQ, b"\0\0\0\0"))[0]
        except (OSError, ValueError):  # the latter where it was closed meanwhile
            return False
        return bool(held + nbytes < self._send_buffer // 4)

    def acknowledged(self) -> int:
        """The bytes that the peer's machine has acknowledged so far. TCP only; 0 where the socket is closed."""
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + 8)
        except OSError:
            return 0
        return int.from_bytes(info[_BYTES_ACKED:], sys.byteorder)

    # ---- reading

    def read_frame(self, decoder: msgspec.msgpack.Decoder[Any], limit: int = MAX_HEADER) -> tuple[Any, int | None]:
        """Return the next frame, of at most `limit` bytes, and the descriptor that came with it.

        The caller closes the descriptor.

        Raises EOFError where the connection ended, FrameError for bytes that are no frame, and BlockingIOError where
        nothing came within the time of `wake_after`.
        """
        descriptor = None
        if self.is_unix:
            header, descriptors, _, _ = socket.recv_fds(self._socket, HEADER_BYTES, 1)
            descriptor = descriptors[0] if descriptors else None
        else:
            beginning = bytearray(HEADER_BYTES)
            header = bytes(beginning[: self._stream.receive_into(memoryview(beginning))])
        if not header:
            raise EOFError
        try:
            if len(header) < HEADER_BYTES:
                rest = bytearray(HEADER_BYTES - len(header))
                self.read_into(memoryview(rest))
                header += rest
            body = bytearray(frame_length(header, limit))
            self.read_into(memoryview(body))
            self.frames_in += 1
            return decoder.decode(body), descriptor
        except BaseException as error:
            if descriptor is not None:
                os.close(descriptor)
            if isinstance(error, NO_MESSAGE):
                raise FrameError(f"not a data frame: {error}") from None
            raise

    def read_into(self, view: memoryview) -> None:
        """Fills `view` with the bytes that follow. Raises EOFError where the connection ends before."""
        position = 0
        while position < view.nbytes:
            try:
                count = self._stream.receive_into(view[position:])
            except BlockingIOError:  # `wake_after`, which is for the time between frames
                continue
            if not count:
                raise EOFError
            position += count
            self.bytes_in += count  # as it comes: whether a peer is silent is told by this

    def wake_after(self, seconds: int) -> None:
        """From the next `read_frame` on, the reading thread wakes where nothing comes for so long; 0: never."""
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))

    def shut_down(self) -> None:
        """Ends the connection for both sides; threads inside of `read_frame` and `send` come out."""
        self._stream.shut_down()

    def close(self) -> None:
        self._stream.close()
