"""Tests of the lease's fence: a controller that does not hold its lease sends nothing to any peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from atoll.controller_process.lease_fence import RELEASED_SECONDS, LeaseFence
from tests.controller_process.fenced_peers import ENGINE, HOSTS, LATER, PROXY, FencedPeers, Peer, player


class Lease:
    """Lease that the test can revoke."""

    name = "the lease of a test"
    transitions = 0
    is_lost = False
    named_standby = ""

    def __init__(self) -> None:
        self.is_held = True
        self.is_released = False

    def holds(self) -> bool:
        return self.is_held and not self.is_released

    def name_standby(self, address: str) -> None:
        """Do nothing, because no test reads the standby's name."""

    def release(self) -> None:
        self.is_released = True

    def retake(self) -> None:
        self.is_released = False


class Scene(FencedPeers):
    """Controller with a lease."""

    fence: LeaseFence

    def __init__(self) -> None:
        super().__init__()
        self.lease = Lease()
        self.is_standby_silent = False
        connections: Any = self
        self.fence = LeaseFence(
            self.lease, lambda: "it is silent" if self.is_standby_silent else "", lambda: HOSTS, connections
        )


@pytest.fixture
def play() -> Callable[[Callable[[Scene], None]], None]:
    return player(Scene)


def test_all_peers_are_fenced_while_the_lease_is_not_held(play):
    def scene(play: Scene) -> None:
        play.look(*play.peers)
        assert play.fenced == []
        play.lease.is_held = False
        play.look(*play.peers)
        assert play.fenced == [*HOSTS, ENGINE, PROXY]
        play.lease.is_held = True
        play.look(*play.peers)
        assert play.fenced == []

    play(scene)


def test_a_check_before_the_messages_of_a_turn_fences_without_a_look(play):
    def scene(play: Scene) -> None:
        play.lease.is_held = False
        play.fence.check()
        assert play.fenced == [*HOSTS, ENGINE, PROXY]
        play.peers[10] = Peer(10)
        play.fence.check()
        assert 10 in play.fenced, "it has connected since"
        play.peers[10].is_corked = False
        play.fence.check()
        assert 10 in play.fenced, "it has resumed its connection since"

    play(scene)


def test_the_loss_of_the_standby_changes_nothing_while_the_lease_is_held(play):
    def scene(play: Scene) -> None:
        play.look(*play.peers)
        play.is_standby_silent = True
        play.look(1, 2, ENGINE, PROXY, after=LATER)
        assert play.fenced == []
        assert not play.lease.is_released
        play.fence.end()
        assert play.fenced == []

    play(scene)


def test_without_a_standby_a_controller_that_does_not_hold_the_lease_stays_fenced(play):
    def scene(play: Scene) -> None:
        play.lease.is_held = False
        play.look()
        play.fence.end()
        assert play.fenced == [*HOSTS, ENGINE, PROXY]

    play(scene)


def test_a_controller_without_its_standby_and_most_of_its_hosts_releases_the_lease_once(play):
    def scene(play: Scene) -> None:
        play.look(*play.peers)
        play.is_standby_silent = True
        play.look(1, ENGINE, PROXY, after=LATER)
        assert play.lease.is_released
        assert play.fenced == [*HOSTS, ENGINE, PROXY]
        play.look(after=RELEASED_SECONDS - 0.1)
        assert play.lease.is_released
        play.look(1, after=0.2)
        assert not play.lease.is_released, "no standby wanted the lease"
        assert play.fenced == []
        play.look(1, after=LATER)
        assert not play.lease.is_released, "it has released the lease for this loss of the standby"

    play(scene)


def test_a_controller_whose_standby_answers_again_takes_the_lease_back_at_once(play):
    def scene(play: Scene) -> None:
        play.look(*play.peers)
        play.is_standby_silent = True
        play.look(after=LATER)
        assert play.lease.is_released
        play.is_standby_silent = False
        play.look()
        assert not play.lease.is_released
        assert play.fenced == []

    play(scene)
