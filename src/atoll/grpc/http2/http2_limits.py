"""Bounds for the resources that one HTTP/2 connection can use."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from atoll.grpc.http2.frames import ConnectionFailure, ErrorCode


class Limits(msgspec.Struct, frozen=True):
    """Bounds for one connection, in bytes, seconds and counts.

    At most `max_concurrent_streams` times both windows of a stream, plus `incomplete_bytes` of incomplete messages, are
    received before a handler takes them. The connection's window is credited on receipt, so that a paused stream never
    blocks another one.
    """

    max_frame_bytes: int = 1 << 20
    stream_window_bytes: int = 256 << 10
    """Bytes that a client can send ahead of a stream's handler, about a thousand small messages. With a smaller window,
    a client that gets no CPU for a while has no work queued and loses its share to others. With a larger one, jaxlib's
    client starts more threads."""
    message_window_bytes: int = 8 << 20
    """Additional window within a message whose length is known."""
    connection_window_bytes: int = 64 << 20
    max_concurrent_streams: int = 128
    incomplete_bytes: int = 4 << 30
    """Limit for the total announced size of incomplete messages above 64 KiB."""
    max_header_bytes: int = 64 << 10
    """Limit for a header block, before and after decompression, and for a control frame."""
    max_continuations: int = 64
    nuisance_burst: int = 1000
    """Capacity of `NuisanceCredit`: cancelled, refused and malformed streams, settings and empty frames."""
    nuisance_per_second: float = 200.0
    """Rate at which `NuisanceCredit` recovers. If it is exceeded, the connection ends with ENHANCE_YOUR_CALM."""
    handshake_seconds: float = 10.0
    """Time for the client to send its preface and settings."""
    linger_seconds: float = 2.0
    """Time for a closing connection to read the bytes that were written to it."""
    write_high_bytes: int = 1 << 20
    """Nothing is written to the transport while its own buffer holds more than this."""


class NuisanceCredit:
    """A leaky bucket for events that an honest peer causes occasionally but not continuously."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._level = 0.0
        self._time = clock()

    def spend(self) -> None:
        """Raise ConnectionFailure if the peer has used up its credit."""
        now = self._clock()
        self._level = max(0.0, self._level - (now - self._time) * self._limits.nuisance_per_second) + 1.0
        self._time = now
        if self._level > self._limits.nuisance_burst:
            raise ConnectionFailure(ErrorCode.ENHANCE_YOUR_CALM, "too many resets, settings or empty frames")
