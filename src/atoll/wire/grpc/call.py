"""One RPC in progress: gRPC messages in and out of the body of an HTTP/2 stream.

A message is five bytes (a compression flag and its length) and its content; messages and DATA frames have
nothing to do with each other's boundaries. Invariant: messages are delivered in order and one at a time, none
while the call is paused and none after it has ended; bytes that wait are bounded by the stream's window. From
the gRPC over HTTP/2 page (grpc/grpc, doc/PROTOCOL-HTTP2.md).
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from atoll.errors import Code
from atoll.wire.grpc.metadata import RESPONSE_HEADERS, encode_metadata, status_trailers
from atoll.wire.http2.stream import Buffer, Stream

log = logging.getLogger(__name__)

SMALL_MESSAGE_BYTES = 64 << 10
"""Messages up to this size are handed out as bytes."""
SCRATCH_BYTES = 4 << 20
"""Up to this size the buffer of a call's last large message is used again: fresh memory is slow to touch."""
LOW_WATER_BYTES = 256 << 10
_HELD_CHUNK_BYTES = 64 << 10

_prefix = struct.Struct(">BI")
_pack_prefix = _prefix.pack
_unpack_prefix = _prefix.unpack_from


class Traffic:
    """Counters that all calls of a server share."""

    __slots__ = ("calls", "messages_in", "messages_out")

    def __init__(self) -> None:
        self.calls = 0
        self.messages_in = 0
        self.messages_out = 0


def _ignore_message(message: bytes | memoryview) -> None:
    pass


def _ignore() -> None:
    pass


