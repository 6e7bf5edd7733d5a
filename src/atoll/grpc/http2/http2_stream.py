"""One HTTP/2 stream: its flow control and its outgoing bytes (RFC 9113, sections 5 and 6.9).

Invariant: bytes are sent in the order in which they were written, after the response's headers and before its trailers,
and within the peer's windows. Frames are built only when bytes are sent, so that consecutive writes share frames.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from atoll.grpc.http2 import frames
from atoll.grpc.http2.frames import DATA, HeaderList, frame_header

Buffer = bytes | bytearray | memoryview


class StreamSender(Protocol):
    """The part of `send.Sender` that a stream uses."""

    def make_ready(self, stream: Http2Stream) -> None: ...
    def control(self, frame: bytes) -> None: ...


class BodyConsumer(Protocol):
    """Consumes the body that the peer sends on one stream.

    The methods run on the event loop's thread and must not raise or block. The consumer adds bytes that it holds back
    to `Http2Stream.held_bytes`. Together with `Http2Stream.paused`, this limits the peer to its window.
    """

    def data(self, view: memoryview, start: int, stop: int) -> None:
        """Consume view[start:stop] of the body. The caller overwrites the view afterwards."""

    def reserve(self, limit: int) -> memoryview | None:
        """Return a buffer for up to `limit` of the next bytes of the body, or None to receive them with `data`."""

    def filled(self, count: int) -> None:
        """Consume `count` bytes that were read into the buffer from `reserve`."""

    def half_closed(self) -> None:
        """Note that the peer has sent everything."""


def ignore() -> None:
    pass


class Http2Stream:
    """One open stream, used only on the event loop's thread.

    The connection calls `on_sent()` when some of the stream's bytes were sent. It calls `on_closed()` once if the
    stream is reset, by the peer or because of the peer's errors, or if the connection is lost. The callbacks must not
    raise.
    """

    __slots__ = (
        "_message_window", "_sender", "_window", "consumer", "expected_bytes", "headers", "held_bytes", "low_water",
        "number", "on_closed", "on_sent", "open", "outgoing", "paused", "ready", "receive_window", "remote_open",
        "send_window", "trailers", "unsent_bytes",
    )  # fmt: skip

    def __init__(
        self, sender: StreamSender, number: int, send_window: int, receive_window: int, message_window: int = 0
    ) -> None:
        self.number = number
        self.consumer: BodyConsumer = DISCARD
        self.on_sent: Callable[[], None] = ignore
        self.on_closed: Callable[[], None] = ignore
        self.open = True
        self.remote_open = True
        """Whether the peer may still send."""
        self.send_window = send_window
        self.receive_window = receive_window
        self.paused = False
        """While true, the peer receives no further credit."""
        self.held_bytes = 0
        """Received bytes that the consumer holds back. The peer receives no credit for them."""
        self.expected_bytes = 0
        """Missing bytes of the incomplete message. The peer receives credit for them, up to the message window."""
        self.low_water = receive_window >> 1
        """`grant` has something to do once the receive window is at most this."""
        self.headers: HeaderList | None = None
        self.outgoing: deque[Buffer] = deque()
        self.unsent_bytes = 0
        self.trailers: HeaderList | None = None
        self.ready = False
        """Whether the stream is in the sender's queue."""
        self._sender = sender
        self._window = receive_window
        self._message_window = message_window

    def set_handlers(self, consumer: BodyConsumer, on_sent: Callable[[], None], on_closed: Callable[[], None]) -> None:
        """Set the consumer and the callbacks. `on_request` does this for each new stream."""
        self.consumer, self.on_sent, self.on_closed = consumer, on_sent, on_closed

    def start(self, headers: HeaderList) -> None:
        """Queue the headers of the response."""
        self.headers = headers
        self._sender.make_ready(self)

    def write(self, buffers: Sequence[Buffer], size: int) -> None:
        """Queue `size` bytes of the body. The buffers must not change until they are sent."""
        if not self.open:
            return
        self.outgoing.extend(buffers)
        self.unsent_bytes += size
        if not self.ready:
            self._sender.make_ready(self)

    def end(self, trailers: HeaderList) -> None:
        """Queue the end of the response. The stream closes when the trailers are sent."""
        self.trailers = trailers
        self._sender.make_ready(self)

    def half_close(self) -> None:
        """Note that the peer has sent everything."""
        self.remote_open = False
        self.consumer.half_closed()

    def expect(self, size: int) -> None:
        """Note that a message of `size` bytes begins, which raises the credit that `grant` can give."""
        self.expected_bytes = size
        self.low_water = self.receive_window

    def grant(self) -> None:
        """Give the peer credit for consumed bytes, unless the stream is paused or the credit is small."""
        if self.paused or not self.remote_open or not self.open:
            return
        full = self._window + min(self.expected_bytes, self._message_window)
        self.low_water = full >> 1
        increment = full - self.receive_window - self.held_bytes
        if increment * 2 >= full:
            self.receive_window += increment
            self._sender.control(frames.window_update(self.number, increment))

    def take(self, out: list[Buffer], limit: int, max_frame: int) -> int:
        """Move up to `limit` bytes of the body to `out` as DATA frames, and return their number."""
        outgoing = self.outgoing
        size = min(self.unsent_bytes, limit)
        self.unsent_bytes -= size
        self.send_window -= size
        if not self.unsent_bytes and size <= max_frame:
            out.append(frame_header.pack(size << 8 | DATA, 0, self.number))
            out.extend(outgoing)
            outgoing.clear()
            return size
        left = size
        while left:
            room = min(left, max_frame)
            left -= room
            out.append(frame_header.pack(room << 8 | DATA, 0, self.number))
            while room:
                piece = outgoing[0]
                length = len(piece)
                if length <= room:
                    out.append(outgoing.popleft())
                    room -= length
                else:
                    view = memoryview(piece)
                    out.append(view[:room])
                    outgoing[0] = view[room:]
                    room = 0
        return size


class _Discard:
    """The default consumer of a stream, which ignores the body."""

    def data(self, view: memoryview, start: int, stop: int) -> None:
        pass

    def reserve(self, limit: int) -> memoryview | None:
        return None

    def filled(self, count: int) -> None:
        pass

    def half_closed(self) -> None:
        pass


DISCARD: BodyConsumer = _Discard()
