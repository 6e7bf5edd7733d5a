"""Transfers between machines: large pieces go in chunks over a few parallel streams, as far as the receiver has room.

The channel's own connection carries what the two ends say (`stream_frames`) and small pieces; the streams are further
connections, which the side that dialed opens when bulk is about to be sent. Until they are there, chunks go on the
channel's own connection.

A stream carries chunks in one direction: TLS costs less where a connection is only written to (`wire.tls.one_way`). At
each of its ends it has one thread. Chunks of a transfer take whichever stream is free, so they come in any order,
straight into the memory that they are for. A sender is done when the receiver says that all has
landed: what was lost with a connection is known by name. (The idea is that of GridFTP, and of MPI's rendezvous.)
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import msgspec

from atoll.errors import AtollError, Code, FrameError, Status, StatusError
from atoll.transfers.frame_socket import FrameSocket
from atoll.transfers.liveness import Liveness
from atoll.transfers.receive_buffer_pool import RECEIVE_BUFFERS
from atoll.transfers.receive_buffers import ReceiveBuffer, ReceiveBuffers
from atoll.transfers.send_queue import OnEnd, Outgoing, SendQueue
from atoll.transfers.stream_frames import CHUNK_BYTES, Chunk, Credit, GivenUp, Landed, MoreStreams, NoRoom, StreamPiece
from atoll.transfers.transfer_engine import Arrivals, Contents, Piece, Received, TransferEngine

# Smaller pieces follow their frame: a round trip costs more.
STREAM_THRESHOLD = 256 * 1024
STREAMS = 2
MAX_STREAMS = 16
_PART_BYTES = 8 << 20
_IDLE_SECONDS = 5.0

_CHUNKS = msgspec.msgpack.Decoder(Chunk)


@dataclass(frozen=True)
class StreamStatistics:
    """What is under way on a channel now. `streams` are those on which this side sends."""

    streams: int
    sending: int
    buffer: int


class StreamEngine(TransferEngine):
    """Sends in chunks, over TCP; both directions of one channel.

    `dial_streams(sends)` is set on the side that dials: it opens streams on which that side sends, or receives.
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

    def __init__(self, socket: FrameSocket) -> None:
        self._socket = socket
        self._outgoing = SendQueue(self.chunk_bytes)
        self._receive_buffers = ReceiveBuffers(
            lambda transfer, chunks: self._say(Credit(transfer, chunks)), self.chunk_bytes
        )
        self._arrivals: Arrivals | None = None
        self._lock = threading.Lock()
        self._announcing = threading.Lock()
        self._streams: list[FrameSocket] = []  # on which this side sends
        self._receiving: list[FrameSocket] = []
        self._writers: set[FrameSocket] = set()  # that have a thread now
        self._asked_for_streams = False
        self._peer_asked = False
        self._closed = False
        self._to_say: queue.SimpleQueue[msgspec.Struct | None] | None = None
        RECEIVE_BUFFERS.open()
        self.dial_streams: Callable[[bool], None] | None = None
        self.liveness: Liveness | None = None

    @classmethod
    def reaches(cls, socket: FrameSocket) -> bool:
        return not socket.is_unix

    # ---- sending

    def takes(self, contents: Contents) -> bool:
        return contents.nbytes >= STREAM_THRESHOLD

    def send(self, session: int, feed: int, contents: Contents, more: bool) -> None:
        ended = threading.Event()
        failure: list[BaseException | None] = []

        def on_end(error: BaseException | None) -> None:
            failure.append(error)
            ended.set()

        self.start(session, feed, contents, more, on_end)
        ended.wait()
        if failure[0] is not None:
            raise failure[0]

    def start(self, session: int, feed: int, contents: Contents, more: bool, on_end: OnEnd) -> None:
        """Sends without waiting: `on_end` is called when the peer has all bytes, or will not get them, on any thread.

        Raises what `send` raises, where that is known at once.
        """
        self._want_streams()
        if self.liveness is not None:
            self.liveness.watch()
        part = _PART_BYTES // self.chunk_bytes if contents.in_parts else 0
        with self._announcing:  # numbers are announced in order
            transfer = self._outgoing.add(session, feed, contents, on_end)
            number = transfer.number
            piece = StreamPiece(session, feed, contents.nbytes, more, number, part, contents.launch)
            try:
                self._socket.send(piece)
            except OSError as error:
                if self._outgoing.fail(number, error):
                    return  # `on_end` was told
                raise

    def _write(self, stream: FrameSocket) -> None:
        """A writing thread: until there has been nothing to write for a while."""
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
                self._say_later(GivenUp(transfer.number, error.status.code, error.status.message))
            return
        self._send_chunk(stream, transfer, index, views)

    def _send_chunk(self, stream: FrameSocket, transfer: Outgoing, index: int, views: Sequence[memoryview]) -> None:
        stream.send(Chunk(transfer.number, index), views)

    def _is_used(self, stream: FrameSocket) -> bool:
        return stream is not self._socket or not self._streams

    def _start_writers(self) -> None:
        """The caller has the lock."""
        for stream in self._streams or [self._socket]:
            if stream not in self._writers:
                self._writers.add(stream)
                threading.Thread(target=self._write, args=(stream,), name="atoll-stream-out", daemon=True).start()

    # ---- streams

    def _want_streams(self) -> None:
        with self._lock:
            self._start_writers()
            if self._asked_for_streams:
                return
            self._asked_for_streams = True
        if self.dial_streams is not None:
            self._dial(sends=True)
        else:
            self._say(MoreStreams())

    def _dial(self, sends: bool) -> None:
        assert self.dial_streams is not None
        threading.Thread(target=self.dial_streams, args=(sends,), name="atoll-stream-dial", daemon=True).start()

    def run_stream(self, stream: FrameSocket, sends: bool) -> None:
        """A further connection to the same peer, on which this side only `sends`, or only receives: reads it to its
        end, which is the channel's end, too.

        Raises FrameError where the peer sends what does not belong there.
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
                    raise FrameError("a chunk came against the direction of its stream")
                self._read_chunk(stream, frame)
        except EOFError:
            self.abort(ConnectionResetError("a stream of the channel has ended"))
        except BaseException as error:
            self.abort(error if isinstance(error, OSError) else ConnectionAbortedError(str(error)))
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
                self._peer_gave_up(transfer, Status(_code(code), message))
            case NoRoom(transfer, code, message):
                self._outgoing.fail(transfer, StatusError(_code(code), message))
            case MoreStreams() if self.dial_streams is not None and not self._peer_asked:
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

        self._arrivals.admit(piece, piece.launch, grant)

    def _refuse(self, piece: StreamPiece, status: Status) -> None:
        assert self._arrivals is not None
        if self._receive_buffers.drop(piece.transfer) is None:
            return
        self._say_later(NoRoom(piece.transfer, status.code, status.message))
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
            self._say(Landed(buffer.piece.transfer))

    def _deliver(self, piece: StreamPiece, delivery: tuple[Any, bool, Callable[[], None]]) -> None:
        assert self._arrivals is not None
        content, more, done = delivery
        self._arrivals.take(Piece(piece.session, piece.feed, piece.nbytes, more), content, done)

    # ---- what is said

    def _say(self, frame: msgspec.Struct) -> None:
        """Sends a small frame without waiting for the peer. Any thread, such as one that serves all sessions."""
        try:
            if self._to_say is None and self._socket.send_nowait(frame):
                return
        except OSError:
            return  # the channel has ended
        self._say_later(frame)

    def _say_later(self, frame: msgspec.Struct) -> None:
        with self._lock:
            if self._closed:
                return
            if self._to_say is None:
                self._to_say = queue.SimpleQueue()
                threading.Thread(target=self._speak, args=(self._to_say,), name="atoll-stream-say", daemon=True).start()
            self._to_say.put(frame)

    def _speak(self, frames: queue.SimpleQueue[msgspec.Struct | None]) -> None:
        while (frame := frames.get()) is not None:
            try:
                self._socket.send(frame)
            except OSError:
                return

    # ---- the end

    def sockets(self) -> list[FrameSocket]:
        """All connections of the channel."""
        return [self._socket, *self._streams, *self._receiving]

    def is_busy(self) -> bool:
        return bool(len(self._outgoing) or len(self._receive_buffers))

    def abort(self, error: BaseException) -> None:
        """The channel's connections end, and with them all transfers, by `error`."""
        self._outgoing.close(error)
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
            if self._to_say is not None:
                self._to_say.put(None)
        for stream in streams:
            stream.shut_down()
        self._outgoing.close(BrokenPipeError("the channel is closed"))
        for piece in self._receive_buffers.close():
            if self._arrivals is not None:
                self._arrivals.withdraw(piece)
        RECEIVE_BUFFERS.close()


def _code(code: int) -> Code:
    try:
        return Code(code)
    except ValueError:
        raise FrameError(f"{code} is no status") from None
