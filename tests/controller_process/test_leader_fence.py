"""Tests of the leader's fence: a controller that receives nothing from its standby and most hosts sends nothing
irrevocable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from atoll.controller_process import takeover
from atoll.controller_process.takeover import LeaderFence, Reachability
from tests.controller_process.fenced_peers import ENGINE, HOSTS, LATER, PROXY, FencedPeers, player


class Scene(FencedPeers):
    """Controller with a standby."""

    def __init__(self) -> None:
        super().__init__()
        self.in_takeover_suspicion = False
        self.hosts: tuple[int, ...] = HOSTS
        connections: Any = self
        self.fence = LeaderFence(
            lambda: "nothing is heard" if self.in_takeover_suspicion else "", lambda: self.hosts, connections
        )


@pytest.fixture
def play() -> Callable[[Callable[[Scene], None]], None]:
    return player(Scene)


def test_who_is_silent_for_the_lease_is_not_heard():
    reachability = Reachability()
    reachability.counted(100, {1: 5, 2: 5})
    reachability.counted(101, {1: 5, 2: 6})
    assert reachability.is_reachable(101, 1)
    assert not reachability.is_reachable(100 + LATER, 1)
    assert reachability.is_reachable(100 + LATER, 2)
    assert not reachability.is_reachable(101, 3), "it never was there"


@pytest.mark.parametrize(("hosts", "silent", "lacks"), [(1, 1, True), (2, 1, False), (3, 1, False), (3, 2, True)])
def test_a_controller_lacks_most_hosts_where_a_standby_could_have_them(hosts, silent, lacks):
    reachability = Reachability()
    everybody = range(hosts)
    reachability.counted(100, dict.fromkeys(everybody, 0))
    reachability.counted(100 + LATER, {each: int(each >= silent) for each in everybody})
    assert reachability.lost_majority(100 + LATER, everybody, ()) == lacks


def test_it_falls_silent_where_it_hears_neither_its_standby_nor_most_of_its_hosts(play):
    def scene(play: Scene) -> None:
        play.look(*HOSTS, ENGINE, PROXY)
        play.look(1, ENGINE, after=LATER)
        assert play.fenced == [], "the standby is reachable"
        play.in_takeover_suspicion = True
        play.look(1, 2, ENGINE, PROXY, after=0.5)
        assert play.fenced == [], "most hosts are reachable, so the standby does not have them"
        play.look(1, ENGINE, after=LATER)
        assert play.fenced == [1, ENGINE, PROXY], "it continues to ping unreachable peers"

    play(scene)


def test_it_speaks_again_when_enough_hosts_answer(play):
    def scene(play: Scene) -> None:
        play.look(*HOSTS)
        play.in_takeover_suspicion = True
        play.look(1, after=LATER)
        assert 1 in play.fenced
        play.look(ENGINE, after=2 * LATER)
        assert play.fenced == [1, ENGINE, PROXY], "of one to whom nothing is said nothing is expected"
        play.look(2)
        assert play.fenced == []

    play(scene)


def test_it_speaks_again_when_there_is_no_doubt_any_more(play):
    def scene(play: Scene) -> None:
        play.in_takeover_suspicion = True
        play.look(after=LATER)
        play.look(after=LATER)
        assert play.fenced == [ENGINE, PROXY]
        play.in_takeover_suspicion = False
        play.look()
        assert play.fenced == []

    play(scene)


def test_without_hosts_there_is_nobody_whom_a_standby_could_have(play):
    def scene(play: Scene) -> None:
        play.hosts, play.in_takeover_suspicion = (), True
        play.look(after=LATER)
        play.look(after=LATER)
        assert play.fenced == []

    play(scene)


def test_where_another_has_taken_over_what_it_had_to_say_is_not_said(play):
    def scene(play: Scene) -> None:
        play.in_takeover_suspicion = True
        play.look(after=LATER)
        play.look(after=LATER)
        play.fence.stop()
        assert play.fenced == [ENGINE, PROXY]

    play(scene)


def test_it_looks_for_as_long_as_there_may_be_another_and_more_often_while_peers_wait(monkeypatch):
    monkeypatch.setattr(takeover, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(takeover, "_FENCED_LOOK_SECONDS", 0.001)
    monkeypatch.setattr(takeover, "LEASE_SECONDS", 0.0)

    async def main() -> None:
        play = Scene()
        play.in_takeover_suspicion = True
        play.fence.begin()
        async with asyncio.timeout(30):
            while not play.fenced:
                await asyncio.sleep(0.001)
            play.in_takeover_suspicion = False
            while play.fenced:
                await asyncio.sleep(0.001)
            play.in_takeover_suspicion = True
            while not play.fenced:
                await asyncio.sleep(0.001)
        play.fence.end()
        assert play.fenced == []
        await asyncio.sleep(0.05)
        assert play.fenced == [], "it does not look any more"

    asyncio.run(main())
