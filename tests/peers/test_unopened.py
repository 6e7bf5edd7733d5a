"""Connections that have not opened: how many there may be, and for how long."""

from __future__ import annotations

from atoll.peers.unopened import Unopened


def test_who_comes_when_there_are_too_many_takes_the_place_of_the_oldest() -> None:
    unopened: Unopened[str] = Unopened(most=2, seconds=10.0)
    assert [unopened.add(name, now) for now, name in enumerate("abc")] == [None, None, "a"]
    assert not unopened.remove("a"), "it opens too late"
    assert unopened.remove("b")
    assert unopened.add("d", 4.0) is None
    assert unopened.oldest() == "c"


def test_connections_expire_in_the_order_of_their_coming() -> None:
    unopened: Unopened[str] = Unopened(most=10, seconds=10.0)
    assert unopened.next_deadline() is None
    for name, now in {"a": 100.0, "b": 101.0, "c": 105.0}.items():
        unopened.add(name, now)
    unopened.remove("b")
    assert unopened.next_deadline() == 110.0
    assert unopened.expired(109.9) == []
    assert unopened.expired(110.0) == ["a"]
    assert unopened.expired(120.0) == ["c"]
    assert len(unopened) == 0
