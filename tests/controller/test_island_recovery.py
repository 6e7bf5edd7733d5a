"""Tests of the recovery of islands.

No state of a failed island remains for its next incarnation, and stuck workers are restarted.
"""

from __future__ import annotations

import pytest

from atoll.cluster.lifecycle import IslandState
from atoll.controller.admission import HELLO_SECONDS
from atoll.errors import OK, Code
from atoll.ir.program import Call, single
from atoll.protocol import actions as a
from atoll.protocol import events as e
from atoll.protocol import messages as m
from atoll.state.gang_states import Reason
from tests.controller.dumps import check_dump
from tests.controller.play import BROKEN, Cluster, Play, joined, on, runs

SEGMENTATION_FAULT = -11


def running() -> Play:
    """Return a play in which a function runs on both hosts of an island."""
    play = Play("1x2x1")
    play.with_function(1, (0, 1))
    play.send(m.RegisterProgram(1, single("f", (), Call(1, (), (on(0, 1),), (0, 1)))))
    play.send(m.Launch(1, (), (11,), ()))
    return play


def silence(play: Play) -> None:
    """Keep host 1 silent until the controller restarts its island."""
    for now in range(1, 20):
        play.tick(float(now), silent=() if now == 1 else (1,))
    assert any(isinstance(each, m.RestartIsland) for each in play.outbox())


def test_a_crash_before_an_island_is_ready_again_quarantines_nothing_that_ran_before_its_restart():
    play = running()
    silence(play)
    play.join(0, pid=3000)
    play.engine(m.WorkerEnded(0, 3000, SEGMENTATION_FAULT, "killed by SIGSEGV"))
    assert (play.controller.quarantine.refused, play.controller.quarantine.suspects) == ({}, set())


def test_a_crash_before_an_island_is_ready_again_quarantines_nothing_that_is_yet_to_be_compiled_there():
    play = Play("1x2x1")
    play.send(m.RegisterFunction(7, "hash", 90, ((0, 1),)))
    play.report(0, m.FeedsArrived(play.session, (90,)))
    silence(play)
    play.join(0, pid=3000)
    play.engine(m.WorkerEnded(0, 3000, SEGMENTATION_FAULT, "killed by SIGSEGV"))
    assert play.controller.quarantine.refused == {}


def test_what_ran_at_a_loss_that_the_engine_never_explained_is_forgotten_when_the_island_is_back():
    play = running()
    play.lose(0, "its connection broke")
    play.join_again(0, 1)
    assert play.controller._recovery._at_loss == {}


def test_a_crash_after_its_connection_was_lost_is_still_that_of_what_ran():
    play = running()
    name = play.controller.sessions[play.session].functions[1]
    play.lose(0, "it closed the connection")
    play.engine(m.WorkerEnded(0, 1000, SEGMENTATION_FAULT, "killed by SIGSEGV"))
    assert set(play.controller.quarantine.refused) == {name}


# ---- workers that connect and do not get ready


def hung(cluster: Cluster, host: int) -> int:
    """Connect a worker that sends only its Hello, and let its time to become ready end."""
    connection = cluster.connect("worker", 3000 + host, host=host)
    cluster.flush()  # sets the timer
    cluster.end_timers(HELLO_SECONDS)
    return connection


def test_a_worker_that_does_not_get_ready_is_named_and_its_island_restarted():
    play = Play("2x2x1")
    play.lose(0, "killed")
    play.join(0, pid=3000)
    play.outbox()
    connection = hung(play, 1)
    actions = play.flush()
    (restart,) = [each.message for each in actions if isinstance(getattr(each, "message", None), m.RestartIsland)]
    assert restart.island == 0
    assert "the worker of host 1 (process 3001) has connected, but was not ready within 10 s" in restart.reason
    assert [each.connection for each in actions if isinstance(each, a.Close) and each.reason] == [connection]
    # All of the island's hosts join again.
    play.join_again(0)
    assert play.controller.resources.islands[0].state is IslandState.RESTARTING
    play.join_again(1)
    assert play.controller.resources.islands[0].state is IslandState.READY


def test_a_new_island_whose_worker_does_not_get_ready_is_restarted():
    cluster = joined("1x1x1")
    cluster.operator(m.AddIslandRequest())
    cluster.outbox()
    hung(cluster, 1)
    assert [each.island for each in cluster.outbox() if isinstance(each, m.RestartIsland)] == [1]
    failure = cluster.controller.resources.islands[1].last_failure
    assert failure is not None
    assert (failure.code, "the worker of host 1" in failure.message) == (Code.DEADLINE_EXCEEDED, True)


@pytest.mark.parametrize("host", [0, -1, 99])
def test_who_only_says_that_it_is_a_worker_costs_no_island_that_works(host):
    play = Play("1x1x1")
    connection = hung(play, host)
    actions = play.flush()
    assert [each.connection for each in actions if isinstance(each, a.Close)] == [connection]
    assert play.controller.resources.islands[0].works


# ---- records of removed islands are freed


def test_an_island_that_was_removed_keeps_no_nodes():
    play = Play("2x1x1")
    play.with_call(arguments=0)
    play.lose(0, "killed")
    for handle in range(10, 20):
        play.send(m.Launch(1, (), (handle,), ()))
    play.engine(m.IslandNotRestarted(0, "its workers ended 9 times"))
    scheduler = play.controller.scheduler
    assert not any(scheduler._barred.values())
    assert scheduler.statistics(0).waiting == 0


# ---- functions that are released while they compile


def test_a_function_that_is_released_while_it_compiles_leaves_nothing():
    play = Play()
    play.send(m.RegisterFunction(7, "hash", 90, ((0,),)))
    (compile_,) = play.report(0, m.FeedsArrived(play.session, (90,)))
    play.send(m.ReleaseFunction(7))
    play.report(0, m.Compiled(compile_.function, OK, b"", 0.1, False, 64))
    functions = play.controller.functions
    assert (functions.users, functions.locations, functions.reports, functions.waiting) == ({}, {}, {}, {})


def test_a_released_function_that_then_fails_to_compile_takes_no_other_sessions_reference():
    play = Play()
    other = play.open(7, "other.py").number
    for session in (play.session, other):
        play.proxy(session, m.RegisterFunction(7, "hash", 90, ((0,),)))
        play.worker(0, m.FeedsArrived(session, (90,)))
    name = play.controller.sessions[other].functions[7]
    play.send(m.ReleaseFunction(7))
    messages = play.report(0, m.Compiled(name, BROKEN, b"", 0.1, False))
    assert [each for each in messages if isinstance(each, m.DropFunction)] == [m.DropFunction(name)]
    assert play.controller.functions.users == {}


def with_one_function_under_two_numbers() -> tuple[Play, str]:
    """A session whose island has restarted. It has a function under the numbers 1 and 2, and program 2 calls it.

    Return the name of the function on its host.
    """
    play = Play()
    for number in (1, 2):
        play.send(m.RegisterFunction(number, "content", 900 + number, ((0,),)))
        (compile_,) = play.report(0, m.FeedsArrived(play.session, (900 + number,)))
        play.report(0, m.Compiled(compile_.function, OK, b"", 0.1, False))
    play.send(m.RegisterProgram(2, single("f", (), Call(2, (), (on(0),), (0,)))))
    play.lose(0, "its connection broke")
    play.send(m.FailureAcknowledged((0,), (), ()))
    play.join_again(0)
    return play, compile_.function


def test_launches_on_a_restarted_island_wait_for_the_functions_that_they_call_and_for_no_others():
    play = Play("1x1x1")
    for number in (1, 2):
        play.with_function(number)
        play.send(m.RegisterProgram(number, single("f", (), Call(number, (), (on(0),), (0,)))))
    play.lose(0, "its connection broke")
    play.send(m.FailureAcknowledged((0,), (), ()))
    play.join_again(0)

    def compile_again(function: int) -> list[m.Run]:
        play.send(m.Recompile(function, 950 + function))
        play.report(0, m.FeedsArrived(play.session, (950 + function,)))
        name = play.controller.sessions[play.session].functions[function]
        return runs(play.report(0, m.Compiled(name, OK, b"", 0.1, True)))

    assert runs(play.send(m.Launch(2, (), (12,), ()))) == []
    assert runs(play.send(m.Launch(1, (), (11,), ()))) == []
    (first,) = compile_again(2)
    assert first.results == (12,)
    (waiting,) = play.controller.scheduler.nodes(0)
    assert waiting.reason is Reason.FUNCTIONS
    assert len(runs(play.send(m.Launch(2, (), (13,), ())))) == 0, "it is behind an earlier launch of its session"
    assert sorted(run.results for run in compile_again(1)) == [(11,), (13,)]


def test_a_session_waits_for_a_function_of_which_it_has_released_another_number():
    play, name = with_one_function_under_two_numbers()
    play.send(m.ReleaseFunction(1))
    assert runs(play.send(m.Launch(2, (), (12,), ()))) == [], "the host has yet to compile it again"
    play.send(m.Recompile(2, 950))
    play.report(0, m.FeedsArrived(play.session, (950,)))
    assert len(runs(play.report(0, m.Compiled(name, OK, b"", 0.1, False)))) == 1


