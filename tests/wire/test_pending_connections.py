"""Bounds for connections that are not authenticated yet, and for log lines about refused connections."""

from __future__ import annotations

import pytest

from atoll.wire.pending_connections import MAX_ADDRESSES, MAX_REASONS, PendingConnections, Refusals, address_key


def test_who_comes_when_there_are_too_many_takes_the_place_of_the_oldest() -> None:
    pending: PendingConnections[str] = PendingConnections(limit=2, seconds=10.0)
    assert [pending.add(name, now) for now, name in enumerate("abc")] == [None, None, "a"]
    assert not pending.remove("a"), "it opens too late"
    assert pending.remove("b")
    assert pending.add("d", 4.0) is None
    assert pending.oldest() == "c"


def test_connections_expire_in_the_order_of_their_coming() -> None:
    pending: PendingConnections[str] = PendingConnections(limit=10, seconds=10.0)
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
    pending: PendingConnections[str] = PendingConnections(limit=100, seconds=10.0, max_per_address=3)
    pending.add("honest", 0.0, "10.0.0.1")
    evicted = [pending.add(f"flood {count}", 1.0, "10.0.0.2") for count in range(50)]
    assert evicted == [None] * 3 + [f"flood {count}" for count in range(47)]
    assert len(pending) == 4
    assert pending.evicted == 47
    assert pending.remove("honest")


def test_the_bound_in_total_is_at_the_cost_of_the_address_with_most_connections() -> None:
    pending: PendingConnections[str] = PendingConnections(limit=4, seconds=10.0, max_per_address=3)
    for name, address in {"honest": "10.0.0.1", "a": "10.0.0.2", "b": "10.0.0.2", "c": "10.0.0.2"}.items():
        pending.add(name, 0.0, address)
    assert pending.add("late", 1.0, "10.0.0.3") == "a"
    assert len(pending) == 4


def test_the_addresses_of_one_ipv6_network_count_together() -> None:
    pending: PendingConnections[int] = PendingConnections(limit=100, seconds=10.0, max_per_address=3)
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


def test_an_address_is_logged_once_per_minute_and_then_with_the_number_of_refusals_between() -> None:
    refusals = Refusals()
    lines = [refusals.line("10.0.0.2", "it does not use TLS", now) for now in range(121)]
    assert [now for now, line in enumerate(lines) if line is not None] == [0, 60, 120]
    assert lines[0] == "a connection from 10.0.0.2 was refused: it does not use TLS"
    assert "(59 more refusals of this address since the last such line)" in str(lines[60])
    assert refusals.total == 121


def test_another_address_is_logged_at_once() -> None:
    refusals = Refusals()
    assert refusals.line("10.0.0.2", "x", 0.0) is not None
    assert refusals.line("10.0.0.3", "x", 0.1) is not None


def test_many_addresses_do_not_flood_the_log() -> None:
    refusals = Refusals()
    lines = [refusals.line(f"10.0.{count >> 8}.{count & 255}", "x", 0.01 * count) for count in range(2 * MAX_ADDRESSES)]
    assert sum(line is not None for line in lines) == MAX_ADDRESSES
    assert refusals.line("10.9.9.9", "x", 60.0) is not None, "the first lines are a minute old"


def test_each_reason_of_an_address_is_logged_once_per_minute() -> None:
    refusals = Refusals()
    reasons = ["a client is not a host", "its secret is not the session's"] * 30
    lines = [refusals.line("10.0.0.2", reason, 0.5 * count) for count, reason in enumerate(reasons)]
    assert [line for line in lines if line is not None] == [
        f"a connection from 10.0.0.2 was refused: {reason}" for reason in reasons[:2]
    ]
    assert "(58 more refusals of this address since the last such line)" in str(refusals.line("10.0.0.2", "x", 60.0))


def test_an_address_with_a_new_reason_each_time_does_not_flood_the_log() -> None:
    refusals = Refusals()
    lines = [refusals.line("10.0.0.2", f"{count} is no role", 0.01 * count) for count in range(1000)]
    assert sum(line is not None for line in lines) == MAX_REASONS
    assert refusals.total == 1000
