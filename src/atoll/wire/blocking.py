"""A driver of a dialer's link on blocking sockets, for processes that work with threads.

Any thread can send directly. Sending through an event loop would cost a worker two thread switches per message. If the
acceptor sends a resume token (`wire.resumption`), the connection survives its sockets: the receiving thread dials
again, and messages that are sent meanwhile are kept.
"""

from __future__ import annotations

import math
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from atoll.errors import AccessError, FrameError
from atoll.wire.address import Address
from atoll.wire.byte_stream import SocketStream, Stream, dial_stream
from atoll.wire.framing import MAX_LENGTH, FrameDecoder, frame_header, too_long
from atoll.wire.resumption.dialing_link import DialingLink
from atoll.wire.resumption.link import LIMITS, LinkEvent, LinkLimits, Retransmission
from atoll.wire.resumption.link import LinkState as S
from atoll.wire.resumption.link_messages import decode_link, encode_link
from atoll.wire.sockets import NEXT_SECONDS
from atoll.wire.tls.identity import Identity

_READ_SIZE = 64 * 1024
_CLOSE_SECONDS = 1.0  # for another thread to finish sending


class BlockingConnection:
    """One end of a control connection. Any thread can send, and one thread receives.

    A dialer passes the `address` of the peer, and `redial(address, timeout)`, which returns a new stream to one of the
    peer's addresses. If the peer admits nobody now, the connection tries all addresses for `patience` seconds. If the
    peer does not answer at all for that time, the connection ends. It waits without a limit if `patience` is 0.
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
        limits: LinkLimits = LIMITS,
        patience: float = 0.0,
    ) -> None:
        self.name = name
        self._stream: Stream = SocketStream(stream) if isinstance(stream, socket.socket) else stream
        self._message_type = message_type
        self._encode = msgspec.msgpack.Encoder().encode
        self._redial = redial
        self._lock = threading.Lock()  # protects the link, its effects and writes
        self._link = DialingLink(name, address if redial is not None else None, identity, limits)
        self._decoder = FrameDecoder(message_type, on_link=self._receive_link)
        opens_by = time.monotonic() + patience
        self._link.open(self._decoder, opens_by)
        # When the acceptor must have confirmed a new transport, in monotonic time.
        self._answer_by = opens_by if patience else math.inf
        if patience:
            _bound_silence(self._stream, patience)

    @classmethod
    def dial(
        cls,
        address: Address,
        message_type: Any,
        *,
        name: str,
        timeout: float = 10.0,
        patience: float = 0.0,
        role: str = "controller",
        identity: Identity | None = None,
        limits: LinkLimits = LIMITS,
    ) -> BlockingConnection:
        """Connect to a process of `role` within `timeout` seconds. Raise ConnectError if that fails.

        If the process admits nobody now, `receive` tries all addresses for `patience` seconds.
        """

        def redial(address: Address, timeout: float) -> Stream:
            return dial_stream(address, role, identity, what=name, timeout=timeout)

        stream = redial(address, timeout)
        return cls(
            stream,
            message_type,
            name=name,
            address=address,
            redial=redial,
            identity=identity,
            limits=limits,
            patience=patience,
        )

    @property
    def can_resume(self) -> bool:
        """Whether the acceptor has sent a resume token, which arrives before its first message."""
        return self._link.token is not None

    @property
    def reason(self) -> str:
        """Why the connection is away or has ended, if it was lost."""
        return self._link.reason

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
                if len(body) > MAX_LENGTH:
                    raise too_long(message, len(body))
                parts.append(frame_header(len(body)))
                parts.append(body)
            content = b"".join(parts)
            link = self._link
            if link.kept is not None:
                writes = link.send(content) if len(parts) == 2 else link.send_all(parts)
            else:
                writes = link.writes
            if writes:
                self._write(content)
            elif link.effects:
                self._do_effects()

    def _write(self, content: bytes) -> None:
        try:
            self._stream.send((content,))
        except OSError:
            self._stream.shut_down()  # wakes up `receive`

    def _do_effects(self) -> None:
        """Execute the effects of the link. The caller holds the lock."""
        frames = []
        for effect in self._link.take_effects():
            if isinstance(effect, Retransmission):
                frames.append(effect.frame)
            elif not isinstance(effect, LinkEvent):
                frames.append(encode_link(effect))
            elif effect in (LinkEvent.GRANTED, LinkEvent.BACK):
                _bound_silence(self._stream, self._link.limits.silent_seconds)
            elif effect in (LinkEvent.FAILED, LinkEvent.LOST):
                self._stream.shut_down()  # wakes up `receive`
        if frames:
            self._write(b"".join(frames))

    # ---- receiving

    def receive(self) -> Iterator[Any]:
        """Yield the peer's messages in order until the connection ends.

        Raise FrameError for invalid data, and AccessError if the peer does not trust this process.
        """
        link = self._link
        buffer = memoryview(bytearray(_READ_SIZE))
        while True:
            try:
                count = self._stream.receive_into(buffer)
                is_silent = False
            except OSError as error:
                if isinstance(error, AccessError) and not self.can_resume:
                    raise
                count, is_silent = 0, isinstance(error, BlockingIOError)
            if not count or self._is_late:
                if not self._resume(is_silent):
                    return
                continue
            try:
                for message in self._decoder.feed(buffer[:count]):
                    if link.is_starting:
                        with self._lock:
                            link.first_message()
                            _bound_silence(self._stream, 0)  # a link without a resume token may be silent
                    yield message
            except FrameError as error:
                if link.state is not S.RESUMING:
                    raise FrameError(f"{self.name} sent invalid data: {error}") from None
                self._stream.shut_down()  # try the next address
            if link.kept is not None and link.read(count):
                with self._lock:
                    link.acknowledge()
                    self._do_effects()

    def _receive_link(self, content: memoryview) -> None:
        with self._lock:
            self._link.receive(decode_link(content))
            self._do_effects()

    # ---- later transports

    def drop(self) -> None:
        """Give up the current socket without waiting. Any thread can call this."""
        self._stream.shut_down()

    @property
    def _is_late(self) -> bool:
        """Whether a transport was not confirmed in time, although its peer may send something."""
        return self._link.is_starting and time.monotonic() > self._answer_by

    def _resume(self, is_silent: bool) -> bool:
        """Make the next transport after the current stream has ended, and wait for that. Return False if it is over."""
        self._stream.shut_down()  # wakes up a thread that blocks in `send` and holds the lock
        with self._lock:
            if is_silent and not self._link.is_starting:
                self._link.fall_silent(time.monotonic())
            else:
                reason = f"{self.name} {'does not answer' if self._is_late else 'closed the connection'}"
                self._link.disconnect(time.monotonic(), reason)
            self._do_effects()
        self._stream.close()
        while True:
            with self._lock:
                dial = self._link.next_dial(time.monotonic())
            if dial is None or self._redial is None:
                return False
            time.sleep(dial.pause)
            try:
                stream = self._redial(dial.address, dial.seconds)
                _bound_silence(stream, NEXT_SECONDS)
            except OSError as error:  # includes ConnectError and AccessError: a process that ends refuses in many ways
                with self._lock:
                    self._link.dial_failed(str(error))
                continue
            with self._lock:
                if self._link.state is not S.AWAY:  # closed meanwhile
                    stream.close()
                    return False
                self._stream = stream
                self._answer_by = time.monotonic() + dial.seconds
                self._decoder = FrameDecoder(self._message_type, on_link=self._receive_link)
                self._link.resume(self._decoder)
                self._do_effects()
            return True

    # ---- closing

    def close(self) -> None:
        if not self._lock.acquire(timeout=_CLOSE_SECONDS):  # a thread sends, and the peer does not read
            self._stream.shut_down()
            self._lock.acquire()
        try:
            self._link.close()
            self._do_effects()
        finally:
            self._lock.release()
        self._stream.close()


def _bound_silence(stream: Stream, seconds: float) -> None:
    """Make reads fail after `seconds` of silence. The acceptor sends at least once per second."""
    stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", math.ceil(seconds), 0))
