"""Tests of spare engines: when one replaces the engine, and which messages it then receives."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.cluster.lifecycle import IslandState
from atoll.controller.islands.engine_role import ENGINE_AWAY_SECONDS
from atoll.protocol import events as e
from atoll.protocol import messages as m
from tests.controller.play import Cluster, joined

RESTARTED = "killed by SIGKILL"


def tick(play: Cluster, seconds: float) -> list[Any]:
    """Let time pass, with one tick per second, and return the actions."""
    found: list[Any] = []
    for _ in range(round(seconds)):
        play.now += 1.0
        play.event(e.Tick(play.now))
        found += play.event(e.Flush(play.now))
    return found


@pytest.fixture
def play() -> Cluster:
    made = joined("2x1x2", engine="hosts")
    made.flush()
    return made


def messages_to(connection: int, actions: list[Any]) -> list[Any]:
    return [
        each.message for each in actions if getattr(each, "connection", 0) == connection and hasattr(each, "message")
    ]


def test_it_has_nothing_to_do_while_the_engine_is_there(play: Cluster) -> None:
    spare = play.connect("spare engine")
    assert messages_to(spare, tick(play, 30)) == []


@pytest.mark.parametrize("loss", [e.ConnectionAway, e.ConnectionLost])
def test_it_becomes_the_engine_some_seconds_after_that_is_lost(play: Cluster, loss: Any) -> None:
    spare = play.connect("spare engine")
    lost = play.engine_connection
    play.event(loss(play.now, lost, *(["closed"] if loss is e.ConnectionLost else [])))
    assert messages_to(spare, tick(play, ENGINE_AWAY_SECONDS)) == []
    (become,) = messages_to(spare, tick(play, 2))
    assert [(each.island, each.state) for each in become.islands] == [(0, IslandState.READY), (1, IslandState.READY)]
    assert become.settings.islands == "2x1x2"
    assert become.settings.tenants == ()
    assert play.controller.connections.engine == spare
    assert lost not in play.controller.connections.peers


def test_it_replaces_an_engine_that_is_lost_before_the_islands_are_ready() -> None:
    """A cluster whose engine and controller were killed while it waited for hosts continues with a spare engine."""
    play = Cluster("2x1x2", engine="hosts")
    play.join(0)
    spare = play.connect("spare engine")
    play.event(e.ConnectionAway(play.now, play.engine_connection))
    (become,) = messages_to(spare, tick(play, ENGINE_AWAY_SECONDS + 2))
    assert [each.state for each in become.islands] == [IslandState.READY, IslandState.STARTING]
    assert play.controller.connections.engine == spare


def test_an_engine_that_returns_in_time_keeps_its_role(play: Cluster) -> None:
    spare = play.connect("spare engine")
    play.event(e.ConnectionAway(play.now, play.engine_connection))
    tick(play, ENGINE_AWAY_SECONDS - 1)
    play.event(e.ConnectionBack(play.now, play.engine_connection))
    assert messages_to(spare, tick(play, 30)) == []


def test_without_a_spare_engine_the_connection_of_the_engine_is_kept(play: Cluster) -> None:
    play.event(e.ConnectionAway(play.now, play.engine_connection))
    tick(play, 30)
    assert play.controller.connections.engine == play.engine_connection


def test_it_is_told_to_restart_the_islands_that_are_restarting(play: Cluster) -> None:
    spare = play.connect("spare engine")
    play.event(e.ConnectionLost(play.now, play.engine_connection, "closed"))
    play.lose(0, RESTARTED)
    become, restart = messages_to(spare, tick(play, ENGINE_AWAY_SECONDS + 2))
    assert [each.state for each in become.islands] == [IslandState.RESTARTING, IslandState.READY]
    assert restart.island == 0


def test_agents_connect_again_since_the_new_engine_does_not_know_them(play: Cluster) -> None:
    play.connect("spare engine")
    agent = play.connect("agent", label="m1")
    play.event(e.ConnectionLost(play.now, play.engine_connection, "closed"))
    tick(play, ENGINE_AWAY_SECONDS + 2)
    assert agent in [each.connection for each in play.closed]


def test_there_is_one_and_one_that_is_away_is_replaced(play: Cluster) -> None:
    first = play.connect("spare engine")
    second = play.connect("spare engine")
    assert play.controller.connections.spare_engine == first
    assert second not in play.controller.connections.peers
    play.event(e.ConnectionAway(play.now, first))
    third = play.connect("spare engine")
    assert play.controller.connections.spare_engine == third


def test_it_may_send_nothing(play: Cluster) -> None:
    spare = play.connect("spare engine")
    play.receive(spare, m.IslandNotRestarted(0, "no"))
    play.event(e.Flush(play.now))
    assert play.controller.resources.islands[0].state is IslandState.READY
    assert play.controller.connections.spare_engine is None


@pytest.mark.parametrize("engine", ["local", "ray"])
def test_there_is_none_for_an_engine_whose_workers_end_with_it(engine: str) -> None:
    play = joined("1x1x2", engine=engine)
    spare = play.connect("spare engine")
    (refused,) = messages_to(spare, play.event(e.Flush(play.now)))
    assert f"this cluster's engine is '{engine}'" in refused.status.message
    play.event(e.ConnectionAway(play.now, play.engine_connection))
    tick(play, ENGINE_AWAY_SECONDS + 2)
    assert play.controller.connections.engine == play.engine_connection
