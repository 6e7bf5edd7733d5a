"""A channel of the data plane: bulk bytes between two processes, past the controller, on a blocking socket.

A channel carries pieces of feeds. It chooses how the bytes of each piece travel, by where the peer is and by what the
piece is made of; the ways are the engines of `transfers.transfer_kinds`.

Bounded: a sender waits while its engine has no memory left, and for the socket otherwise.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Union

import msgspec

from atoll.errors import AccessError, AtollError, ConnectError, FrameError, StatusError
from atoll.protocol.messages import INTERNAL_FEEDS
from atoll.transfers.arrivals import ChannelArrivals, OnFailure, OnPiece, ReceiveBudget
from atoll.transfers.frame_socket import FrameSocket
from atoll.transfers.liveness import Alive, Liveness, Probe
from atoll.transfers.piece_contents import Buffers, as_views
from atoll.transfers.send_queue import OnEnd
from atoll.transfers.shared_chunks import SharedChunksEngine
from atoll.transfers.socket_engine import SocketEngine
from atoll.transfers.streams import STREAMS, StreamEngine
from atoll.transfers.transfer_engine import Contents, Piece, TransferEngine
from atoll.transfers.transfer_kinds import KINDS
from atoll.wire.address import Address
from atoll.wire.byte_stream import Stream, dial_stream
from atoll.wire.framing import MAX_FIRST_FRAME
from atoll.wire.tls.identity import Identity

_log = logging.getLogger(__name__)

MAX_PIECE = 1 << 40
PART_BYTES = 8 << 20
# Pieces of feeds from here on wait for nothing that the peer says, as chunks do for credits: their sender may be the
# thread that reads another channel, which the peer needs to go on.
FIRST_INLINE_FEED = 1 << 62
# Pieces of session 0 with this number are messages between hosts: see `worker.host_links`.
CONTROL = FIRST_INLINE_FEED


class Open(msgspec.Struct, frozen=True, array_like=True, tag="o"):
    """The first frame of a connection: for which session, and the secret that opens it (session 0: between hosts).

    `channel` is the dialer's own name for the channel; with `stream`, this is a further connection of that one, on
    which the dialer only sends, or only receives.
    """

    session: int
    secret: str
    channel: str = ""
    stream: Literal["", "sends", "receives"] = ""


class Passed(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """A connected socket comes along, for whom it may concern."""


# A socket that the peer has passed: the receiver's own from now on.
OnSocket = Callable[[socket.socket], None]


@dataclass(frozen=True)
class ChannelStatistics:
    """Counts since the channel was made. Bytes are those on the socket; `engines` has what each kind says, by name."""

    frames_in: int
    frames_out: int
    socket_bytes_in: int
    socket_bytes_out: int
    engines: dict[str, Any]


class DataChannel:
    """One connection between data ports, and its streams. `send*` may be called from any thread; one calls `receive`.

    Both ends must be read: a sender learns from the receiver how much it may send.

    Sending waits while the peer does not read. It raises OSError (TimeoutError is one) where the peer cannot be
    reached, and StatusError where the contents cannot be had.
    """

    def __init__(self, stream: Stream | socket.socket, kinds: Sequence[type[TransferEngine]] = KINDS) -> None:
        self._socket = FrameSocket(stream)
        self._engines = [kind(self._socket) for kind in kinds if kind.reaches(self._socket)]
        ways = [(type(engine), (engine.takes, engine.send)) for engine in self._engines]
        self._between_hosts = [way for _, way in ways]
        self._choices = [way for kind, way in ways if kind is not SharedChunksEngine]
        self._in_place = [way for kind, way in ways if not issubclass(kind, StreamEngine)]
        self._handlers = {frame: engine.handle for engine in self._engines for frame in engine.frames}
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
            Union[Open, Passed, Probe, Alive, *(frame for kind in kinds for frame in kind.frames)]
        )
        self._streams = next((engine for engine in self._engines if type(engine) is StreamEngine), None)
        self.is_closed = False
        self.carries_control = False  # messages that nobody sends again
        self.is_local = self._socket.is_unix  # whether it takes sockets
        self.silence: TimeoutError | None = None  # by which it has ended
        self.liveness = self._watch(self._streams) if self._streams is not None else None

    def _watch(self, streams: StreamEngine) -> Liveness:
        liveness = Liveness(self._socket, streams.sockets, streams.is_busy, self.fail)
        for engine in self._engines:
            if isinstance(engine, StreamEngine | SocketEngine):
                engine.liveness = liveness
        self._handlers[Probe] = self._handlers[Alive] = lambda frame, descriptor: liveness.handle(frame)
        return liveness

    def fail(self, error: TimeoutError) -> None:
        """The peer is silent: all that is under way fails with `error`, and the channel has ended."""
        self.silence = error
        if self._streams is not None:
            self._streams.abort(error)
        self._socket.shut_down()

    @classmethod
    def dial(
        cls, address: Address, timeout: float = 10.0, identity: Identity | None = None, one_way: bool = False
    ) -> DataChannel:
        """A channel to the data port at `address`, yet to be opened; `one_way`: one that only sends.

        Raises ConnectError that names the address.
        """
        return cls(dial_stream(address, "host", identity, what="a data port", timeout=timeout, one_way=one_way))

    @classmethod
    def connect(
        cls, address: Address, session: int, secret: str, identity: Identity | None = None, timeout: float = 10.0
    ) -> DataChannel:
        """A channel to the data port at `address`, opened for the session. Raises ConnectError, and OSError."""
        channel = cls.dial(address, timeout=timeout, identity=identity)
        name = os.urandom(16).hex() if channel._streams is not None else ""
        try:
            channel.open(session, secret, name)
        except OSError:
            channel.close()
            raise
        if channel._streams is not None:
            opening = Open(session, secret, name)
            channel._streams.dial_streams = partial(channel._dial_streams, address, identity, opening)
        return channel

    def _dial_streams(self, address: Address, identity: Identity | None, opening: Open, sends: bool) -> None:
        """Opens streams, as many as can be had: without any, bulk goes along the channel's own connection."""
        assert self._streams is not None
        opening = msgspec.structs.replace(opening, stream="sends" if sends else "receives")
        for _ in range(STREAMS):
            try:
                stream = DataChannel.dial(address, identity=identity, one_way=sends)
            except ConnectError as error:
                _log.warning("a stream of a data channel cannot be opened: %s", error)
                return
            try:
                stream._socket.send(opening)
            except OSError as error:
                _log.warning("a stream of a data channel cannot be opened: %s", error)
                stream.close()
                return
            threading.Thread(target=self._run_dialed, args=(stream, sends), name="atoll-stream-in", daemon=True).start()

    def _run_dialed(self, stream: DataChannel, sends: bool) -> None:
        try:
            self.run_stream(stream, sends)
        except (AtollError, MemoryError) as error:
            _log.warning("a stream of a data channel ends: %s", error)
        finally:
            stream.close()

    def run_stream(self, stream: DataChannel, sends: bool) -> None:
        """Has a further connection of this channel, on which this side only sends or only receives, until it ends.

        Raises FrameError.
        """
        if self._streams is None:
            raise FrameError("this channel has no streams")
        self._streams.run_stream(stream._socket, sends)

    @property
    def peer_role(self) -> str:
        """That of the peer's certificate; "" without TLS."""
        return self._socket.peer_role

    def secure(self) -> None:
        """The handshake of who has been dialed, where there is to be one. Raises ConnectError."""
        self._socket.secure()

    # ---- sending

    def open(self, session: int, secret: str, channel: str = "") -> None:
        """Says who this is; before all else, by who has dialed."""
        self._socket.send(Open(session, secret, channel))

    def send(self, session: int, feed: int, contents: Sequence[Any]) -> None:
        """Sends buffers, one after the other, as one piece."""
        self._send(session, feed, Buffers(as_views(contents)), False)

    def start(self, session: int, feed: int, contents: Contents, on_end: OnEnd) -> None:
        """Sends one piece, without waiting for the receiver's room where that may take long.

        `on_end` is called once, on any thread, when it is over: with None; with OSError where the channel has ended;
        with StatusError where that is known to the receiver, too. Raises as `send` does: then `on_end` is not called.
        """
        if self._streams is not None and self._streams.takes(contents):
            self._streams.start(session, feed, contents, False, on_end)
            return
        self._send(session, feed, contents, False)
        on_end(None)

    def send_in_parts(self, session: int, feed: int, content: Any) -> None:
        """Sends one buffer, in several pieces where it is large: the receiver works on one while the next is copied."""
        view = memoryview(content).cast("B") if memoryview(content).nbytes else memoryview(b"")
        if self._streams is not None and self._streams.takes(whole := Buffers((view,), in_parts=True)):
            self._streams.send(session, feed, whole, False)
            return
        for start in range(0, max(1, view.nbytes), PART_BYTES):
            part = view[start : start + PART_BYTES]
            self._send(session, feed, Buffers((part,)), start + PART_BYTES < view.nbytes)

    def send_contents(self, session: int, feed: int, contents: Contents) -> None:
        """Sends one piece: what is written or read only now goes straight into the memory that it travels in."""
        self._send(session, feed, contents, False)

    def pass_socket(self, sock: socket.socket) -> None:
        """Passes a socket to a local peer, which closes it where it has no use for it. The caller's own stays open."""
        self._socket.send(Passed(), descriptor=sock.fileno())

    def _send(self, session: int, feed: int, contents: Contents, more: bool) -> None:
        if feed < INTERNAL_FEEDS:
            ways = self._choices
        else:
            ways = self._between_hosts if feed < FIRST_INLINE_FEED else self._in_place
        for takes, send in ways:
            if takes(contents):
                try:
                    send(session, feed, contents, more)
                except OSError as error:
                    raise self.silence or error from None
                return
        raise AssertionError("no kind of transfer takes these contents")

    def can_send_nowait(self, nbytes: int) -> bool:
        """Whether sending so much would not wait for the peer. So much is small: it goes along the socket."""
        return self._socket.can_send_nowait(nbytes)

    # ---- receiving

    def receive_open(self) -> Open:
        """The peer's first frame. Raises FrameError for any other, and EOFError where the connection ends before."""
        frame, descriptor = self._socket.read_frame(self._decoder, MAX_FIRST_FRAME)
        if descriptor is not None:
            os.close(descriptor)
        if not isinstance(frame, Open):
            raise FrameError("the first frame on a data port must open it")
        return frame

    def receive(
        self,
        on_piece: OnPiece,
        on_failure: OnFailure | None = None,
        on_socket: OnSocket | None = None,
        budget: ReceiveBudget | None = None,
    ) -> None:
        """Reads until the peer closes. Pieces are given to `on_piece`, those of one feed in order: on this thread, or
        on that of a stream.

        A piece that cannot be had is given to `on_failure`; without that, it ends the channel by its StatusError.
        `room` is asked before the bytes of a large piece come. Raises TimeoutError where the peer is silent, FrameError
        where it sends what is no frame, or ends inside of a piece, and AccessError where it does not trust this one.
        """
        arrivals = ChannelArrivals(on_piece, on_failure, budget)
        for engine in self._engines:
            engine.receive_for(arrivals)
        while True:
            try:
                frame, descriptor = self._socket.read_frame(self._decoder)
            except BlockingIOError:  # nothing has come for some seconds
                for engine in self._engines:
                    engine.trim()
                continue
            except (FrameError, AccessError):
                raise
            except (EOFError, OSError):
                if self.silence is not None:
                    raise self.silence from None
                return
            try:
                if isinstance(frame, Passed):
                    if on_socket is not None and descriptor is not None:
                        on_socket(_socket_of(descriptor))
                else:
                    self._handle(frame, descriptor, arrivals)
            except EOFError:
                raise FrameError("the connection ended inside a piece") from None
            finally:
                if descriptor is not None:
                    os.close(descriptor)

    def _handle(self, frame: Any, descriptor: int | None, arrivals: ChannelArrivals) -> None:
        handle = self._handlers.get(type(frame))
        if handle is None:
            raise FrameError(
                "a data port is opened once" if isinstance(frame, Open) else f"no {type(frame).__name__} to this peer"
            )
        if not isinstance(frame, Piece):
            handle(frame, descriptor)
            return
        if not 0 <= frame.nbytes <= MAX_PIECE:
            raise FrameError(f"a piece of {frame.nbytes} bytes")
        try:
            received = handle(frame, descriptor)
        except StatusError as error:
            arrivals.fail(frame, error.status)
            return
        if received is not None:
            arrivals.take(frame, *received)

    # ---- the end

    def shut_down(self) -> None:
        """Ends the connection; threads inside of `send` and `receive` come out. The channel is still to be closed."""
        self.is_closed = True
        self._socket.shut_down()

    def close(self) -> None:
        """Ends the connection and frees all memory; threads inside of `send` and `receive` come out."""
        self.is_closed = True
        self._socket.close()
        if self.liveness is not None:
            self.liveness.close()
        for engine in self._engines:
            engine.close()

    def statistics(self) -> ChannelStatistics:
        said = {type(engine).__name__: engine.statistics() for engine in self._engines}
        return ChannelStatistics(
            self._socket.frames_in,
            self._socket.frames_out,
            self._socket.bytes_in,
            self._socket.bytes_out,
            {name: each for name, each in said.items() if each is not None},
        )


def _socket_of(descriptor: int) -> socket.socket:
    """A descriptor of its own for the socket. Raises OSError for what is none."""
    own = os.dup(descriptor)
    try:
        return socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise
