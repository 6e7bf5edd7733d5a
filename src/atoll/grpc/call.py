"""One RPC in progress: what its handler sees of it, from its first message to its status.

Invariant: a call ends once, either by its handler's `finish` or by `on_closed`, and does nothing after that.
How messages are read is in `messages`, how bytes leave in `atoll.grpc.http2`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from atoll.grpc.http2.http2_stream import Buffer, Stream, ignore
from atoll.grpc.message_reader import MessageReader, Traffic, message_prefix
from atoll.grpc.metadata import RESPONSE_HEADERS, encode_metadata, status_trailers
from atoll.grpc.status import GrpcError, StatusCode

log = logging.getLogger(__name__)

LOW_WATER_BYTES = 256 << 10
"""`Call.drained` waits until no more than this is unsent."""

_pack_prefix = message_prefix.pack


class Call:
    """One RPC in progress. All methods and callbacks belong to the event loop's thread; none blocks.

    The handler sets the callbacks before it returns:

    on_message(message)
        Once for each message. Up to 64 KiB it is bytes; a larger one is a memoryview that is valid only until
        the callback returns: its memory is used again.
    on_half_close()
        The client has sent everything. Comes after the last message.
    on_closed()
        The call ended by anything but `finish`: the client cancelled or broke the protocol, the connection is
        lost, or a callback raised. Called once, and never after `finish`.

    A handler or callback that raises GrpcError ends the call with that status, its message preceded by the
    call's path; any other exception is logged and ends it with INTERNAL. Once a call has ended, `send` and
    `finish` do nothing, so that a handler's late reply needs no check.

    Backpressure: `pause` stops the client after its window (`Limits`) of bytes. What is
    sent is queued without a bound; a handler that sends much awaits `drained` between its messages.
    """

    __slots__ = (
        "_admit", "_ended", "_initial_sent", "_loop", "_reader", "_stream", "_traffic", "_waiters", "metadata",
        "on_closed", "path", "peer",
    )  # fmt: skip

    def __init__(
        self,
        stream: Stream,
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
        """The request's headers, by lower-case name; values of "-bin" names are decoded."""
        self.peer = peer
        """The IP address of a client that is not admitted yet; "" for others, and on a unix socket."""
        self.on_closed: Callable[[], None] = ignore
        self._stream = stream
        self._reader = stream.consumer = MessageReader(stream, traffic, self._failed)
        stream.on_sent, stream.on_closed = self._sent, self._closed
        self._traffic = traffic
        self._admit = admit
        self._loop = asyncio.get_running_loop()
        self._ended = False
        self._initial_sent = False
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def on_message(self) -> Callable[[bytes | memoryview], None]:
        return self._reader.on_message

    @on_message.setter
    def on_message(self, callback: Callable[[bytes | memoryview], None]) -> None:
        if not self._ended:
            self._reader.on_message = callback

    @property
    def on_half_close(self) -> Callable[[], None]:
        return self._reader.on_end

    @on_half_close.setter
    def on_half_close(self, callback: Callable[[], None]) -> None:
        if not self._ended:
            self._reader.on_end = callback

    @property
    def ended(self) -> bool:
        """Whether finish() was called or the call was closed."""
        return self._ended

    @property
    def unsent_bytes(self) -> int:
        """Bytes of messages that the transport has not taken yet."""
        return self._stream.unsent_bytes

    def send_initial_metadata(self, metadata: Mapping[str, bytes] | None = None) -> None:
        """Send the response's headers now, not with the first message; "-bin" values are encoded here.

        Raises RuntimeError if they were sent already.
        """
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

    def finish(self, code: int = StatusCode.OK, message: str = "") -> None:
        """End the call with a gRPC status, once everything queued is sent."""
        if self._ended:
            return
        trailers = status_trailers(code, message)
        if not self._initial_sent:
            trailers = RESPONSE_HEADERS + trailers
        self._stream.end(trailers)
        self._release()

    def admit(self) -> None:
        """The client has proved who it is: its connection may stay, and carry large messages, also of this call.

        Does nothing if the server asks for no such proof.
        """
        self._admit()
        self._reader.adopt_limit()

    def pause(self) -> None:
        """Deliver no more messages, and let the client send no more than its window."""
        if not self._ended:
            self._stream.paused = True

    def resume(self) -> None:
        """Go on after pause(). What was held back is delivered later, from the event loop."""
        self._reader.resume()

    async def drained(self) -> None:
        """Wait until at most 256 KiB are unsent, or the stream is closed (see `ended`)."""
        if self._stream.unsent_bytes <= LOW_WATER_BYTES:
            return
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append(waiter)
        await waiter

    # For the server and the stream

    def start(self, handler: Callable[[Call], None]) -> None:
        """Pass the call to its handler."""
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
        on_closed = self.on_closed
        self._release()
        try:
            on_closed()
        except Exception as error:
            # For the loop's owner to decide: the client is gone, or has its answer.
            self._loop.call_exception_handler({"message": f"on_closed of {self.path} raised", "exception": error})

    def _failed(self, error: Exception) -> None:
        """End the call for an error of its client or its handler."""
        if self._ended:
            log.error("a callback of %s raised after the call had ended", self.path, exc_info=error)
            return
        code, message = StatusCode.INTERNAL, "internal error, see the server's log"
        if isinstance(error, GrpcError):
            code, message = error.code, error.message
        else:
            log.error("a handler of %s raised", self.path, exc_info=error)
        on_closed = self.on_closed
        self.finish(code, f"{self.path}: {message}")
        try:
            on_closed()
        except Exception as error:
            # For the loop's owner to decide: the client is gone, or has its answer.
            self._loop.call_exception_handler({"message": f"on_closed of {self.path} raised", "exception": error})

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _release(self) -> None:
        """Free the handler's callbacks and what was received."""
        self._ended = True
        self.on_closed = ignore
        self._reader.close()


def _flat(piece: Buffer) -> Buffer:
    """The buffer as one whose length is its size in bytes."""
    if isinstance(piece, memoryview) and (piece.itemsize != 1 or piece.ndim != 1):
        return piece.cast("B")
    return piece
