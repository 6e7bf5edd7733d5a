"""Tests of launches that survive the failure of an island: they run after its restart if all that they need remains."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.cluster.settings import Dispatch
from atoll.errors import OK, Code
from atoll.ir.program import Call, DeviceToHost, HostBuffer, HostToDevice, Transfer, single
from atoll.launch.shared_parts import GANG_WINDOW
from atoll.protocol import messages as m
from tests.controller.play import Play, on, runs


def back(play: Play, session: int, function: int = 1, feed: int = 95) -> list[Any]:
    """Restart the island of host 0, compile the session's function again, and return the messages that follow."""
    play.proxy(session, m.FailureAcknowledged((0,)))
    sent = play.join_again(0)
    play.proxy(session, m.Recompile(function, feed))
    (compile_,) = [each for each in play.report(0, m.FeedsArrived(session, (feed,))) if isinstance(each, m.Compile)]
    return sent + play.report(0, m.Compiled(compile_.function, OK, b"", 0.1, True))


def waits_behind(play: Play) -> tuple[m.Run, ...]:
    """Launch a program on device 0, behind which another session makes an array without arguments and reads it."""
    play.with_call(arguments=0)
    play.send(m.Launch(1, (), (11,), ()))
    other = play.open(7, "other.py").number
    play.proxy(other, m.RegisterFunction(5, "content 5", 50, ((0,),)))
    (compile_,) = [each for each in play.report(0, m.FeedsArrived(other, (50,))) if isinstance(each, m.Compile)]
    play.report(0, m.Compiled(compile_.function, OK, b"", 0.1, False))
    play.proxy(other, m.RegisterProgram(1, single("make", (), Call(5, (), (on(0),), (0,)))))
    play.proxy(other, m.RegisterProgram(2, single("read", (on(0),), DeviceToHost((0,), 0, None), feeds=1)))
    play.proxy(other, m.Launch(1, (), (21,), ()))
    play.proxy(other, m.Launch(2, (21,), (22,), (60,)))
    play.proxy(other, m.Await(9, (22,)))
    return tuple(runs(play.outbox()))


def test_what_was_sent_behind_a_program_that_costs_its_island_runs_after_the_restart():
    play = Play()
    assert len(waits_behind(play)) == 2
    play.send(m.Await(8, (11,)))
    play.lose(0, "killed")
    (awaited,) = [each for each in play.outbox() if isinstance(each, m.Awaited)]
    assert awaited.wait == 8
    assert "(it had started there)" in awaited.status.message
    other = play.session + 1
    again = runs(back(play, other, 5))
    assert [each.results for each in again] == [(21,), (22,)], "in the order of their launches"
    play.done(*[each.sequence for each in again])
    assert play.controller.scheduler.statistics(0).in_flight == 0
    assert play.controller.sessions[other].directory.entries[22].error is None
    assert play.controller.sessions[other].directory.entries[22].ready


def test_contents_that_a_launch_carried_to_a_lost_host_are_carried_again():
    play = Play()
    play.with_call(arguments=0)
    play.with_put()
    play.send(m.Launch(1, (), (11,), ()))
    (sent,) = runs(play.send(m.Launch(2, (), (12,), (77,), contents=b"12345678")))
    assert sent.contents == b"12345678"
    play.lose(0, "killed")
    (again,) = runs(back(play, play.session))
    assert (again.results, again.contents) == ((12,), b"12345678")
    play.done(again.sequence)
    assert play.controller.sessions[play.session].directory.entries[12].ready


def test_what_stood_in_line_behind_it_runs_after_the_restart():
    play = Play()
    play.with_call(arguments=0)
    for handle in range(2 * GANG_WINDOW):
        play.send(m.Launch(1, (), (100 + handle,), ()))
    play.outbox()
    play.lose(0, "killed")
    found = runs(back(play, play.session))
    assert found[0].results == (101,), "the first could have been running, and has failed"
    count = 0
    while found:
        count += len(found)
        found = runs(play.done(*[each.sequence for each in found]))
    assert count == 2 * GANG_WINDOW - 1
    entries = play.controller.sessions[play.session].directory.entries
    assert [entries[100 + i].error is None for i in range(2 * GANG_WINDOW)] == [False] + [True] * (2 * GANG_WINDOW - 1)


def test_what_needs_an_array_of_the_lost_island_fails_and_says_so():
    play = Play()
    play.with_call()
    play.array(10)
    play.send(m.Launch(1, (10,), (11,), ()))
    play.send(m.Launch(1, (10,), (12,), ()))
    play.send(m.Await(5, (12,)))
    play.lose(0, "killed")
    (awaited,) = [each for each in play.outbox() if isinstance(each, m.Awaited)]
    assert awaited.status.code == Code.DATA_LOSS
    assert "(its argument 0, float32[2] made by put, was stored there) (in f)" in awaited.status.message


def test_with_sequential_dispatch_what_was_sent_precedes_what_stood_in_line():
    play = Play(dispatch=Dispatch.SEQUENTIAL)
    play.with_call(arguments=0)
    for handle in (10, 11, 12):
        play.send(m.Launch(1, (), (handle,), ()))
    first = play.controller.launches.in_flight
    play.report(0, m.Enqueued(next(iter(first))))
    assert [gang.run.launch.results for gang in first.values()] == [(10,), (11,)], "the third waits for an answer"
    play.outbox()
    play.lose(0, "killed")
    order = []
    found = runs(back(play, play.session))
    while found:
        order += [each.results for each in found]
        found = runs([message for each in found for message in play.report(0, m.Enqueued(each.sequence))])
    assert order == [(11,), (12,)]
    entries = play.controller.sessions[play.session].directory.entries
    assert [entries[handle].error is None for handle in (10, 11, 12)] == [False, True, True]


def test_with_sequential_dispatch_the_next_launch_is_dispatched_if_the_one_before_has_lost_its_array():
    play = Play(dispatch=Dispatch.SEQUENTIAL)
    play.with_call(arguments=0)
    play.with_call(3)
    play.array(9)
    for program, arguments, result in ((1, (), 10), (3, (9,), 11), (1, (), 12)):
        play.send(m.Launch(program, arguments, (result,), ()))
    play.outbox()
    play.lose(0, "killed")
    assert [each.results for each in runs(back(play, play.session))] == [(12,)]


def test_arrays_that_were_released_after_their_last_use_was_sent_are_made_again():
    play = Play()
    play.with_call(arguments=0)
    play.with_call(3)
    play.send(m.Launch(1, (), (10,), ()))
    play.send(m.Launch(1, (), (11,), ()))
    play.send(m.Launch(3, (11,), (12,), ()))
    play.send(m.Release((11,)))
    session = play.controller.sessions[play.session]
    assert 11 not in session.directory.entries, "its memory is freed after its last use"
    play.outbox()
    play.lose(0, "killed")
    messages = back(play, play.session)
    again = runs(messages)
    assert [(each.arguments, each.results) for each in again] == [((), (11,)), ((11,), (12,))]
    frees = [each for each in [*messages, *play.done(*[each.sequence for each in again])] if isinstance(each, m.Free)]
    assert [each.handles for each in frees] == [(11,)], "it is freed a second time"
    assert set(session.directory.entries) == {10, 12}
    assert session.directory.entries[12].error is None


def test_the_error_names_the_first_cause_and_not_what_follows_from_it():
    play = Play()
    play.with_call()
    play.array(10)
    play.send(m.Launch(1, (10,), (11,), ()))
    play.send(m.Launch(1, (10,), (12,), ()))
    play.send(m.Launch(1, (12,), (13,), ()))
    play.send(m.Await(5, (13,)))
    play.lose(0, "killed")
    (awaited,) = [each for each in play.outbox() if isinstance(each, m.Awaited)]
    assert "its argument 0, float32[2] made by put, was stored there" in awaited.status.message, "both use this array"


@pytest.mark.parametrize("is_sent", [False, True])
def test_a_launch_over_two_islands_outlives_the_loss_of_one_unless_the_other_may_have_begun_it(is_sent):
    play = Play("2x1x1")
    play.with_call(arguments=0)
    play.send(m.RegisterProgram(3, single("move", (on(0),), Transfer((0,), (on(1),), reshard=True))))
    if not is_sent:
        for handle in range(GANG_WINDOW):
            play.send(m.Launch(1, (), (100 + handle,), ()))
    play.send(m.Launch(1, (), (9,), ()))
    play.send(m.Launch(1, (), (10,), ()))
    play.send(m.Launch(3, (10,), (11,), ()))
    play.send(m.Await(5, (11,)))
    sent = [gang.run.launch.results for gang in play.controller.launches.in_flight.values()]
    assert ((11,) in sent) == is_sent
    play.outbox()
    play.lose(0, "killed")
    if is_sent:
        (awaited,) = play.send(m.Await(6, (11,)))[-1:]
        assert "(hosts of other islands may have begun it) (in move)" in awaited.status.message
        return
    found = runs(back(play, play.session))
    while not any(each.results == (11,) for each in found):
        found = runs(play.done(*[each.sequence for each in found]))
    send, receive = (each for each in found if 11 in each.results or 10 in each.arguments)
    play.done(send.sequence)
    assert m.Awaited(5, OK) in play.done(receive.sequence, host=1)


def test_a_launch_that_waits_for_python_on_another_island_waits_on():
    play = Play("2x1x1")
    play.with_function(1, (1,))
    python = single("python", (), Call(1, (), (on(1),), (1,), stream=1))
    play.send(m.RegisterProgram(6, python))
    play.send(m.RegisterProgram(3, single("move", (on(1),), Transfer((0,), (on(0),), reshard=True))))
    (call,) = runs(play.send(m.Launch(6, (), (10,), ())))
    assert runs(play.send(m.Launch(3, (10,), (11,), ()))) == []
    play.lose(0, "killed")
    play.send(m.FailureAcknowledged((0,)))
    play.join_again(0)
    receive, send = runs(play.done(call.sequence, host=1))
    assert (send.arguments, receive.results) == ((10,), (11,))
    play.done(send.sequence, host=1)
    play.done(receive.sequence)
    entry = play.controller.sessions[play.session].directory.entries[11]
    assert (entry.ready, entry.error) == (True, None)


# ---- uploads


@pytest.fixture
def play() -> Play:
    """Return a session with programs that put and read an array on device 0."""
    play = Play()
    play.with_put()
    play.send(m.RegisterProgram(3, single("read", (on(0),), DeviceToHost((0,), 0, None), feeds=1)))
    return play


def errors(play: Play, *handles: int) -> list[str]:
    entries = play.controller.sessions[play.session].directory.entries
    return ["" if (error := entries[handle].error) is None else error.message for handle in handles]


def fill(play: Play, count: int = GANG_WINDOW) -> None:
    """Launch this many gangs on device 0 from another session."""
    other = play.open(7, "other.py").number
    put = single("put", (), HostToDevice((HostBuffer(0, (2,), None, None),), (on(0),)), feeds=1)
    play.proxy(other, m.RegisterProgram(2, put))
    for number in range(count):
        play.worker(0, m.FeedsArrived(other, (50 + number,)))
        play.proxy(other, m.Launch(2, (), (100 + number,), (50 + number,)))
    play.outbox()


@pytest.mark.parametrize("state", ["bytes are on their way", "in line", "unbounded"])
def test_a_launch_waits_until_its_bytes_have_come_again(play, state):
    if state == "in line":
        fill(play)
        play.report(0, m.FeedsArrived(play.session, (77,)))
    if state == "unbounded":
        play.lose(0, "killed")
    play.send(m.Launch(2, (), (11,), (77,)))
    play.send(m.Launch(3, (11,), (12,), (60,)))
    if state != "unbounded":
        play.lose(0, "killed")
    assert errors(play, 11, 12) == ["", ""]
    play.send(m.FailureAcknowledged((0,), ((0, 77),)))
    play.join_again(0)
    put, read = runs(play.report(0, m.FeedsArrived(play.session, (77,))))
    assert (put.results, read.arguments) == ((11,), (11,))
    play.done(put.sequence, read.sequence)
    assert errors(play, 11, 12) == ["", ""]


def test_a_put_that_was_sent_behind_others_waits_for_its_bytes_again(play):
    fill(play, 1)
    play.report(0, m.FeedsArrived(play.session, (77,)))
    (put,) = runs(play.send(m.Launch(2, (), (11,), (77,))))
    play.lose(0, "killed")
    assert errors(play, 11) == [""]
    play.send(m.FailureAcknowledged((0,), ((0, 77),)))
    play.join_again(0)
    (again,) = runs(play.report(0, m.FeedsArrived(play.session, (77,))))
    assert again.results == put.results


def test_bytes_that_are_not_kept_fail_their_launch_and_what_needs_it(play):
    play.send(m.Launch(2, (), (11,), (77,)))
    play.send(m.Launch(3, (11,), (12,), (60,)))
    play.send(m.Launch(2, (), (13,), (78,)))
    play.lose(0, "killed")
    play.send(m.FailureAcknowledged((0,), (), (78,)))
    lost, made_of_it, unsent = errors(play, 11, 12, 13)
    assert "host 0 of island 0 is gone (worker 1000: killed)" in lost
    assert "(bytes of its client were on their way to host 0, and are not kept) (in put)" in lost
    assert made_of_it == lost
    assert unsent == ""
    play.join_again(0)
    (run,) = runs(play.report(0, m.FeedsArrived(play.session, (78,))))
    assert run.results == (13,)


def test_bytes_that_come_again_though_they_were_used_are_dropped(play):
    play.array(10)
    play.lose(0, "killed")
    play.send(m.FailureAcknowledged((0,), ((0, 10_010),)))
    play.join_again(0)
    assert m.DropFeed(play.session, 10_010) in play.report(0, m.FeedsArrived(play.session, (10_010,)))
    assert not play.controller.sessions[play.session].feeds.unwanted


def test_each_acknowledgement_is_about_its_own_loss(play):
    play.send(m.Launch(2, (), (11,), (77,)))
    play.lose(0, "killed")
    play.join_again(0)
    play.lose(0, "killed again")
    play.send(m.FailureAcknowledged((0,), ((0, 77),)))
    assert errors(play, 11) == [""]
    play.send(m.FailureAcknowledged((0,)))
    assert "(worker 2000: killed again)" in errors(play, 11)[0]


def test_a_number_of_a_loss_that_was_not_reported_changes_nothing(play):
    play.send(m.Launch(2, (), (11,), (77,)))
    play.send(m.FailureAcknowledged((0,), ((0, 5),)))
    assert errors(play, 11) == [""]
    assert not play.controller.sessions[play.session].feeds.unwanted
