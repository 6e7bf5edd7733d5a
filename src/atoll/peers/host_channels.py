"""This worker's channels to the data ports of other hosts, each opened at its first use.

Invariant: at most one channel per host is in use, and it was dialed with the address and secret that were set last.
Nothing blocks while holding the lock, because the control thread takes it. Hosts are dialed without the lock.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial

from atoll.errors import AtollError, ConnectError
from atoll.transfers.channel import CONTROL, DataChannel
from atoll.transfers.liveness import SILENCE_SECONDS
from atoll.wire.address import parse_address
from atoll.wire.tls.identity import Identity

# Receives a host, the feeds (session, feed) that may not have reached it because the channel broke, and the reason if
# known. Session 0 stands for control messages.
OnLost = Callable[[int, list[tuple[int, int]], str], None]


class HostChannels:
    """One channel per host. Safe to use from any thread. `identity` is for hosts with TLS.

    `on_lost` is called if a channel breaks and small pieces may be lost. Large pieces fail at their senders.
    `on_open(host)` is called when a channel to a host has opened.
    """

    def __init__(
        self,
        on_lost: OnLost = lambda host, lost, why: None,
        identity: Identity | None = None,
        on_open: Callable[[int], None] = lambda host: None,
    ) -> None:
        self._on_lost = on_lost
        self._on_open = on_open
        self.patience = SILENCE_SECONDS  # for which a host may be silent during a transfer
        self._identity = identity
        self._lock = threading.Lock()
        self._secret = ""
        self._addresses: dict[int, str] = {}
        self._channels: dict[int, Future[DataChannel]] = {}
        self._silent: dict[int, str] = {}  # hosts that only `dial` tries to reach, with the reason

    @property
    def secret(self) -> str:
        """The secret between hosts, which opens their data ports. Empty until it is set."""
        return self._secret

    def set_hosts(self, hosts: Iterable[tuple[int, str]], secret: str) -> None:
        """Set the data port addresses of all hosts. Close channels to hosts that have changed, and keep the others."""
        with self._lock:
            before, self._addresses = self._addresses, dict(hosts)
            changed = secret != self._secret
            self._secret = secret
            replaced = [
                self._channels.pop(host)
                for host in list(self._channels)
                if changed or before.get(host) != self._addresses.get(host)
            ]
            for host in list(self._silent):
                if changed or before.get(host) != self._addresses.get(host):
                    del self._silent[host]
        _close(replaced)

    def to(self, host: int) -> DataChannel:
        """Return the channel to a host, and dial it if necessary. Raise ConnectError, at once if the host is silent."""
        silence = self._silent.get(host)
        if silence is not None:
            raise ConnectError(silence)
        return self.dial(host)

    def opened(self, host: int) -> DataChannel | None:
        """Return the channel to a host, or None if it has none."""
        opening = self._channels.get(host)
        if opening is None or not opening.done() or opening.exception() is not None:
            return None
        channel = opening.result()
        return None if channel.is_closed else channel

    def fail(self, host: int, silence: str) -> None:
        """Fail the transfers to a silent host, and later ones until `dial` reaches it."""
        with self._lock:
            self._silent[host] = silence
        channel = self.opened(host)
        if channel is not None:
            channel.fail(TimeoutError(silence))

    def dial(self, host: int, timeout: float = 10.0) -> DataChannel:
        """Return the channel to a host, silent or not. `timeout` is in seconds, for the call that dials."""
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
                raise ConnectError(f"host {host} is not known to this host")
            channel = _open(address, secret, self._identity, timeout, self.patience, partial(self._ended, host))
        except BaseException as error:
            with self._lock:
                if self._channels.get(host) is mine:
                    del self._channels[host]
            mine.set_exception(error)
            raise
        with self._lock:
            self._silent.pop(host, None)
        mine.set_result(channel)  # if the host has changed meanwhile, `set_hosts` has registered to close the channel
        self._on_open(host)
        return channel

    def _ended(self, host: int, channel: DataChannel) -> None:
        """Report what a channel that ended may have lost, unless `set_hosts` closed it because its host changed."""
        was_closed = channel.is_closed
        channel.shut_down()  # first: the kernel may accept what other threads send until then
        lost = [] if was_closed or channel.liveness is None else channel.liveness.unconfirmed()
        if channel.carries_control and not was_closed:
            lost.append((0, CONTROL))
        channel.close()
        if channel.silence is not None:
            with self._lock:
                opening = self._channels.get(host)
                # Otherwise the host has restarted or was reached again meanwhile.
                if opening is not None and _holds(opening, channel):
                    self._silent.setdefault(host, f"host {host} is silent")
        if lost:
            self._on_lost(host, lost, str(channel.silence or ""))

    def can_send_nowait(self, host: int, nbytes: int) -> bool:
        """Return whether `nbytes` can be sent to the host without waiting. False if it has no open channel."""
        channel = self.opened(host)
        return channel is not None and channel.can_send_nowait(nbytes)

    def close(self) -> None:
        self.set_hosts((), "")


def _open(
    address: str,
    secret: str,
    identity: Identity | None,
    timeout: float,
    patience: float,
    on_end: Callable[[DataChannel], None],
) -> DataChannel:
    channel = DataChannel.connect(parse_address(address), 0, secret, identity, timeout)
    if channel.liveness is not None:
        channel.liveness.patience = patience

    def read_returns() -> None:
        with contextlib.suppress(AtollError, OSError):
            channel.receive(lambda *_: None)
        on_end(channel)

    threading.Thread(target=read_returns, name="atoll-data-peer", daemon=True).start()
    return channel


def _holds(opening: Future[DataChannel], channel: DataChannel) -> bool:
    """Return whether this channel was opened."""
    return opening.done() and opening.exception() is None and opening.result() is channel


def _close(openings: Iterable[Future[DataChannel]]) -> None:
    """Close channels, or if they are being opened, as soon as they are open."""

    def close(opening: Future[DataChannel]) -> None:
        if opening.exception() is None:
            opening.result().close()

    for opening in openings:
        opening.add_done_callback(close)
