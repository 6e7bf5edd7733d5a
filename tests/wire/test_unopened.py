"""Connections that have not opened: how many there may be, and for how long."""

from __future__ import annotations

import pytest

from atoll.wire.unopened import Unopened, address_key


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


def test_a_flood_from_one_address_displaces_its_own_connections_only() -> None:
    unopened: Unopened[str] = Unopened(most=100, seconds=10.0, most_per_address=3)
    unopened.add("honest", 0.0, "10.0.0.1")
    evicted = [unopened.add(f"flood {count}", 1.0, "10.0.0.2") for count in range(50)]
    assert evicted == [None] * 3 + [f"flood {count}" for count in range(47)]
    assert len(unopened) == 4
    assert unopened.evicted == 47
    assert unopened.remove("honest")


def test_the_bound_in_total_is_at_the_cost_of_the_address_with_most_connections() -> None:
    unopened: Unopened[str] = Unopened(most=4, seconds=10.0, most_per_address=3)
    for name, address in {"honest": "10.0.0.1", "a": "10.0.0.2", "b": "10.0.0.2", "c": "10.0.0.2"}.items():
        unopened.add(name, 0.0, address)
    assert unopened.add("late", 1.0, "10.0.0.3") == "a"
    assert len(unopened) == 4


def test_the_addresses_of_one_ipv6_network_count_together() -> None:
    unopened: Unopened[int] = Unopened(most=100, seconds=10.0, most_per_address=3)
    for count in range(50):
        unopened.add(count, 0.0, f"2001:db8:0:1::{count:x}")
    assert len(unopened) == 3


@pytest.mark.parametrize(
    ("host", "key"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:0:1:2:3:4:5", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("user 1000", "user 1000"),
        ("", ""),
    ],
)
def test_addresses_under_which_connections_count(host: str, key: str) -> None:
    assert address_key(host) == key
