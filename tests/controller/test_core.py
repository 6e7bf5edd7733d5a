"""Tests of the controller's state machine: events, and the messages that it sends."""

from __future__ import annotations

import re
from collections import deque

import msgspec
import pytest

from atoll.cluster.settings import Dispatch
from atoll.errors import OK, Code
from atoll.ir.program import (
    Call,
    HostBuffer,
    HostToDevice,
    Program,
    Transfer,
    single,
)
from atoll.protocol import messages as m
from atoll.protocol.number_ranges import HOST_FEEDS
from tests.controller.play import BROKEN, Cluster, Play, chain_of, joined, on, runs

MS = 1_000_000

# ---- sessions


def test_a_session_opens_a_store_on_every_host_and_learns_of_all_devices():
    cluster = joined("2x1x2")
    session = cluster.open()
    *stores, (to, welcome) = cluster.sent()
    assert stores == [(("host", host), m.OpenStore(session.number, session.secret)) for host in (0, 1)]
    assert to == ("session", session.number)
    assert [(device.id, device.island, device.host) for device in welcome.devices] == [
        (0, 0, 0),
        (1, 0, 0),
        (2, 1, 1),
        (3, 1, 1),
    ]
    assert welcome.hosts == ((0, "unix:/data-0"), (1, "unix:/data-1"))
    assert welcome.secret == session.secret
    assert session.secret


def test_sessions_have_secrets_of_their_own():
    cluster = joined("1x1x1")
    assert len({cluster.open().secret for _ in range(3)}) == 3


def test_messages_of_a_session_that_is_over_are_ignored():
    play = Play()
    play.close(play.session)
    assert play.outbox() == [m.CloseStore(play.session)]
    assert play.send(m.Launch(1, (), (5,), ())) == []
    play.close(play.session)
    assert play.outbox() == []


# ---- functions


def test_a_function_is_compiled_once_its_program_has_arrived():
    play = Play("2x1x2")
    assert play.send(m.RegisterFunction(7, "hash", 90, ((3, 2),))) == []
    (compile_,) = play.report(1, m.FeedsArrived(play.session, (90,)))
    # As the island numbers them: hosts from 0, devices by ordinal.
    assert compile_ == m.Compile(compile_.function, play.session, 90, (((0, 1), (0, 0)),), "hash", native_code=True)
    info = msgspec.msgpack.encode(m.FunctionInfo("f", b"", None, (), (), (), {}, 0))
    assert play.report(1, m.Compiled(compile_.function, OK, info, 0.5, False)) == [m.FunctionReady(7, OK, info)]


def test_a_program_that_arrives_before_the_request_is_compiled_at_once():
    play = Play()
    assert play.report(0, m.FeedsArrived(play.session, (90,))) == []
    (compile_,) = play.send(m.RegisterFunction(7, "hash", 90, ((0,),)))
    assert isinstance(compile_, m.Compile)


def test_a_function_that_does_not_compile_is_forgotten_and_its_error_reported():
    play = Play()
    play.send(m.RegisterFunction(7, "hash", 90, ((0,),)))
    (compile_,) = play.report(0, m.FeedsArrived(play.session, (90,)))
    messages = play.report(0, m.Compiled(compile_.function, BROKEN, b"", 0.5, False))
    assert messages == [m.DropFunction(compile_.function), m.FunctionReady(7, BROKEN, b"")]
    assert play.controller.functions.users == {}


def test_a_function_lives_as_long_as_a_program_that_calls_it():
    play = Play()
    name = play.with_function()
    play.with_call()
    assert play.send(m.ReleaseFunction(1)) == []
    *_, dropped = play.send(m.ReleaseProgram(1))
    assert dropped == m.DropFunction(name)


def test_a_function_is_dropped_after_the_calls_of_python_that_were_launched_before_its_release():
    """A call may need objects that the function holds."""
    play = Play()
    name = play.with_function(9)
    play.with_put()
    play.with_call(stream=1)
    play.send(m.Launch(2, (), (20,), (500,)))  # its bytes have not arrived
    play.send(m.Launch(1, (20,), (21,), ()))
    assert play.send(m.ReleaseFunction(9)) == []
    play.send(m.Launch(1, (20,), (22,), ()))
    sent = play.report(0, m.FeedsArrived(play.session, (500,)))
    assert [type(each) for each in sent] == [m.Run, m.Run, m.Run, m.DropFunction]
    assert sent[-1] == m.DropFunction(name)
    assert play.send(m.ReleaseFunction(1)) == [], "its program needs it"


