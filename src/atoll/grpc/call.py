"""One RPC in progress, from its first message to its status, as the handler sees it.

Invariant: a call ends once, either with the handler's `finish` or with `on_closed`, and does nothing afterwards.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from atoll.grpc.http2.http2_stream import Buffer, Http2Stream, ignore
from atoll.grpc.message_reader import MessageReader, Traffic, ignore_message, message_prefix
from atoll.grpc.metadata import RESPONSE_HEADERS, encode_metadata, status_trailers
from atoll.grpc.status import GrpcError, StatusCode

log = logging.getLogger(__name__)

LOW_WATER_BYTES = 256 << 10
"""`Call.drained` returns once no more than this is unsent."""

_pack_prefix = message_prefix.pack


class Call:
    """One RPC in progress. All methods and callbacks run on the event loop's thread; none blocks.

    The handler sets the callbacks before it returns, using `set_handlers`:

    on_message(message)
        Called for each message. A message of up to 64 KiB is `bytes`. A larger one is a memoryview that is valid
        only until the callback returns, because its memory is reused.
    on_half_close()
        Called after the last message, when the client has sent everything.
    on_closed()
        Called once if the call ends without the handler's `finish`: the client cancelled or broke the protocol, the
        connection was lost, or a callback raised.

    If a handler or callback raises GrpcError, the call ends with that status and a message that begins with the
    call's path. Any other exception is logged and ends the call with INTERNAL. After a call has ended, `send` and
    `finish` do nothing, so a late reply needs no check.

    Backpressure: after `pause`, the client can send no more than its window (`Limits`). The queue of sent messages is
    unbounded; a handler that sends a lot of data should await `drained` between messages.
    """

    __slots__ = (
        "_admit", "_ended", "_initial_sent", "_loop", "_on_closed", "_reader", "_stream", "_traffic", "_waiters",
        "metadata", "path", "peer",
    )  # fmt: skip

    def __init__(
        self,
        stream: Http2Stream,
        path: str,
        metadata: Mapping[str, bytes],
        *,
        traffic: Traffic,
        admit: Callable[[], None] = ignore,
        peer: str = "",
    ) -> None:
        self.path = path
        """The method's path: "/package.Service/Method"."""
        self.metadata = metadata
        """The request's headers by lower-case name, with decoded "-bin" values."""
        self.peer = peer
        """The IP address of a client that is not admitted yet; "" for other clients and on a unix socket."""
        self._on_closed: Callable[[], None] = ignore
        self._stream = stream
        self._reader = MessageReader(stream, traffic, self._failed)
        stream.set_handlers(self._reader, self._sent, self._closed)
        self._traffic = traffic
        self._admit = admit
        self._loop = asyncio.get_running_loop()
        self._ended = False
        self._initial_sent = False
        self._waiters: list[asyncio.Future[None]] = []

    def set_handlers(
        self,
        on_message: Callable[[bytes | memoryview], Any] = ignore_message,
        on_half_close: Callable[[], None] = ignore,
        on_closed: Callable[[], None] = ignore,
    ) -> None:
        """Replace all callbacks, as asyncio's transports do with a new protocol. Do nothing if the call has ended."""
        if not self._ended:
            self._reader.set_handlers(on_message, on_half_close)
            self._on_closed = on_closed

    @property
    def ended(self) -> bool:
        """Whether the handler called `finish` or the call was closed."""
        return self._ended

    @property
    def unsent_bytes(self) -> int:
        """Number of bytes of messages that the transport has not accepted yet."""
        return self._stream.unsent_bytes

    def send_initial_metadata(self, metadata: Mapping[str, bytes] | None = None) -> None:
        """Send the response's headers now instead of with the first message. "-bin" values are encoded here.

        Raise RuntimeError if the headers were sent already.
        """
        if self._ended:
            return
        if self._initial_sent:
            raise RuntimeError(f"initial metadata of {self.path} was sent already; send it before the first message")
        self._initial_sent = True
        self._stream.start(RESPONSE_HEADERS + encode_metadata(metadata or {}))

    def send(self, message: Buffer | Sequence[Buffer]) -> None:
        """Queue one message, given as one buffer or as several that are sent without joining them.

        The buffers are not copied and must not change until they are sent.
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

    def finish(self, code: int = StatusCode.OK, message: str = "") -> None:
        """End the call with a gRPC status after everything queued has been sent."""
        if self._ended:
            return
        trailers = status_trailers(code, message)
        if not self._initial_sent:
            trailers = RESPONSE_HEADERS + trailers
        self._stream.end(trailers)
        self._release()

    def admit(self) -> None:
        """Mark the client as authenticated: its connection may stay open and carry large messages, also in this call.

        Do nothing if the server requires no authentication.
        """
        self._admit()
        self._reader.adopt_limit()

    def pause(self) -> None:
        """Stop delivering messages and granting the client credit beyond its window."""
        if not self._ended:
            self._stream.paused = True

    def resume(self) -> None:
        """Undo `pause`. Messages that were held back are delivered later, from the event loop."""
        self._reader.resume()

    async def drained(self) -> None:
        """Wait until at most `LOW_WATER_BYTES` are unsent or the stream is closed (see `ended`)."""
        if self._stream.unsent_bytes <= LOW_WATER_BYTES:
            return
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append(waiter)
        await waiter

    # Called by the server and the stream

    def start(self, handler: Callable[[Call], None]) -> None:
        try:
            handler(self)
        except Exception as error:
            self._failed(error)

    def _sent(self) -> None:
        if self._waiters and self._stream.unsent_bytes <= LOW_WATER_BYTES:
            self._wake()

    def _closed(self) -> None:
        self._wake()
        if self._ended:
            return
        on_closed = self._on_closed
        self._release()
        self._report_closed(on_closed)

    def _failed(self, error: Exception) -> None:
        """End the call because of an error of its client or its handler."""
        if self._ended:
            log.error("a callback of %s raised after the call had ended", self.path, exc_info=error)
            return
        code, message = StatusCode.INTERNAL, "internal error, see the server's log"
        if isinstance(error, GrpcError):
            code, message = error.code, error.message
        else:
            log.error("a handler of %s raised", self.path, exc_info=error)
        on_closed = self._on_closed
        self.finish(code, f"{self.path}: {message}")
        self._report_closed(on_closed)

    def _report_closed(self, on_closed: Callable[[], None]) -> None:
        try:
            on_closed()
        except Exception as error:
            # The client is gone or has its answer, so the owner of the loop must handle the error.
            self._loop.call_exception_handler({"message": f"on_closed of {self.path} raised", "exception": error})

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _release(self) -> None:
        self._ended = True
        self._on_closed = ignore
        self._reader.close()


def _flat(piece: Buffer) -> Buffer:
    """Return a view of the buffer whose length is its size in bytes."""
    if isinstance(piece, memoryview) and (piece.itemsize != 1 or piece.ndim != 1):
        return piece.cast("B")
    return piece
