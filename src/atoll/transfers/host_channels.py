"""This worker's channels to the data ports of other hosts, each opened at its first use.

Invariant: at most one channel a host is in use, and it goes to the address and with the secret that were set last.
Nothing blocks under the lock, which the control thread takes: hosts are dialed outside of it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial

from atoll.errors import AtollError, ConnectError
from atoll.transfers.channel import CONTROL, DataChannel
from atoll.wire.address import parse_address
from atoll.wire.tls.identity import Identity

# A host, and feeds (session, feed) that may not have reached it, since the channel to it has broken; those of session
# 0 are control messages.
OnLost = Callable[[int, list[tuple[int, int]]], None]


class HostChannels:
    """Channels by host. For any thread. `identity` is for those that are reached by TLS.

    `on_lost` is called where a channel breaks and small pieces may have been lost: large ones fail for who sends them.
    """

    def __init__(self, on_lost: OnLost = lambda host, lost: None, identity: Identity | None = None) -> None:
        self._on_lost = on_lost
        self._identity = identity
        self._lock = threading.Lock()
        self._secret = ""
        self._addresses: dict[int, str] = {}
        self._channels: dict[int, Future[DataChannel]] = {}

    @property
    def secret(self) -> str:
        """What opens data ports between hosts; empty before it was set."""
        return self._secret

    def set_hosts(self, hosts: Iterable[tuple[int, str]], secret: str) -> None:
        """All hosts and their data ports' addresses. Channels to what has changed are closed, others kept."""
        with self._lock:
            before, self._addresses = self._addresses, dict(hosts)
            changed = secret != self._secret
            self._secret = secret
            replaced = [
                self._channels.pop(host)
                for host in list(self._channels)
                if changed or before.get(host) != self._addresses.get(host)
            ]
        _close(replaced)

    def to(self, host: int) -> DataChannel:
        """The channel to a host; dials where there is none. Raises ConnectError."""
        with self._lock:
            opening = self._channels.get(host)
            if opening is not None and not (opening.done() and opening.result().is_closed):
                mine = None
            else:
                address, secret = self._addresses.get(host), self._secret
                opening = mine = self._channels[host] = Future()
        if mine is None:
            return opening.result()
        try:
            if address is None:
                raise ConnectError(f"host {host} is not known here")
            channel = _open(address, secret, self._identity, partial(self._ended, host))
        except BaseException as error:
            with self._lock:
                if self._channels.get(host) is mine:
                    del self._channels[host]
            mine.set_exception(error)
            raise
        mine.set_result(channel)  # `set_hosts` closes it from here on, where the host has changed meanwhile
        return channel

    def _ended(self, host: int, channel: DataChannel) -> None:
        """A channel has ended. Those that are replaced were closed here: their host has changed, and others tell so."""
        lost = [] if channel.is_closed or channel.liveness is None else channel.liveness.unconfirmed()
        if channel.carries_control and not channel.is_closed:
            lost.append((0, CONTROL))
        channel.close()
        if lost:
            self._on_lost(host, lost)

    def takes_at_once(self, host: int, nbytes: int) -> bool:
        """Whether so much could be sent to the host without waiting; False where there is no channel to it yet."""
        opening = self._channels.get(host)
        if opening is None or not opening.done() or opening.exception() is not None:
            return False
        channel = opening.result()
        return not channel.is_closed and channel.takes_at_once(nbytes)

    def close(self) -> None:
        self.set_hosts((), "")


def _open(address: str, secret: str, identity: Identity | None, on_end: Callable[[DataChannel], None]) -> DataChannel:
    channel = DataChannel.connect(parse_address(address), 0, secret, identity)

    def read_returns() -> None:
        with contextlib.suppress(AtollError, OSError):
            channel.receive(lambda *_: None)
        on_end(channel)

    threading.Thread(target=read_returns, name="atoll-data-peer", daemon=True).start()
    return channel


def _close(openings: Iterable[Future[DataChannel]]) -> None:
    """Closes channels, those that are being opened as soon as they are."""

    def close(opening: Future[DataChannel]) -> None:
        if opening.exception() is None:
            opening.result().close()

    for opening in openings:
        opening.add_done_callback(close)
