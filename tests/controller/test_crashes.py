"""Tests of crashes caused by tenants' programs and compilations: they cost the tenant, not the island."""

from __future__ import annotations

from atoll.errors import Code, Status
from atoll.ir.program import Call, single
from atoll.protocol import messages as m
from atoll.state.offenses import FIRST_SUSPENSION_SECONDS, MAX_CRASHES
from atoll.state.session import Session
from tests.controller.play import Play, on, runs
from tests.controller.test_tenants import shared, status

SEGMENTATION_FAULT, KILLED, TERMINATED = -11, -9, -15


def launch(play: Play, session: Session, number: int, host: int = 0) -> list[m.Run]:
    """Compile a new function, and launch it on the first device of a host."""
    device = play.topology.number_of(host, 0)
    play.proxy(session.number, m.RegisterFunction(number, f"hash {number}", number, ((device,),)))
    (compile_,) = [
        each for each in play.report(host, m.FeedsArrived(session.number, (number,))) if isinstance(each, m.Compile)
    ]
    play.report(host, m.Compiled(compile_.function, Status(Code.OK, ""), b"", 0.1, False, 0))
    program = single("f", (), Call(number, (), (on(device),), (device,)))
    play.proxy(session.number, m.RegisterProgram(number, program))
    play.proxy(session.number, m.Launch(number, (), (1000 + number,), ()))
    return runs(play.outbox())


def crash(play: Play, incarnation: int, status: int = SEGMENTATION_FAULT) -> list[object]:
    play.engine(m.WorkerEnded(0, incarnation, status, "killed by a signal"))
    found = play.outbox()
    play.join(0, pid=incarnation + 1)
    play.outbox()
    return found


def test_crashes_by_ever_new_functions_suspend_their_tenant_and_leave_the_island():
    play = shared("1x1x2")
    alice, bob = play.open(token="alice"), play.open(token="bob")
    play.outbox()
    incarnation = play.controller.resources.hosts[0].incarnation
    for number in range(MAX_CRASHES):
        assert launch(play, alice, 100 + number)
        assert m.RestartExcused(0) in crash(play, incarnation)
        play.proxy(alice.number, m.ReleaseFunction(100 + number))  # without this, it is compiled again first
        incarnation = play.controller.resources.hosts[0].incarnation
    assert launch(play, bob, 200)
    (tenant,) = [each for each in status(play, "alice")["tenants"]]
    assert tenant["suspended_seconds"] == FIRST_SUSPENSION_SECONDS
    play.proxy(alice.number, m.Launch(100, (), (77,), ()))
    play.proxy(alice.number, m.Await(5, (77,)))
    (awaited,) = [each for each in play.outbox() if isinstance(each, m.Awaited)]
    assert awaited.status.code == Code.RESOURCE_EXHAUSTED
    assert f"cannot launch programs for another {FIRST_SUSPENSION_SECONDS:.0f} s" in awaited.status.message
    play.proxy(alice.number, m.RegisterFunction(300, "hash 300", 300, ((0,),)))
    (ready,) = [each for each in play.outbox() if isinstance(each, m.FunctionReady)]
    assert ready.status.code == Code.RESOURCE_EXHAUSTED


def test_a_worker_that_the_system_killed_is_charged_to_the_tenant_with_the_most_memory_among_those_that_ran():
    play = shared("1x1x2")
    controller = play.controller
    for number in range(100, 100 + MAX_CRASHES):
        alice, bob = play.open(token="alice"), play.open(token="bob")
        play.outbox()
        assert launch(play, bob, number)
        assert launch(play, alice, number)
        assert launch(play, alice, 100 + number), "twice as much memory as bob's"
        assert m.RestartExcused(0) in crash(play, controller.resources.hosts[0].incarnation, KILLED)
        play.close(alice.number)
        play.close(bob.number)
    suspended = [controller.offenses.suspended_seconds(name, play.now) for name in ("alice", "bob")]
    assert suspended == [FIRST_SUSPENSION_SECONDS, 0.0]
    assert controller.quarantine.refused == {}, "the cause is unknown"


def test_a_worker_that_was_killed_while_nothing_ran_counts_against_the_island_unless_tenants_have_arrays_there():
    play = shared("1x1x2")
    alice = play.open(token="alice")
    assert m.RestartExcused(0) not in crash(play, play.controller.resources.hosts[0].incarnation, KILLED)
    (run,) = launch(play, alice, 100)
    play.done(run.sequence)
    assert m.RestartExcused(0) in crash(play, play.controller.resources.hosts[0].incarnation, KILLED)
    assert play.controller.offenses.suspended_seconds("alice", play.now) == 0.0


def test_a_worker_that_was_asked_to_end_is_charged_to_nobody():
    play = shared("1x1x2")
    alice = play.open(token="alice")
    play.outbox()
    assert launch(play, alice, 100)
    assert m.RestartExcused(0) not in crash(play, play.controller.resources.hosts[0].incarnation, TERMINATED)


def test_a_function_that_is_refused_for_one_tenant_runs_for_another():
    play = shared("1x1x2")
    alice, bob = play.open(token="alice"), play.open(token="bob")
    play.outbox()
    assert launch(play, alice, 100)
    crash(play, play.controller.resources.hosts[0].incarnation)
    assert launch(play, bob, 100)
    assert len(play.controller.quarantine.refused) == 1


def test_a_function_that_is_refused_is_not_compiled_again():
    play = Play("1x1x2")
    play.with_call(arguments=0)
    play.send(m.Launch(1, (), (11,), ()))
    crash(play, play.controller.resources.hosts[0].incarnation)
    (name,) = play.controller.quarantine.refused
    found = [*play.send(m.Recompile(1, 95)), *play.report(0, m.FeedsArrived(play.session, (95,)))]
    assert not any(isinstance(each, m.Compile) for each in found), name
    (ready,) = [each for each in found if isinstance(each, m.FunctionReady)]
    assert (ready.function, ready.status.code) == (1, Code.ABORTED)
    assert m.DropFeed(play.session, 95) in found, "the host does not keep the source"


def test_on_a_cluster_without_tenants_a_crash_counts_against_the_island():
    play = Play("1x1x2")
    play.with_call(arguments=0)
    play.send(m.Launch(1, (), (11,), ()))
    found = crash(play, play.controller.resources.hosts[0].incarnation)
    assert not any(isinstance(each, m.RestartExcused) for each in found)


def compilation(play: Play, session: Session, number: int) -> list[object]:
    play.proxy(session.number, m.RegisterFunction(number, f"hash {number}", number, ((0,),)))
    return play.report(0, m.FeedsArrived(session.number, (number,)))


def test_the_next_compilation_after_a_compiler_process_crashed_waits_and_then_is_refused():
    play = shared("1x1x2")
    alice = play.open(token="alice")
    play.outbox()
    now = 0.0
    crashed = Status(Code.ABORTED, "the compiler process was killed by SIGSEGV")
    for number in range(100, 100 + MAX_CRASHES):
        found = compilation(play, alice, number)
        if number > 100:
            assert found == [], "delayed"
            while not found:
                now += 1.0
                play.tick(now)
                found = [each for each in play.outbox() if isinstance(each, m.Compile)]
            assert now == {101: 1.0, 102: 3.0}[number]
        (compile_,) = [each for each in found if isinstance(each, m.Compile)]
        play.report(0, m.Compiled(compile_.function, crashed, b"", 0.1, False, 0, crashed=True))
    (ready,) = [each for each in compilation(play, alice, 300) if isinstance(each, m.FunctionReady)]
    assert "cannot compile functions for another 30 s" in ready.status.message


def test_a_delayed_compilation_ends_with_its_session():
    play = shared("1x1x2")
    alice = play.open(token="alice")
    play.outbox()
    (compile_,) = [each for each in compilation(play, alice, 100) if isinstance(each, m.Compile)]
    crashed = Status(Code.ABORTED, "the compiler process was killed by SIGSEGV")
    play.report(0, m.Compiled(compile_.function, crashed, b"", 0.1, False, 0, crashed=True))
    compilation(play, alice, 101)
    play.close(alice.number)
    play.tick(5.0)
    assert not [each for each in play.outbox() if isinstance(each, m.Compile)]
    assert play.controller._compilation._delayed == {}
