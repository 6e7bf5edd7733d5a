"""Tests of the watchdog: it reports work that takes over a minute once, with the process that must act next."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.errors import OK, Code
from atoll.ir.program import Call, HostBuffer, HostToDevice, single
from atoll.protocol import messages as m
from atoll.protocol.actions import Log, Send
from tests.controller.play import Play, on, runs
from tests.controller.publishing_play import Trainer
from tests.controller.test_tenants import shared


def pass_time(play: Play, until: float, since: float = 0.0) -> list[str]:
    """Advance the time. Return the texts of overdue work that the session's proxy receives."""
    late: list[str] = []
    for now in range(int(since) + 1, int(until) + 1):
        play.tick(float(now))
        late += [each.text for each in play.outbox() if isinstance(each, m.Late)]
    return late


def events(play: Play) -> list[dict[str, Any]]:
    return [each for each in play.controller.history.events() if each.kind == "late"]


def test_a_gang_that_runs_on_is_reported_once_to_its_session_and_runs_on():
    play = Play("1x1x2")
    play.with_call(name="f")
    play.array(7)
    (run,) = runs(play.send(m.Launch(1, (7,), (8,), ())))
    assert pass_time(play, 55) == []
    (text,) = pass_time(play, 200, 55)
    assert text.startswith("f has run on host 0 of island 0 for ")
    assert text.endswith(" s: the worker of host 0 has not reported its end")
    assert [(each.text, each.session, each.island) for each in events(play)] == [(text, play.session, 0)]
    assert play.controller.resources.islands[0].restarts == 0
    play.done(run.sequence)
    (again,) = runs(play.send(m.Launch(1, (7,), (9,), ())))
    assert pass_time(play, 240, 200) == [], "the next one has its own deadline"
    play.done(again.sequence)


@pytest.mark.parametrize(
    ("devices", "reported"),
    [(1, True), (2, False)],
    ids=["beside", "behind"],
)
def test_a_gang_is_reported_if_it_runs_beside_the_callback_of_another_session_and_not_if_it_waits(
    devices: int, reported: bool
) -> None:
    play = Play(f"1x1x{devices}")
    sessions = []
    for calls_client in (True, False):
        play.session = play.open().number
        play.send(m.RegisterFunction(1, f"content {calls_client}", 900, (tuple(range(devices)),)))
        (compile_,) = play.report(0, m.FeedsArrived(play.session, (900,)))
        play.report(0, m.Compiled(compile_.function, OK, b"", 0.1, False, calls_client=calls_client))
        places = tuple(range(devices))
        call = Call(1, (), (on(*places),), places)
        play.send(m.RegisterProgram(1, single("callback" if calls_client else "loop", (), call)))
        play.send(m.Launch(1, (), (8,), ()))
        sessions.append(play.session)
    pass_time(play, 100)
    callback, loop = sessions
    late = {each.session: each.text for each in events(play)}
    assert late.keys() == ({callback, loop} if reported else {callback})
    if reported:
        assert late[loop].startswith("loop has run on host 0 of island 0 for ")
        assert late[loop].endswith(" s: the worker of host 0 has not reported its end")


def test_python_that_a_gang_calls_is_named_before_its_worker():
    play = Play("1x1x2")
    play.send(m.RegisterFunction(1, "content", 900, ((0,),)))
    (compile_,) = play.report(0, m.FeedsArrived(play.session, (900,)))
    play.report(0, m.Compiled(compile_.function, OK, b"", 0.1, False, calls_client=True))
    play.with_call(name="f")
    play.array(7)
    (run,) = runs(play.send(m.Launch(1, (7,), (8,), ())))
    (text,) = pass_time(play, 100)
    assert text.endswith(
        " s: it calls Python in its client's process, which may not have returned; "
        "otherwise the worker of host 0 has not reported its end"
    )
    play.done(run.sequence)


def test_a_delayed_upload_whose_bytes_do_not_come_is_owed_by_its_client():
    play = shared(upload_rate=1)
    bob = play.open(token="bob")
    play.open(token="alice")
    upload = HostToDevice((HostBuffer(0, (100,), None, None),), (on(0),))
    play.proxy(bob.number, m.RegisterProgram(7, single("put", (), upload, feeds=1)))
    for feed in range(3):
        play.proxy(bob.number, m.Launch(7, (), (50 + feed,), (feed,)))
    play.worker(0, m.FeedsArrived(bob.number, (0,)))
    (run,) = runs(play.outbox())
    play.done(run.sequence)
    (text,) = pass_time(play, 120)
    assert "has waited for bytes on island 0" in text
    assert text.endswith(": its client has not sent the bytes")
    play.worker(0, m.FeedsArrived(bob.number, (1, 2)))
    assert len(runs(play.outbox())) == 2


def test_a_launch_whose_bytes_do_not_come_is_owed_by_its_client():
    play = Play("1x1x2")
    play.with_put()
    play.send(m.Launch(2, (), (8,), (500,)))
    (text,) = pass_time(play, 120)
    assert "a launch has waited for bytes on island 0 for " in text
    assert text.endswith("its client has not sent the bytes")


def test_a_compilation_and_a_query_are_owed_by_the_worker():
    play = Play("1x1x2")
    play.send(m.RegisterFunction(1, "content", 900, ((0,),)))
    compiles = play.report(0, m.FeedsArrived(play.session, (900,)))
    play.send(m.Query(5, m.QueryKind.MEMORY, 0, -1, b""))
    late = pass_time(play, 120)
    assert len(late) == 2
    assert "the compilation of function 1 has taken " in late[0]
    assert late[1].endswith(" s: the worker of host 0 has not answered")
    assert "(memory)" in late[1]
    for each in compiles:
        if isinstance(each, m.Compile):
            play.report(0, m.Compiled(each.function, OK, b"", 0.1, False))


