"""Relays calls and contents of arrays between the workers' data channels and the clients' processes.

Each client with callbacks or large reads opens one data channel to its proxy. The channels' threads pass on calls,
answers and contents, without the proxy's loop. If a client leaves the channel, the relay answers its pending calls.
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

from atoll.errors import OK, AtollError, Status
from atoll.host_services.calls.call_messages import (
    GREETING,
    NO_CLIENT,
    Released,
    Retained,
    Unread,
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


class CallbackPort:
    """The port at which clients open their channels. It listens at `address()` from the first call of `relay` on."""

    def __init__(self, address: Callable[[], Address]) -> None:
        self._address = address
        self._listener: Listener | None = None
        self._relays: dict[int, CallbackRelay] = {}

    def relay(self, number: int, cluster: ClusterSession) -> CallbackRelay:
        """Relay the calls of a session to the client that opens a channel for `number`.

        Raise OSError if the port cannot listen.
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
            _log.warning("a connection for callbacks has ended: %s", error)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()


class CallbackRelay:
    """Relays calls between a session's workers and its client. Thread-safe."""

    def __init__(self, cluster: ClusterSession, where: CallbackAddress) -> None:
        self.where = where
        self._cluster = cluster
        self._channel: DataChannel | None = None
        self._unanswered: dict[int, DataChannel | None] = {}  # the channel that took the call, by feed
        # By the first number of a function's callables:
        self._holders: dict[int, set[int]] = {}  # the hosts that may call them
        self._dropped: dict[int, tuple[int, ...]] = {}  # callables whose executable the client has dropped
        self._lock = threading.Lock()

    # ---- calls from the hosts: see `session.session_interfaces.CallbackHandler`

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
        except (AtollError, OSError, ValueError):  # ValueError: the channel's memory is being closed
            self._answer(feed, NO_CLIENT)
        finally:
            done()

    def pass_socket(self, sock: socket.socket) -> None:
        """Pass a host's direct connection to the client, if the client is on this machine."""
        with self._lock:
            channel = self._channel
        if channel is not None and channel.is_local:
            with contextlib.suppress(OSError):
                channel.pass_socket(sock)

    @property
    def is_local(self) -> bool:
        """Whether the client has a channel and is on this machine, so that hosts may send contents directly to it."""
        channel = self._channel
        return channel is not None and channel.is_local

    def forward(self, feed: int, content: Any, more: bool, done: Callable[[], None]) -> None:
        """Forward contents of an array to the client, or drop them if it has left."""
        with self._lock:
            channel = self._channel
        try:
            if channel is not None:
                channel.send(0, feed, [content], more)
        except (AtollError, OSError, ValueError):  # ValueError: the channel's memory is being closed
            pass  # the client has noticed as well
        finally:
            done()

    def cannot_read(self, feeds: tuple[int, ...] = (), error: Status = OK) -> None:
        """Notify the client that contents will not arrive: see `Unread`. Never waits for the client."""
        if not error.ok:  # jaxlib's exceptions contain the details as text
            error = Status(error.code, error.details.in_text(error.message))
        with self._lock:
            channel = self._channel

        def notify(channel: DataChannel) -> None:
            with contextlib.suppress(AtollError, OSError, ValueError):
                channel.send(0, first_call(0), encode(Unread(feeds, error=error)))

        if channel is not None:
            threading.Thread(target=notify, args=(channel,), name="atoll-unread", daemon=True).start()

    def _take_notice(self, host: int, content: Any) -> None:
        notice, _ = decode(content)
        first = notice.callbacks[0]
        with self._lock:
            if isinstance(notice, Retained):
                self._holders.setdefault(first, set()).add(host)
                return
            self._holders.get(first, set()).discard(host)
        self._release_unheld()

    def host_lost(self, host: int, was_local: bool) -> None:
        with self._lock:
            self._unanswered = {feed: each for feed, each in self._unanswered.items() if host_of(feed) != host}
            for holders in self._holders.values():
                holders.discard(host)
        self._release_unheld()
        if was_local:  # contents may have been lost that count as arrived: see `DirectDownload`
            self.cannot_read()

    # ---- unused callables

    def compiled(self, callbacks: tuple[int, ...], hosts: Sequence[int]) -> None:
        """Note that `hosts` have a function that calls `callbacks`, before the notices of the hosts arrive."""
        with self._lock:
            self._holders.setdefault(callbacks[0], set()).update(hosts)

    def unloaded(self, callbacks: tuple[int, ...]) -> None:
        """Release `callbacks`, whose executable the client has dropped, as soon as no host can run it any more."""
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
                return  # the host has been lost
            del self._unanswered[feed]
        self._cluster.answer(feed, contents)

    def serve(self, channel: DataChannel) -> None:
        """Send calls to the client and receive its answers, until the client closes the channel."""
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
                self._answer(feed, NO_CLIENT)

    def close(self) -> None:
        with self._lock:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
