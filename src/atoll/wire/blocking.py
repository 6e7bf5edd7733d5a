"""A control connection on blocking sockets, for a process whose work is done by threads.

The frames are those of `wire.framing`. Any thread may send, at once and without a detour over an event loop, which
would cost a worker two thread switches a message; one thread receives. It outlives its sockets where who was dialed
grants that, as `wire.resumption` has it: then the receiving thread dials again, and what is sent meanwhile is kept.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from atoll.errors import AccessError, ConnectError, FrameError
from atoll.wire.address import Address, parse_address
from atoll.wire.byte_stream import SocketStream, Stream, dial_stream
from atoll.wire.framing import HEADER_BYTES, FrameDecoder, frame_header, link_length
from atoll.wire.resumption.acknowledgment_pace import (
    ACKNOWLEDGE_BYTES,
    ACKNOWLEDGE_MESSAGES,
    FIRST_PAUSE_SECONDS,
    MOST_PAUSE_SECONDS,
    SILENT_SECONDS,
)
from atoll.wire.resumption.link_messages import (
    Acknowledge,
    AlternateAddresses,
    AnyLinkMessage,
    Close,
    Resume,
    Resumed,
    ResumeRefused,
    ResumeRefusedError,
    ResumeToken,
    decode_link,
    encode_link,
)
from atoll.wire.resumption.retransmit_buffer import Counts, RetransmitBuffer
from atoll.wire.sockets import NEXT_SECONDS
from atoll.wire.tls.identity import Identity

_READ_SIZE = 64 * 1024


class BlockingConnection:
    """One end of a control connection. `redial(address, timeout)` makes a stream to the peer, at one of `addresses`."""

    def __init__(
        self,
        stream: Stream | socket.socket,
        message_type: Any,
        *,
        name: str = "peer",
        addresses: Iterable[Address] = (),
        redial: Callable[[Address, float], Stream] | None = None,
        identity: Identity | None = None,
    ) -> None:
        self.name = name
        self._stream: Stream = SocketStream(stream) if isinstance(stream, socket.socket) else stream
        self._message_type = message_type
        self._decoder = FrameDecoder(message_type, on_link=self._link)
        self._encode = msgspec.msgpack.Encoder().encode
        self._lock = threading.Lock()  # of all that follows
        self._redial = redial
        self._identity = identity
        self._addresses = tuple(addresses)
        self._elsewhere: tuple[Address, ...] = ()  # more of them, by the peer's word
        self._answered: tuple[Address, ...] = ()  # the one at which somebody has answered last: it is tried first
        # until the first message says that it is not needed
        self._retransmit_buffer = RetransmitBuffer() if redial is not None else None
        self._resume_token: ResumeToken | None = None
        self._term = self._attempt = 0
        self._received = 0  # by this stream
        self._is_away = self._is_over = False
        self._acknowledged = Counts()  # to the peer
        self._due = ACKNOWLEDGE_MESSAGES  # messages of this stream after which they are acknowledged
        self._unacknowledged = 0  # bytes

    @classmethod
    def dial(
        cls,
        address: Address,
        message_type: Any,
        *,
        name: str,
        timeout: float = 10.0,
        role: str = "controller",
        identity: Identity | None = None,
    ) -> BlockingConnection:
        """Connects within `timeout` seconds to a process of that role. Raises ConnectError that names the address."""

        def redial(address: Address, timeout: float) -> Stream:
            return dial_stream(address, role, identity, what=name, timeout=timeout)

        stream = redial(address, timeout)
        return cls(stream, message_type, name=name, addresses=address.each, redial=redial, identity=identity)

    # ---- sending

    def send(self, *messages: Any) -> None:
        """Sends messages together, in order; waits while the peer does not read.

        A lost connection is not an error here: `receive` ends.
        """
        self.send_all(messages)

    def send_all(self, messages: Iterable[Any]) -> None:
        """As `send`."""
        parts: list[bytes] = []
        with self._lock:
            for message in messages:
                body = self._encode(message)
                parts.append(frame_header(len(body)))
                parts.append(body)
            content = b"".join(parts)
            if self._retransmit_buffer is not None and not self._retain(parts, content):
                self._give_up()
            elif not self._is_away:
                self._write(content)

    def _retain(self, parts: list[bytes], content: bytes) -> bool:
        assert self._retransmit_buffer is not None
        if len(parts) == 2:  # the header and body of one message, as a rule
            return self._retransmit_buffer.retain(content)
        is_within_bounds = True
        for header, body in zip(parts[::2], parts[1::2], strict=True):
            is_within_bounds = self._retransmit_buffer.retain(header + body)
        return is_within_bounds

    def _write(self, content: bytes) -> None:
        try:
            self._stream.send((content,))
        except OSError:
            self._stream.shut_down()  # `receive` notices

    # ---- receiving

    def receive(self) -> Iterator[Any]:
        """The peer's messages, in order, until it closes; for one thread.

        Raises FrameError for bytes that are none, and AccessError where the peer does not trust this process.
        """
        buffer = memoryview(bytearray(_READ_SIZE))
        while True:
            try:
                count = self._stream.receive_into(buffer)
            except AccessError:
                if self._resume_token is None:
                    raise
                count = 0
            except OSError:
                count = 0
            if not count:
                if not self._resume():
                    return
                continue
            try:
                for message in self._decoder.feed(buffer[:count]):
                    self._received += 1
                    if self._resume_token is None and self._retransmit_buffer is not None:
                        with self._lock:
                            self._retransmit_buffer = None
                    yield message
            except FrameError as error:
                raise FrameError(f"{self.name} sent what we do not understand: {error}") from None
            if self._retransmit_buffer is not None:
                self._read(count)

    def _read(self, count: int) -> None:
        """So many bytes more have come, and their messages were taken."""
        self._unacknowledged += count
        if self._received >= self._due or self._unacknowledged >= ACKNOWLEDGE_BYTES:
            self._acknowledge()

    @property
    def _counts(self) -> Counts:
        """Of the peer's messages, over all streams."""
        assert self._retransmit_buffer is not None
        whole, pieced = self._retransmit_buffer.received
        return Counts(whole + self._received - self._decoder.pieced, pieced + self._decoder.pieced)

    def _acknowledge(self) -> None:
        with self._lock:
            counts = self._counts
            self._due, self._unacknowledged = self._received + ACKNOWLEDGE_MESSAGES, 0
            if counts != self._acknowledged and not self._is_away:
                self._acknowledged = counts
                self._write(encode_link(Acknowledge(*counts)))

    def _link(self, content: memoryview) -> None:
        message = decode_link(content)
        match message:
            case ResumeToken(term=term) if self._retransmit_buffer is not None:
                self._resume_token, self._term = message, term
                _bound_silence(self._stream)
            case Acknowledge(whole=whole, pieced=pieced) if self._retransmit_buffer is not None:
                with self._lock:
                    self._retransmit_buffer.acknowledge(Counts(whole, pieced))
                self._acknowledge()
            case AlternateAddresses(addresses=addresses):
                self._elsewhere = tuple(map(parse_address, addresses))
                if self._identity is not None:
                    self._identity.elsewhere = self._elsewhere
            case Close():
                self._is_over = True

    # ---- resuming

    @property
    def can_resume(self) -> bool:
        """Whether that was granted; not before the first message has come."""
        return self._resume_token is not None

    def drop(self) -> None:
        """The socket is of no use any more, whatever the network thinks of it. For any thread; does not wait."""
        self._stream.shut_down()

    def _resume(self) -> bool:
        """The stream has ended: whether there is another, after having waited for it."""
        token = self._resume_token
        self._stream.shut_down()  # who waits in `send`, with the lock, comes out
        if token is None or self._redial is None or self._is_over:
            return False
        with self._lock:
            self._is_away = True
            assert self._retransmit_buffer is not None
            self._retransmit_buffer.received = self._counts
            self._received, self._due, self._unacknowledged = 0, ACKNOWLEDGE_MESSAGES, 0
            self._decoder = FrameDecoder(self._message_type, on_link=self._link)
        self._stream.close()
        deadline, pause = time.monotonic() + token.seconds, FIRST_PAUSE_SECONDS
        while not self._is_over and time.monotonic() < deadline:
            for address in dict.fromkeys((*self._answered, *self._addresses, *self._elsewhere)):
                try:
                    self._resume_on(self._redial(address, NEXT_SECONDS), token)
                    self._answered = (address,)
                    return True
                except ResumeRefusedError as error:
                    if error.final:
                        return False
                    self._answered = (address,)
                except OSError:  # as AtollError's of connections are: a process that ends refuses in many ways
                    continue
            time.sleep(pause)
            pause = min(2 * pause, MOST_PAUSE_SECONDS)
        return False

    def _resume_on(self, stream: Stream, token: ResumeToken) -> None:
        """Raises ConnectError, or OSError, where it is not resumed there."""
        assert self._retransmit_buffer is not None
        try:
            _bound_silence(stream, NEXT_SECONDS)
            self._attempt += 1
            resume = Resume(token.number, token.secret, self._term, *self._retransmit_buffer.received, self._attempt)
            stream.send((encode_link(resume),))
            answer = _read_link(stream)
            if isinstance(answer, ResumeRefused):
                raise ResumeRefusedError(answer.reason, answer.final)
            if not isinstance(answer, Resumed) or answer.term < self._term:
                raise ConnectError(f"{self.name} does not resume the connection")
            _bound_silence(stream)
            with self._lock:
                try:
                    self._retransmit_buffer.acknowledge(Counts(answer.whole, answer.pieced))
                except FrameError as error:
                    raise ResumeRefusedError(str(error), True) from None
                self._stream, self._term, self._is_away = stream, answer.term, False
                self._write(b"".join(frame for frame, _ in self._retransmit_buffer.unacknowledged()))
        except BaseException:
            stream.close()
            raise

    # ---- ending

    def _give_up(self) -> None:
        self._is_over = True
        self._stream.shut_down()

    def close(self) -> None:
        self._is_over = True
        if self._resume_token is not None and not self._is_away:
            self._write(encode_link(Close()))
        self._stream.close()


def _bound_silence(stream: Stream, seconds: float = SILENT_SECONDS) -> None:
    """Reading ends with an error where nothing comes for so long: who was dialed is heard once a second."""
    timeout = struct.pack("ll", int(seconds), 0)
    stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)


def _read_link(stream: Stream) -> AnyLinkMessage:
    """What is said first on a stream about the connection. Raises FrameError for anything else, and OSError."""
    header = _read(stream, HEADER_BYTES)
    return decode_link(_read(stream, link_length(header)))


def _read(stream: Stream, count: int) -> bytes:
    content = bytearray(count)
    view = memoryview(content)
    while view:
        received = stream.receive_into(view)
        if not received:
            raise ConnectionResetError("the connection was closed")
        view = view[received:]
    return bytes(content)
