"""What one HTTP/2 connection may cost this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from atoll.grpc.http2.frames import ConnectionFailure, ErrorCode


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds for one connection, in bytes, seconds and counts.

    Received bytes that no handler has taken yet are at most `max_concurrent_streams` times both windows of a stream,
    and `incomplete_bytes` of messages that have not come whole. The connection's window is credited on receipt, so that
    a paused stream never blocks another one.
    """

    max_frame_bytes: int = 1 << 20
    stream_window_bytes: int = 256 << 10
    """How far a client may be ahead of the handler of a stream: a thousand small messages. With fewer, one that gets no
    CPU for a while has no work in line, and others its share; with more, jaxlib's client begins more threads."""
    message_window_bytes: int = 8 << 20
    """The same within a message whose length is known, beside that."""
    connection_window_bytes: int = 64 << 20
    max_concurrent_streams: int = 128
    incomplete_bytes: int = 4 << 30
    """Announced sizes, together, of the messages above 64 KiB of which only a part has come."""
    max_header_bytes: int = 64 << 10
    """Longest header block, before and after decompression, and longest control frame."""
    max_continuations: int = 64
    nuisance_burst: int = 1000
    """Cancelled, refused and malformed streams, settings and empty frames taken at once ..."""
    nuisance_per_second: float = 200.0
    """... and for longer; beyond that the connection ends with ENHANCE_YOUR_CALM."""
    handshake_seconds: float = 10.0
    """Time for the client to send its preface and settings."""
    linger_seconds: float = 2.0
    """Time for a closing connection to take what was written to it."""
    write_high_bytes: int = 1 << 20
    """With more bytes than this in the transport's own buffer, it gets no more."""


class NuisanceCredit:
    """A leaky bucket for what an honest peer does now and then, but not all the time."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._level = 0.0
        self._time = clock()

    def spend(self, cost: float = 1.0) -> None:
        """Raise ConnectionFailure if the peer has used up its credit."""
        now = self._clock()
        self._level = max(0.0, self._level - (now - self._time) * self._limits.nuisance_per_second) + cost
        self._time = now
        if self._level > self._limits.nuisance_burst:
            raise ConnectionFailure(ErrorCode.ENHANCE_YOUR_CALM, "too many resets, settings or empty frames")
