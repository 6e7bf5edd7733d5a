"""Finds hosts that this one cannot hear, or that cannot hear it, while the controller hears both.

A host has an open channel to each that it watches: its neighbours in the island, and whom it has sent anything. While
bytes flow there, all is well. Else it asks, every second or two, and an answer shows that both directions work. So a
pair needs to be watched from one side only.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence

from atoll.errors import AtollError
from atoll.peers.host_channels import HostChannels
from atoll.transfers.channel import DataChannel
from atoll.transfers.silence_monitor import MONITOR, SILENCE_SECONDS, SilenceMonitor

# Of the others of an island: the next ones, and further on those at a power of two.
NEXT_HOSTS = 4
# A first dial may take as long as any; one after a silence is soon done or tried again, so that the end of the silence
# is noticed.
_REDIAL_SECONDS = 2.0
# An answer to a question and its acknowledgement are smaller than this, in bytes; all else is traffic.
_SMALL = 256

# A host, and for how many seconds nothing was heard of it. On a thread of its own; again while that lasts.
OnSilent = Callable[[int, float], None]


def neighbours(host: int, island: Sequence[int]) -> frozenset[int]:
    """The hosts of its island that `host` watches: in islands of up to nine, each pair is watched.

    In a larger one their number grows with the logarithm of the island's size.
    """
    size, rank = len(island), island.index(host)
    distances = {*range(1, NEXT_HOSTS + 1), *itertools.takewhile(lambda each: each <= size // 2, _powers_of_two())}
    return frozenset(island[(rank + distance) % size] for distance in distances if distance < size)


def _powers_of_two() -> Iterable[int]:
    return (1 << exponent for exponent in itertools.count())


class HostWatch:
    """Watches some hosts of those that `channels` reaches. For any thread; nothing blocks."""

    def __init__(self, channels: HostChannels, on_silent: OnSilent, monitor: SilenceMonitor | None = None) -> None:
        self._channels = channels
        self._on_silent = on_silent
        self._monitor = monitor or MONITOR
        self._lock = threading.Lock()
        self._watched: dict[int, _Watched] = {}
        self._known: frozenset[int] = frozenset()
        self._patience = SILENCE_SECONDS

    def set_hosts(self, known: Iterable[int], always: Iterable[int], patience: float) -> None:
        """Of the hosts that are there, which are `known`, these are always watched; others once there is a channel."""
        with self._lock:
            self._known = frozenset(known)
            self._patience = patience
            gone = [host for host in self._watched if host not in self._known]
            for each in gone:
                self._watched.pop(each).end()
        for host in always:
            self.add(host)

    def add(self, host: int) -> None:
        """There is a channel to the host, or should be one."""
        with self._lock:
            if host not in self._known or host in self._watched:
                return
            # The last question that was answered may be one period old when a silence begins.
            patience = self._patience + self._monitor.period
            watched = self._watched[host] = _Watched(host, self._channels, patience, self._on_silent, self._again)
        self._monitor.watch(watched)
        watched.probe()

    def _again(self, watched: _Watched) -> None:
        self._monitor.watch(watched)

    def close(self) -> None:
        self.set_hosts((), (), self._patience)


class _Watched:
    """One host: see `silence.Watched`."""

    def __init__(
        self,
        host: int,
        channels: HostChannels,
        patience: float,
        on_silent: OnSilent,
        again: Callable[[_Watched], None],
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
        self._counts = (0, 0)  # bytes that came in, and that were acknowledged
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
        self._channels.fail(self._host, f"nothing was heard of host {self._host} for {seconds:.0f} s")
        threading.Thread(target=self._on_silent, args=(self._host, seconds), name="atoll-silent", daemon=True).start()
        self._again(self)
