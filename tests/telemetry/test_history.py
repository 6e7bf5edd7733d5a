"""Tests of the history of a cluster's events, apart from gangs."""

from __future__ import annotations

from atoll.errors import OK, Code, Status
from atoll.telemetry.history import KINDS, History


def test_events_are_numbered_and_dated_and_the_oldest_go():
    now = [0.0]
    history = History(lambda: now[0], lambda event: None, limit=2)
    for number in range(4):
        now[0] = float(number)
        history.record("failed", f"why {number}", island=number)
    assert [(each.number, each.seconds, each.island) for each in history.events()] == [
        (3, 2.0, 2),
        (4, 3.0, 3),
    ]
    assert sum(history.counts.values()) == 4, "counts know also those that are not kept"


def test_operations_are_done_or_refused():
    history = History(lambda: 0.0, lambda event: None)
    history.operation(OK, "island 1 is up")
    history.operation(Status(Code.NOT_FOUND, "there is none"), "")
    assert [(each.kind, each.text) for each in history.events()] == [
        ("operation", "island 1 is up"),
        ("refused", "there is none"),
    ]
    assert {each.kind for each in history.events()} <= set(KINDS)
