"""Tests that a session with a silent controller ends with an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atoll.errors import Code, Status
from atoll.protocol import messages as m
from atoll.session.controller_lease import ControllerLease
from tests.session.fake_cluster import FakeCluster

BROKEN = Status(Code.UNAVAILABLE, "the data port of host 1 is gone")


class Loop:
    """Event loop whose time only advances when the test requests it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, call: Callable[[], None]) -> Timer:
        self.timers.append(Timer(self, self.now + seconds, call))
        return self.timers[-1]

    def pass_to(self, now: float) -> None:
        while due := [each for each in self.timers if each.when <= now]:
            first = min(due, key=lambda each: each.when)
            first.cancel()
            self.now = first.when
            first.call()
        self.now = now


class Timer:
    def __init__(self, loop: Loop, when: float, call: Callable[[], None]) -> None:
        self.loop, self.when, self.call = loop, when, call

    def cancel(self) -> None:
        if self in self.loop.timers:
            self.loop.timers.remove(self)


def leased() -> tuple[Loop, FakeCluster, ControllerLease]:
    loop = Loop()
    lease = ControllerLease(loop, lambda reason: cluster.session.connection_lost(reason))  # type: ignore[arg-type]
    cluster = FakeCluster(lease=lease)
    return loop, cluster, lease


def ping(cluster: FakeCluster, seconds: float) -> list[Any]:
    cluster.session.handle(m.Ping(seconds))
    return cluster.take()


def test_a_session_answers_pings_and_lives_as_long_as_they_come() -> None:
    loop, cluster, _ = leased()
    for now in range(100):
        loop.pass_to(float(now))
        assert [type(each) for each in ping(cluster, 10.0)] == [m.Pong]
    assert cluster.session.lost is None


def test_a_session_whose_controller_is_silent_ends_with_its_lease_and_says_so() -> None:
    loop, cluster, _ = leased()
    ping(cluster, 10.0)
    loop.pass_to(9.5)
    assert cluster.session.lost is None
    loop.pass_to(12.0)
    assert cluster.session.lost is not None
    assert cluster.session.lost.message == "the Atoll controller is gone: it was silent for 11 s"
    assert loop.timers == []


def test_a_session_that_the_controller_does_not_hear_ends_when_its_pings_say_so() -> None:
    loop, cluster, _ = leased()
    for now in range(20):
        loop.pass_to(float(now))
        ping(cluster, max(0.0, 10.0 - now))
        if cluster.session.lost is not None:
            break
    assert 5 <= now <= 11


def test_a_session_that_is_closed_waits_for_nothing() -> None:
    loop, cluster, _ = leased()
    ping(cluster, 10.0)
    cluster.session.close()
    assert loop.timers == []


def test_a_controller_that_continues_after_another_one_may_not_know_for_its_grace_which_hosts_are_lost() -> None:
    loop, cluster, lease = leased()
    for now in range(100):
        loop.pass_to(float(now))
        ping(cluster, 10.0)
        if now == 20:
            lease.resumed()
        assert lease.may_miss_losses(grace=60.0) == (20 <= now < 80)


def test_a_controller_that_is_silent_may_not_know_which_hosts_are_lost() -> None:
    loop, cluster, lease = leased()
    ping(cluster, 10.0)
    loop.pass_to(1.0)
    assert not lease.may_miss_losses(grace=60.0)
    loop.pass_to(2.0)
    assert lease.may_miss_losses(grace=60.0)


def test_a_data_channel_that_breaks_while_the_controller_is_silent_too_is_not_what_is_wrong() -> None:
    loop, cluster, lease = leased()
    assert lease.explain(BROKEN) == BROKEN  # no message has arrived yet
    ping(cluster, 10.0)
    loop.pass_to(2.0)
    assert lease.explain(BROKEN) == BROKEN
    loop.pass_to(8.0)
    status = lease.explain(BROKEN)
    assert status.code == Code.UNAVAILABLE
    assert status.message == f"the Atoll controller is gone: it was silent for 8 s, and {BROKEN.message}"
