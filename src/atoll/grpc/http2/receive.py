"""Parses the frames that an HTTP/2 connection receives, and passes the bodies of DATA frames to their streams.

Frames are parsed in the read buffer. The body of a DATA frame is passed on as it arrives, so that only control frames
must be complete, and a large body can be read from the socket directly to its destination.

Invariant: the size of the read buffer is fixed, and nothing is accepted beyond the granted windows (RFC 9113, sections
4.1, 6.1 and 6.9).
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.grpc.http2 import frames
from atoll.grpc.http2.frames import ConnectionFailure, ErrorCode
from atoll.grpc.http2.http2_limits import Limits, NuisanceCredit
from atoll.grpc.http2.http2_stream import Http2Stream
from atoll.grpc.http2.send import Sender

READ_BUFFER_BYTES = 256 << 10
DIRECT_READ_BYTES = 64 << 10
"""If less than this is missing of a body, it is read through the read buffer: a copy costs less than a read."""

_unpack_header = frames.frame_header.unpack_from
_CONTROL_FRAMES = frozenset(range(frames.HEADERS, frames.CONTINUATION + 1)) - {frames.GOAWAY}


class Receiver:
    """The receiving half of a connection.

    `on_control(type, flags, stream number, payload)` receives complete control frames of known types.
    `on_stream_failure` closes a stream because of the peer's error. These callbacks and `received` can raise
    ConnectionFailure.
    """

    def __init__(
        self,
        limits: Limits,
        streams: dict[int, Http2Stream],
        sender: Sender,
        credit: NuisanceCredit,
        on_control: Callable[[int, int, int, bytes], None],
        on_stream_failure: Callable[[Http2Stream, ErrorCode], None],
    ) -> None:
        self.bytes_in = 0
        self.last_stream = 0
        """The highest stream number that the peer has used."""
        self.settings_seen = False
        self.open_block = 0
        """The stream whose header block is incomplete, or 0."""
        self.stopped = False
        self._limits = limits
        self._streams = streams
        self._sender = sender
        self._credit = credit
        self._on_control = on_control
        self._on_stream_failure = on_stream_failure
        # A complete control frame and its header must fit in.
        self._view = memoryview(bytearray(max(READ_BUFFER_BYTES, 2 * limits.max_header_bytes)))
        self._kept = 0
        self._preface_seen = False
        self._direct = False
        self._window = limits.connection_window_bytes
        self._body_left = 0
        self._body_stream: Http2Stream | None = None
        self._body_ends = False
        self._skip_left = 0

    def known_stream(self, number: int, what: str) -> Http2Stream | None:
        """Return the stream, or None if it was closed. Raise ConnectionFailure if it was never open (section 5.1)."""
        stream = self._streams.get(number)
        if stream is None and (number > self.last_stream or not number & 1):
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, f"{what} on idle stream {number}")
        return stream

    def get_buffer(self) -> memoryview:
        stream = self._body_stream
        if self._body_left >= DIRECT_READ_BYTES and stream is not None:
            room = stream.consumer.reserve(self._body_left)
            if room is not None:
                self._direct = True
                return room
        self._direct = False
        return self._view[self._kept :]

    def received(self, count: int) -> None:
        """Handle `count` bytes that were read into the buffer from `get_buffer`."""
        self.bytes_in += count
        if not self._direct:
            self._parse(self._kept + count)
            return
        self._direct = False
        self._body_left -= count
        if self._body_stream is not None:
            self._body_stream.consumer.filled(count)
        if not self._body_left:
            self._body_complete()

    def _parse(self, end: int) -> None:
        """Handle the complete frames in the first `end` bytes of the read buffer, and keep the rest."""
        view = self._view
        streams = self._streams
        half_connection = self._limits.connection_window_bytes >> 1
        max_frame = self._limits.max_frame_bytes
        position = 0
        if not self._preface_seen:
            if not self._check_preface(end):
                self._kept = end
                return
            position = len(frames.PREFACE)
        while not self.stopped:
            if self._body_left or self._skip_left:
                position = self._pass_body(position, end)
                if self._body_left or self._skip_left:
                    break
            start = position + frames.HEADER_BYTES
            if start > end:
                break
            head, flags, number = _unpack_header(view, position)
            stream = streams.get(number)
            length = head >> 8
            # The most frequent case, a complete DATA frame without padding on an open stream, is inlined for speed.
            if (
                stream is not None
                and not head & 0xFF
                and flags <= frames.END_STREAM
                and 0 < length <= end - start
                and length <= max_frame
                and length <= stream.receive_window
                and length <= self._window
                and stream.remote_open
                and not self.open_block
            ):
                self._window -= length
                stream.receive_window -= length
                position = start + length
                stream.consumer.data(view, start, position)
                if flags:
                    stream.half_close()
                elif stream.receive_window <= stream.low_water:
                    stream.grant()
                if self._window <= half_connection:
                    self._grant()
                continue
            consumed = self._frame(head & 0xFF, flags, number & 0x7FFFFFFF, length, start, end)
            if consumed < 0:
                break
            position = start + consumed
        self._kept = end - position
        if self._kept and position:
            view[: self._kept] = view[position:end]

    def _check_preface(self, end: int) -> bool:
        size = min(end, len(frames.PREFACE))
        if self._view[:size] != frames.PREFACE[:size]:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "missing HTTP/2 connection preface")
        self._preface_seen = size == len(frames.PREFACE)
        return self._preface_seen

    def _pass_body(self, position: int, end: int) -> int:
        """Pass on the received part of a DATA frame's body, skip padding, and return the position after them."""
        count = min(self._body_left, end - position)
        if count:
            self._body_left -= count
            stream = self._body_stream
            if stream is not None and stream.open:
                stream.consumer.data(self._view, position, position + count)
            position += count
            if not self._body_left:
                self._body_complete()
        if not self._body_left:
            skipped = min(self._skip_left, end - position)
            self._skip_left -= skipped
            position += skipped
        return position

    def _body_complete(self) -> None:
        stream, self._body_stream = self._body_stream, None
        if stream is not None and stream.open:
            if self._body_ends:
                stream.half_close()
            else:
                stream.grant()
        if self._window * 2 <= self._limits.connection_window_bytes:
            self._grant()

    def _grant(self) -> None:
        increment = self._limits.connection_window_bytes - self._window
        self._window += increment
        self._sender.control(frames.window_update(0, increment))

    def _frame(self, kind: int, flags: int, number: int, length: int, start: int, end: int) -> int:
        """Handle one frame. Return how many bytes of its payload were consumed, or -1 if it is incomplete."""
        if length > self._limits.max_frame_bytes:
            raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, f"frame of {length} bytes")
        if self.open_block and (kind != frames.CONTINUATION or number != self.open_block):
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, f"type {kind} inside a header block")
        if not self.settings_seen and (kind != frames.SETTINGS or flags & frames.ACK):
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, f"first frame is of type {kind}, not SETTINGS")
        if kind == frames.DATA:
            return self._data(flags, number, length, start, end)
        if kind not in _CONTROL_FRAMES:
            if kind == frames.GOAWAY and number:
                raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, f"GOAWAY on stream {number}")
            if not length:
                self._credit.spend()
            self._skip_left = length
            return 0
        if length > self._limits.max_header_bytes:
            raise ConnectionFailure(ErrorCode.ENHANCE_YOUR_CALM, f"frame of type {kind} with {length} bytes")
        if length > end - start:
            return -1
        self._on_control(kind, flags, number, bytes(self._view[start : start + length]))
        return length

    def _data(self, flags: int, number: int, length: int, start: int, end: int) -> int:
        """Begin a DATA frame. `_pass_body` handles its body."""
        padding = 0
        if flags & frames.PADDED:
            if not length:
                raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "padded DATA without a pad length")
            if start == end:
                return -1
            padding = self._view[start] + 1
            if padding > length:
                raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "DATA padding exceeds its frame")
        stream = self.known_stream(number, "DATA")
        self._window -= length
        if self._window < 0:
            raise ConnectionFailure(ErrorCode.FLOW_CONTROL_ERROR, "connection's window exceeded")
        if stream is not None:
            stream.receive_window -= length
            if not stream.remote_open:
                self._on_stream_failure(stream, ErrorCode.STREAM_CLOSED)
            elif stream.receive_window < 0:
                self._on_stream_failure(stream, ErrorCode.FLOW_CONTROL_ERROR)
        if length == padding and not flags & frames.END_STREAM:
            self._credit.spend()
        self._body_left = length - padding
        self._body_stream = stream
        self._body_ends = bool(flags & frames.END_STREAM)
        self._skip_left = max(0, padding - 1)
        if not self._body_left:
            self._body_complete()
        return min(padding, 1)
