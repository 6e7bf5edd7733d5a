"""What is logged of refused connections."""

from __future__ import annotations

from atoll.wire.refusals import MAX_ADDRESSES, MAX_REASONS, Refusals


def test_an_address_is_logged_once_per_minute_and_then_with_the_number_of_refusals_between() -> None:
    refusals = Refusals()
    lines = [refusals.line("10.0.0.2", "it speaks no TLS", now) for now in range(121)]
    assert [now for now, line in enumerate(lines) if line is not None] == [0, 60, 120]
    assert lines[0] == "a connection from 10.0.0.2 was refused: it speaks no TLS"
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
