"""Tests of overruns: runs that take too long are stopped, and their tenant is charged."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.cluster.slice_requests import SliceRequest
from atoll.errors import OK, Code, Status
from atoll.ir.program import Call, single
from atoll.protocol import messages as m
from atoll.protocol.actions import StoreUsage
from atoll.state.offenses import MAX_CRASHES
from atoll.state.session import Session
from tests.controller.play import Play, on, runs
from tests.controller.test_crashes import launch
from tests.controller.test_tenants import shared
from tests.launch.test_failures import endless


def ticks(play: Play, seconds: range, *running: int) -> list[Any]:
    """Let time pass while these gangs keep host 0 busy. Return the messages."""
    for now in seconds:
        play.tick(float(now), running={0: running})
    return play.outbox()


def stops_in(messages: list[Any]) -> list[m.StopRun]:
    return [message for message in messages if isinstance(message, m.StopRun)]


class Contest:
    """Cluster with bob's first run, which may keep others waiting for `run_seconds`, and a session of alice."""

    def __init__(self, run_seconds: int) -> None:
        self.play = shared("1x1x1", run_seconds=run_seconds)
        self.alice, self.bob = self.play.open(token="alice"), self.play.open(token="bob")
        self.play.outbox()
        (self.run,) = launch(self.play, self.bob, 100)

    def wait(self, number: int = 200) -> m.Run:
        """Launch a program of alice behind the running one. Return its run."""
        (run,) = launch(self.play, self.alice, number)
        return run

    def stops(self, seconds: range, *running: int) -> list[m.StopRun]:
        return stops_in(ticks(self.play, seconds, *(running or (self.run.sequence,))))

    def restarts(self) -> int:
        return self.play.controller.resources.islands[0].restarts


def launch_over(play: Play, session: Session, hosts: tuple[int, ...], runs_apart: bool = False) -> list[m.Run]:
    """Launch a function on device 0 of these hosts."""
    play.proxy(session.number, m.RegisterFunction(1, "together", 901, (hosts,), runs_apart=runs_apart))
    compiles: list[m.Compile] = []
    for host in hosts:
        sent = play.report(host, m.FeedsArrived(session.number, (901,)))
        compiles += [each for each in sent if isinstance(each, m.Compile)]
    for host in hosts:
        play.report(host, m.Compiled(compiles[0].function, OK, b"", 0.1, False))
    play.proxy(session.number, m.RegisterProgram(1, single("f", (), Call(1, (), (on(*hosts),), hosts))))
    play.proxy(session.number, m.Launch(1, (), (11,), ()))
    return runs(play.outbox())


def test_a_run_that_keeps_another_tenant_waiting_is_stopped_after_its_limit():
    contest = Contest(10)
    assert contest.stops(range(1, 60)) == [], "nobody waits"
    contest.wait()
    stop, *again = contest.stops(range(60, 70))
    assert stop.sequence == contest.run.sequence
    assert "f was stopped: it ran for" in stop.text
    assert "its tenant's limit is 10 s (run_seconds)" in stop.text
    assert {each.sequence for each in again} == {stop.sequence}, "it may have waited for its devices"
    contest.play.report(0, m.Failed(stop.sequence, Status(Code.CANCELLED, stop.text)))
    assert contest.stops(range(70, 75)) == []
    assert contest.restarts() == 0


def test_a_run_that_had_to_be_stopped_stays_charged():
    contest = Contest(10)
    contest.wait()
    (stop, *_) = contest.stops(range(60, 75))
    contest.play.report(0, m.Failed(stop.sequence, Status(Code.CANCELLED, stop.text)))
    contest.play.tick(75.0)
    charged = [each for action in contest.play.actions if isinstance(action, StoreUsage) for each in action.usage]
    found = sum(each.device_ns for each in charged if each.tenant == "bob")
    assert found >= 10_000_000_000
    tally = contest.play.controller.launches.charges.by_island()[0, "bob"]
    assert tally.device_ns == found


def test_a_run_over_islands_is_stopped_on_those_where_nobody_waits_too():
    play = shared("2x1x1", run_seconds=10)
    alice, bob = play.open(token="alice"), play.open(token="bob")
    on_0, on_1 = launch_over(play, bob, (0, 1))
    launch(play, alice, 200)  # on island 0
    for now in range(1, 15):
        play.tick(float(now), running={0: (on_0.sequence,), 1: (on_1.sequence,)})
    sent = play.outbox()
    assert {each.sequence for each in stops_in(sent)} == {on_0.sequence, on_1.sequence}
    # The hosts leave the world before the stop, and only once, so that no later run meets this one in a collective.
    closed = [position for position, each in enumerate(sent) if isinstance(each, m.CloseWorld)]
    assert len(closed) == 2
    assert max(closed) < min(position for position, each in enumerate(sent) if isinstance(each, m.StopRun))


