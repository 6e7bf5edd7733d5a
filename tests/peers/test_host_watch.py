"""Tests of unreachable hosts: they are detected, reported as long as they are unreachable, and then used again."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from atoll.errors import ConnectError
from atoll.peers.data_port import DataPort
from atoll.peers.host_channels import HostChannels
from atoll.peers.host_watch import HostWatch, neighbors
from atoll.transfers import liveness
from atoll.transfers.inbox import Inbox
from atoll.transfers.liveness import SilenceMonitor
from atoll.wire.address import Address
from tests.transfers.ends import SECONDS
from tests.transfers.test_streams import until

SECRET = "between hosts"
PERIOD = 0.05
PATIENCE = 0.2


class Watch:
    """Host 0, which watches host 1 at a port of this machine."""

    def __init__(self, port: int) -> None:
        self.reports: list[int] = []
        self.reported = threading.Semaphore(0)
        self.channels = HostChannels()
        self.channels.set_hosts(((1, f"127.0.0.1:{port}"),), SECRET)
        self.watch = HostWatch(self.channels, self._report, SilenceMonitor(PERIOD))

    def start(self) -> None:
        self.watch.set_hosts((1,), (1,), PATIENCE)

    def _report(self, host: int, seconds: float) -> None:
        assert seconds >= PATIENCE
        self.reports.append(host)
        self.reported.release()

    def close(self) -> None:
        self.watch.close()
        self.channels.close()


def data_port(port: int = 0) -> DataPort:
    opened = DataPort(Address(host="127.0.0.1", port=port), Inbox(lambda *_: None))
    opened.set_peers((), SECRET)
    return opened


@pytest.fixture
def deaf() -> Iterator[tuple[int, list[socket.socket]]]:
    """Return a port that accepts one connection and reads nothing, like a host behind a broken link, and that
    connection.
    """
    server = socket.create_server(("127.0.0.1", 0))
    taken: list[socket.socket] = []

    def take_one() -> None:
        taken.append(server.accept()[0])
        server.close()

    threading.Thread(target=take_one, daemon=True).start()
    yield server.getsockname()[1], taken
    for each in taken:
        each.close()


@pytest.mark.parametrize("size", [2, 3, 4, 8, 9, 64, 1000])
def test_neighbors_are_few_and_in_small_islands_every_pair_is_watched(size: int) -> None:
    island = range(100, 100 + size)
    watched = {host: neighbors(host, island) for host in island}
    assert all(host not in those and those <= set(island) for host, those in watched.items())
    assert max(len(those) for those in watched.values()) <= 12
    pairs = {frozenset((host, other)) for host, those in watched.items() for other in those}
    if size <= 9:
        assert len(pairs) == size * (size - 1) // 2
    # Many hosts miss a host that is cut off from all others. It does not report any host that others reach.
    watchers = Counter(host for pair in pairs for host in pair)
    assert all(watchers[host] >= min(size - 1, 8) for host in island)


def test_a_host_that_answers_is_not_reported_however_long_nothing_is_sent() -> None:
    port = data_port()
    watch = Watch(port.address.port)
    watch.start()
    until(lambda: watch.channels.opened(1) is not None)
    channel = watch.channels.to(1)
    assert not watch.reported.acquire(timeout=5 * PATIENCE)
    assert watch.channels.to(1) is channel
    watch.close()
    port.close()


def test_a_silent_host_is_reported_again_and_again_and_what_would_be_sent_there_fails_at_once(
    deaf: tuple[int, list[socket.socket]],
) -> None:
    watch = Watch(deaf[0])
    watch.start()
    for _ in range(2):
        assert watch.reported.acquire(timeout=SECONDS)
    assert set(watch.reports) == {1}
    with pytest.raises(ConnectError, match="host 1 was silent for"):
        watch.channels.to(1)
    # The host is reachable again, which the watch detects by itself.
    port = data_port(deaf[0])
    until(lambda: watch.channels.opened(1) is not None)
    assert not watch.channels.to(1).is_closed
    count = len(watch.reports)
    assert not watch.reported.acquire(timeout=3 * PATIENCE) or len(watch.reports) <= count
    watch.close()
    port.close()


def test_who_was_sent_anything_is_watched_from_then_on(deaf: tuple[int, list[socket.socket]]) -> None:
    watch = Watch(deaf[0])
    watch.watch.set_hosts((1,), (), PATIENCE)
    assert not watch.reported.acquire(timeout=2 * PATIENCE)
    watch.channels.to(1)
    watch.watch.add(1)
    assert watch.reported.acquire(timeout=SECONDS)
    watch.close()


def test_a_host_that_has_left_is_watched_no_more(deaf: tuple[int, list[socket.socket]]) -> None:
    watch = Watch(deaf[0])
    watch.start()
    watch.watch.set_hosts((), (), PATIENCE)
    assert not watch.reported.acquire(timeout=5 * PATIENCE)
    watch.close()


def test_time_in_which_this_process_did_not_run_is_no_silence_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, peer = Clock(stopped_at=3, seconds=60.0), Mute()
    monkeypatch.setattr(liveness, "time", clock)
    SilenceMonitor(1.0).watch(peer)
    assert peer.over.wait(SECONDS)
    assert peer.silent_for == 10.0
    assert clock.now >= 70.0


class Clock:
    """Counts the seconds of sleep. One sleep takes much longer, as if the machine had been suspended."""

    def __init__(self, stopped_at: int, seconds: float) -> None:
        self.now = 0.0
        self._sleeps = 0
        self._stopped = {stopped_at: seconds}

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self._sleeps += 1
        self.now += seconds + self._stopped.get(self._sleeps, 0.0)


class Mute:
    """Connection that never sends anything."""

    patience = 9.5

    def __init__(self) -> None:
        self.over = threading.Event()
        self.silent_for = 0.0

    def is_under_way(self) -> bool:
        return True

    def progress(self) -> object:
        return 0

    def probe(self) -> None:
        pass

    def peer_is_silent(self, seconds: float) -> None:
        self.silent_for = seconds
        self.over.set()