# ---- launches


def test_a_launch_is_one_message_a_host_and_its_end_makes_room():
    play = Play()
    plan = play.with_call()
    play.array(10)
    (run,) = play.send(m.Launch(1, (10,), (11,), ()))
    assert run == m.Run(run.sequence, play.session, plan, (10,), (11,), ())
    assert play.send(m.Await(5, (11,))) == []
    assert play.done(run.sequence) == [m.Awaited(5, OK), m.CreditReturned(1)]
    assert play.send(m.Await(6, (11,))) == [m.Awaited(6, OK)]


def test_room_that_nobody_waits_for_is_given_back_in_few_messages():
    play = Play()
    play.with_call()
    play.array(10)
    launches = 40
    started = deque(runs([each for i in range(launches) for each in play.send(m.Launch(1, (10,), (100 + i,), ()))]))
    returned = []
    while started:
        sent = play.done(started.popleft().sequence)
        started += runs(sent)
        returned += [each.launches for each in sent if isinstance(each, m.CreditReturned)]
    assert returned == [16, 16, 8], "16 at a time, and the rest when none is in flight"


def test_room_is_given_back_within_a_second_whatever_is_in_flight():
    play = Play()
    play.with_call()
    play.array(10)
    first, second = runs([each for i in (11, 12) for each in play.send(m.Launch(1, (10,), (i,), ()))])
    assert play.done(first.sequence) == []
    for now, is_returned in ((1.0, True), (2.0, False)):
        play.tick(now)
        assert (m.CreditReturned(1) in play.outbox()) is is_returned
    assert play.done(second.sequence) == [m.CreditReturned(1)]


def test_a_result_may_be_used_before_it_is_there():
    play = Play()
    play.with_call()
    play.array(10)
    (first,) = play.send(m.Launch(1, (10,), (11,), ()))
    (second,) = play.send(m.Launch(1, (11,), (12,), ()))
    assert second.arguments == first.results


def test_a_launch_waits_for_its_feeds_and_holds_back_its_session():
    play = Play()
    play.with_call()
    play.array(9)
    assert play.send(m.Launch(2, (), (10,), (77,))) == []
    assert play.send(m.Launch(1, (9,), (11,), ())) == []
    assert [run.results for run in runs(play.report(0, m.FeedsArrived(play.session, (77,))))] == [(10,), (11,)]


def test_a_launch_that_carries_its_contents_waits_for_no_feed():
    play = Play()
    play.with_call()
    play.array(9)
    (put,) = runs(play.send(m.Launch(2, (), (10,), (77,), contents=b"12345678")))
    assert (put.results, put.contents) == ((10,), b"12345678")
    (call,) = runs(play.send(m.Launch(1, (10,), (11,), ())))
    assert call.contents is None
    feeds = play.controller.sessions[play.session].feeds
    assert (feeds.awaited, feeds.early) == ({}, set())


def test_contents_of_a_refused_launch_leave_nothing_behind():
    play = Play()
    play.with_call()
    play.array(9)
    play.send(m.Launch(2, (9,), (10,), (77,), contents=b"12345678"))
    assert play.controller.sessions[play.session].directory.entries[10].error is not None
    assert play.controller.sessions[play.session].feeds.unwanted == set()


def test_a_gang_over_two_hosts_is_done_when_both_are():
    play = Play("1x2x1")
    play.with_function(1, (0, 1))
    play.send(m.RegisterProgram(1, single("f", (), Call(1, (), (on(0, 1),), (0, 1)))))
    first, second = play.send(m.Launch(1, (), (11,), ()))
    assert first.sequence == second.sequence
    assert play.done(first.sequence, host=1) == []
    assert play.done(first.sequence, host=0) == [m.CreditReturned(1)]


def test_both_ends_of_a_transfer_are_sent_at_once():
    play = Play("2x1x1")
    play.with_put()
    play.array(10)
    program = single("copy", (on(0),), Transfer((0,), (on(1),)))
    send, receive = play.send(m.RegisterProgram(3, program))
    first, second = play.send(m.Launch(3, (10,), (11,), ()))
    assert (first.plan, first.arguments, first.results) == (send.plan, (10,), ())
    assert (second.plan, second.arguments, second.results) == (receive.plan, (), (11,))
    feed = first.host_feeds
    assert second.host_feeds == feed
    assert feed >= HOST_FEEDS.start, "all handles of proxies are lower"
    assert second.sequence > first.sequence
    assert play.done(first.sequence) == []
    assert play.done(second.sequence, host=1) == [m.CreditReturned(1)]


