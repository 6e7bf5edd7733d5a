"""The server's side of an HTTP/2 connection, as an asyncio protocol.

This module handles control frames and the life cycle of the connection and its streams; `receive` and `send` handle
the bytes. The implementation is optimized for many small DATA frames per read and for large bodies.

Invariant: no input of the peer makes the protocol raise or exceed `Limits`. A peer that breaks the rules receives
RST_STREAM or GOAWAY (RFC 9113, section 5.4). A peer that causes useless work, such as "rapid reset" (CVE-2023-44487),
runs out of credit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from atoll.grpc.http2 import frames
from atoll.grpc.http2.frames import ConnectionFailure, ErrorCode, HeaderList, Setting
from atoll.grpc.http2.headers import HeaderBlocks, MalformedRequest, check_request
from atoll.grpc.http2.http2_limits import Limits, NuisanceCredit
from atoll.grpc.http2.http2_stream import Http2Stream
from atoll.grpc.http2.receive import Receiver
from atoll.grpc.http2.send import Sender

log = logging.getLogger(__name__)


class Http2Connection(asyncio.BufferedProtocol):
    """The connection of one client, used only on the event loop's thread.

    The connection calls `on_request(stream, headers)` for each new stream; the callback sets the stream's consumer and
    callbacks and can reply at once. It calls `on_made(connection)` once before it sends anything, and
    `on_lost(connection)` once after `on_closed` of all streams. The callbacks must not raise or block.
    """

    def __init__(
        self,
        on_request: Callable[[Http2Stream, HeaderList], None],
        on_made: Callable[[Http2Connection], None],
        on_lost: Callable[[Http2Connection], None],
        limits: Limits,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.streams: dict[int, Http2Stream] = {}
        self.lost = loop.create_future()
        self._loop = loop
        self._limits = limits
        self._on_request = on_request
        self._on_made = on_made
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closing = False
        self._peer_stream_window = frames.DEFAULT_WINDOW
        self._credit = NuisanceCredit(limits, loop.time)
        self._blocks = HeaderBlocks(limits)
        self._sender = Sender(self.streams)
        self._receiver = Receiver(
            limits, self.streams, self._sender, self._credit, self._control_frame, self._stream_failure
        )

    @property
    def bytes_in(self) -> int:
        return self._receiver.bytes_in

    @property
    def bytes_out(self) -> int:
        return self._sender.bytes_out

    def queued_bytes(self) -> int:
        """Return the number of bytes received that no handler has taken, and bytes written but not sent."""
        queued = sum(stream.held_bytes + stream.unsent_bytes for stream in self.streams.values())
        if self._transport is not None:
            queued += self._transport.get_write_buffer_size()
        return queued

    @property
    def peer(self) -> str:
        """The peer's IP address; "" for a unix socket."""
        name = self._transport.get_extra_info("peername") if self._transport is not None else None
        return str(name[0]) if isinstance(name, tuple) else ""

    # Transport callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = self._sender.transport = cast(asyncio.Transport, transport)
        self._on_made(self)
        if self._closing:
            return
        limits = self._limits
        self._transport.set_write_buffer_limits(high=limits.write_high_bytes)
        settings = (
            (Setting.MAX_CONCURRENT_STREAMS, limits.max_concurrent_streams),
            (Setting.INITIAL_WINDOW_SIZE, limits.stream_window_bytes),
            (Setting.MAX_FRAME_SIZE, limits.max_frame_bytes),
            (Setting.MAX_HEADER_LIST_SIZE, limits.max_header_bytes),
        )
        self._sender.control(frames.settings_frame(settings))
        more = limits.connection_window_bytes - frames.DEFAULT_WINDOW
        if more > 0:
            self._sender.control(frames.window_update(0, more))
        self._timer = self._loop.call_later(limits.handshake_seconds, self._handshake_overdue)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._closing = self._receiver.stopped = True
        self._transport = self._sender.transport = None
        if self._timer is not None:
            self._timer.cancel()
        self._close_streams()
        if not self.lost.done():
            self.lost.set_result(None)
        self._on_lost(self)

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._sender.pause()

    def resume_writing(self) -> None:
        self._sender.resume()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._receiver.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        if self._closing:
            return
        sender = self._sender
        sender.reading = True
        try:
            self._receiver.received(nbytes)
        except ConnectionFailure as failure:
            self.fail(failure.code, str(failure))
        except Exception:
            log.exception("HTTP/2 connection ends after an internal error")
            self.fail(ErrorCode.INTERNAL_ERROR, "internal error")
        finally:
            sender.reading = False
        sender.flush()

    # Control frames

    def _control_frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        _HANDLERS[kind](self, flags, number, payload)

    def _on_headers(self, flags: int, number: int, payload: bytes) -> None:
        if not number & 1:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, f"HEADERS on stream {number}")
        self._headers(number, self._blocks.begin(flags, number, payload))

    def _on_continuation(self, flags: int, number: int, payload: bytes) -> None:
        self._headers(number, self._blocks.extend(flags, payload))

    def _headers(self, number: int, headers: HeaderList | None) -> None:
        self._receiver.open_block = self._blocks.stream
        if headers is None:
            return
        ends = self._blocks.end_stream
        stream = self.streams.get(number)
        if stream is None and number <= self._receiver.last_stream:
            self._refuse(number, ErrorCode.STREAM_CLOSED)
        elif stream is None:
            self._receiver.last_stream = number
            self._open(number, headers, ends)
        elif not stream.remote_open:
            self._stream_failure(stream, ErrorCode.STREAM_CLOSED)
        elif not ends or any(name[:1] == b":" for name, _ in headers):
            self._stream_failure(stream, ErrorCode.PROTOCOL_ERROR)
        else:  # trailers of a client, which gRPC does not use, end the request
            stream.half_close()

    def _open(self, number: int, headers: HeaderList, ends: bool) -> None:
        if len(self.streams) >= self._limits.max_concurrent_streams:
            self._refuse(number, ErrorCode.REFUSED_STREAM)
            return
        try:
            check_request(headers)
        except MalformedRequest:
            self._refuse(number, ErrorCode.PROTOCOL_ERROR)
            return
        stream = Http2Stream(
            self._sender,
            number,
            self._peer_stream_window,
            self._limits.stream_window_bytes,
            self._limits.message_window_bytes,
        )
        self.streams[number] = stream
        self._on_request(stream, headers)
        if ends and stream.open:
            stream.half_close()

    def _on_priority(self, flags: int, number: int, payload: bytes) -> None:
        if not number:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "PRIORITY on stream 0")
        if len(payload) != 5:
            raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "PRIORITY length is not 5")
        self._credit.spend()

    def _on_rst_stream(self, flags: int, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM length is not 4")
        stream = self._receiver.known_stream(number, "RST_STREAM")
        if stream is not None:
            self._sender.drop(stream)
            stream.on_closed()
            self._credit.spend()

    def _on_settings(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, f"SETTINGS on stream {number}")
        if flags & frames.ACK:
            if payload:
                raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS acknowledgement with a payload")
            return
        settings = frames.parse_settings(payload)
        if self._receiver.settings_seen:
            self._credit.spend()
        elif self._timer is not None:
            self._timer.cancel()
        self._receiver.settings_seen = True
        if Setting.HEADER_TABLE_SIZE in settings:
            self._sender.limit_header_table(settings[Setting.HEADER_TABLE_SIZE])
        self._sender.max_frame = settings.get(Setting.MAX_FRAME_SIZE, self._sender.max_frame)
        window = settings.get(Setting.INITIAL_WINDOW_SIZE, self._peer_stream_window)
        change, self._peer_stream_window = window - self._peer_stream_window, window
        for stream in list(self.streams.values()) if change else ():
            stream.send_window += change
            if stream.send_window > frames.MAX_WINDOW:
                raise ConnectionFailure(ErrorCode.FLOW_CONTROL_ERROR, "a stream's window above 2^31 - 1")
            if stream.unsent_bytes:
                self._sender.make_ready(stream)
        self._sender.control(frames.SETTINGS_ACK)

    def _on_push_promise(self, flags: int, number: int, payload: bytes) -> None:
        raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE from a client")

    def _on_ping(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, f"PING on stream {number}")
        if len(payload) != 8:
            raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "PING length is not 8")
        if not flags & frames.ACK:
            self._sender.control(frames.ping_ack(payload))

    def _on_window_update(self, flags: int, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE length is not 4")
        increment = int.from_bytes(payload, "big") & frames.MAX_WINDOW
        if not number:
            if not increment:
                raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of 0")
            self._sender.window += increment
            if self._sender.window > frames.MAX_WINDOW:
                raise ConnectionFailure(ErrorCode.FLOW_CONTROL_ERROR, "connection's window above 2^31 - 1")
            return
        stream = self._receiver.known_stream(number, "WINDOW_UPDATE")
        if stream is None:
            return
        stream.send_window += increment
        if not increment:
            self._stream_failure(stream, ErrorCode.PROTOCOL_ERROR)
        elif stream.send_window > frames.MAX_WINDOW:
            self._stream_failure(stream, ErrorCode.FLOW_CONTROL_ERROR)
        elif stream.unsent_bytes:
            self._sender.make_ready(stream)

    # Closing

    def _stream_failure(self, stream: Http2Stream, code: ErrorCode) -> None:
        """Close a stream with RST_STREAM because of the peer's error."""
        self._sender.reset(stream, code)
        stream.on_closed()
        self._credit.spend()

    def _refuse(self, number: int, code: ErrorCode) -> None:
        self._sender.control(frames.rst_stream(number, code))
        self._credit.spend()

    def _close_streams(self) -> None:
        while self.streams:
            stream = next(iter(self.streams.values()))
            self._sender.drop(stream)
            stream.on_closed()

    def fail(self, code: ErrorCode, reason: str) -> None:
        """Close all streams, write the queued control frames and a GOAWAY with the reason, and end the connection."""
        if self._closing:
            return
        self._closing = self._receiver.stopped = True
        if code:
            log.info("HTTP/2 connection ends: %s, %s", code.name, reason)
        if self._timer is not None:
            self._timer.cancel()
        self._close_streams()
        if self._transport is not None:
            self._timer = self._loop.call_later(self._limits.linger_seconds, self.abort)
            self._sender.close(frames.goaway(self._receiver.last_stream, code, reason.encode()[:128]))

    def abort(self) -> None:
        """Drop the connection and all unsent bytes at once. `on_made` can call this to refuse the connection."""
        self._closing = self._receiver.stopped = True
        if self._transport is not None:
            self._transport.abort()

    def drop(self, reason: str) -> None:
        """End the connection because the peer uses too many resources."""
        self.fail(ErrorCode.ENHANCE_YOUR_CALM, reason)

    def _handshake_overdue(self) -> None:
        self.fail(ErrorCode.SETTINGS_TIMEOUT, f"no settings within {self._limits.handshake_seconds} s")


_HANDLERS: dict[int, Callable[[Http2Connection, int, int, bytes], None]] = {
    frames.HEADERS: Http2Connection._on_headers,
    frames.PRIORITY: Http2Connection._on_priority,
    frames.RST_STREAM: Http2Connection._on_rst_stream,
    frames.SETTINGS: Http2Connection._on_settings,
    frames.PUSH_PROMISE: Http2Connection._on_push_promise,
    frames.PING: Http2Connection._on_ping,
    frames.WINDOW_UPDATE: Http2Connection._on_window_update,
    frames.CONTINUATION: Http2Connection._on_continuation,
}