@pytest.mark.parametrize("has_ended", [False, True], ids=["runs everywhere", "has ended on a host"])
def test_the_runs_of_a_closed_session_over_islands_end_with_one_world(has_ended: bool) -> None:
    """A host that has ended a run may have begun the next one, which others must not begin in a later world."""
    play = shared("2x1x1")
    bob, other = play.open(token="bob"), play.open(token="bob")
    launch_over(play, bob, (0, 1))
    play.proxy(bob.number, m.Launch(1, (), (12,), ()))
    launch_over(play, other, (0, 1))
    first, second, of_other = sorted({each.sequence for each in play.controller.launches.in_flight.values()})
    play.proxy(other.number, m.Await(5, (11,)))
    play.close(bob.number)
    if has_ended:
        play.done(first, host=0)
    play.outbox()
    for now in range(1, 15):
        play.tick(float(now), running={1: (first,)})
    sent = play.outbox()
    closed = [each for each in sent if isinstance(each, m.CloseWorld)]
    assert len(closed) == 2, "one per host"
    assert {each for message in closed for each in message.ended} == {first, second} | (
        {of_other} if has_ended else set()
    )
    if has_ended:
        for host in range(2):
            play.report(host, m.Failed(of_other, Status(Code.UNKNOWN, "Connection closed by peer")))
        for now in range(15, 18):
            play.tick(float(now))
        (awaited,) = [each for each in play.outbox() if isinstance(each, m.Awaited)]
        assert awaited.status == closed[0].status.within("f")
        assert "its session has ended" in awaited.status.message


def test_a_new_slice_is_not_where_a_stopped_run_has_not_ended():
    play = Play("2x1x1")
    endless, early, late = (play.open() for _ in range(3))
    (run,) = launch(play, endless, 100)  # on island 0
    play.close(endless.number)
    ticks(play, range(1, 4), run.sequence)
    assert slice_island(play, early, 1) == 0, "it may end by itself"
    play.close(early.number)
    ticks(play, range(4, 12), run.sequence)
    assert slice_island(play, late, 2) == 1
    elsewhere = SliceRequest(1, other_island_than=tuple(late.devices.slices))
    assert slice_island(play, late, 3, elsewhere) == 0, "no other island fits"
    play.done(run.sequence)
    play.close(late.number)
    assert slice_island(play, play.open(), 4) == 0, "the run has ended"


ONE_DEVICE = SliceRequest(1)


def slice_island(play: Play, session: Session, number: int, slice_request: SliceRequest = ONE_DEVICE) -> int:
    """Add a slice. Return its island."""
    play.proxy(session.number, m.AddSlice(number, slice_request))
    (added,) = (each for each in play.outbox() if isinstance(each, m.SliceAdded))
    assert added.status == OK
    return session.devices.island_of(added.slice)


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
    sent = ticks(contest.play, range(1, 60), contest.run.sequence)
    (restart,) = (message for message in sent if isinstance(message, m.RestartIsland))
    assert "the run of f on hosts [0] of island 0 could not be stopped" in restart.reason
    assert m.RestartExcused(0) in sent


@pytest.mark.parametrize("is_joint", [False, True])
def test_a_run_is_charged_once_for_all_islands_that_it_costs(is_joint):
    islands = tuple(range(MAX_CRASHES + 1))
    play = shared(f"{len(islands)}x1x1", run_seconds=10, joint_islands=2 if is_joint else 0)
    alice, bob = play.open(token="alice"), play.open(token="bob")
    sent = launch_over(play, bob, islands, runs_apart=is_joint)
    assert len({each.sequence for each in sent}) == (1 if is_joint else len(islands))
    running = dict(zip(islands, [(each.sequence,) for each in sent], strict=True))
    for island in islands:
        launch(play, alice, 200 + island, island)
    for now in range(1, 60):
        play.tick(float(now), running=running)
    sent = play.outbox()
    assert [each for each in islands if m.RestartExcused(each) in sent] == list(islands)
    assert "suspended" not in {each.kind for each in play.controller.history.events("bob")}