def test_it_is_in_the_log():
    play = Play("1x1x2")
    play.with_put()
    play.send(m.Launch(2, (), (8,), (500,)))
    logged: list[str] = []
    for now in range(1, 121):
        play.tick(float(now))
        logged += [action.text for action in play.flush() if isinstance(action, Log)]
    assert len(logged) == 1
    assert "its client has not sent the bytes" in logged[0]


def test_a_subscriber_that_waits_is_owed_a_version():
    play = Trainer()
    play.complete()
    reader = play.open(50, token="reader").number
    for newer_than in (1, 7):
        play.proxy(reader, m.OpenVersion(play.request(), "trainer/policy", newer_than=newer_than, seconds=60.0))
    assert pass_time(play, 50) == []
    ((subject, seconds),) = play.controller.watchdog.owed(50.0)
    assert subject.session == reader
    missing = "a version newer than 1 of trainer/policy: version 1 exists"
    assert subject.text(seconds) == f"a subscription waits for {missing}"
    play.complete()
    ((subject, seconds),) = play.controller.watchdog.owed(51.0)
    assert "newer than 7" in subject.text(seconds)


class LostCompilation(Play):
    """Session that has registered a function of which its worker has no record."""

    def __init__(self) -> None:
        super().__init__("1x1x2")
        self.send(m.RegisterFunction(1, "content of f", 900, ((0,),)))
        (self.compile,) = self.report(0, m.FeedsArrived(self.session, (900,)))
        self.asked: list[str] = []

    def pass_time(self, seconds: int, stage: m.CompileStage, progress: int = -1) -> list[Any]:
        """Advance the time while the worker answers each question.

        Return all messages but pings and reports of overdue work.
        """
        sent: list[Any] = []
        for _ in range(seconds):
            self.tick(self.now + 1.0)
            for action in self.flush():
                message = action.message if isinstance(action, Send) else None
                if isinstance(message, m.Ping) and message.compiles:
                    reports = tuple(m.CompileReport(name, stage, progress) for name in message.compiles)
                    self.worker(0, m.Pong(self.now, compiles=reports))
                elif message is not None and not isinstance(message, m.Ping | m.Late):
                    sent.append(message)
        return sent + self.outbox()


def test_a_lost_compilation_is_requested_again_from_its_session():
    play = LostCompilation()
    sent = play.pass_time(25, m.CompileStage.UNKNOWN)
    assert sent == [m.DropFeed(play.session, 900), m.SendSources(((1, (0,)),))]
    assert play.send(m.Recompile(1, 901)) == []
    (again,) = play.report(0, m.FeedsArrived(play.session, (901,)))
    assert (again.function, again.feed) == (play.compile.function, 901)
    answered = play.report(0, m.Compiled(again.function, OK, b"", 0.1, False))
    assert {(each.function, each.status.ok) for each in answered} == {(1, True)}


def test_a_compilation_that_is_lost_again_and_again_fails_with_its_host():
    play = LostCompilation()
    failed: list[Any] = []
    for number in range(901, 906):
        sent = play.pass_time(25, m.CompileStage.UNKNOWN)
        failed = [each for each in sent if isinstance(each, m.FunctionReady)]
        if failed:
            break
        play.send(m.Recompile(1, number))
        play.report(0, m.FeedsArrived(play.session, (number,)))
    assert failed
    assert failed[0].status.code == Code.UNAVAILABLE
    assert failed[0].status.message == (
        "the compilation of program content of f was lost by the worker of host 0, which does not know it although it "
        "was requested 3 times: compile the program again"
    )


def test_a_compilation_without_progress_fails_and_one_with_progress_does_not():
    play = LostCompilation()
    for ticks in range(100, 110):
        assert play.pass_time(500, m.CompileStage.COMPILING, ticks) == []
    assert play.pass_time(500, m.CompileStage.COMPILING) == [], "its progress is unknown"
    assert play.pass_time(1500, m.CompileStage.QUEUED, 5) == [], "the gangs before it may be stuck"
    stopped, dropped, failed = play.pass_time(650, m.CompileStage.COMPILING, 5)
    assert stopped == m.StopCompiling(play.compile.function)
    assert dropped == m.DropFunction(play.compile.function), "nobody needs it"
    assert failed.status.code == Code.DEADLINE_EXCEEDED
    assert "on host 0 made no progress for " in failed.status.message
    assert failed.status.message.endswith(" s: the process that compiles it uses no CPU time")


def test_a_worker_stops_a_compilation_without_progress_also_while_a_program_uses_the_function():
    play = LostCompilation()
    play.report(0, m.Compiled(play.compile.function, OK, b"", 0.1, False))
    play.with_call()
    play.send(m.Recompile(1, 901))
    play.report(0, m.FeedsArrived(play.session, (901,)))
    stopped, failed = play.pass_time(650, m.CompileStage.COMPILING, 5)
    assert stopped == m.StopCompiling(play.compile.function)
    assert (failed.function, failed.status.code) == (1, Code.DEADLINE_EXCEEDED)


def test_the_report_of_lateness_says_what_the_worker_does():
    play = LostCompilation()
    play.pass_time(30, m.CompileStage.QUEUED)
    (text,) = [subject.text(30.0) for subject, _ in play.controller.watchdog.owed(play.now)]
    assert text.endswith("the worker of host 0 has not sent the result, and reports that it is queued")
