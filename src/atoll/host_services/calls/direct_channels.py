"""Channels from a host straight to its sessions' clients, past their proxies, where all three are on one machine.

With a session's first call a host makes a pair of sockets and passes one to the client, along the way of calls. When
the client has greeted it there, calls go that way. Until then, and where no greeting comes, they go by the proxy. Only
the host itself makes its end, so nobody else can change how that behaves.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

from atoll.errors import AtollError
from atoll.transfers.channel import DataChannel
from atoll.transfers.transfer_engine import Piece

_log = logging.getLogger(__name__)

Answered = Callable[[int, int, Any, Callable[[], None]], None]


class DirectChannels:
    """For any thread. `answered` is as `Calls.answered`; `ended(session, channel)`: no answer will come on it."""

    def __init__(self, answered: Answered, ended: Callable[[int, DataChannel], None]) -> None:
        self._answered = answered
        self._ended = ended
        self._offered: dict[int, DataChannel | None] = {}
        self._greeted: dict[int, DataChannel] = {}
        self._lock = threading.Lock()

    def of(self, session: int, proxy: DataChannel) -> DataChannel:
        """Where the session's calls go now: to its client, or to its proxy."""
        channel = self._greeted.get(session)
        if channel is not None:
            return channel
        with self._lock:
            is_first = session not in self._offered
            self._offered.setdefault(session, None)
        if is_first and proxy.is_local:
            self._offer(session, proxy)
        return proxy

    def _offer(self, session: int, proxy: DataChannel) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            channel = DataChannel(ours)
            with self._lock:
                self._offered[session] = channel
            threading.Thread(target=self._receive, args=(session, channel), name="atoll-answers", daemon=True).start()
            try:
                proxy.pass_socket(theirs)
            except OSError:  # the call itself will say so
                channel.shut_down()

    def _receive(self, session: int, channel: DataChannel) -> None:
        def on_piece(piece: Piece, content: Any, done: Callable[[], None]) -> None:
            if session in self._greeted:
                self._answered(session, piece.feed, content, done)
                return
            done()
            with self._lock:
                if self._offered.get(session) is channel:
                    self._greeted[session] = channel

        try:
            with contextlib.suppress(AtollError, OSError, MemoryError):
                channel.receive(on_piece)
        except Exception:  # at what this client has sent: it is not served any more, and the others are
            _log.exception("the direct connection of session %d ends: what came on it cannot be handled", session)
            channel.shut_down()
        finally:
            channel.shut_down()  # before calls fail: who has just called notices
            with self._lock:
                if self._greeted.get(session) is channel:
                    del self._greeted[session]
            self._ended(session, channel)
            channel.close()

    def close(self, session: int) -> None:
        """The session's channel to its proxy has ended, and so does this one."""
        with self._lock:
            channel = self._offered.pop(session, None)
            self._greeted.pop(session, None)
        if channel is not None:
            channel.shut_down()