def test_a_tenant_whose_runs_had_to_be_stopped_again_and_again_is_suspended():
    contest = Contest(5)
    run = contest.run
    for turn in range(3):
        behind = contest.wait(200 + turn)
        stop, *_ = contest.stops(range(1 + 10 * turn, 9 + 10 * turn), run.sequence)
        assert stop.sequence == run.sequence
        contest.play.report(0, m.Failed(run.sequence, Status(Code.CANCELLED, stop.text)))
        contest.play.done(behind.sequence)
        if turn < 2:
            (run,) = launch(contest.play, contest.bob, 101 + turn)
    contest.play.proxy(contest.bob.number, m.Launch(100, (), (77,), ()))
    contest.play.proxy(contest.bob.number, m.Await(5, (77,)))
    (awaited,) = [each for each in contest.play.outbox() if isinstance(each, m.Awaited)]
    assert "its programs ended workers, or had to be stopped, 3 times within 60 s" in awaited.status.message


def test_a_run_of_a_closed_session_is_told_to_stop_before_its_island_restarts():
    play, run = endless()
    play.close(play.session)
    stops = stops_in(ticks(play, range(100, 112)))
    assert {each.sequence for each in stops} == {run.sequence}
    assert "its session has ended" in stops[0].text
    assert runs(play.outbox()) == []


def test_a_gang_that_keeps_no_device_busy_is_not_charged():
    contest = Contest(10)
    contest.wait()
    assert stops_in(ticks(contest.play, range(1, 100))) == [], "it is blocked, or its client reads its results"
    assert contest.stops(range(100, 110)) == [], "its time is counted from its start"
    assert {each.sequence for each in contest.stops(range(110, 113))} == {contest.run.sequence}


def test_the_run_is_charged_that_keeps_devices_busy_and_not_a_gang_before_it():
    contest = Contest(10)
    (loop,) = launch(contest.play, contest.bob, 101)
    contest.wait()
    assert {each.sequence for each in contest.stops(range(1, 20), loop.sequence)} == {loop.sequence}


def test_a_run_that_waits_for_one_of_its_hosts_is_not_charged():
    play = shared("1x2x1", run_seconds=10)
    alice, bob = play.open(token="alice"), play.open(token="bob")
    play.outbox()
    play.proxy(bob.number, m.RegisterFunction(1, "hash", 1, ((0, 1),)))
    compile_, *_ = [each for each in play.report(0, m.FeedsArrived(bob.number, (1,))) if isinstance(each, m.Compile)]
    for host in range(2):
        play.report(host, m.Compiled(compile_.function, Status(Code.OK, ""), b"", 0.1, False, 0))
    play.proxy(bob.number, m.RegisterProgram(1, single("f", (), Call(1, (), (on(0, 1),), (0, 1)))))
    play.proxy(bob.number, m.Launch(1, (), (11,), ()))
    run, *_ = runs(play.outbox())
    launch(play, alice, 200)
    for now in range(1, 40):
        play.tick(float(now), running={0: (run.sequence,)})
    assert stops_in(play.outbox()) == []
    for now in range(40, 60):
        play.tick(float(now), running={0: (run.sequence,), 1: (run.sequence,)})
    assert {each.sequence for each in stops_in(play.outbox())} == {run.sequence}


def test_a_run_of_a_closed_session_is_stopped_behind_a_gang_that_waits():
    contest = Contest(0)
    (loop,) = launch(contest.play, contest.alice, 200)
    contest.play.close(contest.alice.number)
    stops = stops_in(ticks(contest.play, range(1, 20), loop.sequence))
    assert {each.sequence for each in stops} == {loop.sequence}


def test_the_runs_of_a_closed_session_share_one_time_to_end():
    """Each of the endless loops would keep other sessions waiting for five seconds."""
    contest = Contest(0)
    loops = [contest.run, *(launch(contest.play, contest.bob, number)[0] for number in (101, 102))]
    contest.play.tick(1.0, running={0: (loops[0].sequence,)})
    contest.play.close(contest.bob.number)
    assert contest.stops(range(2, 6), loops[0].sequence) == [], "they may end by themselves"
    stops = contest.stops(range(7, 8), loops[0].sequence)
    assert {each.sequence for each in stops} == {each.sequence for each in loops}
    assert contest.restarts() == 0


def test_an_island_restarts_once_for_two_runs_of_a_closed_session():
    contest = Contest(0)
    (other,) = launch(contest.play, contest.bob, 101)
    contest.play.close(contest.bob.number)
    contest.stops(range(1, 100), contest.run.sequence, other.sequence)
    assert contest.restarts() == 1