def test_a_program_of_many_nodes_is_one_run_for_each_host_and_then_dispatches():
    play = Play("2x1x1")
    play.with_function()
    play.array(10)
    far = on(1)
    nodes = (Call(1, (0,), (on(0),), (0,)), Transfer((1,), (far,)), Transfer((2,), (on(0),)))
    play.send(m.RegisterProgram(1, Program("f", (on(0),), nodes, (1, 2, 3))))
    messages = play.proxy(play.session, m.Launch(1, (10,), (11, 12, 13), ())) or play.sent()
    by_host = {host: [message for (_, to), message in messages if to == host] for host in (0, 1)}
    run, go = by_host[0]
    assert (run.arguments, run.results) == ((10,), (11, 13))
    assert go == m.Dispatch(play.session, run.sequence, tuple((run.sequence + i, 1) for i in (1, 3)))
    there, back = by_host[1]
    assert there.sequence == run.sequence + 2
    assert back == m.Dispatch(play.session, there.sequence, ((run.sequence + 4, 1),))
    assert play.done(*(run.sequence + i for i in (0, 1, 3))) == []
    assert play.done(there.sequence, run.sequence + 4, host=1) == [m.CreditReturned(1)]


@pytest.mark.parametrize("program", [5, 99])
def test_a_launch_gives_back_the_room_that_it_took(program):
    play = Play()
    play.with_call(program=5)
    play.array(10)
    replies = play.send(m.Launch(program, (10,), (11,), (), credits=4))
    answer = replies if program == 99 else play.done(runs(replies)[0].sequence)
    assert m.CreditReturned(4) in answer


def test_a_program_whose_plan_is_too_large_for_a_message_is_refused_and_costs_no_worker(monkeypatch):
    monkeypatch.setattr("atoll.state.program_registration.MAX_PLAN_BYTES", 1000)
    play = Play()
    play.with_call(program=4)
    play.array(10)
    assert play.send(m.RegisterProgram(5, chain_of(100))) == []
    play.send(m.Launch(5, (10,), (11, 13), ()))
    (answer,) = play.send(m.Await(1, (11,)))
    assert (answer.status.code, "too large" in answer.status.message) == (Code.INVALID_ARGUMENT, True)


def test_no_more_is_in_flight_on_an_island_than_the_least_of_its_hosts_can_take():
    cluster = Cluster("1x2x1")
    for host, most in ((0, 8), (1, 5)):
        cluster.join(host, max_in_flight=most)
    assert cluster.controller.scheduler.statistics(0).window == 5


def test_another_sessions_work_gets_in_between_the_nodes_of_a_long_program():
    play = Play()
    play.with_function()
    play.array(10)
    play.send(m.RegisterProgram(1, chain_of(100)))
    (run, go) = play.send(m.Launch(1, (10,), (11,), ()))
    assert len(go.units) == 2, "three of a program that has never run"
    other = play.open(7, "other.py").number
    play.outbox()
    buffer = HostBuffer(0, (2,), None, None)
    play.proxy(other, m.RegisterProgram(1, single("put", (), HostToDevice((buffer,), (on(0),)), feeds=1)))
    play.worker(0, m.FeedsArrived(other, (5,)))
    play.proxy(other, m.Launch(1, (), (1,), (5,)))
    play.outbox()
    ended = enumerate((run.sequence, *(sequence for sequence, _ in go.units)))
    messages = play.report(0, m.Done(tuple((each, 3 * MS * at, 3 * MS * (at + 1)) for at, each in ended)))
    assert [type(message) for message in messages] == [m.Run, m.Dispatch]
    assert messages[0].session == other


def test_a_node_that_fails_ends_its_program_and_those_after_it_do_not_run():
    play = Play()
    play.with_function()
    play.array(10)
    play.send(m.RegisterProgram(1, chain_of(100)))
    (run, go) = play.send(m.Launch(1, (10,), (11,), ()))
    assert play.report(0, m.Failed(run.sequence, BROKEN)) == [m.DropRun(play.session, run.sequence)]
    *_, returned = play.done(*(sequence for sequence, _ in go.units))
    assert returned == m.CreditReturned(1)
    assert play.send(m.Await(5, (11,))) == [m.Awaited(5, BROKEN)]
    assert play.controller.scheduler.statistics(0).waiting == 0


