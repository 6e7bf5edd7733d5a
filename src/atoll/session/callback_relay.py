"""Calls into clients' Python, on their way between the workers' data channels and the clients' processes.

Each client that has callbacks opens one data channel to its proxy. Calls and answers pass on the channels' own threads,
past the proxy's loop. A client that leaves the channel leaves no call unanswered.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from atoll.errors import AtollError
from atoll.host_services.calls.call_messages import (
    GREETING,
    Raised,
    Released,
    Retained,
    decode,
    encode,
    first_call,
    host_of,
    is_call,
    is_notice,
)
from atoll.peers.listener import Listener
from atoll.protocol.callbacks import CallbackAddress
from atoll.session.cluster_session import ClusterSession
from atoll.transfers.channel import DataChannel
from atoll.transfers.transfer_engine import Piece
from atoll.wire.address import Address

_log = logging.getLogger(__name__)

_NOBODY = encode(Raised("its client does not take calls", cancelled=True))


class CallbackPort:
    """Where clients open their channels; listens from the first `relay` on, at an address of `address()`."""

    def __init__(self, address: Callable[[], Address]) -> None:
        self._address = address
        self._listener: Listener | None = None
        self._relays: dict[int, CallbackRelay] = {}

    def relay(self, number: int, cluster: ClusterSession) -> CallbackRelay:
        """Has the calls of a session go to the client that opens a channel for `number`.

        Raises OSError where nothing can listen there.
        """
        if number in self._relays:
            return self._relays[number]
        if self._listener is None:
            self._listener = Listener(self._address(), self._serve, lambda: None)
        relay = CallbackRelay(cluster, CallbackAddress(str(self._listener.address), number, secrets.token_hex(16)))
        self._relays[number] = relay
        cluster.set_callback_handler(relay)
        return relay

    def close_relay(self, number: int) -> None:
        relay = self._relays.pop(number, None)
        if relay is not None:
            relay.close()

    def _serve(self, channel: DataChannel) -> None:
        opening = channel.receive_open()
        relay = self._relays.get(opening.session)
        if relay is None or not hmac.compare_digest(relay.where.secret.encode(), opening.secret.encode()):
            raise AtollError("a connection for callbacks was refused: its secret is not the session's")
        assert self._listener is not None
        if not self._listener.opened(channel):
            return
        try:
            relay.serve(channel)
        except (AtollError, EOFError, OSError, MemoryError) as error:
            _log.warning("a connection for callbacks ends: %s", error)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()


class CallbackRelay:
    """Between a session's workers and its client. For any thread."""

    def __init__(self, cluster: ClusterSession, where: CallbackAddress) -> None:
        self.where = where
        self._cluster = cluster
        self._channel: DataChannel | None = None
        self._unanswered: dict[int, DataChannel | None] = {}  # feeds, with the channel that took the call
        # By the first number of a function's callables: hosts that may call them, and those whose executable is gone.
        self._holders: dict[int, set[int]] = {}
        self._dropped: dict[int, tuple[int, ...]] = {}
        self._lock = threading.Lock()

    # ---- from the hosts: see `session.session_interfaces.CallbackHandler`

    def call(self, feed: int, content: Any, done: Callable[[], None]) -> None:
        if is_notice(feed):
            self._take_notice(host_of(feed), content)
            done()
            return
        with self._lock:
            channel = self._channel
            self._unanswered[feed] = channel
        try:
            if channel is None:
                raise BrokenPipeError
            channel.send(0, feed, [content])
        except (AtollError, OSError, ValueError):  # ValueError: memory of a channel that is being closed
            self._answer(feed, _NOBODY)
        finally:
            done()

    def pass_socket(self, sock: socket.socket) -> None:
        """A host offers the client a way of its own, past this relay: it is for a client on this machine."""
        with self._lock:
            channel = self._channel
        if channel is not None and channel.is_local:
            with contextlib.suppress(OSError):
                channel.pass_socket(sock)

    def _take_notice(self, host: int, content: Any) -> None:
        notice, _ = decode(content)
        first = notice.callbacks[0]
        with self._lock:
            if isinstance(notice, Retained):
                self._holders.setdefault(first, set()).add(host)
                return
            self._holders.get(first, set()).discard(host)
        self._release_unheld()

    def host_lost(self, host: int) -> None:
        with self._lock:
            self._unanswered = {feed: each for feed, each in self._unanswered.items() if host_of(feed) != host}
            for holders in self._holders.values():
                holders.discard(host)
        self._release_unheld()

    # ---- callables that nobody needs

    def compiled(self, callbacks: tuple[int, ...], hosts: Sequence[int]) -> None:
        """These hosts have a function that calls these: what they say of that themselves may be on its way yet."""
        with self._lock:
            self._holders.setdefault(callbacks[0], set()).update(hosts)

    def unloaded(self, callbacks: tuple[int, ...]) -> None:
        """The client has dropped the executable that calls these. They stay for as long as a host may still run it."""
        with self._lock:
            self._dropped[callbacks[0]] = callbacks
        self._release_unheld()

    def _release_unheld(self) -> None:
        with self._lock:
            channel = self._channel
            unheld = [each for first, each in self._dropped.items() if not self._holders.get(first)]
            for callbacks in unheld:
                del self._dropped[callbacks[0]]
                self._holders.pop(callbacks[0], None)
        if channel is not None:
            for callbacks in unheld:
                with contextlib.suppress(AtollError, OSError):
                    channel.send(0, first_call(0), encode(Released(callbacks)))

    # ---- to and from the client

    def _answer(self, feed: int, contents: Sequence[Any]) -> None:
        with self._lock:
            if feed not in self._unanswered:
                return  # nobody waits for it
            del self._unanswered[feed]
        self._cluster.answer(feed, contents)

    def serve(self, channel: DataChannel) -> None:
        """Takes calls to the client, and its answers, until it closes the channel."""
        with self._lock:
            before, self._channel = self._channel, channel
        if before is not None:
            before.close()
        channel.send(0, first_call(0), encode(GREETING))

        def on_piece(piece: Piece, content: Any, done: Callable[[], None]) -> None:
            try:
                if is_call(piece.feed):
                    self._answer(piece.feed, [content])
            finally:
                done()

        try:
            channel.receive(on_piece)
        finally:
            with self._lock:
                if self._channel is channel:
                    self._channel = None
                unanswered = [feed for feed, each in self._unanswered.items() if each is channel]
            for feed in unanswered:
                self._answer(feed, _NOBODY)

    def close(self) -> None:
        with self._lock:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
