"""Tests of an island's life cycle: its transitions, and the notifications about them."""

from __future__ import annotations

import itertools

import pytest

from atoll.cluster.lifecycle import (
    TRANSITIONS,
    Island,
    IslandDrained,
    IslandFailed,
    IslandReady,
    IslandRemoved,
    IslandRestarted,
    IslandState,
    Lifecycle,
)
from atoll.cluster.state_machine import IllegalTransition
from atoll.errors import Code, Details, Kind, Status

WHY = Status(Code.DATA_LOSS, "a fire")
FAILED = WHY.with_details(Details(Kind.ISLAND, (0,), retriable=True))
REMOVED = WHY.with_details(Details(Kind.ISLAND, (0,)))
S = IslandState

# The transition that each method makes.
CHANGES = {
    S.READY: lambda life: life.hosts_joined(0),
    S.RESTARTING: lambda life: life.fail(0, WHY),
    S.REMOVED: lambda life: life.remove(0, WHY),
    S.DRAINING: lambda life: life.begin_drain(0),
    S.DRAINED: lambda life: life.end(0, WHY),
}


@pytest.mark.parametrize(("was", "to"), list(itertools.product(S, CHANGES)))
def test_an_island_goes_from_state_to_state_as_the_table_has_it_and_in_no_other_way(was, to):
    life = Lifecycle({0: Island(0, was)})
    if to in TRANSITIONS[was]:
        CHANGES[to](life)
        assert life.islands[0].state is to
    else:
        with pytest.raises(IllegalTransition, match=f"island 0 cannot go from {was.name} to {to.name}"):
            CHANGES[to](life)
        assert life.islands[0].state is was


def test_subscribers_are_notified_in_the_order_in_which_they_subscribed():
    life = Lifecycle({0: Island(0)})
    seen = []
    for kind in (IslandReady, IslandFailed, IslandRestarted, IslandRemoved, IslandDrained):
        life.subscribe(kind, lambda notification: seen.append(("first", notification, life.islands[0].state)))
        life.subscribe(kind, lambda notification: seen.append(("second", notification, life.islands[0].state)))
    life.hosts_joined(0)
    life.fail(0, WHY)
    life.hosts_joined(0)
    life.fail(0, WHY)
    life.remove(0, WHY)
    life.end(0, WHY)
    assert [(who, each, state) for who, each, state in seen if who == "first"] == [
        ("first", IslandReady(0), S.READY),
        ("first", IslandFailed(0, FAILED), S.RESTARTING),
        ("first", IslandRestarted(0), S.READY),
        ("first", IslandFailed(0, FAILED), S.RESTARTING),
        ("first", IslandRemoved(0, REMOVED), S.REMOVED),
        ("first", IslandDrained(0, REMOVED), S.DRAINED),
    ]
    assert [who for who, _, _ in seen] == ["first", "second"] * 6
    assert life.islands[0].restarts == 2


def test_an_island_that_has_returned_from_a_drain_has_no_last_failure():
    life = Lifecycle({0: Island(0, S.READY)})
    life.fail(0, WHY)
    life.hosts_joined(0)
    assert life.islands[0].last_failure == FAILED
    life.begin_drain(0)
    life.end(0, WHY)
    life.begin_return(0)
    assert life.islands[0].last_failure == REMOVED, "why it does not work yet"
    life.hosts_joined(0)
    assert life.islands[0].last_failure is None


def test_a_drain_that_stops_leaves_an_island_that_was_lost_meanwhile_as_it_is():
    life = Lifecycle({0: Island(0, S.READY)})
    life.begin_drain(0)
    life.stop_drain(0)
    assert life.islands[0].state is S.READY
    life.begin_drain(0)
    life.fail(0, WHY)
    life.stop_drain(0)
    assert life.islands[0].state is S.RESTARTING
