"""Parses the body of a request into messages (grpc/grpc, doc/PROTOCOL-HTTP2.md).

A message is a prefix of five bytes (compression flag and length) and its content. Boundaries of messages and of DATA
frames are independent.

Invariant: messages are delivered in order and one at a time, but not while the stream is paused or after `close`. The
stream's window bounds the bytes that are held back, and `Limits.incomplete_bytes` bounds incomplete messages.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from atoll.grpc.http2.http2_stream import Http2Stream, ignore
from atoll.grpc.status import GrpcError, StatusCode

SMALL_MESSAGE_BYTES = 64 << 10
"""Messages up to this size are delivered as `bytes`, larger ones as memoryviews."""
SCRATCH_BYTES = 4 << 20
"""Up to this size, a call reuses the buffer of its last large message, because touching fresh memory is slow."""
_HELD_CHUNK_BYTES = 64 << 10

message_prefix = struct.Struct(">BI")
_unpack_prefix = message_prefix.unpack_from


class Traffic:
    """The counters and message limits that all calls of a connection share."""

    __slots__ = (
        "calls", "incomplete_bytes", "max_incomplete_bytes", "max_message_bytes", "messages_in", "messages_out",
    )  # fmt: skip

    def __init__(self, max_incomplete_bytes: int, max_message_bytes: int) -> None:
        self.calls = 0
        self.max_message_bytes = max_message_bytes
        """Limit for calls that begin now; see `MessageReader.adopt_limit` for open calls."""
        self.incomplete_bytes = 0
        self.max_incomplete_bytes = max_incomplete_bytes
        self.messages_in = 0
        self.messages_out = 0


def ignore_message(message: bytes | memoryview) -> None:
    pass


class MessageReader:
    """The BodyConsumer of a stream, which calls `on_message` with each message of the body.

    `on_end()` follows the last message when the client has sent everything. `on_error(error)` receives the exception of
    a callback, or a GrpcError if the body is invalid; the owner must then close the reader. All methods and callbacks
    run on the event loop's thread.
    """

    __slots__ = (
        "_body",
        "_closed",
        "_ended",
        "_filled",
        "_held",
        "_max_message_bytes",
        "_on_end",
        "_on_error",
        "_on_message",
        "_partial",
        "_scratch",
        "_size",
        "_stream",
        "_traffic",
    )  # fmt: skip

    def __init__(self, stream: Http2Stream, traffic: Traffic, on_error: Callable[[Exception], None]) -> None:
        self._on_message: Callable[[bytes | memoryview], Any] = ignore_message
        self._on_end: Callable[[], None] = ignore
        self._stream = stream
        self._max_message_bytes = traffic.max_message_bytes
        self._traffic = traffic
        self._on_error = on_error
        self._closed = False
        self._ended = False
        """Whether the client has sent everything and `on_end` was not called yet."""
        self._partial = bytearray()
        """The received part of an incomplete prefix."""
        self._body: memoryview | None = None
        """The buffer of the incomplete message. It holds `_filled` of `_size` bytes."""
        self._filled = 0
        self._size = 0
        self._scratch: memoryview | None = None
        self._held: deque[bytearray | memoryview] = deque()
        """Bytes that arrived while the stream was paused."""

    def set_handlers(self, on_message: Callable[[bytes | memoryview], Any], on_end: Callable[[], None]) -> None:
        """Replace both handlers, from the next message on."""
        self._on_message, self._on_end = on_message, on_end

    def resume(self) -> None:
        """Resume a paused stream. Bytes that were held back are delivered later, from the event loop."""
        stream = self._stream
        if not stream.paused:
            return
        stream.paused = False
        if self._held or self._ended:
            asyncio.get_running_loop().call_soon(self._deliver_held)
        else:
            stream.grant()

    def adopt_limit(self) -> None:
        """Apply the current message limit of the connection to this call."""
        self._max_message_bytes = self._traffic.max_message_bytes

    def close(self) -> None:
        """Stop delivering messages and free the received bytes."""
        self._closed = True
        self._on_message, self._on_end = ignore_message, ignore
        self._held.clear()
        self._stream.held_bytes = self._stream.expected_bytes = 0
        self._stream.paused = False
        if self._body is not None and self._size > SMALL_MESSAGE_BYTES:
            self._traffic.incomplete_bytes -= self._size
        self._body = self._scratch = None
        self._partial.clear()

    # BodyConsumer

    def data(self, view: memoryview, start: int, stop: int) -> None:
        if not (self._held or self._stream.paused or self._closed):
            start = self._deliver(view, start, stop)
        if start < stop and not self._closed:
            self._hold(view[start:stop])

    def reserve(self, limit: int) -> memoryview | None:
        if self._body is None or self._held or self._stream.paused:
            return None
        return self._body[self._filled : min(self._filled + limit, self._size)]

    def filled(self, count: int) -> None:
        self._filled += count
        self._stream.expected_bytes = self._size - self._filled
        if self._filled < self._size:
            return
        try:
            self._complete()
        except Exception as error:
            self._on_error(error)

    def half_closed(self) -> None:
        self._ended = True
        if not self._held and not self._stream.paused:
            self._deliver_end()

    # Parsing

    def _deliver(self, view: memoryview, start: int, stop: int) -> int:
        """Deliver the messages in view[start:stop] and return the position at which delivery stopped."""
        delivered = 0
        stream = self._stream
        try:
            while start < stop:
                if self._body is None and not self._partial and stop - start >= 5:
                    flag, size = _unpack_prefix(view, start)
                    if flag or size > self._max_message_bytes:
                        self._refuse(flag, size)
                    start += 5
                    if size > stop - start:
                        self._begin(size)
                        continue
                    begin = start
                    start += size
                    delivered += 1
                    self._on_message(bytes(view[begin:start]) if size <= SMALL_MESSAGE_BYTES else view[begin:start])
                else:
                    start = self._gather(view, start, stop)
                if stream.paused or self._closed:
                    return start
        except Exception as error:
            self._on_error(error)
        finally:
            self._traffic.messages_in += delivered
        return start

    def _gather(self, view: memoryview, start: int, stop: int) -> int:
        """Add bytes to an incomplete message or prefix, and return the position after them."""
        if self._body is None:
            count = min(5 - len(self._partial), stop - start)
            self._partial += view[start : start + count]
            if len(self._partial) == 5:
                flag, size = _unpack_prefix(self._partial)
                self._partial.clear()
                if flag or size > self._max_message_bytes:
                    self._refuse(flag, size)
                self._begin(size)
                if not size:
                    self._complete()
            return start + count
        count = min(self._size - self._filled, stop - start)
        self._body[self._filled : self._filled + count] = view[start : start + count]
        self._filled += count
        self._stream.expected_bytes = self._size - self._filled
        if self._filled == self._size:
            self._complete()
        return start + count

    def _refuse(self, flag: int, size: int) -> None:
        if flag:
            raise GrpcError(StatusCode.UNIMPLEMENTED, "compressed messages are not supported")
        limit = self._max_message_bytes
        raise GrpcError(StatusCode.RESOURCE_EXHAUSTED, f"message of {size} bytes exceeds the limit of {limit} bytes")

    def _begin(self, size: int) -> None:
        """Allocate a message. The kernel provides memory for a large one only when its bytes arrive."""
        self._filled, self._size = 0, size
        if size <= SMALL_MESSAGE_BYTES:
            self._body = memoryview(bytearray(size))
            return
        traffic = self._traffic
        if traffic.incomplete_bytes + size > traffic.max_incomplete_bytes:
            limit = traffic.max_incomplete_bytes
            raise GrpcError(
                StatusCode.RESOURCE_EXHAUSTED,
                f"message of {size} bytes and {traffic.incomplete_bytes} bytes of other incomplete messages on this "
                f"connection exceed the limit of {limit} bytes",
            )
        if self._scratch is not None and size <= len(self._scratch):
            self._body = self._scratch
        else:
            try:
                self._body = memoryview(cast(Any, np.empty(size, np.uint8)))
            except MemoryError as error:
                raise GrpcError(
                    StatusCode.RESOURCE_EXHAUSTED, f"out of memory for a message of {size} bytes"
                ) from error
            if size <= SCRATCH_BYTES:
                self._scratch = self._body
        traffic.incomplete_bytes += size
        self._stream.expect(size)

    def _complete(self) -> None:
        body, self._body = self._body, None
        assert body is not None
        self._traffic.messages_in += 1
        if self._size <= SMALL_MESSAGE_BYTES:
            self._on_message(bytes(body))
            return
        self._traffic.incomplete_bytes -= self._size
        self._on_message(body[: self._size])

    def _hold(self, view: memoryview) -> None:
        """Hold bytes back. Small pieces share a chunk, so that many of them cost no more than their size."""
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
            if self._closed:
                return
            stream.held_bytes -= start
            if start < len(chunk):
                self._held.appendleft(chunk[start:])
        if stream.paused or self._closed:
            return
        stream.grant()
        if self._ended:
            self._deliver_end()

    def _deliver_end(self) -> None:
        self._ended = False
        try:
            if self._body is not None or self._partial:
                raise GrpcError(StatusCode.INTERNAL, "the request ends inside a message")
            self._on_end()
        except Exception as error:
            self._on_error(error)
