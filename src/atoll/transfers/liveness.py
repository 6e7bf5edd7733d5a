"""Detection of silent peers on connections between machines, and of small pieces that a broken channel lost.

After a link has been cut, TCP reports nothing for many minutes. So connections are watched while they have work: a peer
is alive if bytes arrive from it, or if its machine acknowledges what was sent. Otherwise it is probed once per second.
An idle connection costs nothing.

The sender of a small piece does not wait for the receiver, and the kernel may lose the piece with the connection. So
both ends count small pieces, and the receiver's count returns once per second while any is unconfirmed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from atoll.cluster.processes.leases import LEASE_SECONDS
from atoll.transfers.frame_socket import FrameSocket
from atoll.wire.framing import HEADER_BYTES

SILENCE_SECONDS = LEASE_SECONDS  # for which a host may be silent, unless the cluster has another lease
PERIOD_SECONDS = 1.0  # between two probes
# Unconfirmed small pieces. If there are more, the oldest count as received. One second brings far fewer.
_REMEMBERED = 65_536


class WatchedConnection(Protocol):
    """A watched connection. The monitor's thread calls its methods for all connections, so none of them may block."""

    patience: float  # seconds for which the peer may be silent

    def is_under_way(self) -> bool:
        """Return whether the connection awaits anything from the peer."""

    def progress(self) -> object:
        """Return a value that differs from the last one if the peer has done anything since."""

    def probe(self) -> None:
        """Ask the peer for a reaction."""

    def peer_is_silent(self, seconds: float) -> None:
        """Handle a peer that has done nothing for this long. Called once per `SilenceMonitor.watch`."""


class _State(msgspec.Struct):
    progress: object
    since: float


class SilenceMonitor:
    """A thread that watches connections, and runs only while there are any. Safe to use from any thread."""

    def __init__(self, period: float = PERIOD_SECONDS) -> None:
        self.period = period
        self._lock = threading.Lock()
        self._watched: dict[WatchedConnection, _State] = {}
        self._runs = False

    def watch(self, connection: WatchedConnection) -> None:
        """Watch the connection as long as it awaits anything."""
        if connection in self._watched:
            return
        with self._lock:
            self._watched.setdefault(connection, _State(None, time.monotonic()))
            starts, self._runs = not self._runs, True
        if starts:
            threading.Thread(target=self._run, name="atoll-silence", daemon=True).start()

    def _run(self) -> None:
        while True:
            before = time.monotonic()
            time.sleep(self.period)
            # While this machine was suspended or this process stopped, nothing that peers sent was read.
            away = time.monotonic() - before - self.period
            with self._lock:
                if not self._watched:
                    self._runs = False
                    return
                watched = list(self._watched.items())
                if away > self.period / 2:
                    for _, state in watched:
                        state.since += away
            for connection, state in watched:
                self._look(connection, state, time.monotonic())

    def _look(self, connection: WatchedConnection, state: _State, now: float) -> None:
        if not connection.is_under_way():
            with self._lock:
                self._watched.pop(connection, None)
            if connection.is_under_way():  # a transfer began meanwhile, and may have found the connection watched
                self.watch(connection)
            return
        progress = connection.progress()
        if progress != state.progress:
            state.progress, state.since = progress, now
        elif now - state.since >= connection.patience:
            with self._lock:
                self._watched.pop(connection, None)
            connection.peer_is_silent(now - state.since)
            return
        connection.probe()


MONITOR = SilenceMonitor()  # of this process


class Probe(msgspec.Struct, frozen=True, array_like=True, tag="q"):
    """A request for `Alive`."""


_PROBE_BYTES = HEADER_BYTES + len(msgspec.msgpack.encode(Probe()))


class Alive(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    pieces: int  # small pieces received on this connection


class Liveness:
    """The watch on the peer of one TCP channel. Safe to use from any thread.

    `is_busy()` returns whether large transfers are under way, `awaits()` whether the channel's user awaits other bytes,
    and `sockets()` all connections of the channel. If the peer is silent, `on_silence(error)` is called.
    """

    def __init__(
        self,
        socket: FrameSocket,
        sockets: Callable[[], list[FrameSocket]],
        is_busy: Callable[[], bool],
        on_silence: Callable[[TimeoutError], None],
        awaits: Callable[[], bool] = lambda: False,
        monitor: SilenceMonitor | None = None,
    ) -> None:
        self._socket = socket
        self._sockets = sockets
        self._is_busy = is_busy
        self._on_silence = on_silence
        self._monitor = monitor or MONITOR
        self.patience = SILENCE_SECONDS
        self._awaits = awaits
        self._lock = threading.Lock()
        self._unconfirmed: deque[tuple[int, tuple[int, ...]]] = deque()  # the session and the feeds of each
        self._confirmed = 0
        self._received = 0
        self._probed = self._acknowledged = 0  # bytes
        self._closed = False

    # ---- small pieces

    def sent(self, session: int, *feeds: int) -> None:
        """Record a small piece that is being written. Called in the order in which pieces are written."""
        with self._lock:
            self._unconfirmed.append((session, feeds))
            if len(self._unconfirmed) > _REMEMBERED:
                self._unconfirmed.popleft()
                self._confirmed += 1
        self.watch()

    def received(self) -> None:
        """Count a small piece that has arrived. Called on the receiving thread only."""
        self._received += 1

    def handle(self, frame: Probe | Alive) -> None:
        if isinstance(frame, Probe):
            with contextlib.suppress(OSError):
                # If it is not sent, the peer receives other bytes, or probes again.
                self._socket.send_nowait(Alive(self._received))
            return
        with self._lock:
            while self._confirmed < frame.pieces and self._unconfirmed:
                self._unconfirmed.popleft()
                self._confirmed += 1

    def unconfirmed(self) -> list[tuple[int, int]]:
        """Return the (session, feed) of all small pieces that the peer may not have received."""
        with self._lock:
            return [(session, feed) for session, feeds in self._unconfirmed for feed in feeds]

    # ---- silence

    def watch(self) -> None:
        if not self._closed:
            self._monitor.watch(self)

    def is_under_way(self) -> bool:
        return not self._closed and (bool(self._unconfirmed) or self._is_busy() or self._awaits())

    def progress(self) -> object:
        return self.counts()

    def counts(self) -> tuple[int, int]:
        """Return the bytes received and the bytes acknowledged.

        Probes do not count as acknowledged, because the machine may acknowledge them while the peer's process hangs.
        """
        sockets = self._sockets()
        acknowledged = sum(socket.acknowledged() for socket in sockets) - self._probed
        self._acknowledged = max(self._acknowledged, acknowledged)
        return sum(socket.bytes_in for socket in sockets), self._acknowledged

    def probe(self) -> None:
        with contextlib.suppress(OSError):
            if self._socket.send_nowait(Probe()):
                self._probed += _PROBE_BYTES

    def peer_is_silent(self, seconds: float) -> None:
        self._on_silence(TimeoutError(f"the other side was silent for {seconds:.0f} s"))

    def close(self) -> None:
        self._closed = True
