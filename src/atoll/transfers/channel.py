"""The data port's protocol: bulk bytes between two processes, past the controller, on blocking sockets.

A frame is a length-prefixed `Piece` and then its bytes, unless these are in memory that both sides share. On one
machine large pieces go through pooled memory files: the first use of a segment passes its descriptor along the
unix socket, later ones its number alone, and the receiver sends it back when it has read it. Nothing in the file
system names these segments, so that nothing is left behind whatever process is killed.

Bounded: a sender waits for a free segment once its pool is in use, and for the socket otherwise.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import struct
import termios
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from atoll.errors import ConnectError
from atoll.wire.address import Address

_HEADER = struct.Struct("<I")
_MAX_HEADER = 1 << 20
MAX_PIECE = 1 << 40

# Pieces from this size on go through shared memory where both sides are on one machine.
SHARED_THRESHOLD = 256 * 1024
PART_BYTES = 8 << 20
_POOL_BYTES = 1 << 30
_SEGMENT_WAIT_SECONDS = 60.0
# A segment in use is often on its way back, and to wait for it is cheaper than to touch fresh memory.
_RETURN_SECONDS = 0.01


class Open(msgspec.Struct, frozen=True, array_like=True, tag="o"):
    """The first frame of a connection: for which session, and the secret that opens it (session 0: between hosts)."""

    session: int
    secret: str


class Piece(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    """The contents of a feed. `segment` -1: `nbytes` follow; -2: in the file whose descriptor comes along; else
    in that segment of the sender's pool."""

    session: int
    feed: int
    nbytes: int
    segment: int = -1
    segment_bytes: int = 0
    more: bool = False  # further pieces of the same feed will follow


class Unmap(msgspec.Struct, frozen=True, array_like=True, tag="u"):
    """A segment of the sender's pool is no more."""

    segment: int