def test_values_between_nodes_take_memory_until_their_last_use():
    play = Play(device_memory=100)
    play.with_function()
    play.array(10)
    play.send(m.RegisterProgram(1, chain_of(100)))  # of 8 bytes each
    (run, *more) = play.send(m.Launch(1, (10,), (11,), ()))
    sequences = [run.sequence]
    while sequences or more:
        sequences += [sequence for message in more if isinstance(message, m.Dispatch) for sequence, _ in message.units]
        more = play.done(sequences.pop(0)) if sequences else []
    assert play.send(m.Await(5, (11,))) == [m.Awaited(5, OK)]
    assert play.controller.ledger.used == {(0, 0): 16, (0, 1): 0}, "only the argument and the result exist"
    assert play.controller.ledger.peak[0, 0] <= 100


def test_dispatched_in_sequence_a_node_waits_for_the_one_before_to_be_enqueued():
    play = Play(dispatch=Dispatch.SEQUENTIAL)
    play.with_function()
    play.array(10)
    play.outbox()
    play.send(m.RegisterProgram(1, chain_of(3)))
    (run,) = play.send(m.Launch(1, (10,), (11,), ()))
    (second,) = play.report(0, m.Enqueued(run.sequence))
    assert second == m.Dispatch(play.session, run.sequence, ((run.sequence + 1, 1),))
    # The end implies it.
    assert play.done(run.sequence) == []
    (third,) = play.done(run.sequence + 1)
    assert third.units == ((run.sequence + 2, 1),)


def test_a_long_computation_is_followed_by_one_and_short_ones_by_many():
    play = Play()
    play.with_call()
    play.array(10)
    for i in range(20):
        play.proxy(play.session, m.Launch(1, (10,), (100 + i,), ()))
    in_flight = runs(play.outbox())
    assert len(in_flight) == 3, "the outcome is unknown so far"
    now, most = 0, {50_000: 0, 50_000_000: 0}
    for duration in (50_000, 50_000_000):  # which the controller learns
        for _ in range(20):
            run = in_flight.pop(0)
            in_flight += runs(play.report(0, m.Done(((run.sequence, now, now + duration),))))
            most[duration] = max(most[duration], len(in_flight))
            now += duration
            play.proxy(play.session, m.Launch(1, (10,), (200 + now,), ()))
            in_flight += runs(play.outbox())
    assert most[50_000] > 10
    assert len(in_flight) == 2


def test_dispatched_in_sequence_a_launch_waits_for_the_one_before_to_be_enqueued():
    play = Play(dispatch=Dispatch.SEQUENTIAL)
    play.with_call()
    play.array(10)
    play.outbox()
    (first,) = play.send(m.Launch(1, (10,), (11,), ()))
    assert first.acknowledge
    assert play.send(m.Launch(1, (11,), (12,), ())) == []
    (second,) = play.report(0, m.Enqueued(first.sequence))
    assert second.arguments == (11,)
    assert play.send(m.Launch(1, (12,), (13,), ())) == []
    # A failed gang has also ended.
    (third, *_) = runs(play.report(0, m.Failed(second.sequence, BROKEN))) or [None]
    assert third is None, "its argument is now an error"
    (fourth,) = play.send(m.Launch(1, (10,), (14,), ()))
    assert fourth.results == (14,)


@pytest.mark.parametrize(
    ("launch", "code", "text"),
    [
        (m.Launch(99, (), (11,), ()), Code.NOT_FOUND, "program 99"),
        (m.Launch(1, (), (11,), ()), Code.INVALID_ARGUMENT, "f takes 1 argument "),
        (m.Launch(1, (10,), (11,), (5,)), Code.INVALID_ARGUMENT, "0 feeds"),
        (m.Launch(1, (10,), (11, 12), ()), Code.INVALID_ARGUMENT, "returns 1 result;"),
        (m.Launch(1, (77,), (11,), ()), Code.NOT_FOUND, "array 77"),
    ],
)
def test_a_launch_that_cannot_be_makes_its_results_errors_and_room_for_the_next(launch, code, text):
    play = Play()
    play.with_call()
    play.array(10)
    assert play.send(launch) == [m.CreditReturned(1)]
    (awaited,) = play.send(m.Await(5, launch.results))
    assert awaited.status.code == code
    assert text in awaited.status.message


