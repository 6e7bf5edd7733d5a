"""Frames on a blocking socket, each with the bytes or the descriptor that belong to it.

A frame is a length and a tagged msgpack struct, as in `wire.framing`. If a frame has a payload, its bytes are read from
the socket directly into their final memory. A descriptor is sent with the first byte of its frame.

Invariant: frames and their payloads are written as a whole even if several threads send.
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
from atoll.wire.byte_stream import ClosedStream, SocketStream, Stream
from atoll.wire.framing import HEADER_BYTES, NO_MESSAGE, frame_header, frame_length

MAX_HEADER = 1 << 20
_BUFFER_BYTES = 1 << 20
_SMALL_FRAME = 64  # maximum bytes of a frame that consists of numbers
_JOINED_BYTES = 64 * 1024  # smaller payloads are joined with their frame, because a system call costs more than a copy
_BYTES_ACKED = 120  # offset of this field in `struct tcp_info`

_encode = msgspec.msgpack.Encoder().encode


def _lost(received: Sequence[int]) -> FrameError:
    """Return the error for descriptors that the kernel has dropped. Close those that it has `received`."""
    for descriptor in received:
        os.close(descriptor)
    if received:
        return FrameError("not a data frame: it has several descriptors")
    return FrameError("the descriptor of a data frame was lost, because this process has too many open files")


def _encoded(frame: msgspec.Struct) -> bytes:
    body = _encode(frame)
    return frame_header(len(body)) + body


class FrameSocket:
    """One end of a connection. Any thread may send, and one thread reads. Methods raise OSError if the socket fails."""

    def __init__(self, stream: Stream | socket.socket) -> None:
        self._stream: Stream = SocketStream(stream) if isinstance(stream, socket.socket) else stream
        # The socket below the stream, for its options, and for descriptors if it is a unix socket.
        sock = self._socket = self._stream.socket
        self.is_unix = sock.family == socket.AF_UNIX  # then the peer is on this machine, and can receive descriptors
        if self.is_unix:
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        # Half of these bytes are the kernel's bookkeeping.
        self._send_buffer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        self._send_lock = threading.RLock()  # its holder sends inside `reserved`
        self._is_writing = False  # a frame, on the thread that holds the lock
        self.frames_out = self.bytes_out = 0
        self.frames_in = self.bytes_in = 0

    @property
    def peer_role(self) -> str:
        """The role in the peer's certificate, or "" without TLS."""
        return self._stream.peer_role

    def secure(self) -> None:
        """Perform the TLS handshake if it is pending: see `Stream.secure`."""
        self._stream.secure()

    # ---- sending

    def send(
        self,
        frame: msgspec.Struct,
        payload: Sequence[memoryview] = (),
        descriptor: int | None = None,
        note: Callable[[], None] | None = None,
    ) -> None:
        """Send a frame with its payload or descriptor. Wait while the peer does not read.

        `note` is called before the first byte is written. Its calls are in the order of the frames.
        """
        head = _encoded(frame)
        with self._send_lock:
            if note is not None:
                note()
            self._write(head, payload, descriptor)

    def send_nowait(self, frame: msgspec.Struct, note: Callable[[], None] | None = None) -> bool:
        """Send a frame and return True, or return False if that would wait for the peer or for another thread.

        `note` is as in `send`.
        """
        if not self.try_reserve(HEADER_BYTES + _SMALL_FRAME):
            return False
        try:
            if note is not None:
                note()
            self._write(_encoded(frame))
        finally:
            self.release()
        return True

    def _write(self, head: bytes, payload: Sequence[memoryview] = (), descriptor: int | None = None) -> None:
        """Write a frame. The caller holds the lock."""
        nbytes = sum([part.nbytes for part in payload])  # a list is faster here than a generator
        self.frames_out += 1
        self.bytes_out += len(head) + nbytes
        self._is_writing = True
        try:
            if descriptor is not None:
                socket.send_fds(self._socket, [head[:1]], [descriptor])
                head = head[1:]
            if nbytes < _JOINED_BYTES:
                self._stream.send((b"".join((head, *payload)),))
            else:
                self._stream.send((head, *payload))
        finally:
            self._is_writing = False

    def can_send_nowait(self, nbytes: int) -> bool:
        """Return whether `nbytes` can be sent without waiting for the peer or for another thread."""
        is_reserved = self.try_reserve(nbytes)
        if is_reserved:
            self.release()
        return is_reserved

    def try_reserve(self, nbytes: int) -> bool:
        """Reserve the socket for this thread and return True. The thread can then send `nbytes` without waiting.

        Return False if sending would wait for the peer or for another thread. Otherwise, `release` has to follow.
        """
        if not self._send_lock.acquire(blocking=False):
            return False
        # A garbage collection inside `_write` can return memory to the peer, on the thread that holds the lock.
        has_space = not self._is_writing and self._has_space(nbytes)
        if not has_space:
            self._send_lock.release()
        return has_space

    def release(self) -> None:
        """End a reservation of this thread."""
        self._send_lock.release()

    def _has_space(self, nbytes: int) -> bool:
        """Return whether the socket's send buffer has enough free space."""
        try:
            held = struct.unpack("i", fcntl.ioctl(self._socket, termios.TIOCOUTQ, b"\0\0\0\0"))[0]
        except (OSError, ValueError):  # ValueError if the socket was closed meanwhile
            return False
        return bool(held + nbytes < self._send_buffer // 4)

    def acknowledged(self) -> int:
        """Return the bytes that the peer's machine has acknowledged. TCP only; 0 if the socket is closed.

        Systems other than Linux do not report this. There, the bytes that were sent take their place: they grow with
        those that are acknowledged, because the kernel holds few.
        """
        if not hasattr(socket, "TCP_INFO"):
            return self.bytes_out
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + 8)
        except OSError:
            return 0
        return int.from_bytes(info[_BYTES_ACKED:], sys.byteorder)

    # ---- reading

    def read_frame(self, decoder: msgspec.msgpack.Decoder[Any], limit: int = MAX_HEADER) -> tuple[Any, int | None]:
        """Return the next frame, of at most `limit` bytes, and its descriptor, which the caller has to close.

        Raise EOFError if the connection ended, FrameError if the bytes are not a frame or its descriptor was lost, and
        BlockingIOError if nothing arrived within the time of `wake_after`.
        """
        descriptor = None
        if self.is_unix:
            header, descriptors, flags, _ = socket.recv_fds(self._socket, HEADER_BYTES, 1)
            if flags & socket.MSG_CTRUNC:
                raise _lost(descriptors)
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
        """Fill `view` with the next bytes. Raise EOFError if the connection ends before."""
        position = 0
        while position < view.nbytes:
            try:
                count = self._stream.receive_into(view[position:])
            except BlockingIOError:  # `wake_after` applies only between frames
                continue
            if not count:
                raise EOFError
            position += count
            self.bytes_in += count  # while reading, because `liveness` needs the progress

    def wake_after(self, seconds: int) -> None:
        """Make `read_frame` raise BlockingIOError if nothing arrives for `seconds`; 0 disables this."""
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))

    def shut_down(self) -> None:
        """End the connection for both sides, so that threads inside `read_frame` and `send` return."""
        self._stream.shut_down()

    def close(self) -> None:
        """End the connection, and drop its TLS state and buffers.

        A channel and its transfers refer to each other. Otherwise, a process that rarely collects garbage would keep
        about one MiB per closed channel.
        """
        stream, self._stream = self._stream, ClosedStream(self._stream)
        stream.close()
