"""Tests of the evaluation of traces of a tenant that pauses."""

from __future__ import annotations

import pytest

from atoll.protocol.spans import Span
from benchmarks.paper.pauses import pause

MS = 1_000_000


def turns(sessions: list[int], begin: int, end: int) -> list[Span]:
    """Return spans of consecutive gangs of one millisecond, of these sessions in turn, on two devices."""
    return [
        Span(
            0,
            0,
            sessions[at % len(sessions)],
            "p",
            "call",
            at,
            at * MS,
            (at + 1) * MS,
            devices=(0, 1),
            launched=at * MS,
        )
        for at in range(begin, end)
    ]


def test_shares_that_are_met_at_once_deviate_by_nothing() -> None:
    spans = turns([1, 2, 3, 4], 0, 400) + turns([1, 2, 3], 400, 1400) + turns([1, 2, 3, 4], 1400, 2400)
    found = pause(spans, [1, 2, 3, 4])
    assert found["left"] < 1
    assert found["idle"] == pytest.approx(0, abs=0.5)
    assert found["back"] < 1


def test_one_that_takes_the_whole_share_of_who_left_is_seen() -> None:
    spans = turns([1, 2, 3, 4], 0, 400) + turns([1, 2, 3, 3], 400, 1400) + turns([1, 2, 3, 4], 1400, 2400)
    assert pause(spans, [1, 2, 3, 4])["left"] == pytest.approx(50, abs=1)


def test_idle_devices_and_a_return_without_a_share_are_seen() -> None:
    spans = turns([1, 2, 3, 4], 0, 400) + turns([1, 2, 3], 400, 1400)[::2] + turns([1, 2, 3, 4, 1, 2, 3], 1400, 2400)
    found = pause(spans, [1, 2, 3, 4])
    assert found["idle"] == pytest.approx(50, abs=1)
    assert found["back"] == pytest.approx(43, abs=2)
