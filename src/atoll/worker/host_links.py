"""Messages between the hosts of a group, on the channels of their data ports.

Invariant: messages to a host arrive in order, or the loss of the link is reported once. A message in pieces arrives
after earlier messages, but later messages may arrive before it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from atoll.peers.data_port import DataPort
from atoll.protocol import messages as m
from atoll.transfers.channel import CONTROL
from atoll.wire.framing import PIECE_BYTES, PieceQueue

MAX_UNSENT = 256 << 20  # bytes, as for a control connection
_POLL_SECONDS = 1e-3  # while a piece does not fit into the socket's buffer

_encode = msgspec.msgpack.Encoder().encode


class HostLinks:
    """Links to the other hosts of the group. Safe to use from any thread.

    `on_lost(host, text)` is called on any thread once a link is lost.
    """

    def __init__(self, port: DataPort, on_lost: Callable[[int, str], None]) -> None:
        self._port = port
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._links: dict[int, _Link] = {}

    def send(self, host: int, content: bytes, in_pieces: bool = False) -> None:
        """Send a message without waiting for the host. Later messages may overtake one that is sent `in_pieces`."""
        with self._lock:
            link = self._links.get(host)
            if link is None:
                link = self._links[host] = _Link(self._port, host, self._on_lost)
        link.send(content, in_pieces and len(content) > PIECE_BYTES)

    def lose(self, host: int, text: str) -> None:
        """Report the link as lost, because messages to the host may not have arrived."""
        with self._lock:
            link = self._links.get(host)
        if link is not None:
            link.lose(text)


class _Link:
    """A link to one host. A thread sends what cannot be sent at once, and ends when nothing is left.

    Pieces are sent only while no other message waits and the socket's buffer has space for more than the piece. So the
    next message can be sent at once, ahead of further pieces.
    """

    def __init__(self, port: DataPort, host: int, on_lost: Callable[[int, str], None]) -> None:
        self._port = port
        self._host = host
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._large = PieceQueue()
        self._has_thread = False
        self._is_lost = False

    def send(self, content: bytes, in_pieces: bool) -> None:
        with self._lock:
            if self._is_lost:
                return
            problem = ""
            if in_pieces:
                self._large.put(memoryview(content))
            elif not self._unsent and self._port.can_send_to_host_nowait(self._host, len(content)):
                problem = self._send(content)
            else:
                self._unsent.append(content)
                self._unsent_bytes += len(content)
            if self._unsent_bytes + self._large.nbytes > MAX_UNSENT:
                problem = f"host {self._host} does not read: {MAX_UNSENT >> 20} MiB are waiting for it"
            elif not problem and not self._has_thread and (self._unsent or self._large.nbytes):
                self._has_thread = True
                name = f"atoll-link-{self._host}"
                threading.Thread(target=self._send_rest, name=name, daemon=True).start()
        if problem:
            self.lose(problem)

    def _send_rest(self) -> None:
        while True:
            with self._lock:
                if self._is_lost or not (self._unsent or self._large.nbytes):
                    self._has_thread = False
                    return
                content = self._unsent[0] if self._unsent else b""  # it remains first until it is sent
            problem = self._send(content) if content else self._send_piece()
            if problem:
                self.lose(problem)
                return
            with self._lock:
                if self._unsent and content:
                    self._unsent.popleft()
                    self._unsent_bytes -= len(content)

    def _send_piece(self) -> str:
        """Send the next piece, or wait briefly if it does not fit into the socket's buffer. Return as `_send` does."""
        if not self._port.can_send_to_host_nowait(self._host, 1):
            try:
                self._port.to_host(self._host)
            except Exception as error:
                return f"host {self._host} cannot be reached: {error}"
            time.sleep(_POLL_SECONDS)
            return ""
        with self._lock:
            if self._is_lost or self._unsent:
                return ""
            piece, is_last = self._large.take()
        return self._send(_encode(m.RelayedPiece(bytes(piece), is_last)))

    def _send(self, content: bytes) -> str:
        """Send a message, and return "", or why it cannot be sent."""
        try:
            channel = self._port.to_host(self._host)
            channel.carries_control = True
            channel.send(0, CONTROL, [content])
        except Exception as error:  # on any error the link is lost, because later messages must not overtake this one
            return f"host {self._host} cannot be reached: {error}"
        return ""

    def lose(self, text: str) -> None:
        with self._lock:
            was_lost, self._is_lost = self._is_lost, True
            self._unsent.clear()
            self._large.clear()
        if not was_lost:
            self._on_lost(self._host, text)
