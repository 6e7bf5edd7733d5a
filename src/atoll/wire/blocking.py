"""A control connection on blocking sockets, for processes that work with threads.

Any thread can send directly. Sending through an event loop would cost a worker two thread switches per message. If the
acceptor sends a resume token (`wire.resumption`), the connection survives its sockets: the receiving thread dials
again, and messages that are sent meanwhile are kept.
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
from atoll.wire.address import Address
from atoll.wire.byte_stream import SocketStream, Stream, dial_stream
from atoll.wire.framing import HEADER_BYTES, FrameDecoder, frame_header, link_length
from atoll.wire.resumption.link_messages import (
    ACKNOWLEDGE_BYTES,
    ACKNOWLEDGE_MESSAGES,
    FIRST_PAUSE_SECONDS,
    MOST_PAUSE_SECONDS,
    SILENT_SECONDS,
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
from atoll.wire.resumption.peer_addresses import PeerAddresses
from atoll.wire.resumption.retransmit_buffer import Counts, RetransmitBuffer
from atoll.wire.sockets import NEXT_SECONDS
from atoll.wire.tls.identity import Identity

_READ_SIZE = 64 * 1024


class BlockingConnection:
    """One end of a control connection. Any thread can send, and one thread receives.

    A dialer passes the `address` of the peer, and `redial(address, timeout)`, which returns a new stream to one of the
    peer's addresses.
    """

    def __init__(
        self,
        stream: Stream | socket.socket,
        message_type: Any,
        *,
        name: str = "peer",
        address: Address | None = None,
        redial: Callable[[Address, float], Stream] | None = None,
        identity: Identity | None = None,
    ) -> None:
        self.name = name
        self._stream: Stream = SocketStream(stream) if isinstance(stream, socket.socket) else stream
        self._message_type = message_type
        self._decoder = FrameDecoder(message_type, on_link=self._link)
        self._encode = msgspec.msgpack.Encoder().encode
        self._lock = threading.Lock()  # protects all following attributes
        self._redial = redial
        self._identity = identity
        self._addresses = PeerAddresses(address) if address is not None else None
        # Dropped if the first message arrives before a resume token.
        self._retransmit_buffer = RetransmitBuffer() if redial is not None else None
        self._resume_token: ResumeToken | None = None
        self._term = self._attempt = 0
        self._received = 0  # messages of this stream
        self._is_away = self._is_over = False
        self._acknowledged = Counts()  # last counts sent to the peer
        self._due = ACKNOWLEDGE_MESSAGES  # value of `_received` at which to acknowledge
        self._unacknowledged = 0  # received bytes since the last acknowledgement

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
        """Connect to a process of `role` within `timeout` seconds. Raise ConnectError if that fails."""

        def redial(address: Address, timeout: float) -> Stream:
            return dial_stream(address, role, identity, what=name, timeout=timeout)

        stream = redial(address, timeout)
        return cls(stream, message_type, name=name, address=address, redial=redial, identity=identity)

    # ---- sending

    def send(self, *messages: Any) -> None:
        """Send messages together and in order. Block while the peer does not read.

        A lost connection is not an error here, but ends `receive`.
        """
        self.send_all(messages)

    def send_all(self, messages: Iterable[Any]) -> None:
        """Send messages together and in order; see `send`."""
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
        if len(parts) == 2:  # the header and body of one message, the usual case
            return self._retransmit_buffer.retain(content)
        is_within_bounds = True
        for header, body in zip(parts[::2], parts[1::2], strict=True):
            is_within_bounds = self._retransmit_buffer.retain(header + body)
        return is_within_bounds

    def _write(self, content: bytes) -> None:
        try:
            self._stream.send((content,))
        except OSError:
            self._stream.shut_down()  # wakes up `receive`

    # ---- receiving

    def receive(self) -> Iterator[Any]:
        """Yield the peer's messages in order until the connection ends.

        Raise FrameError for invalid data, and AccessError if the peer does not trust this process.
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
                raise FrameError(f"{self.name} sent invalid data: {error}") from None
            if self._retransmit_buffer is not None:
                self._unacknowledged += count
                if self._received >= self._due or self._unacknowledged >= ACKNOWLEDGE_BYTES:
                    self._acknowledge()

    @property
    def _counts(self) -> Counts:
        """The numbers of messages received from the peer over all streams."""
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
            case AlternateAddresses() if self._addresses is not None:
                self._addresses.told(message, self._identity)
            case Close():
                self._is_over = True

    # ---- resuming

    @property
    def can_resume(self) -> bool:
        """Whether the acceptor has sent a resume token, which arrives before its first message."""
        return self._resume_token is not None

    def drop(self) -> None:
        """Give up the current socket without waiting. Any thread can call this."""
        self._stream.shut_down()

    def _resume(self) -> bool:
        """Resume the connection after its stream has ended, and wait for that. Return False if it is over."""
        token = self._resume_token
        self._stream.shut_down()  # wakes up a thread that blocks in `send` and holds the lock
        if token is None or self._redial is None or self._addresses is None or self._is_over:
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
            for address in self._addresses.in_turn:
                try:
                    self._resume_on(self._redial(address, NEXT_SECONDS), token)
                    self._addresses.answered(address)
                    return True
                except ResumeRefusedError as error:
                    if error.final:
                        return False
                    self._addresses.answered(address)
                except OSError:  # includes ConnectError and AccessError: a process that ends refuses in many ways
                    continue
            time.sleep(pause)
            pause = min(2 * pause, MOST_PAUSE_SECONDS)
        return False

    def _resume_on(self, stream: Stream, token: ResumeToken) -> None:
        """Resume the connection on `stream`. Raise ResumeRefusedError or an OSError if that fails."""
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

    # ---- closing

    def _give_up(self) -> None:
        self._is_over = True
        self._stream.shut_down()

    def close(self) -> None:
        self._is_over = True
        if self._resume_token is not None and not self._is_away:
            self._write(encode_link(Close()))
        self._stream.close()


def _bound_silence(stream: Stream, seconds: float = SILENT_SECONDS) -> None:
    """Make reads fail after `seconds` of silence. The acceptor sends at least once per second."""
    timeout = struct.pack("ll", int(seconds), 0)
    stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)


def _read_link(stream: Stream) -> AnyLinkMessage:
    """Read a link message. Raise FrameError if the stream has another frame, or OSError if it ends."""
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