def test_a_result_that_exists_already_ends_the_session():
    play = Play()
    play.with_call()
    play.array(10)
    closing, *_ = play.send(m.Launch(1, (10,), (10,), ()))
    assert "not in use" in closing.status.message
    assert play.session not in play.controller.sessions
    assert [close.reason for close in play.closed] == [f"session {play.session} ends: {closing.status}"]


@pytest.mark.parametrize(
    "message",
    [
        m.Launch(1, (10,), (10,), ()),
        m.Launch(1, (99,), (10,), ()),
        m.Launch(99, (), (10,), ()),
        m.Launch(99, (), (11, 11), ()),
        m.MakeError((10,), BROKEN),
        m.MakeError((11, 11), BROKEN),
    ],
)
def test_new_arrays_take_no_handle_that_exists_whatever_else_is_wrong(message):
    play = Play()
    play.with_call()
    play.array(10)
    closing, *_ = play.send(message)
    assert re.search(r"not in use|each handle once", closing.status.message)
    assert not any(play.controller.ledger.used.values())


def test_a_donated_array_cannot_be_used_again():
    play = Play()
    play.with_call(donated=(0,))
    play.array(10)
    play.send(m.Launch(1, (10,), (11,), ()))
    play.send(m.Launch(1, (10,), (12,), ()))
    (awaited,) = play.send(m.Await(5, (12,)))
    assert "array 10 has been deleted or donated" in awaited.status.message


def test_errors_that_the_client_made_are_errors_to_whatever_uses_them():
    play = Play()
    play.with_call()
    assert play.send(m.MakeError((10,), BROKEN)) == []
    play.send(m.Launch(1, (10,), (11,), ()))
    assert play.send(m.Await(5, (11,))) == [m.Awaited(5, BROKEN)]


# ---- closing


def test_a_closed_session_leaves_no_plan_no_function_and_no_gang_in_line():
    play = Play()
    name = play.with_function()
    plan = play.with_call()
    play.array(10)
    play.send(m.Launch(2, (), (20,), (77,)))  # waits forever
    play.send(m.Launch(1, (10,), (11,), ()))
    play.send(m.ReleaseProgram(1))
    play.send(m.ReleaseFunction(1))
    play.close(play.session)
    messages = play.outbox()
    for message in (m.DropPlan(plan), m.DropFunction(name), m.CloseStore(play.session)):
        assert message in messages
    assert play.controller.functions.users == {}
    assert play.controller.scheduler.statistics(0).waiting == 0


def test_what_a_closed_session_has_started_does_not_wait_for_what_it_will_not_start():
    play = Play("2x1x1")
    play.with_put()
    play.array(10)
    play.send(m.RegisterProgram(3, single("copy", (on(1),), Transfer((0,), (on(0),)))))
    play.send(m.RegisterProgram(4, single("copy", (on(0),), Transfer((0,), (on(1),)))))
    (_, first) = play.send(m.Launch(4, (10,), (11,), ()))
    play.done(first.sequence - 1)
    play.done(first.sequence, host=1)
    # Island 1 is full. Its part of the copy cannot start, so that host 0's part waits.
    island = play.controller.scheduler._islands[1]
    (cell,) = island.loads.of((1,), None)
    cell.count.full, island.full_hosts = True, 1
    (waiting,) = play.send(m.Launch(3, (11,), (12,), ()))
    play.close(play.session)
    failed, *closes = play.outbox()
    assert (failed.feeds, failed.status.code) == (((waiting.host_feeds, 1),), Code.CANCELLED)
    assert closes[:2] == [m.CloseStore(play.session)] * 2


def test_gangs_of_a_closed_session_keep_their_place_in_the_window_until_they_end():
    play = Play()
    play.with_call()
    play.array(10)
    (run,) = play.send(m.Launch(1, (10,), (11,), ()))
    play.close(play.session)
    play.outbox()
    assert play.controller.scheduler.statistics(0).in_flight == 1
    assert play.done(run.sequence) == []
    assert play.controller.scheduler.statistics(0).in_flight == 0
