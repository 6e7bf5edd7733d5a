"""A channel of the data plane, which carries bulk bytes between two processes on a blocking socket.

A channel carries pieces of feeds. For each piece it chooses an engine of `transfers.transfer_kinds`, based on where the
peer is and on what the piece consists of.

Bounded: a sender waits for the socket, and while its engine has no memory left.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, Protocol, Union

import msgspec

from atoll.decodable import decodable
from atoll.errors import AccessError, AtollError, ConnectError, FrameError, Status, StatusError, copied
from atoll.protocol.number_ranges import CALL_FEEDS, HOST_FEEDS, is_call
from atoll.transfers.frame_socket import FrameSocket
from atoll.transfers.liveness import Alive, Liveness, Probe
from atoll.transfers.piece_contents import BufferContents, as_views
from atoll.transfers.shared_chunks import SharedChunksEngine
from atoll.transfers.socket_engine import SocketEngine
from atoll.transfers.stream_transfers import OnEnd
from atoll.transfers.streams import STREAMS, StreamEngine
from atoll.transfers.transfer_engine import Contents, Group, Piece, TransferEngine, group_bytes, group_of
from atoll.transfers.transfer_kinds import KINDS
from atoll.wire.address import Address
from atoll.wire.byte_stream import Stream, dial_stream
from atoll.wire.framing import MAX_FIRST_FRAME
from atoll.wire.tls.identity import Identity

_log = logging.getLogger(__name__)

MAX_PIECE = 1 << 40
PART_BYTES = 8 << 20
_FIRST_HOST_FEED = HOST_FEEDS.start
# Pieces of session 0 with this number are messages between hosts: see `worker.host_links`.
CONTROL = CALL_FEEDS.start


class Open(msgspec.Struct, frozen=True, array_like=True, tag="o"):
    """The first frame of a connection.

    `secret` is the session's, or the secret between hosts if `session` is 0. `channel` is the dialer's name for the
    channel. If `stream` is set, this is a further connection of that channel, on which the dialer only sends or only
    receives.
    """

    session: int
    secret: str
    channel: str = ""
    stream: Literal["", "sends", "receives"] = ""


class TakesReads(msgspec.Struct, frozen=True, array_like=True, tag="h"):
    """A host tells a proxy that it takes requests for the contents of arrays: see `call_messages.ReadWanted`.

    Hosts of null devices do not, because they call no clients.
    """


class Passed(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """A connected socket accompanies this frame, for the receiver's `on_socket`. `host` has its other end, if known."""

    host: int = -1


class PassedMemory(msgspec.Struct, frozen=True, array_like=True, tag="y"):
    """A descriptor of memory accompanies this frame, for the receiver's `on_memory`."""


# Receives a piece, its bytes, and a function to call once the bytes have been read.
OnPiece = Callable[[Piece, Any, Callable[[], None]], None]
# Receives a piece that failed, and the reason. The channel continues.
OnFailure = Callable[[Piece, Status], None]
# Receives a socket that the peer has passed, and owns it; and the host that has the other end, or -1.
OnSocket = Callable[[socket.socket, int], None]
# Receives a descriptor of memory that the peer has passed. It is open only during the call.
OnMemory = Callable[[int], None]


class ReceiveBudget(Protocol):
    """Decides when the bytes of large pieces may arrive. Called on any thread; must not block."""

    def admit(self, piece: Piece, launch: int, grant: Callable[[], None], refuse: Callable[[Status], None]) -> None:
        """Call `grant` once the bytes may arrive, now or later. The piece, its failure or `withdraw` follows.

        Call `refuse` instead if the bytes may never arrive. The failure of the piece follows.
        """

    def withdraw(self, piece: Piece) -> None:
        """Forget a piece that was passed to `admit` and will not arrive."""


