"""Connections that have not opened: how many there may be, and for how long."""

from __future__ import annotations

import pytest

from atoll.wire.pending_connections import PendingConnections, address_key


def test_who_comes_when_there_are_too_many_takes_the_place_of_the_oldest() -> None:
    pending: PendingConnections[str] = PendingConnections(most=2, seconds=10.0)
    assert [pending.add(name, now) for now, name in enumerate("abc")] == [None, None, "a"]
    assert not pending.remove("a"), "it opens too late"
    assert pending.remove("b")
    assert pending.add("d", 4.0) is None
    assert pending.oldest() == "c"


def test_connections_expire_in_the_order_of_their_coming() -> None:
    pending: PendingConnections[str] = PendingConnections(most=10, seconds=10.0)
    assert pending.next_deadline() is None
    for name, now in {"a": 100.0, "b": 101.0, "c": 105.0}.items():
        pending.add(name, now)
    pending.remove("b")
    assert pending.next_deadline() == 110.0
    assert pending.expired(109.9) == []
    assert pending.expired(110.0) == ["a"]
    assert pending.expired(120.0) == ["c"]
    assert len(pending) == 0


def test_a_flood_from_one_address_displaces_its_own_connections_only() -> None:
    pending: PendingConnections[str] = PendingConnections(most=100, seconds=10.0, most_per_address=3)
    pending.add("honest", 0.0, "10.0.0.1")
    evicted = [pending.add(f"flood {count}", 1.0, "10.0.0.2") for count in range(50)]
    assert evicted == [None] * 3 + [f"flood {count}" for count in range(47)]
    assert len(pending) == 4
    assert pending.evicted == 47
    assert pending.remove("honest")


def test_the_bound_in_total_is_at_the_cost_of_the_address_with_most_connections() -> None:
    pending: PendingConnections[str] = PendingConnections(most=4, seconds=10.0, most_per_address=3)
    for name, address in {"honest": "10.0.0.1", "a": "10.0.0.2", "b": "10.0.0.2", "c": "10.0.0.2"}.items():
        pending.add(name, 0.0, address)
    assert pending.add("late", 1.0, "10.0.0.3") == "a"
    assert len(pending) == 4


def test_the_addresses_of_one_ipv6_network_count_together() -> None:
    pending: PendingConnections[int] = PendingConnections(most=100, seconds=10.0, most_per_address=3)
    for count in range(50):
        pending.add(count, 0.0, f"2001:db8:0:1::{count:x}")
    assert len(pending) == 3


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
