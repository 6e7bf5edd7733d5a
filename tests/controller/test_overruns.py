"""Runs that last too long are stopped, and cost their tenant: tables of messages."""

from __future__ import annotations

from typing import Any

from atoll.errors import Code, Status
from atoll.protocol import messages as m
from tests.controller.play import Play, runs
from tests.controller.test_crashes import launch
from tests.controller.test_failures import endless
from tests.controller.test_tenants import shared


def ticks(play: Play, seconds: range) -> list[Any]:
    for now in seconds:
        play.tick(float(now))
    return play.outbox()


def stops_in(messages: list[Any]) -> list[m.StopRun]:
    return [message for message in messages if isinstance(message, m.StopRun)]


class Contest:
    """The first run of bob, who may keep others waiting for `run_seconds`; the session of alice."""

    def __init__(self, run_seconds: int) -> None:
        self.play = shared("1x1x1", run_seconds=run_seconds)
        self.alice, self.bob = self.play.open(token="alice"), self.play.open(token="bob")
        self.play.outbox()
        (self.run,) = launch(self.play, self.bob, 100)

    def wait(self, number: int = 200) -> m.Run:
        """A launch of alice stands behind what runs."""
        (run,) = launch(self.play, self.alice, number)
        return run

    def stops(self, seconds: range) -> list[m.StopRun]:
        return stops_in(ticks(self.play, seconds))

    def restarts(self) -> int:
        return self.play.controller.resources.islands[0].restarts


def test_a_run_that_keeps_another_tenant_waiting_is_stopped_after_its_limit():
    contest = Contest(10)
    assert contest.stops(range(1, 60)) == [], "nobody waits"
    contest.wait()
    stop, *again = contest.stops(range(60, 70))
    assert stop.sequence == contest.run.sequence
    assert "f was stopped: it ran for" in stop.text
    assert "its tenant may for 10 s (run_seconds)" in stop.text
    assert {each.sequence for each in again} == {stop.sequence}, "it may have been in line on its devices"
    contest.play.report(0, m.Failed(stop.sequence, Status(Code.CANCELLED, stop.text)))
    assert contest.stops(range(70, 75)) == []
    assert contest.restarts() == 0


def test_work_of_the_same_tenant_is_not_kept_waiting():
    contest = Contest(10)
    launch(contest.play, contest.play.open(token="bob"), 300)
    assert contest.stops(range(1, 60)) == []


def test_without_a_limit_a_run_may_keep_others_waiting():
    contest = Contest(0)
    contest.wait()
    assert contest.stops(range(1, 2000)) == []


def test_the_island_of_a_run_that_cannot_be_stopped_restarts_at_its_tenants_cost():
    contest = Contest(10)
    contest.wait()
    sent = ticks(contest.play, range(1, 60))
    (restart,) = (message for message in sent if isinstance(message, m.RestartIsland))
    assert "the run of f on hosts [0] of island 0 could not be stopped" in restart.reason
    assert m.RestartExcused(0) in sent


def test_a_tenant_whose_runs_had_to_be_stopped_again_and_again_is_suspended():
    contest = Contest(5)
    run = contest.run
    for turn in range(3):
        behind = contest.wait(200 + turn)
        stop, *_ = contest.stops(range(1 + 10 * turn, 9 + 10 * turn))
        assert stop.sequence == run.sequence
        contest.play.report(0, m.Failed(run.sequence, Status(Code.CANCELLED, stop.text)))
        contest.play.done(behind.sequence)
        if turn < 2:
            (run,) = launch(contest.play, contest.bob, 101 + turn)
    contest.play.proxy(contest.bob.number, m.Launch(100, (), (77,), ()))
    contest.play.proxy(contest.bob.number, m.Await(5, (77,)))
    (awaited,) = [each for each in contest.play.outbox() if isinstance(each, m.Awaited)]
    assert "its programs crashed workers, or had to be stopped, 3 times within 60 s" in awaited.status.message


def test_a_run_of_a_closed_session_is_told_to_stop_before_its_island_restarts():
    play, run = endless()
    play.close(play.session)
    stops = stops_in(ticks(play, range(100, 112)))
    assert {each.sequence for each in stops} == {run.sequence}
    assert "its session is over" in stops[0].text
    assert runs(play.outbox()) == []