class ChannelStatistics(msgspec.Struct, frozen=True):
    """Counts since the channel was made."""

    frames_in: int
    frames_out: int
    socket_bytes_in: int
    socket_bytes_out: int
    engines: dict[str, Any]  # statistics of each kind of transfer, by the name of its class


class _Dialed(msgspec.Struct, frozen=True):
    """How a channel was dialed, so that its streams can be dialed as well."""

    address: Address
    identity: Identity | None
    opening: Open


class DataChannel:
    """A connection between data ports, with its streams. Any thread may send, and one thread calls `receive`.

    Both ends have to call `receive`, because the receiver sends the sender its credits.

    Sending waits while the peer does not read. It raises OSError (such as TimeoutError) if the peer cannot be reached,
    and StatusError if the contents fail.
    """

    def __init__(
        self,
        stream: Stream | socket.socket,
        kinds: Sequence[type[TransferEngine]] = KINDS,
        dialed: _Dialed | None = None,
        awaits: Callable[[], bool] = lambda: False,
    ) -> None:
        self._socket = FrameSocket(stream)
        dial_streams = None if dialed is None else partial(self._dial_streams, dialed)
        self._engines = [
            StreamEngine(self._socket, dial_streams) if kind is StreamEngine else kind(self._socket)
            for kind in kinds
            if kind.reaches(self._socket)
        ]
        ways = [(type(engine), (engine.takes, engine.send)) for engine in self._engines]
        self._between_hosts = [way for _, way in ways]
        self._choices = [way for kind, way in ways if kind is not SharedChunksEngine]
        self._in_place = [way for kind, way in ways if not issubclass(kind, StreamEngine)]
        self._handlers = {frame: engine.handle for engine in self._engines for frame in engine.frames}
        self._handlers[TakesReads] = self._note_reads
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
            decodable(
                Union[
                    Open,
                    TakesReads,
                    Passed,
                    PassedMemory,
                    Probe,
                    Alive,
                    *(frame for kind in kinds for frame in kind.frames),
                ]
            )
        )
        self._streams = next((engine for engine in self._engines if type(engine) is StreamEngine), None)
        self._chunks = next((engine for engine in self._engines if type(engine) is SharedChunksEngine), None)
        self.is_closed = False
        self.takes_reads = False  # whether the peer takes requests for the contents of arrays
        self.carries_control = False  # messages that are not sent again if they are lost
        self.is_local = self._socket.is_unix  # whether it can pass sockets
        self.silence: TimeoutError | None = None  # set if a silence of the peer has ended the channel
        self.liveness = self._watch(self._streams, awaits) if self._streams is not None else None

    def _watch(self, streams: StreamEngine, awaits: Callable[[], bool]) -> Liveness:
        liveness = Liveness(self._socket, streams.sockets, streams.is_busy, self.fail, awaits)
        for engine in self._engines:
            if isinstance(engine, StreamEngine | SocketEngine):
                engine.liveness = liveness
        self._handlers[Probe] = self._handlers[Alive] = lambda frame, descriptor: liveness.handle(frame)
        return liveness

    def fail(self, error: TimeoutError) -> None:
        """End the channel because its peer is silent. All transfers fail with `error`."""
        self.silence = copied(error)
        if self._streams is not None:
            self._streams.abort(error)
        self._socket.shut_down()

    @classmethod
    def dial(
        cls, address: Address, timeout: float = 10.0, identity: Identity | None = None, one_way: bool = False
    ) -> DataChannel:
        """Return a channel to the data port at `address`, on which the caller has to call `open`.

        A `one_way` channel only sends. Raise ConnectError, which names the address.
        """
        return cls(dial_stream(address, "host", identity, what="a data port", timeout=timeout, one_way=one_way))

    @classmethod
    def connect(
        cls,
        address: Address,
        session: int,
        secret: str,
        identity: Identity | None = None,
        timeout: float = 10.0,
        awaits: Callable[[], bool] = lambda: False,
    ) -> DataChannel:
        """Return a channel to the data port at `address`, opened for the session. Raise ConnectError or OSError.

        `awaits()` returns whether the caller awaits anything of the peer, on any thread.
        """
        dialed = _Dialed(address, identity, Open(session, secret, os.urandom(16).hex()))
        channel = cls(
            dial_stream(address, "host", identity, what="a data port", timeout=timeout), KINDS, dialed, awaits
        )
        try:
            channel.open(session, secret, dialed.opening.channel if channel._streams is not None else "")
        except OSError:
            channel.close()
            raise
        return channel

    def _dial_streams(self, dialed: _Dialed, sends: bool) -> None:
        """Open as many streams as possible. Without any, bulk data uses the channel's own connection."""
        opening = msgspec.structs.replace(dialed.opening, stream="sends" if sends else "receives")
        for _ in range(STREAMS):
            try:
                stream = DataChannel.dial(dialed.address, identity=dialed.identity, one_way=sends)
            except ConnectError as error:
                _log.warning("a stream of a data channel cannot be opened: %s", error)
                return
            try:
                stream.send_opening(opening)
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
        """Serve a further connection of this channel, on which this side only sends or only receives, until it ends.

        Raise FrameError if the peer violates the protocol.
        """
        if self._streams is None:
            raise FrameError("this channel has no streams")
        self._streams.run_stream(stream._socket, sends)

    @property
    def peer_role(self) -> str:
        """The role in the peer's certificate, or "" without TLS."""
        return self._socket.peer_role

    def secure(self) -> None:
        """Perform the TLS handshake of the side that was dialed, if there is one. Raise ConnectError if it fails."""
        self._socket.secure()

    # ---- sending

    def open(self, session: int, secret: str, channel: str = "") -> None:
        """Send the first frame, which authenticates the side that dialed."""
        self.send_opening(Open(session, secret, channel))

    def send_opening(self, opening: Open) -> None:
        """Send the first frame of a channel, or of one of its streams."""
        self._socket.send(opening)

    def offer_reads(self) -> None:
        """Tell the proxy that dialed that this host takes requests for the contents of arrays."""
        self._socket.send(TakesReads())

    def _note_reads(self, frame: TakesReads, descriptor: int | None) -> None:
        self.takes_reads = True

    def send(self, session: int, feed: int, contents: Sequence[Any], more: bool = False) -> None:
        """Send the concatenation of buffers as one piece. With `more`, further pieces of the feed will follow."""
        self._send(session, feed, BufferContents(as_views(contents)), more)

    def start(self, session: int, feed: int, contents: Contents, on_end: OnEnd) -> None:
        """Start to send one piece, without waiting until the receiver has memory for a large one.

        `on_end` is called once, on any thread, when the transfer is over: with None if it succeeded, with OSError if
        the channel has ended, and with StatusError if the piece failed and the receiver knows. Raise as `send` does;
        then `on_end` is not called.
        """
        if self._streams is not None and self._streams.takes(contents):
            self._streams.start(session, feed, contents, False, on_end)
            return
        self._send(session, feed, contents, False)
        on_end(None)

    def start_in_chunks(self, session: int, feed: int, contents: Contents, on_end: OnEnd) -> None:
        """Start to send one piece of at least 256 KiB in chunks, to a local peer through few blocks.

        The receiver copies each chunk to its destination at once. Otherwise like `start`.
        """
        engine = self._chunks or self._streams
        assert engine is not None
        engine.start(session, feed, contents, False, on_end)

    def send_in_parts(self, session: int, feed: int, content: Any) -> None:
        """Send one buffer, split into pieces if it is large. The receiver uses one piece while the next is copied."""
        view = memoryview(content).cast("B") if memoryview(content).nbytes else memoryview(b"")
        if self._streams is not None and self._streams.takes(whole := BufferContents((view,), in_parts=True)):
            self._streams.send(session, feed, whole, False)
            return
        for start in range(0, max(1, view.nbytes), PART_BYTES):
            part = view[start : start + PART_BYTES]
            self._send(session, feed, BufferContents((part,)), start + PART_BYTES < view.nbytes)

    def send_contents(self, session: int, feed: int, contents: Contents, more: bool = False) -> None:
        """Send one piece. Contents that are only now computed or read are written to the memory that carries them."""
        self._send(session, feed, contents, more)

    def pass_socket(self, sock: socket.socket, host: int = -1) -> None:
        """Pass a socket to a local peer, which closes it if it has no use for it. The caller's socket stays open."""
        self._socket.send(Passed(host), descriptor=sock.fileno())

    def pass_memory(self, descriptor: int) -> None:
        """Pass a descriptor of memory to a local peer, which may map it. The caller's descriptor stays open."""
        self._socket.send(PassedMemory(), descriptor=descriptor)

    def _send(self, session: int, feed: int, contents: Contents, more: bool) -> None:
        # Calls never wait for credits of the peer, because their sender may be the thread that reads another channel,
        # and the peer may need that thread in order to continue.
        if feed < _FIRST_HOST_FEED:
            ways = self._choices
        elif is_call(feed):
            ways = self._in_place
        else:
            ways = self._between_hosts
        for takes, send in ways:
            if takes(contents):
                try:
                    send(session, feed, contents, more)
                except OSError as error:
                    raise error if self.silence is None else copied(self.silence) from None
                return
        raise AssertionError("no kind of transfer takes these contents")

    def can_send_nowait(self, nbytes: int) -> bool:
        """Return whether `nbytes` can be sent along the socket without waiting for the peer. Meant for small pieces."""
        return self._socket.can_send_nowait(nbytes)

    def try_reserve(self, nbytes: int) -> bool:
        """Reserve the socket for this thread, if it can then send small pieces of `nbytes` without waiting.

        Return whether it is reserved. If so, `release` has to follow.
        """
        return self._socket.try_reserve(nbytes)

    def release(self) -> None:
        """End a reservation of this thread."""
        self._socket.release()

    # ---- receiving

    def receive_open(self) -> Open:
        """Return the peer's first frame. Raise FrameError if it is another one, or EOFError if the connection ends."""
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
        on_memory: OnMemory | None = None,
        feeds_only: bool = False,
        expects: Callable[[int, int], bool] | None = None,
        groups: bool = False,
        feeds: range | None = None,
    ) -> None:
        """Read until the peer closes the channel.

        `on_piece` receives the pieces, on this thread or on that of a stream. The pieces of one feed are in order.
        `on_failure` receives pieces that fail; without it, such a piece ends the channel with its StatusError.
        `budget` decides when the bytes of a large piece may arrive. With `feeds_only`, calls and their answers,
        which have no budget, are invalid. If `expects` returns false for the number and the size of a large call
        or answer, the piece is dropped. Pieces that carry several feeds are invalid unless `groups` is set, and feeds
        outside of `feeds` if it is given.

        Raise TimeoutError if the peer is silent, FrameError if it sends an invalid frame or ends inside a piece, and
        AccessError if it does not trust this side.
        """
        arrivals = ChannelArrivals(on_piece, on_failure, budget, feeds_only, expects, groups, feeds)
        for engine in self._engines:
            engine.receive_for(arrivals)
        while True:
            try:
                frame, descriptor = self._socket.read_frame(self._decoder)
            except BlockingIOError:  # nothing was received for some seconds
                for engine in self._engines:
                    engine.trim()
                continue
            except (FrameError, AccessError):
                raise
            except (EOFError, OSError):
                if self.silence is not None:
                    raise copied(self.silence) from None
                return
            try:
                if isinstance(frame, Passed):
                    if on_socket is not None and descriptor is not None:
                        on_socket(_socket_of(descriptor), frame.host)
                elif isinstance(frame, PassedMemory):
                    if on_memory is not None and descriptor is not None:
                        on_memory(descriptor)
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
                "a data connection is opened once"
                if isinstance(frame, Open)
                else f"this channel takes no frames of type {type(frame).__name__}"
            )
        if not isinstance(frame, Piece):
            handle(frame, descriptor)
            return
        if not 0 <= frame.nbytes <= MAX_PIECE:
            raise FrameError(f"a piece of {frame.nbytes} bytes is invalid: a piece has 0 to {MAX_PIECE} bytes")
        feeds = arrivals.feeds
        if is_call(frame.feed):
            if arrivals.feeds_only:
                raise FrameError("this channel carries only feeds, and no calls or answers")
        elif feeds is not None and frame.feed not in feeds:
            raise FrameError(f"feed {frame.feed} has a number that this peer may not choose")
        group = group_of(frame)
        if group:
            _check_group(frame, group, arrivals.groups)
        try:
            received = handle(frame, descriptor)
        except StatusError as error:
            arrivals.fail(frame, error.status)
            return
        if received is not None:
            arrivals.take(frame, *received)

    # ---- the end

    def shut_down(self) -> None:
        """End the connection, so that threads inside `send` and `receive` return. Call `close` later."""
        self.is_closed = True
        self._socket.shut_down()

    def close(self) -> None:
        """End the connection, so that threads inside `send` and `receive` return, and free all memory."""
        self.is_closed = True
        self._socket.close()
        if self.liveness is not None:
            self.liveness.close()
        for engine in self._engines:
            engine.close()

    def statistics(self) -> ChannelStatistics:
        engines = {type(engine).__name__: engine.statistics() for engine in self._engines}
        return ChannelStatistics(
            self._socket.frames_in,
            self._socket.frames_out,
            self._socket.bytes_in,
            self._socket.bytes_out,
            {name: each for name, each in engines.items() if each is not None},
        )


