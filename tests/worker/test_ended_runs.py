"""Tests of the runs that must not begin on a host."""

from __future__ import annotations

from atoll.errors import Code, Status
from atoll.worker.ended_runs import EndedRuns

LOST = Status(Code.DATA_LOSS, "host 1 is gone")


def test_an_ended_run_fails_once() -> None:
    ended = EndedRuns()
    ended.add((3, 5), LOST)
    assert ended.take(4) is None
    assert [ended.take(3), ended.take(3)] == [LOST, None]
    assert ended


def test_runs_that_had_begun_are_forgotten_and_those_that_wait_are_kept() -> None:
    ended = EndedRuns()
    ended.add((3, 5), LOST)
    ended.forget((3, 5), waiting={5})
    assert [ended.take(3), ended.take(5)] == [None, LOST]
    assert not ended
