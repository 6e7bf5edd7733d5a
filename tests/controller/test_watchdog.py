"""What has not ended after a minute is reported once, with the process that owes the next step, and goes on."""

from __future__ import annotations

from typing import Any

from atoll.errors import OK
from atoll.protocol import messages as m
from atoll.protocol.actions import Log
from tests.controller.play import Play, runs
from tests.controller.publishing_play import Trainer


def pass_time(play: Play, until: float, since: float = 0.0) -> list[str]:
    """The texts of what is late, as the session's proxy gets them."""
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
    (run,) = runs(play.say(m.Launch(1, (7,), (8,), ())))
    assert pass_time(play, 55) == []
    (text,) = pass_time(play, 200, 55)
    assert text.startswith("f has run on host 0 of island 0 for ")
    assert text.endswith(" s: the worker of host 0 owes its end")
    assert [(each.text, each.session, each.island) for each in events(play)] == [(text, play.session, 0)]
    assert play.controller.resources.islands[0].restarts == 0
    play.done(run.sequence)
    (again,) = runs(play.say(m.Launch(1, (7,), (9,), ())))
    assert pass_time(play, 240, 200) == [], "the next one has its own deadline"
    play.done(again.sequence)


def test_python_that_a_gang_calls_is_named_before_its_worker():
    play = Play("1x1x2")
    play.say(m.RegisterFunction(1, "content", 900, ((0,),)))
    (compile_,) = play.report(0, m.FeedsArrived(play.session, (900,)))
    play.report(0, m.Compiled(compile_.function, OK, b"", 0.1, False, calls_client=True))
    play.with_call(name="f")
    play.array(7)
    (run,) = runs(play.say(m.Launch(1, (7,), (8,), ())))
    (text,) = pass_time(play, 100)
    assert text.endswith(
        " s: it calls Python in its client's process, which may not have returned; "
        "otherwise the worker of host 0 owes its end"
    )
    play.done(run.sequence)


def test_a_launch_whose_bytes_do_not_come_is_owed_by_its_client():
    play = Play("1x1x2")
    play.with_put()
    play.say(m.Launch(2, (), (8,), (500,)))
    (text,) = pass_time(play, 120)
    assert "a launch has waited for bytes on island 0 for " in text
    assert text.endswith("its client owes the bytes")


def test_a_compilation_and_a_query_are_owed_by_the_worker():
    play = Play("1x1x2")
    play.say(m.RegisterFunction(1, "content", 900, ((0,),)))
    compiles = play.report(0, m.FeedsArrived(play.session, (900,)))
    play.say(m.Query(5, "memory", 0, -1, b""))
    late = pass_time(play, 120)
    assert len(late) == 2
    assert "function 1 has been compiled for " in late[0]
    assert late[1].endswith(" s: the worker of host 0 owes the answer")
    assert "(memory)" in late[1]
    for each in compiles:
        if isinstance(each, m.Compile):
            play.report(0, m.Compiled(each.function, OK, b"", 0.1, False))


def test_it_is_in_the_log():
    play = Play("1x1x2")
    play.with_put()
    play.say(m.Launch(2, (), (8,), (500,)))
    logged: list[str] = []
    for now in range(1, 121):
        play.tick(float(now))
        logged += [action.text for action in play.flush() if isinstance(action, Log)]
    assert len(logged) == 1
    assert "its client owes the bytes" in logged[0]


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