class Unlimited:
    """A budget without a limit."""

    def admit(self, piece: Piece, launch: int, grant: Callable[[], None], refuse: Callable[[Status], None]) -> None:
        grant()

    def withdraw(self, piece: Piece) -> None:
        pass


class ChannelArrivals:
    """The `Arrivals` of a channel, which call its callbacks. Without `on_failure`, a failed piece ends the channel."""

    def __init__(
        self,
        on_piece: OnPiece,
        on_failure: OnFailure | None,
        budget: ReceiveBudget | None,
        feeds_only: bool = False,
        expects: Callable[[int, int], bool] | None = None,
        groups: bool = False,
        feeds: range | None = None,
    ) -> None:
        self.take = on_piece
        self.groups = groups
        self.feeds = feeds
        self._expects = expects
        self.feeds_only = feeds_only
        self._on_failure = on_failure
        self._budget = budget or Unlimited()
        self.admit = self._budget.admit
        self.withdraw = self._budget.withdraw

    def expects(self, piece: Piece) -> bool:
        return self._expects is None or self._expects(piece.feed, piece.nbytes)

    def fail(self, piece: Piece, status: Status) -> None:
        if self._on_failure is None:
            raise status.exception()
        self._on_failure(piece, status)


def _check_group(piece: Piece, group: Group, allowed: bool) -> None:
    """Raise FrameError if a piece cannot carry these feeds."""
    if not allowed:
        raise FrameError("this channel takes no piece that carries several feeds")
    are_feeds = all([number in HOST_FEEDS and nbytes >= 0 for number, nbytes in group])
    if piece.more or not are_feeds or group_bytes(group) != piece.nbytes:
        raise FrameError(f"a piece of {piece.nbytes} bytes cannot carry these {len(group)} feeds")


def _socket_of(descriptor: int) -> socket.socket:
    """Return a socket with a duplicate of the descriptor. Raise OSError if it is not a socket."""
    own = os.dup(descriptor)
    try:
        return socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise
