"""Tests of failures of programs, hosts and islands: what fails with them, and what continues."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.cluster.processes.leases import LAPSED_STATUS
from atoll.controller.sessions import proxy_requests
from atoll.errors import OK, Code, Details, Kind, Status, failure
from atoll.ir.program import (
    Call,
    DeviceToHost,
    HostBuffer,
    HostToDevice,
    Transfer,
    single,
)
from atoll.launch.failures import PROCESSES_ENDED_SECONDS
from atoll.launch.shared_parts import GANG_WINDOW
from atoll.protocol import events as e
from atoll.protocol import messages as m
from tests.controller.play import BROKEN, Play, joined, on, runs


def test_a_failure_reaches_its_results_and_what_is_made_of_them_and_nothing_else():
    play = Play()
    play.with_call()
    play.array(10)
    (bad,) = play.send(m.Launch(1, (10,), (11,), ()))
    (good,) = play.send(m.Launch(1, (10,), (12,), ()))
    assert play.report(0, m.Failed(bad.sequence, BROKEN)) == []
    assert play.done(good.sequence) == [m.CreditReturned(2)], "of both launches"
    assert play.send(m.Launch(1, (11,), (13,), ())) == [m.CreditReturned(1)]
    statuses = [play.send(m.Await(handle, (handle,))) for handle in (11, 12, 13)]
    assert statuses == [[m.Awaited(11, BROKEN)], [m.Awaited(12, OK)], [m.Awaited(13, BROKEN)]]


def test_a_read_of_several_arrays_does_not_start_if_one_of_them_has_failed() -> None:
    """The hosts do not know that the results of a failed callback are wrong."""
    play = Play()
    play.send(m.RegisterFunction(1, "content", 900, ((0, 1),)))
    (compile_,) = play.report(0, m.FeedsArrived(play.session, (900,)))
    play.report(0, m.Compiled(compile_.function, OK, b"", 0.1, False, calls_client=True))
    both = on(0, 1)
    play.send(m.RegisterProgram(1, single("callback", (), Call(1, (), (both, both), (0, 1)))))
    play.send(m.RegisterProgram(2, single("get", (both, both), DeviceToHost((0, 1), 0, None), feeds=1)))
    (run,) = runs(play.send(m.Launch(1, (), (11, 12), ())))
    assert runs(play.send(m.Launch(2, (11, 12), (13,), (5,)))) == []
    play.send(m.Await(6, (13,)))
    sent = play.report(0, m.Failed(run.sequence, BROKEN))
    assert runs(sent) == []
    assert any(isinstance(each, m.Awaited) and each.status == BROKEN for each in sent)


def test_what_could_not_be_sent_to_a_host_that_fails_fails_by_that_loss():
    play = Play("2x1x1")
    play.with_put()
    play.array(10)
    play.send(m.RegisterProgram(3, single("copy", (on(0),), Transfer((0,), (on(1),)))))
    send, _ = play.send(m.Launch(3, (10,), (11,), ()))
    unreachable = failure(Code.UNAVAILABLE, "host 1 cannot be reached", Details(Kind.LINK))
    assert play.report(0, m.Failed(send.sequence, unreachable)) == [], "the host's end may be reported soon"
    play.send(m.Await(5, (11,)))
    play.lose(1, "killed")
    play.tick(10.0)
    play.tick(20.0)
    (awaited,) = [each for each in play.outbox() if isinstance(each, m.Awaited)]
    assert awaited.status.code == Code.DATA_LOSS
    assert play.controller.scheduler.statistics(0).in_flight == 0


def test_what_could_not_be_sent_to_a_host_that_is_there_fails_by_itself():
    play = Play("2x1x1")
    play.with_put()
    play.array(10)
    play.send(m.RegisterProgram(3, single("copy", (on(0),), Transfer((0,), (on(1),)))))
    send, receive = play.send(m.Launch(3, (10,), (11,), ()))
    unreachable = failure(Code.UNAVAILABLE, "host 1 cannot be reached", Details(Kind.LINK))
    assert play.report(0, m.Failed(send.sequence, unreachable)) == []
    play.tick(10.0)
    play.tick(11.0)
    assert [type(each) for each in play.outbox()] == [m.FailFeeds]
    assert play.report(1, m.Failed(receive.sequence, unreachable)) == [m.CreditReturned(1)]


def test_the_other_end_of_a_failed_transfer_gets_its_error():
    play = Play("2x1x1")
    play.with_put()
    play.send(m.RegisterProgram(3, single("copy", (on(0),), Transfer((0,), (on(1),)))))
    play.array(10)
    send, receive = play.send(m.Launch(3, (10,), (11,), ()))
    feeds = ((receive.host_feeds, 1),)
    assert play.report(0, m.Failed(send.sequence, BROKEN)) == [m.FailFeeds(play.session, feeds, BROKEN)]
    assert play.send(m.Await(7, (11,))) == [m.Awaited(7, BROKEN)], "the client does not wait for the other end"
    assert play.report(1, m.Failed(receive.sequence, BROKEN)) == [m.CreditReturned(1)]


def test_no_host_waits_for_what_a_lost_host_has_sent():
    play = Play("2x1x1")
    play.array(10)
    body = single("transfer", (on(0),), Transfer((0,), (on(1),), reshard=True))
    play.send(m.RegisterProgram(7, body))
    send, receive = runs(play.send(m.Launch(7, (10,), (11,), ())))
    play.done(send.sequence)
    play.lose(0, "killed")
    failed = [message for message in play.outbox() if isinstance(message, m.FailFeeds)]
    assert [message.feeds for message in failed] == [((receive.host_feeds, 1),)]
    play.report(1, m.Failed(receive.sequence, failed[0].status))
    assert play.controller.scheduler.statistics(1).in_flight == 0


def test_a_lost_host_fails_what_was_there_what_ran_there_and_what_stood_in_line():
    play = Play("2x1x1")
    play.with_put()
    play.with_call()
    play.array(10)
    launches = 2 * GANG_WINDOW
    for i in range(launches):
        play.send(m.Launch(1, (10,), (100 + i,), ()))
    play.send(m.Launch(2, (), (11,), (77,)))
    for handle in (100, 100 + launches - 1, 11):
        assert play.send(m.Await(handle, (handle,))) == []
    play.send(m.Query(5, m.QueryKind.LAYOUT, 0, -1, b""))
    play.send(m.Query(6, m.QueryKind.LAYOUT, 1, -1, b""))

    play.lose(0, "killed")
    messages = play.outbox() + play.send(m.FailureAcknowledged((0,)))

    assert runs(messages) == [], "it receives no more messages"
    statuses = {x.wait: x.status for x in messages if isinstance(x, m.Awaited)}
    assert set(statuses) == {100, 100 + launches - 1, 11}
    for status in statuses.values():
        assert status.code == Code.DATA_LOSS
        assert "host 0 of island 0 is gone (worker 1000: killed)" in status.message
    assert "(in f)" in statuses[100].message
    assert "(in put)" in statuses[11].message
    assert sum(x.launches for x in messages if isinstance(x, m.CreditReturned)) == launches + 1
    assert not any(isinstance(x, m.QueryReply) for x in messages), "questions wait until somebody can answer"
    assert m.HostsFailed((0,)) in messages
    statistics = play.controller.scheduler.statistics(0)
    assert (statistics.waiting, statistics.in_flight) == (0, 0)
    # Launches that need the lost array fail at once.
    assert play.send(m.Launch(1, (10,), (12,), ())) == [m.CreditReturned(1)]
    assert play.send(m.Query(7, m.QueryKind.LAYOUT, 0, -1, b"")) == []
    (answered,) = play.report(1, m.WorkerAnswer(play.session, 2, OK, b"{0}"))
    assert answered == m.QueryReply(6, OK, b"{0}")
    # A second reply has no effect.
    play.lose(0, "again")
    assert play.outbox() == []
    asked = [x for x in play.join_again(0) if isinstance(x, m.WorkerQuery)]
    assert [play.report(0, m.WorkerAnswer(x.session, x.query, OK, b"{1}")) for x in asked] == [
        [m.QueryReply(5, OK, b"{1}")],
        [m.QueryReply(7, OK, b"{1}")],
    ]


def test_the_loss_of_one_island_leaves_the_others_to_work():
    play = Play("2x1x1")
    play.with_function(1, (1,))
    play.send(m.RegisterProgram(5, single("g", (), Call(1, (), (on(1),), (1,)))))
    play.lose(0, "killed")
    play.outbox()
    (run,) = play.send(m.Launch(5, (), (13,), ()))
    assert play.done(run.sequence, host=1) == [m.CreditReturned(1)]
    assert play.send(m.Await(7, (13,))) == [m.Awaited(7, OK)]


def test_the_loss_of_one_host_is_that_of_its_island():
    play = Play("2x2x1")
    play.lose(1, "killed")
    assert m.HostsFailed((0, 1)) in play.outbox()
    assert [play.controller.resources.has_failed(host) for host in range(4)] == [True, True, False, False]


def test_a_restarted_island_gets_back_what_it_had_and_runs_what_waited():
    play = Play()
    name = play.with_function()
    plan = play.with_call(arguments=0)
    play.lose(0, "killed")
    play.outbox()
    assert play.send(m.Launch(1, (), (11,), ())) == [], "it waits for the island"
    play.send(m.FailureAcknowledged((0,)))

    back = play.join_again(0)
    secret = play.controller.sessions[play.session].secret
    assert back[0] == m.OpenStore(play.session, secret)
    assert [x.plan for x in back if isinstance(x, m.RegisterPlan)] == [plan]
    assert m.HostsRestarted(((0, "unix:/data-0-again"),)) in back
    assert runs(back) == [], "the function is not there yet"

    assert play.send(m.Recompile(1, 95)) == []
    (compile_,) = play.report(0, m.FeedsArrived(play.session, (95,)))
    assert compile_.function == name
    ready, run = play.report(0, m.Compiled(name, OK, b"", 0.1, True))
    assert ready == m.FunctionReady(1, OK, b"")
    assert (run.plan, run.results) == (plan, (11,))


def test_a_restarted_island_gets_back_the_plans_of_released_programs_that_launches_wait_for():
    play = Play("2x1x1")
    play.array(10)
    play.lose(1, "killed")
    body = single("transfer", (on(0),), Transfer((0,), (on(1),), reshard=True))
    kept = play.send(m.RegisterProgram(7, body))
    plan = next(message.plan for message in kept if isinstance(message, m.RegisterPlan))
    assert runs(play.send(m.Launch(7, (10,), (11,), ()))) == [], "it waits for the island"
    play.send(m.ReleaseProgram(7))

    back = play.join_again(1)
    plans = [message.plan for message in back if isinstance(message, m.RegisterPlan)]
    assert {run.plan for run in runs(back)} == {plan, *plans}
    assert back.index(runs(back)[-1]) > max(i for i, x in enumerate(back) if isinstance(x, m.RegisterPlan))
    for run, host in zip(runs(back), (0, 1), strict=True):
        play.done(run.sequence, host=host)
    assert set(play.controller.programs.plans) == {play.controller.sessions[play.session].programs[2].number}


def test_a_compilation_goes_on_when_its_island_is_back():
    play = Play()
    play.send(m.RegisterFunction(7, "hash", 90, ((0,),)))
    (compile_,) = play.report(0, m.FeedsArrived(play.session, (90,)))
    play.lose(0, "killed")
    assert not any(isinstance(x, m.FunctionReady) for x in play.outbox())
    play.send(m.FailureAcknowledged((0,)))
    play.join_again(0)
    play.send(m.Recompile(7, 91))
    play.report(0, m.FeedsArrived(play.session, (91,)))
    ready = play.report(0, m.Compiled(compile_.function, OK, b"", 0.1, False))
    assert m.FunctionReady(7, OK, b"") in ready


def test_an_island_that_does_not_come_back_fails_all_that_waits_for_it():
    play = Play()
    play.with_call(arguments=0)
    play.send(m.RegisterFunction(7, "hash", 90, ((0,),)))
    play.lose(0, "killed")
    play.send(m.Launch(1, (), (11,), ()))
    play.send(m.Await(5, (11,)))
    play.tick(1000.0)
    assert play.outbox() == []
    play.tick(1000.0 + play.controller.settings.start_seconds + 1)
    messages = play.outbox()
    (awaited,) = [x for x in messages if isinstance(x, m.Awaited)]
    assert "island 0 is removed: it was not up again within 120 s" in awaited.status.message
    assert [x.function for x in messages if isinstance(x, m.FunctionReady)] == [7]
    (awaited,) = [play.send(m.Launch(1, (), (12,), ())), play.send(m.Await(6, (12,)))][1]
    assert awaited.status.code == Code.DATA_LOSS  # pathwaysutils treats this code as a lost slice


def test_a_silent_host_is_named_and_its_island_restarted():
    play = Play("1x2x1")
    play.with_function(1, (0, 1))
    play.send(m.RegisterProgram(1, single("f", (), Call(1, (), (on(0, 1),), (0, 1)))))
    play.send(m.Launch(1, (), (11,), ()))
    play.send(m.Await(5, (11,)))
    for now in range(1, 20):
        play.tick(float(now), silent=() if now == 1 else (1,))
    messages = play.outbox()
    (restart,) = [x for x in messages if isinstance(x, m.RestartIsland)]
    assert "host 1 of island 0 has not answered for 10 s" in restart.reason
    (awaited,) = [x for x in messages if isinstance(x, m.Awaited)]
    assert awaited.status.code == Code.DEADLINE_EXCEEDED
    assert "host 1 of island 0" in awaited.status.message


def test_a_gang_that_failed_on_one_host_and_hangs_on_another_costs_the_island():
    play = Play("1x2x1")
    play.with_function(1, (0, 1))
    play.send(m.RegisterProgram(1, single("f", (), Call(1, (), (on(0, 1),), (0, 1)))))
    (run, _) = play.send(m.Launch(1, (), (11,), ()))
    play.report(0, m.Failed(run.sequence, BROKEN))
    for now in range(100, 104):
        play.tick(float(now))
    assert play.outbox() == []
    play.tick(106.0)
    (restart,) = [x for x in play.outbox() if isinstance(x, m.RestartIsland)]
    assert "hosts [1] of island 0 wait for another host, where f failed: division by zero" in restart.reason


def test_a_failure_over_several_hosts_that_was_the_loss_of_one_is_reported_as_that():
    play = Play("1x2x1")
    play.with_function(1, (0, 1))
    play.send(m.RegisterProgram(1, single("f", (), Call(1, (), (on(0, 1),), (0, 1)))))
    (run, _) = play.send(m.Launch(1, (), (11,), ()))
    play.send(m.Await(5, (11,)))
    assert play.report(0, m.Failed(run.sequence, Status(Code.UNKNOWN, "connection reset by peer"))) == []
    play.lose(1, "killed")
    (awaited,) = [x for x in play.outbox() if isinstance(x, m.Awaited)]
    assert awaited.status.code == Code.DATA_LOSS


def play_that_awaits_a_read() -> tuple[Play, Any]:
    """Return a play that awaits reading the result of a collective, and the run of the read on the first of
    two hosts.
    """
    play = Play("1x2x1")
    play.with_function(1, (0, 1))
    play.send(m.RegisterProgram(1, single("f", (), Call(1, (), (on(0, 1),), (0, 1)))))
    play.send(m.RegisterProgram(2, single("get", (on(0, 1),), DeviceToHost((0,), 0, None), feeds=1)))
    play.send(m.Launch(1, (), (11,), ()))
    (read, *_) = play.send(m.Launch(2, (11,), (12,), (5,)))
    play.send(m.Await(5, (12,)))
    return play, read


def test_a_read_of_what_another_hosts_loss_has_broken_is_reported_as_that_loss():
    play, read = play_that_awaits_a_read()
    assert play.report(0, m.Failed(read.sequence, Status(Code.UNKNOWN, "connection reset by peer"))) == []
    play.lose(1, "killed")
    (awaited,) = [x for x in play.outbox() if isinstance(x, m.Awaited)]
    assert awaited.status.code == Code.DATA_LOSS


def test_a_read_is_not_reported_while_the_engine_has_to_say_why_another_host_is_lost():
    play, read = play_that_awaits_a_read()
    play.event(e.ConnectionLost(play.now, play.controller.connections.hosts[1], "it closed the connection"))
    play.report(0, m.Failed(read.sequence, Status(Code.UNKNOWN, "connection reset by peer")))
    play.tick(100.0)
    play.tick(101.0)
    assert [each for each in play.outbox() if isinstance(each, m.Awaited)] == []
    play.engine(m.WorkerEnded(1, 1001, -9, "killed by SIGKILL"))
    (awaited,) = [each for each in play.outbox() if isinstance(each, m.Awaited)]
    assert "killed by SIGKILL" in awaited.status.message


def test_a_failure_over_several_hosts_that_are_all_there_is_reported_a_little_later():
    play = Play("1x2x1")
    play.with_function(1, (0, 1))
    play.send(m.RegisterProgram(1, single("f", (), Call(1, (), (on(0, 1),), (0, 1)))))
    (run, _) = play.send(m.Launch(1, (), (11,), ()))
    play.send(m.Await(5, (11,)))
    assert play.report(0, m.Failed(run.sequence, BROKEN)) == []
    over = m.CollectiveEnded(run.sequence)
    assert play.report(1, m.Failed(run.sequence, BROKEN)) == [over, over], "other launches may start on both islands"
    play.tick(100.0)
    play.tick(101.0)
    assert m.Awaited(5, BROKEN) in play.outbox()


ENDED_PROCESS = failure(Code.ABORTED, "the process was ended by signal 6", Details(Kind.PYTHON, retriable=True))


def play_that_awaits_python() -> tuple[Play, Any]:
    """Return a play that awaits a call of Python on two hosts, and the run on the first one."""
    play = Play("1x2x1")
    play.with_function(1, (0, 1))
    call = Call(1, (), (on(0, 1),), (0, 1), stream=0)
    play.send(m.RegisterProgram(1, single("f", (), call)))
    (run, _) = play.send(m.Launch(1, (), (11,), ()))
    play.send(m.Await(5, (11,)))
    return play, run


def statuses(play: Play) -> list[Code]:
    return [each.status.code for each in play.outbox() if isinstance(each, m.Awaited)]


def test_a_process_that_ended_since_a_host_is_lost_fails_its_call_by_that_loss() -> None:
    play, run = play_that_awaits_python()
    play.report(0, m.Failed(run.sequence, ENDED_PROCESS))
    play.tick(100.0)
    play.tick(105.0)
    play.lose(1, "killed")
    assert statuses(play) == [Code.DATA_LOSS]


def test_a_process_that_ended_fails_its_call_when_those_on_the_other_hosts_have_ended() -> None:
    play, run = play_that_awaits_python()
    play.report(0, m.Failed(run.sequence, ENDED_PROCESS))
    play.tick(100.0)
    play.tick(105.0)
    play.report(1, m.Failed(run.sequence, ENDED_PROCESS))
    assert statuses(play) == []
    play.tick(106.0)
    assert statuses(play) == [Code.ABORTED]


def test_a_process_that_ended_fails_its_call_after_a_while_if_those_on_other_hosts_do_not_end() -> None:
    play, run = play_that_awaits_python()
    play.report(0, m.Failed(run.sequence, ENDED_PROCESS))
    play.tick(100.0)
    play.tick(100.0 + PROCESSES_ENDED_SECONDS)
    play.lose(1, "killed")
    assert statuses(play) == [Code.ABORTED]


def test_an_exception_on_one_host_fails_the_call_although_another_host_is_lost_later() -> None:
    play, run = play_that_awaits_python()
    play.report(0, m.Failed(run.sequence, BROKEN))
    play.lose(1, "killed")
    assert statuses(play) == [BROKEN.code]


def test_a_program_that_crashes_its_worker_is_refused_and_no_other():
    play = Play()
    play.with_call(arguments=0)
    play.send(m.Launch(1, (), (11,), ()))
    play.engine(m.WorkerEnded(0, 1000, -6, "killed by SIGABRT"))
    play.outbox()
    play.send(m.FailureAcknowledged((0,)))
    assert play.send(m.Launch(1, (), (12,), ())) == [m.CreditReturned(1)]
    (awaited,) = play.send(m.Await(5, (12,)))
    assert awaited.status.code == Code.ABORTED
    assert "killed by SIGABRT" in awaited.status.message
    (ready,) = play.send(m.RegisterFunction(8, "content 1", 91, ((0,),)))
    assert ready.status.code == Code.ABORTED, "also after another compilation"
    assert play.send(m.RegisterFunction(9, "another", 92, ((0,),))) == []


@pytest.mark.parametrize("status", [-9, LAPSED_STATUS, None])
def test_a_program_whose_worker_was_killed_or_whose_machine_is_lost_is_not_quarantined(status):
    play = Play()
    play.with_call(arguments=0)
    play.send(m.Launch(1, (), (11,), ()))
    play.engine(m.WorkerEnded(0, 1000, status, "it has ended"))
    assert play.controller.quarantine.refused == {}
    assert play.controller.quarantine.suspects == set()


def test_a_client_that_uploads_without_end_loses_its_own_session_and_no_other(monkeypatch):
    monkeypatch.setattr(proxy_requests, "MAX_EARLY_FEEDS", 3)
    play = Play()
    other = play.open(43, "other.py").number
    play.outbox()
    play.report(0, m.FeedsArrived(play.session, (1, 2, 3)))
    closing, close = play.report(0, m.FeedsArrived(play.session, (4, 5)))
    assert closing.status.code == Code.RESOURCE_EXHAUSTED
    assert close == m.CloseStore(play.session)
    assert list(play.controller.sessions) == [other]


# ---- islands that were removed


def test_an_island_that_was_removed_is_nothing_to_new_sessions():
    play = Play("2x1x1")
    play.engine(m.IslandNotRestarted(0, "its workers ended 9 times"))
    play.outbox()
    late = play.open(50, "late.py")
    (welcome,) = [message for message in play.outbox() if isinstance(message, m.Welcome)]
    assert [(device.island, device.host) for device in welcome.devices] == [(1, 1)]
    assert welcome.hosts == ((1, "unix:/data-1"),), "clients must not connect to the removed island"
    # The new session works.
    body = single("put", (), HostToDevice((HostBuffer(0, (2,), None, None),), (on(0),)), feeds=1)
    play.proxy(late.number, m.RegisterProgram(1, body))
    play.proxy(late.number, m.Launch(1, (), (9,), (8,)))
    play.worker(1, m.FeedsArrived(late.number, (8,)))
    assert len(runs(play.outbox())) == 1


def test_a_session_that_opens_while_an_island_restarts_has_its_devices_and_waits_for_it():
    play = Play("2x1x1")
    play.lose(0, "killed")
    play.outbox()
    late = play.open(50, "late.py")
    *_, welcome, lost = play.outbox()
    assert [device.island for device in welcome.devices] == [0, 1]
    assert welcome.hosts == ((1, "unix:/data-1"),)
    assert lost == m.HostsFailed((0,))
    play.proxy(late.number, m.FailureAcknowledged((0,)))
    assert late.unacknowledged_failures == {}
    assert play.join_again(0).count(m.HostsRestarted(((0, "unix:/data-0-again"),))) == 2


def test_a_cluster_without_an_island_refuses_sessions_with_what_to_do():
    play = Play("1x1x1")
    play.engine(m.IslandNotRestarted(0, "its workers ended 9 times"))
    play.outbox()
    play.connect("proxy")
    (refused,) = play.outbox()
    assert isinstance(refused, m.Refused)
    assert refused.status.code == Code.UNAVAILABLE
    assert "island 0 is removed" in refused.status.message
    assert "atoll add-island" in refused.status.message
    # Reading succeeds with the address from the error.
    play.operator(m.AddIslandRequest())
    play.join(1)
    play.outbox()
    assert {device.island for device in play.open(51, "late.py").devices.virtual} == {1}


def test_an_island_that_was_removed_can_be_drained():
    play = Play("2x1x1")
    play.engine(m.IslandNotRestarted(0, "its workers ended 9 times"))
    play.outbox()
    play.operator(m.DrainRequest(0))
    assert m.EndIsland(0) in play.outbox()
    play.engine(m.IslandEnded(0))
    (reply,) = play.outbox()
    assert (reply.status.ok, reply.text) == (True, "island 0 is empty, and its workers have ended")


def test_the_workers_of_an_island_that_is_not_up_in_time_are_ended():
    play = Play()
    play.lose(0, "killed")
    play.tick(1000.0)
    play.outbox()
    play.tick(1000.0 + play.controller.settings.start_seconds + 1)
    assert m.EndIsland(0) in play.outbox()


# ---- runs that a closed session has left behind


def endless(**settings: Any) -> tuple[Play, m.Run]:
    """Return a play with a session whose loop does not end."""
    play = Play("2x1x1", **settings)
    play.with_call(arguments=0, name="loop")
    (run,) = runs(play.send(m.Launch(1, (), (11,), ())))
    return play, run


def restarts(play: Play, seconds: range, *running: int) -> list[m.RestartIsland]:
    for now in seconds:
        play.tick(float(now), running={0: running})
    return [message for message in play.outbox() if isinstance(message, m.RestartIsland)]


def test_a_gang_of_a_closed_session_that_keeps_no_device_busy_is_not_said_to_run():
    play, _ = endless()
    play.close(play.session)
    (restart,) = restarts(play, range(100, 133))
    assert "loop of session 1 (script.py) has not ended on hosts [0] of island 0 for more than 30 s" in restart.reason


def test_a_loop_without_end_costs_its_island_once_its_client_is_gone_for_long():
    play, run = endless()
    assert restarts(play, range(1, 100), run.sequence) == [], "it may run while its client is connected"
    play.close(play.session)
    assert restarts(play, range(100, 131), run.sequence) == []
    (restart,) = restarts(play, range(131, 133), run.sequence)
    assert restart.island == 0
    assert "loop of session 1 (script.py) has run on hosts [0] of island 0 for more than 30 s" in restart.reason
    play.join_again(0)
    assert restarts(play, range(133, 200)) == []


def test_for_how_long_what_a_session_has_left_may_run_is_a_setting():
    play, _ = endless(abandoned_seconds=5.0)
    play.close(play.session)
    assert restarts(play, range(100, 106)) == []
    assert len(restarts(play, range(106, 107))) == 1


def test_what_a_closed_session_has_left_may_end_in_time():
    play, run = endless()
    play.close(play.session)
    assert restarts(play, range(1, 20)) == []
    play.done(run.sequence)
    assert restarts(play, range(20, 100)) == []


def test_what_waits_behind_another_sessions_computation_is_given_its_time():
    play, run = endless()
    other = play.open(7, "other.py").number
    play.proxy(other, m.RegisterFunction(1, "content 1", 900, ((0,),)))
    play.proxy(other, m.RegisterProgram(1, single("g", (), Call(1, (), (on(0),), (0,)))))
    play.worker(0, m.FeedsArrived(other, (900,)))
    play.worker(0, m.Compiled(play.controller.sessions[other].functions[1], OK, b"", 0.1, True))
    play.proxy(other, m.Launch(1, (), (5,), ()))
    (behind,) = runs(play.outbox())
    play.close(other)
    assert restarts(play, range(1, 100)) == [], "the gang before it belongs to an open session"
    play.done(run.sequence)
    assert restarts(play, range(100, 131)) == []
    assert len(restarts(play, range(131, 133))) == 1
    assert behind.session == other


def test_a_host_that_fails_again_before_its_island_is_back_is_not_taken_for_one_that_is_there():
    cluster = joined("1x2x1")
    cluster.open()
    cluster.lose(0, "it crashed")
    cluster.flush()
    cluster.join(0, pid=3000)
    cluster.lose(0, "its new worker crashed before that of host 1 had joined")
    cluster.engine(m.WorkerEnded(0, 3000, -11, "SIGSEGV"))
    cluster.flush()
    cluster.join(1, pid=3001)
    assert [each for each in cluster.outbox() if isinstance(each, m.HostsRestarted | m.Refused)] == []
    cluster.join(0, pid=3002)
    (back,) = [each for each in cluster.outbox() if isinstance(each, m.HostsRestarted | m.Refused)]
    assert [host for host, _ in back.hosts] == [0, 1]
