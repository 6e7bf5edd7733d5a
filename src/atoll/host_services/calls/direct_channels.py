"""Direct channels from a host to its sessions' clients, which bypass proxies if all three are on one machine.

At a session's first call, the host creates a pair of sockets and passes one to the client through the proxy. When the
client sends a greeting on it, the host sends further calls there. Without a greeting, calls go through the proxy. The
host creates its own end, so no other process can change the options of that socket.
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

_log = logging.getLogger(__name__)

Answered = Callable[[int, int, Any, Callable[[], None]], None]
# Receives a client's pieces on its direct channel until it ends, and passes calls' answers to `on_answer(feed, content,
# done)`. Raise what `DataChannel.receive` raises.
OnAnswer = Callable[[int, Any, Callable[[], None]], None]
Receive = Callable[[int, DataChannel, OnAnswer], None]


def receive_answers(session: int, channel: DataChannel, on_answer: OnAnswer) -> None:
    """Receive only answers of calls."""
    channel.receive(lambda piece, content, done: on_answer(piece.feed, content, done))


class DirectChannels:
    """The direct channels of a host. Thread-safe.

    `answered` is `Calls.answered`. `ended(session, channel)` is called when no more answers will arrive on a channel.
    `receive` takes the other pieces of a client, the contents of its arrays.
    """

    def __init__(
        self, answered: Answered, ended: Callable[[int, DataChannel], None], receive: Receive = receive_answers
    ) -> None:
        self._receive_on = receive
        self._answered = answered
        self._ended = ended
        self._offered: dict[int, DataChannel | None] = {}
        self._greeted: dict[int, DataChannel] = {}
        self._lock = threading.Lock()

    def of(self, session: int, proxy: DataChannel) -> DataChannel:
        """Return the channel for the session's next call: to its client, or `proxy`.

        The first call passes a socket to the client, and waits while its proxy does not read.
        """
        channel = self._greeted.get(session)
        if channel is not None:
            return channel
        with self._lock:
            is_first = session not in self._offered
            self._offered.setdefault(session, None)
        if is_first and proxy.is_local:
            self._offer(session, proxy)
        return proxy

    def of_nowait(self, session: int, proxy: DataChannel) -> DataChannel | None:
        """Return what `of` returns, or None if it would pass a socket to the client. Never waits for the client."""
        channel = self._greeted.get(session)
        if channel is None and (session in self._offered or not proxy.is_local):
            return proxy
        return channel

    def _offer(self, session: int, proxy: DataChannel) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            channel = DataChannel(ours)
            with self._lock:
                self._offered[session] = channel
            threading.Thread(target=self._receive, args=(session, channel), name="atoll-answers", daemon=True).start()
            try:
                proxy.pass_socket(theirs)
            except OSError:  # the call itself will raise the error
                channel.shut_down()

    def _receive(self, session: int, channel: DataChannel) -> None:
        def on_answer(feed: int, content: Any, done: Callable[[], None]) -> None:
            if session in self._greeted:
                self._answered(session, feed, content, done)
                return
            done()
            with self._lock:
                if self._offered.get(session) is channel:
                    self._greeted[session] = channel

        try:
            with contextlib.suppress(AtollError, OSError, MemoryError):
                self._receive_on(session, channel, on_answer)
        except Exception:  # a bug that this client's data has triggered: end only its connection
            _log.exception("closing the direct connection of session %d: cannot handle its data", session)
            channel.shut_down()
        finally:
            channel.shut_down()  # before `ended`, so that a concurrent call detects the closed channel
            with self._lock:
                if self._greeted.get(session) is channel:
                    del self._greeted[session]
                if self._offered.get(session) is channel:
                    self._offered[session] = None  # nothing is offered again, and the channel can be freed
            self._ended(session, channel)
            channel.close()

    def close(self, session: int) -> None:
        """Close the session's direct channel, because its channel to the proxy has ended."""
        with self._lock:
            channel = self._offered.pop(session, None)
            self._greeted.pop(session, None)
        if channel is not None:
            channel.shut_down()