def test_a_session_does_not_wait_for_a_function_of_which_it_has_released_all_numbers():
    play, name = with_one_function_under_two_numbers()
    check_dump(play.controller)
    needed = play.controller.resources.islands[0].needs_recompile
    play.send(m.ReleaseFunction(1))
    assert needed == {play.session: {name}}
    play.send(m.ReleaseFunction(2))
    assert needed == {}


# ---- hosts that do not receive each other's messages


def test_hosts_of_an_island_that_do_not_hear_each_other_are_both_named_and_nothing_is_quarantined():
    play = running()
    for now in range(1, 4):
        play.tick(float(now))
    play.worker(1, m.PeerSilent(0, 11.2))
    play.tick(4.0)
    (restart,) = [each for each in play.outbox() if isinstance(each, m.RestartIsland)]
    assert restart.island == 0
    assert "hosts 0 and 1 of island 0 have not heard each other for 11 s" in restart.reason
    for host in (0, 1):
        play.engine(m.WorkerEnded(host, 1000 + host, -9, "killed by SIGKILL"))
    assert (play.controller.quarantine.refused, play.controller.quarantine.suspects) == ({}, set())


def test_a_host_that_the_controller_does_not_hear_either_is_named_alone():
    play = Play("1x3x1")
    for now in range(1, 8):
        play.tick(float(now), silent=(2,) if now > 1 else ())
        if now > 4:
            play.worker(0, m.PeerSilent(2, 5.0))
    assert not [each for each in play.outbox() if isinstance(each, m.RestartIsland)]
    for now in range(8, 14):
        play.tick(float(now), silent=(2,))
    (restart,) = [each for each in play.outbox() if isinstance(each, m.RestartIsland)]
    assert restart.reason.startswith("host 2 of island 0 has not answered")


def test_islands_that_do_not_hear_each_other_are_not_restarted():
    play = Play("2x1x1")
    play.tick(1.0)
    for host, other in ((0, 1), (1, 0), (0, 99)):
        play.worker(host, m.PeerSilent(other, 11.0))
    play.tick(2.0)
    assert not [each for each in play.outbox() if isinstance(each, m.RestartIsland)]


# ---- proxies that are silent


def test_a_proxy_that_is_silent_loses_its_session_and_others_keep_theirs():
    play = Play("1x1x1", lease_seconds=3.0)
    other = play.open().number
    for now in range(1, 40):
        play.tick(float(now), silent_sessions=(play.session,) if now > 1 else ())
    assert list(play.controller.sessions) == [other]
    (closing,) = [each for each in play.outbox() if isinstance(each, m.Closing)]
    assert closing.status.message == "this session's proxy was silent for 18 s"
    assert [each.reason for each in play.closed if each.reason]


def test_a_proxy_that_is_not_heard_is_told_to_trust_the_controller_for_less_and_less():
    play = Play("1x1x1", lease_seconds=3.0)
    for now in range(1, 15):
        play.tick(float(now), silent_sessions=(play.session,) if now > 1 else ())
    actions = play.flush()
    proxy = play.controller.connections.sessions[play.session]
    leases = [each.message.lease for each in actions if isinstance(each, a.Send) and each.connection == proxy]
    assert leases[0] == 18.0
    assert leases[-1] <= 18.0 - 11
    assert leases == sorted(leases, reverse=True)


def test_an_engine_that_begins_anew_is_told_again_which_islands_to_restart():
    play = Play("2x1x1")
    play.event(e.ConnectionLost(play.now, play.engine_connection, "it knows more than this controller"))
    play.lose(1, "refused")
    assert [each for each in play.outbox() if isinstance(each, m.RestartIsland)] == []
    play.engine_connection = play.connect("engine")
    (restart,) = [each for each in play.outbox() if isinstance(each, m.RestartIsland)]
    assert restart.island == 1
    assert "refused" in restart.reason


def test_an_island_that_was_started_anew_by_order_of_an_earlier_controller_is_back_when_its_workers_have_joined():
    play = running()
    play.engine(m.IslandStarts(0, 5000, ("m1", "m2")))
    lost = [each for each in play.outbox() if isinstance(each, m.HostsFailed)]
    assert lost == [m.HostsFailed((0, 1))]
    (status,) = [each.status for each in play.send(m.Await(5, (11,)))]
    assert (status.code, "at the request of an earlier controller" in status.message) == (Code.DATA_LOSS, True)
    for host in (0, 1):
        play.join(host, pid=5000)
    assert play.controller.resources.islands[0].state is IslandState.READY


def test_an_engine_that_says_again_what_runs_loses_nothing():
    play = running()
    play.engine(m.IslandStarts(0, 1000, ("m1", "m2")))
    assert play.outbox() == []
    assert play.controller.resources.islands[0].state is IslandState.READY
