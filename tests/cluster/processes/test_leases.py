"""Tests of leases: how long a peer may be silent, and which part of that time does not count."""

from __future__ import annotations

import threading

import pytest

from atoll.cluster.processes.leases import Leases
from atoll.cluster.processes.lifeline import Lease

# When a peer with a lease of 3 s sent its messages, when the lease was checked, and at which check it has expired. The
# lease should be checked every second.
TABLE = {
    "in time": ([100.0], [100.0, 101.0, 102.0, 103.0, 104.0], [104.0]),
    "heard again": ([100.0, 101.5], [100.0, 101.0, 102.0, 103.0, 104.0, 105.0], [105.0]),
    "the timer is a little late": ([100.0], [100.0, 101.15, 102.3, 103.45, 104.6], [103.45, 104.6]),
    "the owner did not run": ([100.0], [100.5, 160.0, 161.0, 162.0, 163.0], [163.0]),
    "away, and heard on the return": ([100.0, 159.9], [100.5, 160.0, 161.0, 162.0, 163.0, 164.0], [164.0]),
    "away again and again": ([100.0], [100.0, 110.0, 120.0, 130.0, 131.0, 132.0], [131.0, 132.0]),
    "looked at for the first time": ([100.0], [150.0, 151.0, 152.0, 153.0, 154.0], [154.0]),
}


@pytest.mark.parametrize(("heard", "looks", "expired"), TABLE.values(), ids=TABLE)
def test_what_expires_when(heard: list[float], looks: list[float], expired: list[float]) -> None:
    leases = Leases(3.0, period=1.0)
    found = []
    for now in sorted({*heard, *looks}):
        if now in heard:
            leases.renew(7, now)
        if now in looks and leases.expired(now):
            found.append(now)
    assert found == expired


def test_a_peer_that_is_forgotten_does_not_expire() -> None:
    leases = Leases(3.0)
    assert leases.expired(100.0) == []
    for peer in (0, 1):
        leases.renew(peer, 100.0)
    leases.forget(0)
    assert [leases.expired(100.0 + seconds) for seconds in (1, 2, 3, 4)] == [[], [], [], [1]]


def test_a_lease_that_is_not_renewed_lapses_once() -> None:
    lapsed = threading.Semaphore(0)
    Lease(lambda: lapsed.release()).renew(0.08)
    assert lapsed.acquire(timeout=30.0)
    assert not lapsed.acquire(timeout=0.1)


def test_a_ping_for_several_peers_has_the_lease_of_the_one_that_has_been_silent_for_longest():
    leases = Leases(10.0, period=1.0)
    leases.renew(1, 0.0)
    leases.renew(2, 5.0)
    for now in (0.5, 3.0, 5.0, 9.0, 30.0):
        assert leases.min_left((1, 2), now) == min(leases.left(1, now), leases.left(2, now))
    assert leases.min_left((2, 3), 5.0) == 10.0
    assert leases.heard_since(5.0) == {2}
