"""What a channel between machines knows of its peer: whether it is there, and which small pieces it has received.

A small piece is sent and forgotten: the kernel has it, and may lose it with the connection. So pieces are counted at
both ends, and the count comes back once a second while any is unconfirmed. What a broken channel may have lost has a
name.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable

import msgspec

from atoll.transfers.frame_socket import FrameSocket
from atoll.transfers.silence_monitor import MONITOR, SILENCE_SECONDS, SilenceMonitor
from atoll.wire.framing import HEADER_BYTES

# Beyond that the oldest are taken as received: a second's worth of small pieces is far less.
_REMEMBERED = 65_536


class Probe(msgspec.Struct, frozen=True, array_like=True, tag="q"):
    """Are you there? Answered by `Alive`."""


_PROBE_BYTES = HEADER_BYTES + len(msgspec.msgpack.encode(Probe()))


class Alive(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """So many small pieces have been received on this connection."""

    pieces: int


class Liveness:
    """Of one channel on TCP; see `silence.Watched`. For any thread.

    `is_busy()` tells whether large transfers are under way; `sockets()` are all connections of the channel;
    `on_silence(error)` is called where the peer is silent.
    """

    def __init__(
        self,
        socket: FrameSocket,
        sockets: Callable[[], list[FrameSocket]],
        is_busy: Callable[[], bool],
        on_silence: Callable[[TimeoutError], None],
        monitor: SilenceMonitor | None = None,
    ) -> None:
        self._socket = socket
        self._sockets = sockets
        self._is_busy = is_busy
        self._on_silence = on_silence
        self._monitor = monitor or MONITOR
        self.patience = SILENCE_SECONDS
        self.awaits: Callable[[], bool] = lambda: False  # whether anything else is awaited of the peer
        self._lock = threading.Lock()
        self._unconfirmed: deque[tuple[int, int]] = deque()
        self._confirmed = 0
        self._received = 0
        self._probed = self._acknowledged = 0  # bytes
        self._closed = False

    # ---- small pieces

    def sent(self, session: int, feed: int) -> None:
        """A small piece is being written; called in the order in which they are."""
        with self._lock:
            self._unconfirmed.append((session, feed))
            if len(self._unconfirmed) > _REMEMBERED:
                self._unconfirmed.popleft()
                self._confirmed += 1
        self.watch()

    def received(self) -> None:
        """A small piece has come. On the receiving thread."""
        self._received += 1

    def handle(self, frame: Probe | Alive) -> None:
        if isinstance(frame, Probe):
            with contextlib.suppress(OSError):
                self._socket.send_nowait(
                    Alive(self._received)
                )  # else the peer sees bytes of ours anyway, or asks again
            return
        with self._lock:
            while self._confirmed < frame.pieces and self._unconfirmed:
                self._unconfirmed.popleft()
                self._confirmed += 1

    def unconfirmed(self) -> list[tuple[int, int]]:
        """Small pieces, by session and feed, that the peer may not have received."""
        with self._lock:
            return list(self._unconfirmed)

    # ---- silence

    def watch(self) -> None:
        """Something is under way."""
        if not self._closed:
            self._monitor.watch(self)

    def is_under_way(self) -> bool:
        return not self._closed and (bool(self._unconfirmed) or self._is_busy() or self.awaits())

    def progress(self) -> object:
        return self.counts()

    def counts(self) -> tuple[int, int]:
        """Bytes that came in, and that were acknowledged but for probes: a machine may be up without the peer."""
        sockets = self._sockets()
        acknowledged = sum(socket.acknowledged() for socket in sockets) - self._probed
        self._acknowledged = max(self._acknowledged, acknowledged)
        return sum(socket.bytes_in for socket in sockets), self._acknowledged

    def probe(self) -> None:
        with contextlib.suppress(OSError):
            if self._socket.send_nowait(Probe()):
                self._probed += _PROBE_BYTES

    def peer_is_silent(self, seconds: float) -> None:
        self._on_silence(TimeoutError(f"nothing was heard of the other side for {seconds:.0f} s"))

    def close(self) -> None:
        self._closed = True