class Recycle(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """The receiver is done with a segment of the sender's pool."""

    segment: int


_decoder = msgspec.msgpack.Decoder(Open | Piece | Recycle | Unmap)
_encoder = msgspec.msgpack.Encoder()


@dataclass
class _Segment:
    number: int
    size: int
    descriptor: int
    memory: mmap.mmap


class SegmentPool:
    """Shared-memory segments of one channel's sender, reused: fresh memory costs more than the copy into it."""

    def __init__(self, on_drop: Callable[[int], None]) -> None:
        self._on_drop = on_drop
        self._free: list[_Segment] = []
        self._used: dict[int, _Segment] = {}
        self._next = 0
        self._bytes = 0
        self._available = threading.Condition()

    def take(self, nbytes: int) -> _Segment:
        with self._available:
            if any(segment.size >= nbytes for segment in self._used.values()):
                self._available.wait_for(lambda: any(s.size >= nbytes for s in self._free), _RETURN_SECONDS)
            while True:
                fitting = [s for s in self._free if s.size >= nbytes]
                if fitting:
                    segment = min(fitting, key=lambda s: s.size)
                    self._free.remove(segment)
                    break
                size = max(1 << 20, 1 << (nbytes - 1).bit_length())
                while self._free and self._bytes + size > _POOL_BYTES:
                    self._drop(self._free.pop(0))
                if self._bytes + size <= _POOL_BYTES or not self._used:
                    segment = self._create(size)
                    break
                if not self._available.wait(_SEGMENT_WAIT_SECONDS):
                    raise TimeoutError(
                        f"no shared memory became free within {_SEGMENT_WAIT_SECONDS:.0f} s: the receiver does not read"
                    )
            self._used[segment.number] = segment
            return segment

    def _create(self, size: int) -> _Segment:
        descriptor = os.memfd_create("atoll", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size)
        segment = _Segment(self._next, size, descriptor, mmap.mmap(descriptor, size))
        self._next += 1
        self._bytes += size
        return segment

    def give_back(self, number: int) -> None:
        with self._available:
            segment = self._used.pop(number, None)
            if segment is not None:
                self._free.append(segment)
                self._available.notify()

    def _drop(self, segment: _Segment) -> None:
        self._bytes -= segment.size
        with contextlib.suppress(BufferError):
            segment.memory.close()
        os.close(segment.descriptor)
        self._on_drop(segment.number)

    def close(self) -> None:
        with self._available:
            for segment in (*self._free, *self._used.values()):
                self._drop(segment)
            self._free.clear()
            self._used.clear()


# What a receiver is told: the piece, its bytes, and what to call when it has read them.
OnPiece = Callable[[Piece, Any, Callable[[], None]], None]


def _nothing() -> None:
    return None


class DataChannel:
    """One connection between data ports. `send*` may be called from any thread; one thread calls `receive`."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._is_unix = sock.family == socket.AF_UNIX
        if not self._is_unix:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        else:
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                sock.setsockopt(socket.SOL_SOCKET, option, 1 << 20)
        # Half of it is the kernel's own bookkeeping.
        self._send_buffer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        self._send_lock = threading.Lock()
        self._pool = SegmentPool(self._dropped)
        self._sent_segments: set[int] = set()
        self._peer_segments: dict[int, mmap.mmap] = {}
        self.is_closed = False

    # ---- sending

    def open(self, session: int, secret: str) -> None:
        self._send_frame(Open(session, secret))

    def send(self, session: int, feed: int, contents: Sequence[Any]) -> None:
        """Sends buffers, one after the other, as one piece."""
        views = [memoryview(part).cast("B") for part in contents if memoryview(part).nbytes]
        nbytes = sum(view.nbytes for view in views)
        if not self._is_unix or nbytes < SHARED_THRESHOLD:
            self._send_frame(Piece(session, feed, nbytes), views)
            return
        self._send_shared(Piece(session, feed, nbytes), views)

    def send_in_parts(self, session: int, feed: int, content: Any) -> None:
        """Sends one buffer, in several pieces where it is large: the receiver works on one while the next is copied."""
        view = memoryview(content).cast("B") if memoryview(content).nbytes else memoryview(b"")
        for start in range(0, max(1, view.nbytes), PART_BYTES):
            part = view[start : start + PART_BYTES]
            piece = Piece(session, feed, part.nbytes, more=start + PART_BYTES < view.nbytes)
            if not self._is_unix or part.nbytes < SHARED_THRESHOLD:
                self._send_frame(piece, [part])
            else:
                self._send_shared(piece, [part])

    def _send_shared(self, piece: Piece, views: Sequence[memoryview]) -> None:
        def fill(target: memoryview) -> None:
            position = 0
            for view in views:
                target[position : position + view.nbytes] = view
                position += view.nbytes

        self._fill_segment(piece, fill)

    def send_filled(self, session: int, feed: int, nbytes: int, fill: Callable[[memoryview], None]) -> None:
        """Sends one piece whose bytes `fill` writes straight into the memory they travel in."""
        if not self._is_unix or nbytes < SHARED_THRESHOLD:
            buffer = bytearray(nbytes)
            fill(memoryview(buffer))
            self._send_frame(Piece(session, feed, nbytes), [memoryview(buffer)])
            return
        self._fill_segment(Piece(session, feed, nbytes), fill)

    def _fill_segment(self, piece: Piece, fill: Callable[[memoryview], None]) -> None:
        segment = self._pool.take(piece.nbytes)
        try:
            with memoryview(segment.memory)[: piece.nbytes] as view:
                fill(view)
        except BaseException:
            self._pool.give_back(segment.number)
            raise
        shared = msgspec.structs.replace(piece, segment=segment.number, segment_bytes=segment.size)
        with self._send_lock:
            first = segment.number not in self._sent_segments
            self._sent_segments.add(segment.number)
            self._send_locked(shared, [], segment.descriptor if first else None)

    def send_file(self, session: int, feed: int, nbytes: int, descriptor: int) -> None:
        """Hands over a file's contents by its descriptor; unix sockets only."""
        with self._send_lock:
            self._send_locked(Piece(session, feed, nbytes, -2), [], descriptor)

    @property
    def passes_files(self) -> bool:
        return self._is_unix

    def takes_at_once(self, nbytes: int) -> bool:
        """Whether sending so much would not wait for the peer: what the socket still holds leaves room enough."""
        try:
            held = struct.unpack("i", fcntl.ioctl(self._socket, termios.TIOCOUTQ, b"\0\0\0\0"))[0]
        except OSError:
            return False
        return bool(held + nbytes < self._send_buffer // 4)

    def _send_frame(self, frame: Any, payload: Sequence[memoryview] = ()) -> None:
        with self._send_lock:
            self._send_locked(frame, payload, None)

    def _send_locked(self, frame: Any, payload: Sequence[memoryview], descriptor: int | None) -> None:
        header = _encoder.encode(frame)
        head = _HEADER.pack(len(header)) + header
        if descriptor is not None:
            socket.send_fds(self._socket, [head[:1]], [descriptor])
            head = head[1:]
        if sum(part.nbytes for part in payload) < 64 * 1024:
            self._socket.sendall(b"".join((head, *payload)))
            return
        self._socket.sendall(head)
        for part in payload:
            self._socket.sendall(part)

    def _dropped(self, segment: int) -> None:
        if not self.is_closed and segment in self._sent_segments:
            self._sent_segments.discard(segment)
            with contextlib.suppress(OSError):
                self._send_frame(Unmap(segment))

    # ---- receiving

    def receive_open(self) -> Open:
        """The peer's first frame."""
        frame, descriptor = self._read_header()
        if descriptor is not None:
            os.close(descriptor)
        if not isinstance(frame, Open):
            raise ConnectError("the first frame on a data port must open it")
        return frame

    def receive(self, on_piece: OnPiece) -> None:
        """Reads until the peer closes. Pieces are given to `on_piece` on this thread, in order.

        Raises ConnectError where the peer sends what is no frame, or ends inside a piece.
        """
        while True:
            try:
                frame, descriptor = self._read_header()
            except ConnectError:
                raise
            except (EOFError, OSError):
                return
            try:
                match frame:
                    case Recycle(segment=segment):
                        self._pool.give_back(segment)
                    case Piece():
                        self._piece(frame, descriptor, on_piece)
                    case _:
                        raise ConnectError("a data port is opened once")
            except EOFError:
                raise ConnectError("the connection ended inside a piece") from None
            finally:
                if descriptor is not None:
                    os.close(descriptor)

    def _piece(self, frame: Piece, descriptor: int | None, on_piece: OnPiece) -> None:
        if not 0 <= frame.nbytes <= MAX_PIECE:
            raise ConnectError(f"a piece of {frame.nbytes} bytes")
        if frame.segment == -1:
            content = aligned(frame.nbytes)
            self._read_into(content.data)
            on_piece(frame, content, _nothing)
            return
        if frame.segment == -2:
            if descriptor is None:
                raise ConnectError("a file was announced without its descriptor")
            if os.fstat(descriptor).st_size < frame.nbytes:
                raise ConnectError("a file is shorter than announced")
            # A private mapping: the array that is made of it may be written over without touching the file.
            mapped: Any = b""
            if frame.nbytes:
                mapped = mmap.mmap(descriptor, frame.nbytes, access=mmap.ACCESS_COPY)
            on_piece(frame, np.frombuffer(mapped, np.uint8), _nothing)
            return
        if descriptor is not None:
            if not 0 < frame.segment_bytes <= os.fstat(descriptor).st_size:
                raise ConnectError("a segment is shorter than announced")
            self._peer_segments[frame.segment] = mmap.mmap(descriptor, frame.segment_bytes)
        memory = self._peer_segments.get(frame.segment)
        if memory is None or frame.nbytes > len(memory):
            raise ConnectError(f"segment {frame.segment} is not known, or too small")
        number = frame.segment

        def done() -> None:
            with contextlib.suppress(OSError):
                self._send_frame(Recycle(number))

        on_piece(frame, memoryview(memory)[: frame.nbytes], done)

    def _read_header(self) -> tuple[Any, int | None]:
        descriptor = None
        if self._is_unix:
            first, descriptors, _, _ = socket.recv_fds(self._socket, 4, 1)
            descriptor = descriptors[0] if descriptors else None
        else:
            first = self._socket.recv(4)
        if not first:
            raise EOFError
        try:
            while len(first) < 4:
                more = self._socket.recv(4 - len(first))
                if not more:
                    raise EOFError
                first += more
            (length,) = _HEADER.unpack(first)
            if length > _MAX_HEADER:
                raise ConnectError(f"a frame header of {length} bytes")
            body = bytearray(length)
            self._read_into(memoryview(body))
            return _decoder.decode(body), descriptor
        except (msgspec.MsgspecError, EOFError, ConnectError) as error:
            if descriptor is not None:
                os.close(descriptor)
            if isinstance(error, msgspec.MsgspecError):
                raise ConnectError(f"not a data frame: {error}") from None
            raise

    def _read_into(self, view: memoryview) -> None:
        position = 0
        while position < view.nbytes:
            count = self._socket.recv_into(view[position:])
            if not count:
                raise EOFError
            position += count

    def close(self) -> None:
        self.is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._pool.close()
        self._peer_segments.clear()  # those still read are kept by their readers


def aligned(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Uninitialised bytes at a multiple of 64, which a CPU device can use without another copy."""
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]


def dial(address: Address, timeout: float = 10.0) -> socket.socket:
    """A connected blocking socket. Raises ConnectError that names the address."""
    sock = socket.socket(address.family, socket.SOCK_STREAM)
    sock.settimeout(timeout)
    try:
        sock.connect(address.sockaddr)
    except OSError as error:
        sock.close()
        raise ConnectError(f"cannot reach a data port at {address}: {error.strerror or error}") from None
    sock.settimeout(None)
    return sock
