"""Tests of the watch of compilations: the controller's conclusions from a worker's reports."""

from __future__ import annotations

from atoll.launch.compile_watch import ASK_SECONDS, MAX_ASKED, MAX_REQUESTS, STUCK_SECONDS, CompileWatch, Lost, Stuck
from atoll.protocol.messages import CompileReport, CompileStage

F, HOST, SESSION, FEED = "f", 3, 7, 900
ALL = {("f", HOST): None}


def watch() -> CompileWatch:
    found = CompileWatch()
    found.requested(F, HOST, SESSION, FEED, 0.0)
    return found


def report(stage: CompileStage, progress: int = -1) -> CompileReport:
    return CompileReport(F, stage, progress)


def test_a_host_is_asked_about_a_compilation_at_intervals_while_it_is_awaited() -> None:
    found = watch()
    assert found.questions(ASK_SECONDS - 1, {HOST}, ALL) == {}
    assert found.questions(ASK_SECONDS, {HOST}, ALL) == {HOST: [F]}
    assert found.questions(ASK_SECONDS + 1, {HOST}, ALL) == {}
    assert found.questions(3 * ASK_SECONDS, set(), ALL) == {}, "nobody can be asked"
    assert found.questions(3 * ASK_SECONDS, {HOST}, {}) == {}, "it has ended"
    assert found.reported(HOST, report(CompileStage.UNKNOWN), 31.0) is None


def test_of_many_compilations_those_that_were_asked_about_longest_ago_are_next() -> None:
    found = CompileWatch()
    names = [f"f{number}" for number in range(3 * MAX_ASKED)]
    for name in names:
        found.requested(name, HOST, SESSION, FEED, 0.0)
    awaited = {(name, HOST): None for name in names}
    asked = [found.questions((1 + turn) * ASK_SECONDS, {HOST}, awaited)[HOST] for turn in range(4)]
    assert [len(each) for each in asked] == [MAX_ASKED] * 4
    assert [*asked[0], *asked[1], *asked[2]] == names
    assert asked[3] == asked[0]


def test_a_compilation_that_the_worker_does_not_know_is_requested_again_and_then_fails() -> None:
    found = watch()
    unknown = report(CompileStage.UNKNOWN)
    for number in range(1, MAX_REQUESTS + 1):
        assert found.reported(HOST, unknown, 10.0) is None, "it may have overtaken the request"
        lost = found.reported(HOST, unknown, 20.0)
        assert isinstance(lost, Lost)
        assert (lost.request, lost.watched.requests) == (True, number - 1)
        assert (lost.watched.session, lost.watched.feed) == (SESSION, FEED)
        assert found.reported(HOST, unknown, 30.0) is None, "its source is on its way"
        assert found.questions(100.0, {HOST}, ALL) == {}
        found.requested(F, HOST, SESSION, FEED, 40.0)
    assert found.reported(HOST, unknown, 50.0) is None
    lost = found.reported(HOST, unknown, 60.0)
    assert isinstance(lost, Lost)
    assert not lost.request


def test_a_compilation_that_is_known_in_between_is_not_lost() -> None:
    found = watch()
    for stage in (CompileStage.UNKNOWN, CompileStage.COMPILING) * 4:
        assert found.reported(HOST, report(stage), 10.0) is None


def test_a_compilation_is_stuck_only_if_its_reported_progress_stays_the_same() -> None:
    found = watch()
    for number in range(10):
        now = number * STUCK_SECONDS
        assert found.reported(HOST, report(CompileStage.COMPILING, number), now) is None
        assert found.reported(HOST, report(CompileStage.COMPILING, number), now + STUCK_SECONDS / 2) is None
    stuck = found.reported(HOST, report(CompileStage.COMPILING, 9), 10 * STUCK_SECONDS + 1)
    assert stuck == Stuck(STUCK_SECONDS + 1)


def test_a_queued_compilation_is_not_stuck_with_those_before_it() -> None:
    found = watch()
    for number in range(10):
        assert found.reported(HOST, report(CompileStage.QUEUED, 5), number * STUCK_SECONDS) is None
    now = 10 * STUCK_SECONDS
    assert found.reported(HOST, report(CompileStage.COMPILING, 5), now) is None, "it has only started now"
    assert found.reported(HOST, report(CompileStage.COMPILING, 5), now + STUCK_SECONDS) is None
    assert found.reported(HOST, report(CompileStage.COMPILING, 5), now + STUCK_SECONDS + 1) == Stuck(STUCK_SECONDS + 1)


def test_a_compilation_without_known_progress_may_take_any_time() -> None:
    found = watch()
    for number in range(10):
        for stage in (CompileStage.COMPILING, CompileStage.ASKING):
            assert found.reported(HOST, report(stage), number * STUCK_SECONDS * 10) is None


def test_a_lost_host_is_not_asked() -> None:
    found = watch()
    found.forget({HOST})
    assert found.questions(100.0, {HOST}, ALL) == {}