class Call:
    """One RPC in progress. All methods and callbacks belong to the event loop's thread.

    The handler sets the callbacks before it returns:

    on_message(message)
        Once for each message. Up to 64 KiB it is bytes; a larger one is a memoryview that is valid only until
        the callback returns: its memory is used again.
    on_half_close()
        The client has sent everything. Comes after the last message.
    on_closed()
        The client cancelled, broke the protocol, or the connection is lost. Not called after finish().

    A callback that raises ends the call with INTERNAL. Once a call has ended, by either side, `send` and
    `finish` do nothing, so a handler's late answer needs no check.
    """

    __slots__ = (
        "_body", "_ended", "_filled", "_half_close", "_held", "_initial_sent", "_loop", "_max_message_bytes",
        "_partial", "_scratch", "_size", "_stream", "_traffic", "_waiters", "connection", "metadata",
        "on_closed", "on_half_close", "on_message", "path",
    )  # fmt: skip

    def __init__(
        self,
        stream: Stream,
        path: str,
        metadata: Mapping[str, bytes],
        *,
        connection: int,
        max_message_bytes: int,
        traffic: Traffic,
    ) -> None:
        self.path = path
        self.metadata = metadata
        self.connection = connection
        """The server's number for the connection that the call came on."""
        self.on_message: Callable[[bytes | memoryview], None] = _ignore_message
        self.on_half_close: Callable[[], None] = _ignore
        self.on_closed: Callable[[], None] = _ignore
        self._stream = stream
        self._max_message_bytes = max_message_bytes
        self._traffic = traffic
        self._loop = asyncio.get_running_loop()
        self._ended = False
        self._initial_sent = False
        self._half_close = False
        self._partial = bytearray()
        """Of the prefix, if only some of its five bytes have come."""
        self._body: memoryview | None = None
        """Of the message whose rest is still to come; `_filled` bytes of `_size` are there."""
        self._filled = 0
        self._size = 0
        self._scratch: memoryview | None = None
        self._held: deque[bytearray | memoryview] = deque()
        """Bytes that came while the call was paused."""
        self._waiters: list[asyncio.Future[None]] = []

    # For handlers

    @property
    def ended(self) -> bool:
        """Whether finish() was called or the call was closed."""
        return self._ended

    @property
    def unsent_bytes(self) -> int:
        """Bytes of messages that the transport has not taken yet."""
        return self._stream.unsent_bytes

    def send_initial_metadata(self, metadata: Mapping[str, bytes] | None = None) -> None:
        """Send the response's headers now, not with the first message; "-bin" values are encoded here."""
        if self._ended:
            return
        if self._initial_sent:
            raise RuntimeError(f"initial metadata of {self.path} is sent already; give it before the first message")
        self._initial_sent = True
        self._stream.start(RESPONSE_HEADERS + encode_metadata(metadata or {}))

    def send(self, message: Buffer | Sequence[Buffer]) -> None:
        """Queue one message; several buffers make one message, sent without being joined.

        Nothing is copied before it is sent: the buffers must not change until then.
        """
        if self._ended:
            return
        if not self._initial_sent:
            self._initial_sent = True
            self._stream.start(RESPONSE_HEADERS)
        self._traffic.messages_out += 1
        if type(message) is bytes:
            size = len(message)
            self._stream.write((_pack_prefix(0, size), message), size + 5)
            return
        if isinstance(message, (bytes, bytearray, memoryview)):
            message = (message,)
        pieces = [_flat(piece) for piece in message]
        size = sum(map(len, pieces))
        self._stream.write((_pack_prefix(0, size), *(piece for piece in pieces if piece)), size + 5)

    def finish(self, code: int = 0, message: str = "") -> None:
        """End the call with a gRPC status, once everything queued is sent."""
        if self._ended:
            return
        trailers = status_trailers(code, message)
        if not self._initial_sent:
            trailers = RESPONSE_HEADERS + trailers
        self._stream.end(trailers)
        self._release()

    def pause(self) -> None:
        """Deliver no more messages, and let the client send no more than its window."""
        if not self._ended:
            self._stream.paused = True

    def resume(self) -> None:
        """Go on after pause(). What was held back is delivered later, from the event loop."""
        if not self._stream.paused:
            return
        self._stream.paused = False
        if self._held or self._half_close:
            self._loop.call_soon(self._deliver_held)
        else:
            self._stream.grant()

    async def drained(self) -> None:
        """Wait until at most 256 KiB are unsent, or the stream is closed (see `ended`)."""
        if self._stream.unsent_bytes <= LOW_WATER_BYTES:
            return
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append(waiter)
        await waiter

    # For the server and the stream (StreamConsumer)

    def start(self, handler: Callable[[Call], None]) -> None:
        """Hand the call to its handler."""
        self._guarded(lambda: handler(self))

    def data(self, view: memoryview, start: int, stop: int) -> None:
        if not (self._held or self._stream.paused or self._ended):
            start = self._deliver(view, start, stop)
        if start < stop and not self._ended:
            self._hold(view[start:stop])

    def reserve(self, limit: int) -> memoryview | None:
        if self._body is None or self._held or self._stream.paused:
            return None
        return self._body[self._filled : min(self._filled + limit, self._size)]

    def filled(self, count: int) -> None:
        self._filled += count
        if self._filled == self._size:
            self._guarded(self._complete)

    def half_closed(self) -> None:
        self._half_close = True
        if not self._held and not self._stream.paused:
            self._deliver_half_close()

    def sent(self) -> None:
        if self._waiters and self._stream.unsent_bytes <= LOW_WATER_BYTES:
            self._wake()

    def closed(self) -> None:
        self._wake()
        if self._ended:
            return
        on_closed = self.on_closed
        self._release()
        try:
            on_closed()
        except Exception:
            log.exception("on_closed of %s raised", self.path)

    # Inside

    def _deliver(self, view: memoryview, start: int, stop: int) -> int:
        """Deliver the messages in view[start:stop]; return where delivery stopped."""
        delivered = 0
        stream = self._stream
        try:
            while start < stop:
                if self._body is None and not self._partial and stop - start >= 5:
                    flag, size = _unpack_prefix(view, start)
                    if flag or size > self._max_message_bytes:
                        self._refuse(flag, size)
                        return stop
                    start += 5
                    if size > stop - start:
                        self._begin(size)
                        continue
                    begin = start
                    start += size
                    delivered += 1
                    self.on_message(bytes(view[begin:start]) if size <= SMALL_MESSAGE_BYTES else view[begin:start])
                else:
                    start = self._gather(view, start, stop)
                if stream.paused or self._ended:
                    return start
        except Exception:
            self._raised()
        finally:
            self._traffic.messages_in += delivered
        return start

    def _gather(self, view: memoryview, start: int, stop: int) -> int:
        """Take bytes of a message or prefix that did not come in one piece; return where they end."""
        if self._body is None:
            count = min(5 - len(self._partial), stop - start)
            self._partial += view[start : start + count]
            if len(self._partial) == 5:
                flag, size = _unpack_prefix(self._partial)
                self._partial.clear()
                if flag or size > self._max_message_bytes:
                    self._refuse(flag, size)
                    return stop
                self._begin(size)
                if not size:
                    self._complete()
            return start + count
        count = min(self._size - self._filled, stop - start)
        self._body[self._filled : self._filled + count] = view[start : start + count]
        self._filled += count
        if self._filled == self._size:
            self._complete()
        return start + count

    def _begin(self, size: int) -> None:
        """Make room for a message. Its memory is not touched, hence not used, before its bytes come."""
        self._filled, self._size = 0, size
        if size <= SMALL_MESSAGE_BYTES:
            self._body = memoryview(bytearray(size))
        elif self._scratch is not None and size <= len(self._scratch):
            self._body = self._scratch
        else:
            try:
                self._body = memoryview(np.empty(size, np.uint8))  # type: ignore[arg-type]
            except MemoryError:
                self._fail(Code.RESOURCE_EXHAUSTED, f"{self.path}: no memory for a message of {size} bytes")
                return
            if size <= SCRATCH_BYTES:
                self._scratch = self._body

    def _complete(self) -> None:
        body, self._body = self._body, None
        assert body is not None
        self._traffic.messages_in += 1
        message = body[: self._size]
        self.on_message(bytes(message) if self._size <= SMALL_MESSAGE_BYTES else message)

    def _refuse(self, flag: int, size: int) -> None:
        if flag:
            self._fail(Code.UNIMPLEMENTED, f"{self.path}: compressed messages are not supported")
        else:
            limit = self._max_message_bytes
            self._fail(
                Code.RESOURCE_EXHAUSTED,
                f"{self.path}: message of {size} bytes, at most {limit} are taken",
            )

    def _fail(self, code: Code, message: str) -> None:
        """End the call for the client's fault, and tell the handler."""
        on_closed = self.on_closed
        self.finish(code, message)
        on_closed()

    def _guarded(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:
            self._raised()

    def _raised(self) -> None:
        log.exception("handler of %s raised", self.path)
        self.finish(Code.INTERNAL, f"{self.path}: internal error, see the server's log")

    def _hold(self, view: memoryview) -> None:
        """Keep bytes back. Small ones share a chunk, so that many of them cost no more than their size."""
        last = self._held[-1] if self._held else None
        if isinstance(last, bytearray) and len(last) < _HELD_CHUNK_BYTES:
            last += view
        else:
            self._held.append(bytearray(view))
        self._stream.held_bytes += len(view)

    def _deliver_held(self) -> None:
        stream = self._stream
        while self._held and not stream.paused:
            chunk = memoryview(self._held.popleft())
            start = self._deliver(chunk, 0, len(chunk))
            if self._ended:
                return
            stream.held_bytes -= start
            if start < len(chunk):
                self._held.appendleft(chunk[start:])
        if stream.paused or self._ended:
            return
        stream.grant()
        if self._half_close:
            self._deliver_half_close()

    def _deliver_half_close(self) -> None:
        self._half_close = False
        if self._ended:
            return
        if self._body is not None or self._partial:
            self._guarded(lambda: self._fail(Code.INTERNAL, f"{self.path}: request ends inside a message"))
        else:
            self._guarded(lambda: self.on_half_close())

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _release(self) -> None:
        """Let go of the handler and of what was received."""
        self._ended = True
        self.on_message, self.on_half_close, self.on_closed = _ignore_message, _ignore, _ignore
        self._held.clear()
        self._stream.held_bytes = 0
        self._stream.paused = False
        self._body = self._scratch = None
        self._partial.clear()


def _flat(piece: Buffer) -> Buffer:
    """The buffer as one whose length is its size in bytes."""
    if isinstance(piece, memoryview) and (piece.itemsize != 1 or piece.ndim != 1):
        return piece.cast("B")
    return piece
