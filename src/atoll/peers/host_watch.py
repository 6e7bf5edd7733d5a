"""Detects hosts that this host cannot exchange data with although both reach the controller.

A host watches its neighbors in the island and all hosts to which it has sent anything, and keeps an open channel to
each. If no bytes flow on a channel, it sends a probe every second or two. The answer shows that both directions work,
so only one host of a pair has to watch the other.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence

from atoll.errors import AtollError
from atoll.peers.host_channels import HostChannels
from atoll.transfers.channel import DataChannel
from atoll.transfers.liveness import MONITOR, SILENCE_SECONDS, SilenceMonitor

# The hosts that directly follow a host in its island and are its neighbors, beside those at powers of two.
NEXT_HOSTS = 4
# Time limit of a dial. It is short, so that the end of a silence is noticed soon.
_REDIAL_SECONDS = 2.0
# A channel that moved more bytes than this between two looks has traffic, beside the answer to a probe.
_SMALL = 256

# Receives a host and the seconds for which it has been silent. Called on a new thread, and again while it is silent.
OnSilent = Callable[[int, float], None]


def neighbors(host: int, island: Sequence[int]) -> frozenset[int]:
    """Return the hosts of its island that `host` watches.

    In islands of up to nine hosts, each pair is watched. In larger ones, the number of neighbors grows with the
    logarithm of the island's size.
    """
    size, rank = len(island), island.index(host)
    distances = {*range(1, NEXT_HOSTS + 1), *itertools.takewhile(lambda each: each <= size // 2, _powers_of_two())}
    return frozenset(island[(rank + distance) % size] for distance in distances if distance < size)


def _powers_of_two() -> Iterable[int]:
    return (1 << exponent for exponent in itertools.count())


class HostWatch:
    """A watch on some of the hosts that `channels` reaches. Safe to use from any thread; nothing blocks."""

    def __init__(self, channels: HostChannels, on_silent: OnSilent, monitor: SilenceMonitor | None = None) -> None:
        self._channels = channels
        self._on_silent = on_silent
        self._monitor = monitor or MONITOR
        self._lock = threading.Lock()
        self._watched: dict[int, _Watched] = {}
        self._known: frozenset[int] = frozenset()
        self._patience = SILENCE_SECONDS

    def set_hosts(self, known: Iterable[int], always: Iterable[int], patience: float) -> None:
        """Set the hosts that exist, those to watch always, and the seconds for which a host may be silent.

        Other known hosts are watched once `add` is called for them.
        """
        with self._lock:
            self._known = frozenset(known)
            self._patience = patience
            gone = [host for host in self._watched if host not in self._known]
            for each in gone:
                self._watched.pop(each).end()
        for host in always:
            self.add(host)

    def add(self, host: int) -> None:
        """Watch a known host, and dial it unless a channel is open."""
        with self._lock:
            if host not in self._known or host in self._watched:
                return
            # The last answered probe may be one period old when a silence begins.
            patience = self._patience + self._monitor.period
            watched = self._watched[host] = _Watched(host, self._channels, patience, self._on_silent, self._again)
        self._monitor.watch(watched)
        watched.probe()

    def _again(self, watched: _Watched) -> None:
        self._monitor.watch(watched)

    def close(self) -> None:
        self.set_hosts((), (), self._patience)


class _Watched:
    """A watched host, as the silence monitor sees it."""

    def __init__(
        self, host: int, channels: HostChannels, patience: float, on_silent: OnSilent, again: Callable[[_Watched], None]
    ) -> None:
        self._host = host
        self._channels = channels
        self.patience = patience
        self._on_silent = on_silent
        self._again = again
        self._ended = False
        self._dials = False
        self._channel: DataChannel | None = None
        self._opened = 0  # channels so far
        self._counts = (0, 0)  # bytes received, and bytes acknowledged
        self._traffic = False

    def end(self) -> None:
        self._ended = True

    def is_under_way(self) -> bool:
        return not self._ended

    def progress(self) -> object:
        channel = self._channels.opened(self._host)
        if channel is not self._channel:
            self._channel = channel
            self._opened += channel is not None
        if channel is not None and channel.liveness is not None:
            before, self._counts = self._counts, channel.liveness.counts()
            self._traffic = sum(self._counts) - sum(before) > _SMALL
        return self._opened, self._counts

    def probe(self) -> None:
        channel = self._channels.opened(self._host)
        if channel is None:
            self._dial()
        elif channel.liveness is not None and not self._traffic:
            channel.liveness.probe()

    def _dial(self) -> None:
        if self._dials or self._ended:
            return
        self._dials = True

        def dial() -> None:
            with contextlib.suppress(AtollError, OSError):
                self._channels.dial(self._host, _REDIAL_SECONDS)
            self._dials = False

        threading.Thread(target=dial, name="atoll-host-dial", daemon=True).start()

    def peer_is_silent(self, seconds: float) -> None:
        if self._ended:
            return
        self._channels.fail(self._host, f"host {self._host} was silent for {seconds:.0f} s")
        threading.Thread(target=self._on_silent, args=(self._host, seconds), name="atoll-silent", daemon=True).start()
        self._again(self)
