"""Functions that were compiled, and that cannot be compiled again after their island has restarted."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.errors import OK, Code, Status
from atoll.ir.program import Call, Program, credits_of, single
from atoll.launch.large_launches import LARGE_NODES
from atoll.protocol import messages as m
from tests.controller.dumps import check_dump
from tests.controller.play import Play, on, runs
from tests.launch.test_control_flow_runs import LOOP, Chooser

BROKEN = Status(Code.INVALID_ARGUMENT, "the compiler found no layout")


class Recompilation(Play):
    """A session with function 2 on island 1 and with function 1 on island 0, and programs of the same numbers."""

    def __init__(self, topology: str = "2x1x1", **settings: Any) -> None:
        super().__init__(topology, **settings)
        self.with_call(1, arguments=0)
        self.name = self.with_function(2, (1,))
        self.send(m.RegisterProgram(2, single("g", (), Call(2, (), (on(1),), (1,)))))


def restarted(play: Play) -> None:
    play.lose(1, "its connection broke")
    play.send(m.FailureAcknowledged((1,), (), ()))
    play.join_again(1)


def compile_again(play: Play, status: Status, feed: int = 950, function: int = 2) -> list[Any]:
    """Answer a request to compile function 2 again. Return what the controller sends."""
    play.send(m.Recompile(function, feed))
    (compile_,) = play.report(1, m.FeedsArrived(play.session, (feed,)))
    assert compile_.recompile
    return play.report(1, m.Compiled(compile_.function, status, b"", 0.1, False))


def register_again(play: Play, status: Status) -> None:
    """Register function 2 again under number 5, and answer the request to compile it."""
    play.send(m.RegisterFunction(5, "content 2", 960, ((1,),)))
    (compile_,) = play.report(1, m.FeedsArrived(play.session, (960,)))
    play.report(1, m.Compiled(compile_.function, status, b"", 0.1, False))


def error_of(play: Play, handle: int) -> Status | None:
    return play.controller.sessions[play.session].directory.entries[handle].error


def test_launches_that_wait_for_the_function_and_later_ones_fail_with_the_error_of_the_compiler():
    play = Recompilation()
    restarted(play)
    assert runs(play.send(m.Launch(2, (), (11,), ()))) == []
    assert runs(compile_again(play, BROKEN)) == []
    assert runs(play.send(m.Launch(2, (), (12,), ()))) == []
    play.controller = check_dump(play.controller)
    assert runs(play.send(m.Launch(2, (), (13,), ()))) == []
    for handle in (11, 12, 13):
        assert error_of(play, handle) == BROKEN.within("g")
    assert play.controller.sessions[play.session].in_flight == 0


def test_programs_that_are_registered_later_fail_with_the_error_of_the_compiler():
    play = Recompilation()
    restarted(play)
    compile_again(play, BROKEN)
    play.send(m.RegisterProgram(3, single("h", (), Call(2, (), (on(1),), (1,)))))
    play.send(m.Launch(3, (), (11,), ()))
    assert error_of(play, 11) == BROKEN.within("h")


def test_launches_that_depend_on_a_failed_one_fail_and_others_of_the_session_start():
    play = Recompilation()
    play.with_function(3, (1,))
    play.send(m.RegisterProgram(3, single("h", (on(1),), Call(3, (0,), (on(1),), (1,)))))
    play.send(m.RegisterProgram(4, single("i", (), Call(3, (), (on(1),), (1,)))))
    restarted(play)
    play.send(m.Launch(2, (), (11,), ()))
    play.send(m.Launch(3, (11,), (12,), ()))
    play.send(m.Launch(4, (), (13,), ()))
    compile_again(play, BROKEN)
    (run,) = runs(compile_again(play, OK, 951, function=3))
    assert run.results == (13,)
    assert error_of(play, 12) == error_of(play, 11) == BROKEN.within("g")


def test_the_next_restart_of_the_island_compiles_the_function_again():
    play = Recompilation()
    restarted(play)
    compile_again(play, BROKEN)
    restarted(play)
    compile_again(play, OK, 951)
    (run,) = runs(play.send(m.Launch(2, (), (11,), ())))
    assert run.results == (11,)


@pytest.mark.parametrize("status", [OK, Status(Code.UNAVAILABLE, "no compiler process")], ids=["compiled", "failed"])
def test_launches_wait_for_the_compilation_after_the_next_restart(status: Status):
    play = Recompilation()
    restarted(play)
    compile_again(play, BROKEN)
    restarted(play)
    assert runs(play.send(m.Launch(2, (), (11,), ()))) == []
    assert error_of(play, 11) is None
    play.controller = check_dump(play.controller)
    found = [run.results for run in runs(compile_again(play, status, 951))]
    assert found == ([(11,)] if status.ok else [])
    assert error_of(play, 11) == (None if status.ok else status.within("g"))


def test_a_function_that_is_registered_again_serves_the_programs_that_call_it():
    play = Recompilation()
    restarted(play)
    compile_again(play, BROKEN)
    register_again(play, OK)
    assert len(runs(play.send(m.Launch(2, (), (11,), ())))) == 1


def test_a_function_that_is_registered_again_in_vain_does_not_change_the_error():
    play = Recompilation()
    restarted(play)
    compile_again(play, BROKEN)
    register_again(play, BROKEN)
    play.send(m.Launch(2, (), (11,), ()))
    assert error_of(play, 11) == BROKEN.within("g")


def test_a_function_that_is_released_after_it_failed_leaves_nothing():
    play = Recompilation()
    restarted(play)
    compile_again(play, BROKEN)
    play.send(m.ReleaseProgram(2))
    assert play.send(m.ReleaseFunction(2))
    assert play.controller.sessions[play.session].failed_functions == {}
    assert play.name not in play.controller.functions.users


def test_a_failure_ends_the_waiting_of_a_session_that_has_the_function_under_two_numbers():
    play = Recompilation()
    play.send(m.RegisterFunction(5, "content 2", 960, ((1,),)))
    for each in play.report(1, m.FeedsArrived(play.session, (960,))):
        play.report(1, m.Compiled(each.function, OK, b"", 0.1, False))
    restarted(play)
    play.send(m.Launch(2, (), (11,), ()))
    play.send(m.Recompile(5, 970))
    assert runs(compile_again(play, BROKEN)) == []
    assert error_of(play, 11) == BROKEN.within("g"), "one answer serves all requests that wait"


@pytest.mark.parametrize("value", [0, 1])
def test_a_switch_that_has_begun_fails_if_it_takes_a_branch_whose_function_failed(value: int):
    play = Chooser()
    sequence = play.switch()
    restarted(play)
    compile_again(play, BROKEN)
    sent = runs(play.number(sequence, value))
    assert len(sent) == (1 if value == 0 else 0)
    assert error_of(play, 20) == (None if value == 0 else BROKEN.within("far"))


def test_a_deferred_launch_whose_function_failed_fails_before_what_it_depends_on_is_known():
    play = Chooser()
    play.send(m.RegisterProgram(60, Program("late", (on(0),), (Call(2, (), (on(1),), (1,)),), (1,))))
    play.switch()
    play.send(m.Launch(60, (20,), (21,), ()))
    restarted(play)
    compile_again(play, BROKEN)
    assert error_of(play, 21) == BROKEN.within("late")
    assert error_of(play, 20) is None


def test_a_loop_fails_with_the_function_of_its_next_iteration():
    play = Chooser("2x1x1")
    name = play.controller.sessions[play.session].functions[1]
    (first,) = runs(play.send(m.Launch(LOOP, (10, 11), (20, 21), ())))
    play.controller.sessions[play.session].failed_functions[name] = BROKEN
    play.number(first.sequence, 1)
    assert error_of(play, 20) == BROKEN.within("begins")


def test_a_large_launch_that_is_being_put_in_line_fails():
    play = Recompilation()
    call = Call(2, (), (on(1),), (1,))
    large = Program("large", (), (call,) * (LARGE_NODES + 1), (LARGE_NODES,))
    play.send(m.RegisterProgram(7, large))
    restarted(play)
    play.send(m.Recompile(2, 950))
    (compile_,) = play.report(1, m.FeedsArrived(play.session, (950,)))
    play.proxy(play.session, m.Launch(7, (), (11,), (), credits=credits_of(large)))
    play.worker(1, m.Compiled(compile_.function, BROKEN, b"", 0.1, False))
    assert runs(play.outbox()) == []
    assert error_of(play, 11) == BROKEN.within("large")
    assert play.controller.sessions[play.session].in_flight == 0
