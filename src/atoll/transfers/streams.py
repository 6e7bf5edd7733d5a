"""Transfers between machines. A large piece is sent in chunks on a few parallel streams, as the receiver gives credit.

The channel's own connection carries the frames of the two ends (`stream_transfers`) and small pieces. Streams are
further connections, which the side that dialed opens when bulk data is about to be sent. Until they are open, the
channel's own connection carries chunks as well.

A stream carries chunks in one direction, because TLS costs less on a connection that is only written to
(`TlsSender`). Each of its ends has one thread. A chunk takes any free stream, so the chunks of a transfer arrive
in any order, directly in their final memory. A sender is done when the receiver confirms that all chunks have landed,
so the transfers that a broken connection lost are known. GridFTP and the rendezvous protocol of MPI work alike.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import msgspec

from atoll.decodable import decodable
from atoll.errors import AtollError, Code, FrameError, Status, StatusError
from atoll.transfers.frame_socket import FrameSocket
from atoll.transfers.liveness import Liveness
from atoll.transfers.receive_buffer_pool import RECEIVE_BUFFERS
from atoll.transfers.stream_transfers import (
    CHUNK_BYTES,
    MAX_TRANSFERS,
    Chunk,
    Credit,
    GivenUp,
    Landed,
    MoreStreams,
    NoRoom,
    OnEnd,
    Outgoing,
    ReceiveBuffer,
    ReceiveBuffers,
    SendQueue,
    StreamPiece,
)
from atoll.transfers.transfer_engine import Arrivals, Contents, Piece, Received, TransferEngine

# Smaller pieces are sent right after their frame, because a round trip costs more.
STREAM_THRESHOLD = 256 * 1024
STREAMS = 2
MAX_STREAMS = 16
_PART_BYTES = 8 << 20
_IDLE_SECONDS = 5.0

_CODES = frozenset(map(int, Code))
_CHUNKS = msgspec.msgpack.Decoder(decodable(Chunk))


class StreamStatistics(msgspec.Struct, frozen=True):
    """The transfers of a channel that are under way."""

    streams: int  # on which this side sends
    sending: int
    buffer: int  # transfers that this side receives
    pool_bytes: int = 0  # of this side's shared memory


class StreamEngine(TransferEngine):
    """Sends and receives pieces in chunks on one TCP channel.

    The side that dials passes `dial_streams(sends)`, which opens streams on which that side sends, or receives.
    """

    frames: ClassVar[tuple[type[msgspec.Struct], ...]] = (
        StreamPiece,
        Chunk,
        Credit,
        Landed,
        GivenUp,
        NoRoom,
        MoreStreams,
    )
    chunk_bytes: ClassVar[int] = CHUNK_BYTES
    # Frames that wait until the peer reads. A peer causes a few per transfer, and counts a transfer as under way until
    # it has read the last one.
    max_delayed: ClassVar[int] = 4 * MAX_TRANSFERS

    def __init__(self, socket: FrameSocket, dial_streams: Callable[[bool], None] | None = None) -> None:
        self._socket = socket
        self._outgoing = SendQueue(self.chunk_bytes)
        self._receive_buffers = ReceiveBuffers(
            lambda transfer, chunks: self._send_nowait(Credit(transfer, chunks)), self.chunk_bytes
        )
        self._arrivals: Arrivals | None = None
        self._lock = threading.Lock()
        self._announcing = threading.Lock()
        self._streams: list[FrameSocket] = []  # on which this side sends
        self._receiving: list[FrameSocket] = []
        self._writers: set[FrameSocket] = set()  # streams with a writing thread
        self._asked_for_streams = False
        self._peer_asked = False
        self._closed = False
        self._delayed: queue.SimpleQueue[msgspec.Struct | None] | None = None  # frames for a thread that sends them
        RECEIVE_BUFFERS.open()
        self._dial_streams = dial_streams
        self.liveness: Liveness | None = None

    @classmethod
    def reaches(cls, socket: FrameSocket) -> bool:
        return not socket.is_unix

    # ---- sending

    def takes(self, contents: Contents) -> bool:
        return contents.nbytes >= STREAM_THRESHOLD

    def send(self, session: int, feed: int, contents: Contents, more: bool) -> None:
        ended = threading.Event()
        failure: list[BaseException] = []

        def on_end(error: BaseException | None) -> None:
            if error is not None:
                failure.append(error)
            ended.set()

        self.start(session, feed, contents, more, on_end)
        ended.wait()
        if failure:
            raise failure.pop()  # otherwise the error and this frame, with the contents, would refer to each other

    def start(self, session: int, feed: int, contents: Contents, more: bool, on_end: OnEnd) -> None:
        """Start to send a piece. `on_end` is called on any thread when the peer has all bytes, or will not get them.

        Raise what `send` raises if the failure is known at once.
        """
        self._want_streams()
        if self.liveness is not None:
            self.liveness.watch()
        part = _PART_BYTES // self.chunk_bytes if contents.in_parts else 0
        with self._announcing:  # numbers are announced in order
            transfer = self._outgoing.add(session, feed, contents, on_end)
            number = transfer.number
            piece = StreamPiece(session, feed, contents.nbytes, more, number, part, contents.launch, contents.group)
            try:
                self._socket.send(piece)
            except OSError as error:
                if self._outgoing.fail(number, error):
                    return  # `on_end` was called
                raise

    def _write(self, stream: FrameSocket) -> None:
        """Write chunks until there has been nothing to write for a while. The writing thread of a stream."""
        while True:
            taken = self._outgoing.take(_IDLE_SECONDS, partial(self._is_used, stream))
            if taken is None:
                with self._lock:
                    if len(self._outgoing) and not self._closed and self._is_used(stream):
                        continue
                    self._writers.discard(stream)
                return
            transfer, index = taken
            try:
                self._write_chunk(stream, transfer, index)
            except (OSError, AtollError) as error:
                self.abort(error)
            finally:
                self._outgoing.written(transfer)

    def _write_chunk(self, stream: FrameSocket, transfer: Outgoing, index: int) -> None:
        contents = transfer.contents
        start = index * self.chunk_bytes
        stop = min(start + self.chunk_bytes, contents.nbytes)
        try:
            views = contents.slice(start, stop)
        except StatusError as error:
            if self._outgoing.fail(transfer.number, error):
                self._send_later(GivenUp(transfer.number, error.status.code, error.status.message))
            return
        self._send_chunk(stream, transfer, index, views)

    def _send_chunk(self, stream: FrameSocket, transfer: Outgoing, index: int, views: Sequence[memoryview]) -> None:
        stream.send(Chunk(transfer.number, index), views)

    def _is_used(self, stream: FrameSocket) -> bool:
        return stream is not self._socket or not self._streams

    def _start_writers(self) -> None:
        """Start the writing threads that do not run. The caller holds the lock.

        Raise RuntimeError if no thread can be started, as in an exit handler.
        """
        for stream in self._streams or [self._socket]:
            if stream not in self._writers:
                threading.Thread(target=self._write, args=(stream,), name="atoll-stream-out", daemon=True).start()
                self._writers.add(stream)

    # ---- streams

    def _want_streams(self) -> None:
        with self._lock:
            self._start_writers()
            if self._asked_for_streams:
                return
            self._asked_for_streams = True
        if self._dial_streams is not None:
            self._dial(sends=True)
        else:
            self._send_nowait(MoreStreams())

    def _dial(self, sends: bool) -> None:
        assert self._dial_streams is not None
        dialing = threading.Thread(target=self._dial_streams, args=(sends,), name="atoll-stream-dial", daemon=True)
        with contextlib.suppress(RuntimeError):  # in an exit handler, where the channel has no further streams
            dialing.start()

    def run_stream(self, stream: FrameSocket, sends: bool) -> None:
        """Use a further connection to the same peer, on which this side only `sends` or only receives.

        Read it until it ends, which also ends the channel. Raise FrameError if the peer violates the protocol.
        """
        with self._lock:
            streams = self._streams if sends else self._receiving
            if self._closed or len(streams) >= MAX_STREAMS:
                stream.shut_down()
                return
            streams.append(stream)
            if sends and self._writers:
                self._start_writers()
        self._outgoing.wake()
        try:
            while True:
                frame, _ = stream.read_frame(_CHUNKS)
                if sends:
                    raise FrameError("a chunk arrived on a stream of the other direction")
                self._read_chunk(stream, frame)
        except EOFError:
            self.abort(ConnectionResetError("a stream of the channel has ended"))
        except BaseException as error:
            self.abort(error)
            if isinstance(error, FrameError) or not isinstance(error, OSError):
                raise

    # ---- receiving

    def receive_for(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals

    def handle(self, frame: Any, descriptor: int | None) -> Received | None:
        match frame:
            case StreamPiece():
                self._announced(frame)
            case Chunk():
                self._read_chunk(self._socket, frame)
            case Credit(transfer, chunks):
                self._outgoing.credit(transfer, chunks)
                with self._lock:
                    self._start_writers()
            case Landed(transfer):
                self._outgoing.landed(transfer)
            case GivenUp(transfer, code, message):
                self._peer_gave_up(transfer, _error(code, message).status)
            case NoRoom(transfer, code, message):
                self._outgoing.fail(transfer, _error(code, message))
            case MoreStreams() if self._dial_streams is not None and not self._peer_asked:
                self._peer_asked = True
                self._dial(sends=False)
        return None

    def _announced(self, piece: StreamPiece) -> None:
        assert self._arrivals is not None
        buffer = self._receive_buffers.announce(piece)
        if self.liveness is not None:
            self.liveness.watch()

        def grant() -> None:
            try:
                self._receive_buffers.admit(buffer)
            except MemoryError as error:
                text = f"this host has no memory for a piece of {piece.nbytes} bytes: {error}"
                self._refuse(piece, Status(Code.RESOURCE_EXHAUSTED, text))

        self._arrivals.admit(piece, piece.launch, grant, partial(self._refuse, piece))
        if self._closed:  # on another thread, which may have withdrawn the pieces before
            self._arrivals.withdraw(piece)

    def _refuse(self, piece: StreamPiece, status: Status) -> None:
        assert self._arrivals is not None
        if self._receive_buffers.drop(piece.transfer) is None:
            return
        self._send_later(NoRoom(piece.transfer, status.code, status.message))
        self._arrivals.withdraw(piece)
        self._arrivals.fail(piece, status)

    def _peer_gave_up(self, transfer: int, status: Status) -> None:
        assert self._arrivals is not None
        piece = self._receive_buffers.drop(transfer)
        if piece is not None:
            self._arrivals.withdraw(piece)
            self._arrivals.fail(piece, status)

    def _read_chunk(self, stream: FrameSocket, chunk: Chunk) -> None:
        buffer, target = self._receive_buffers.target(chunk.transfer, chunk.index)
        stream.read_into(target)
        self._chunk_landed(buffer, chunk.index)

    def _chunk_landed(self, buffer: ReceiveBuffer, index: int) -> None:
        if self._receive_buffers.landed(buffer, index, self._deliver):
            self._send_nowait(Landed(buffer.piece.transfer))

    def _deliver(self, piece: StreamPiece, delivery: tuple[Any, bool, Callable[[], None]]) -> None:
        assert self._arrivals is not None
        content, more, done = delivery
        whole = piece if piece.group else Piece(piece.session, piece.feed, piece.nbytes, more)
        self._arrivals.take(whole, content, done)

    # ---- small frames

    def _send_nowait(self, frame: msgspec.Struct) -> None:
        """Send a small frame without waiting for the peer, because the thread may be one that serves all sessions."""
        try:
            if self._delayed is None and self._socket.send_nowait(frame):
                return
        except OSError:
            return  # the channel has ended
        self._send_later(frame)

    def _send_later(self, frame: msgspec.Struct) -> None:
        if self._delayed is not None and self._delayed.qsize() >= self.max_delayed:
            self.abort(ConnectionAbortedError(f"the peer does not read: {self.max_delayed} frames wait for it"))
            return
        with self._lock:
            if self._closed:
                return
            if self._delayed is None:
                self._delayed = queue.SimpleQueue()
                threading.Thread(
                    target=self._send_delayed, args=(self._delayed,), name="atoll-stream-say", daemon=True
                ).start()
            self._delayed.put(frame)

    def _send_delayed(self, frames: queue.SimpleQueue[msgspec.Struct | None]) -> None:
        while (frame := frames.get()) is not None:
            try:
                self._socket.send(frame)
            except OSError:
                return

    # ---- the end

    def sockets(self) -> list[FrameSocket]:
        """Return all connections of the channel."""
        return [self._socket, *self._streams, *self._receiving]

    def is_busy(self) -> bool:
        return bool(len(self._outgoing) or len(self._receive_buffers))

    def abort(self, error: BaseException) -> None:
        """End the channel's connections, and fail all transfers with `error`, or its text if it is not an OSError."""
        self._outgoing.close(error if isinstance(error, OSError) else ConnectionAbortedError(str(error)))
        for socket in self.sockets():
            socket.shut_down()

    def statistics(self) -> StreamStatistics:
        return StreamStatistics(len(self._streams), len(self._outgoing), len(self._receive_buffers))

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            streams = [*self._streams, *self._receiving]
            if self._delayed is not None:
                self._delayed.put(None)
        for stream in streams:
            stream.shut_down()
        self._outgoing.close(BrokenPipeError("the channel is closed"))
        for piece in self._receive_buffers.close():
            if self._arrivals is not None:
                self._arrivals.withdraw(piece)
        RECEIVE_BUFFERS.close()


def _error(code: int, message: str) -> StatusError:
    """Return the error that a peer states. Raise FrameError if its code is not that of an error."""
    if not code or code not in _CODES:
        raise FrameError(f"{code} is not the code of an error")
    return StatusError(Code(code), message)
