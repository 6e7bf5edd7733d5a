"""One HTTP/2 stream: what it may receive, what it still has to send.

Invariant: bytes leave in the order they were written, after the response's headers and before its trailers,
and never more of them than the peer's windows allow. Framing is done only when bytes leave, so that
everything written to a stream in the meantime shares its frames. RFC 9113, sections 5 and 6.9.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from atoll.grpc.http2 import frames
from atoll.grpc.http2.frames import DATA, HeaderList, frame_header

Buffer = bytes | bytearray | memoryview


class StreamSender(Protocol):
    """What a stream needs of its connection to send (see `send.Sender`)."""

    def make_ready(self, stream: Stream) -> None: ...
    def control(self, frame: bytes) -> None: ...


class BodyConsumer(Protocol):
    """Takes the body that the peer sends on one stream. Called on the loop's thread; none of these may raise or block.

    What it keeps back it adds to `Stream.held_bytes`: this and `Stream.paused` hold the peer to its window.
    """

    def data(self, view: memoryview, start: int, stop: int) -> None:
        """Bytes of the body: view[start:stop], which are overwritten once this returns."""

    def reserve(self, limit: int) -> memoryview | None:
        """Where to read up to `limit` coming bytes of the body to, if they need not pass through `data`."""

    def filled(self, count: int) -> None:
        """`count` bytes were read into what `reserve` returned."""

    def half_closed(self) -> None:
        """The peer has sent everything."""


def ignore() -> None:
    pass


class Stream:
    """One open stream. All of it belongs to the event loop's thread.

    `on_sent()` is called when some of what was written has left, `on_closed()` once if the stream is reset (by
    the peer, or for its faults) or the connection is lost. Neither may raise.
    """

    __slots__ = (
        "_message_window",
        "_sender",
        "_window",
        "consumer",
        "expected_bytes",
        "headers",
        "held_bytes",
        "low_water",
        "number",
        "on_closed",
        "on_sent",
        "open",
        "outgoing",
        "paused",
        "ready",
        "receive_window",
        "remote_open",
        "send_window",
        "trailers",
        "unsent_bytes",
    )

    def __init__(
        self, sender: StreamSender, number: int, send_window: int, receive_window: int, message_window: int = 0
    ) -> None:
        self.number = number
        self.consumer: BodyConsumer = DISCARD
        self.on_sent = ignore
        self.on_closed = ignore
        self.open = True
        self.remote_open = True
        """Whether the peer may still send."""
        self.send_window = send_window
        self.receive_window = receive_window
        self.paused = False
        """While set, the peer gets no credit beyond its window."""
        self.held_bytes = 0
        """Received bytes that the consumer keeps back: the peer gets no credit for them."""
        self.expected_bytes = 0
        """Those of a message that are still to come: there is credit for them, as far as the message window goes."""
        self.low_water = receive_window >> 1
        """With a receive window below it, there is something to `grant`."""
        self.headers: HeaderList | None = None
        self.outgoing: deque[Buffer] = deque()
        self.unsent_bytes = 0
        self.trailers: HeaderList | None = None
        self.ready = False
        """Whether it is in the sender's queue."""
        self._sender = sender
        self._window = receive_window
        self._message_window = message_window

    def start(self, headers: HeaderList) -> None:
        """Queue the response's headers."""
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
        """Queue the end of the response; the stream closes when it is sent."""
        self.trailers = trailers
        self._sender.make_ready(self)

    def half_close(self) -> None:
        """The peer has sent everything."""
        self.remote_open = False
        self.consumer.half_closed()

    def expect(self, size: int) -> None:
        """A message of so many bytes begins: there is more to grant from now on."""
        self.expected_bytes = size
        self.low_water = self.receive_window

    def grant(self) -> None:
        """Give the peer credit for what was taken, unless the stream is paused."""
        if self.paused or not self.remote_open or not self.open:
            return
        full = self._window + min(self.expected_bytes, self._message_window)
        self.low_water = full >> 1
        increment = full - self.receive_window - self.held_bytes
        if increment * 2 >= full:
            self.receive_window += increment
            self._sender.control(frames.window_update(self.number, increment))

    def take(self, out: list[Buffer], limit: int, max_frame: int) -> int:
        """Move up to `limit` bytes of the body to `out`, as DATA frames; return how many."""
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
    """The consumer of a stream that has none."""

    def data(self, view: memoryview, start: int, stop: int) -> None:
        pass

    def reserve(self, limit: int) -> memoryview | None:
        return None

    def filled(self, count: int) -> None:
        pass

    def half_closed(self) -> None:
        pass


DISCARD: BodyConsumer = _Discard()
