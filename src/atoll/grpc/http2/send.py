"""Sends the frames of an HTTP/2 connection: control frames first, then those of ready streams, round robin.

All frames that are queued during one iteration of the event loop are sent in one write. Invariants:
- DATA never exceeds the peer's windows and frame size (RFC 9113, section 6.9).
- The transport's buffer holds little more than `Limits.write_high_bytes`; the rest stays in the streams.
- The connection does not read from a peer that causes many replies without reading them.
"""

from __future__ import annotations

import asyncio
from collections import deque

import hpack

from atoll.grpc.http2 import frames
from atoll.grpc.http2.frames import ErrorCode, HeaderList
from atoll.grpc.http2.http2_stream import Buffer, Http2Stream

QUANTUM_BYTES = 256 << 10
"""Bytes that one stream can send before the next stream's turn, which bounds the delay of small messages."""
BURST_BYTES = 1 << 20
"""Body bytes written per iteration of the event loop. The connection reads between two iterations."""
JOIN_BYTES = 64 << 10
"""Writes up to this size are joined, which is cheaper than passing the parts separately."""
MAX_CONTROL_BACKLOG = 64 << 10
"""While more bytes of control frames than this are unsent, the connection does not read from the peer."""


class Sender:
    """The sending half of a connection. `streams` is the connection's table of open streams."""

    def __init__(self, streams: dict[int, Http2Stream]) -> None:
        self.transport: asyncio.Transport | None = None
        self.bytes_out = 0
        self.reading = False
        """Whether received bytes are being handled. No flush is scheduled then, because one follows."""
        self.window = frames.DEFAULT_WINDOW
        self.max_frame = frames.DEFAULT_MAX_FRAME
        self._loop = asyncio.get_running_loop()
        self._streams = streams
        self._encoder = hpack.Encoder()
        self._control: list[bytes] = []
        self._control_bytes = 0
        self._ready: deque[Http2Stream] = deque()
        self._write_paused = False
        self._read_paused = False
        self._scheduled = False

    def limit_header_table(self, size: int) -> None:
        """Limit the header compression table to `size`, which the peer allows, and to the default of 4 KiB."""
        self._encoder.header_table_size = min(size, 4096)

    def control(self, frame: bytes) -> None:
        """Queue a control frame, which is sent before all frames of streams."""
        self._control.append(frame)
        self._control_bytes += len(frame)
        transport = self.transport
        backlog = self._write_paused and self._control_bytes > MAX_CONTROL_BACKLOG
        if backlog and not self._read_paused and transport is not None:
            self._read_paused = True
            transport.pause_reading()
        self._schedule()

    def make_ready(self, stream: Http2Stream) -> None:
        """Queue a stream that has frames to send."""
        if stream.ready or not stream.open:
            return
        stream.ready = True
        self._ready.append(stream)
        self._schedule()

    def reset(self, stream: Http2Stream, code: ErrorCode) -> None:
        """Close a stream at once and send RST_STREAM."""
        if stream.open:
            self.drop(stream)
            self.control(frames.rst_stream(stream.number, code))

    def drop(self, stream: Http2Stream) -> None:
        """Close a stream without sending RST_STREAM."""
        self._streams.pop(stream.number, None)
        stream.open = False
        stream.outgoing.clear()
        stream.unsent_bytes = 0

    def pause(self) -> None:
        """Stop writing, because the transport's buffer is full."""
        self._write_paused = True

    def resume(self) -> None:
        self._write_paused = False
        self.flush()

    def _schedule(self) -> None:
        if not self._scheduled and not self.reading:
            self._scheduled = True
            self._loop.call_soon(self._scheduled_flush)

    def _scheduled_flush(self) -> None:
        self._scheduled = False
        self.flush()

    def flush(self) -> None:
        """Write one burst of queued frames, and schedule another flush if frames remain."""
        transport = self.transport
        if transport is None or self._write_paused or not (self._ready or self._control):
            return
        out: list[Buffer] = []
        if self._control:
            out.extend(self._control)
            self._control.clear()
            self._control_bytes = 0
        budget = BURST_BYTES
        blocked: list[Http2Stream] = []
        while self._ready and budget > 0:
            stream = self._ready.popleft()
            stream.ready = False
            if not stream.open:
                continue
            budget -= self._turn(stream, out)
            if not stream.unsent_bytes:
                continue
            if self.window <= 0:
                blocked.append(stream)
            elif stream.send_window > 0:
                self._again(stream)
        if out:
            self._write(transport, out)
        if self._ready:
            self._schedule()
        for stream in blocked:
            self._again(stream)
        if self._read_paused and not self._write_paused:
            self._read_paused = False
            transport.resume_reading()

    def _again(self, stream: Http2Stream) -> None:
        if stream.open and not stream.ready:
            stream.ready = True
            self._ready.append(stream)

    def _turn(self, stream: Http2Stream, out: list[Buffer]) -> int:
        """Add the frames that the stream can send now to `out`, and return the number of their body bytes."""
        taken = 0
        if stream.headers is not None:
            out.append(self._header_frames(stream.number, stream.headers, False))
            stream.headers = None
        if stream.unsent_bytes:
            room = min(stream.send_window, self.window, QUANTUM_BYTES)
            if room > 0:
                taken = stream.take(out, room, self.max_frame)
                self.window -= taken
                stream.on_sent()
        if stream.trailers is not None and not stream.unsent_bytes and stream.open:
            out.append(self._header_frames(stream.number, stream.trailers, True))
            if stream.remote_open:  # stop the peer's upload (section 8.1)
                out.append(frames.rst_stream(stream.number, ErrorCode.NO_ERROR))
            self.drop(stream)
        return taken

    def _header_frames(self, number: int, headers: HeaderList, ends: bool) -> bytes:
        return frames.header_frames(number, self._encoder.encode(headers), self.max_frame, ends)

    def _write(self, transport: asyncio.Transport, out: list[Buffer]) -> None:
        size = sum(map(len, out))
        self.bytes_out += size
        if size <= JOIN_BYTES:
            transport.write(b"".join(out))
        else:
            # asyncio of CPython 3.12.1 and 3.13.0 tells the protocol that the buffer is full in write only.
            *most, last = out
            transport.writelines(most)
            transport.write(last)

    def close(self, frame: bytes) -> None:
        """Write the queued control frames and `frame`, and close the transport."""
        transport, self.transport = self.transport, None
        self._ready.clear()
        if transport is not None:
            self._write(transport, [*self._control, frame])
            transport.close()
        self._control.clear()
