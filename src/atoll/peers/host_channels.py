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
from atoll.transfers.silence_monitor import SILENCE_SECONDS
from atoll.wire.address import parse_address
from atoll.wire.tls.identity import Identity

# A host, and feeds (session, feed) that may not have reached it, since the channel to it has broken, those of session 0
# being control messages; and why, if known.
OnLost = Callable[[int, list[tuple[int, int]], str], None]


class HostChannels:
    """Channels by host. For any thread. `identity` is for those that are reached by TLS.

    `on_lost` is called where a channel breaks and small pieces may have been lost: large ones fail for who sends them.
    `on_open(host)` is called when there is a channel to a host.
    """

    def __init__(
        self,
        on_lost: OnLost = lambda host, lost, why: None,
        identity: Identity | None = None,
        on_open: Callable[[int], None] = lambda host: None,
    ) -> None:
        self._on_lost = on_lost
        self._on_open = on_open
        self.patience = SILENCE_SECONDS  # with a host during a transfer
        self._identity = identity
        self._lock = threading.Lock()
        self._secret = ""
        self._addresses: dict[int, str] = {}
        self._channels: dict[int, Future[DataChannel]] = {}
        self._silent: dict[int, str] = {}  # hosts that nobody but `dial` tries, and why

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
            for host in list(self._silent):
                if changed or before.get(host) != self._addresses.get(host):
                    del self._silent[host]
        _close(replaced)

    def to(self, host: int) -> DataChannel:
        """The channel to a host; dials where there is none. Raises ConnectError, at once where the host is silent."""
        silence = self._silent.get(host)
        if silence is not None:
            raise ConnectError(silence)
        return self.dial(host)

    def opened(self, host: int) -> DataChannel | None:
        """The channel to a host, if there is one."""
        opening = self._channels.get(host)
        if opening is None or not opening.done() or opening.exception() is not None:
            return None
        channel = opening.result()
        return None if channel.is_closed else channel

    def fail(self, host: int, silence: str) -> None:
        """Nothing is heard of the host: what is under way to it fails, and what follows, until `dial` reaches it."""
        with self._lock:
            self._silent[host] = silence
        channel = self.opened(host)
        if channel is not None:
            channel.fail(TimeoutError(silence))

    def dial(self, host: int, timeout: float = 10.0) -> DataChannel:
        """As `to`, silent or not, with a time limit of its own where it is the one who dials."""
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
            channel = _open(address, secret, self._identity, timeout, self.patience, partial(self._ended, host))
        except BaseException as error:
            with self._lock:
                if self._channels.get(host) is mine:
                    del self._channels[host]
            mine.set_exception(error)
            raise
        with self._lock:
            self._silent.pop(host, None)
        mine.set_result(channel)  # `set_hosts` closes it from here on, where the host has changed meanwhile
        self._on_open(host)
        return channel

    def _ended(self, host: int, channel: DataChannel) -> None:
        """A channel has ended. Those that are replaced were closed here: their host has changed, and others tell so."""
        lost = [] if channel.is_closed or channel.liveness is None else channel.liveness.unconfirmed()
        if channel.carries_control and not channel.is_closed:
            lost.append((0, CONTROL))
        channel.close()
        if channel.silence is not None:
            with self._lock:
                self._silent.setdefault(host, f"nothing is heard of host {host}")
        if lost:
            self._on_lost(host, lost, str(channel.silence or ""))

    def can_send_nowait(self, host: int, nbytes: int) -> bool:
        """Whether so much could be sent to the host without waiting; False where there is no channel to it yet."""
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


def _close(openings: Iterable[Future[DataChannel]]) -> None:
    """Closes channels, those that are being opened as soon as they are."""

    def close(opening: Future[DataChannel]) -> None:
        if opening.exception() is None:
            opening.result().close()

    for opening in openings:
        opening.add_done_callback(close)
