"""Tests of control flow nodes: events for the controller, and the messages that it sends."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.cluster.settings import Dispatch
from atoll.errors import OK, Code
from atoll.ir.program import Call, Mapping, Program, Rearrange, Report, Transfer, single
from atoll.ir.types import ArraySpec, Sharding
from atoll.protocol import events as e
from atoll.protocol import messages as m
from atoll.state.programs import RegisteredProgram
from tests.controller.play import BROKEN, Play, on, runs
from tests.work_counts import instructions_of

NUMBER = ArraySpec("int32", (), Sharding((0,)))
INDEX, FIRST, LAST, BEGINS, FOLLOWING = 30, 40, 41, 42, 43  # programs
BRANCHES = (31, 32)
SWITCH, LOOP = 50, 51


def frees(messages: list[Any]) -> list[int]:
    return [handle for each in messages if isinstance(each, m.Free) for handle in each.handles]


class Chooser(Play):
    """Session with array 10, the number 11, and a switch and a loop that use them.

    It calls functions on array 10 on island 0.
    """

    def __init__(self, topology: str = "2x1x1", **settings: Any) -> None:
        super().__init__(topology, **settings)
        self.with_function()
        self.with_function(2, (1,))
        self.array(10)
        self.array(11)
        self.register(INDEX, Program("index", (NUMBER,), (Report((0,)),), ()))
        near = Call(1, (0,), (on(0),), (0,))
        far = (
            Transfer((0,), (on(1),), reshard=True),
            Call(2, (1,), (on(1),), (1,)),
            Transfer((2,), (on(0),), reshard=True),
        )
        self.register(BRANCHES[0], single("near", (on(0),), near))
        self.register(BRANCHES[1], Program("far", (on(0),), far, (3,)))
        self.send(m.RegisterSwitch(SWITCH, INDEX, BRANCHES))
        both = (on(0), NUMBER)
        self.register(FIRST, Program("first", both, (Report((1,)),), ()))
        body = (near, Call(1, (1,), (NUMBER,), (0,)), Report((3,)))
        self.register(BEGINS, Program("begins", both, body, (2, 3)))
        consumes = Call(1, (0,), (on(0),), (0,), donated=(0,))
        self.register(FOLLOWING, Program("following", both, (consumes, *body[1:]), (2, 3)))
        self.register(LAST, Program("last", both, (view(0, on(0)), view(1, NUMBER)), (2, 3)))
        self.send(m.RegisterLoop(LOOP, 0, FIRST, BEGINS, FOLLOWING, LAST))
        self.with_call(3)

    def register(self, number: int, program: Program) -> None:
        self.send(m.RegisterProgram(number, program))

    def switch(self, result: int = 20) -> int:
        """Launch the switch. Return the sequence of the gang that reports the number."""
        (run,) = self.send(m.Launch(SWITCH, (11, 10), (result,), ()))
        return int(run.sequence)

    def number(self, sequence: int, value: int) -> list[Any]:
        return self.report(0, m.ValueReported(sequence, value))

    def plan(self, program: int) -> int:
        """Return the number of a program's plan."""
        registered = self.controller.sessions[self.session].programs[program]
        assert isinstance(registered, RegisteredProgram)
        return registered.number

    def round(self, reporter: int, value: int) -> m.Run:
        """Report a number for a loop, and end what is in flight. Return the run that the loop starts next."""
        (run,) = runs(self.number(reporter, value) + self.done(*range(reporter - 2, reporter + 1)))
        return run


def view(value: int, spec: ArraySpec) -> Rearrange:
    return Rearrange((value,), (spec,), (Mapping(0, 0, (0, 1, 1), (0, 1, 1)),))


@pytest.mark.parametrize(("value", "hosts"), [(0, {0}), (1, {0, 1}), (-5, {0}), (7, {0, 1})])
def test_a_branch_is_dispatched_when_its_number_is_known_and_one_out_of_range_is_the_nearest(value, hosts):
    play = Chooser()
    sequence = play.switch()
    play.worker(0, m.ValueReported(sequence, value))
    sent = [(to, message) for to, message in play.sent() if isinstance(message, m.Run)]
    assert {host for (_, host), _ in sent} == hosts
    assert [run.results for _, run in sent if run.results] == [(20,)]


def test_only_what_depends_on_it_waits_for_the_number():
    play = Chooser()
    sequence = play.switch()
    assert play.send(m.Launch(3, (20,), (21,), ())) == [], "needs the result"
    (independent,) = play.send(m.Launch(3, (10,), (22,), ()))
    assert independent.results == (22,)
    play.done(sequence, independent.sequence)
    chosen, dependent = runs(play.number(sequence, 0))
    assert (chosen.arguments, chosen.results) == ((10,), (20,))
    assert (dependent.arguments, dependent.results) == ((20,), (21,))


def test_a_branch_comes_before_what_was_launched_later():
    """A later launch would consume the branch's arguments, so it waits for the branch even if its own age is higher."""
    play = Chooser()
    play.with_call(4, donated=(0,))
    sequence = play.switch()
    assert play.send(m.Launch(4, (10,), (22,), ())) == []
    assert [run.results for run in runs(play.number(sequence, 0))] == [(20,), (22,)]


def test_results_are_ready_and_the_credit_returns_when_the_branch_has_ended():
    play = Chooser()
    sequence = play.switch()
    play.send(m.Await(5, (20,)))
    assert play.done(sequence) == [], "the number may arrive later than the end, through a relay"
    (run,) = runs(play.number(sequence, 0))
    assert play.done(run.sequence) == [m.Awaited(5, OK), m.CreditReturned(1)]
    assert play.controller.sessions[play.session].in_flight == 0


def test_a_number_that_fails_fails_the_results_and_what_needs_them():
    play = Chooser()
    sequence = play.switch()
    play.send(m.Launch(3, (20,), (21,), ()))
    (other,) = play.send(m.Launch(3, (10,), (22,), ()))
    play.send(m.Await(5, (21,)))
    sent = play.report(0, m.Failed(sequence, BROKEN))
    assert sent == [m.Awaited(5, BROKEN)]
    assert play.done(other.sequence) == [m.CreditReturned(3)]
    assert play.number(sequence, 1) == []


def test_what_is_released_before_the_number_is_known_stays_until_the_branch_has_it():
    play = Chooser()
    sequence = play.switch()
    assert frees(play.send(m.Release((10, 11, 20)))) == []
    sent = play.number(sequence, 0)
    assert runs(sent)[0].arguments == (10,)
    assert sorted(frees(sent)) == [10, 11, 20]
    play.done(sequence, runs(sent)[0].sequence)
    assert play.controller.sessions[play.session].directory.entries == {}


def test_programs_that_are_released_meanwhile_stay_until_the_node_is_over():
    play = Chooser()
    sequence = play.switch()
    assert play.send(m.ReleaseProgram(SWITCH)) == []
    for program in (INDEX, *BRANCHES):
        assert play.send(m.ReleaseProgram(program)) == []
    sent = play.number(sequence, 0)
    assert [type(each) for each in sent][-1] is m.DropPlan
    assert len([each for each in sent if isinstance(each, m.DropPlan)]) == 4, "three plans, one of them on two hosts"


def test_a_loop_goes_on_while_the_number_is_not_0_and_keeps_one_round_of_arrays():
    play = Chooser()
    (first,) = play.send(m.Launch(LOOP, (10, 11), (20, 21), ()))
    one = play.round(first.sequence, 1)
    assert one.arguments == (10, 11)
    two = play.round(one.sequence + 2, 1)
    assert two.arguments == one.results
    assert (one.plan, two.plan) == tuple(play.plan(number) for number in (BEGINS, FOLLOWING))
    last = play.round(two.sequence + 2, 0)
    assert (last.arguments, last.results) == (two.results, (20, 21))
    assert set(one.results).isdisjoint(play.controller.sessions[play.session].directory.entries)
    play.done(last.sequence, last.sequence + 1)
    assert set(play.controller.sessions[play.session].directory.entries) == {10, 11, 20, 21}


def test_a_loop_that_does_not_begin_gives_what_it_was_given():
    play = Chooser()
    (first,) = play.send(m.Launch(LOOP, (10, 11), (20, 21), ()))
    (last,) = runs(play.number(first.sequence, 0))
    assert (last.arguments, last.results) == ((10, 11), (20, 21))


@pytest.mark.parametrize("launch", [m.Launch(SWITCH, (11, 10), (20,), ()), m.Launch(LOOP, (10, 11), (20, 21), ())])
def test_a_session_that_ends_meanwhile_leaves_nothing(launch):
    play = Chooser()
    (run,) = play.send(launch)
    play.close(play.session)
    play.outbox()
    assert play.number(run.sequence, 1) == []
    play.done(run.sequence)
    controller = play.controller
    assert controller.launches.control_flow_runs.statistics() == {"awaited": 0}
    assert (controller.programs.plans, controller.launches.in_flight) == ({}, {})


def test_a_number_that_is_lost_with_its_host_fails_the_node():
    play = Chooser()
    sequence = play.switch()
    play.send(m.Await(5, (20,)))
    play.done(sequence)
    play.lose(0, "killed")
    (awaited,) = [each for each in play.outbox() if isinstance(each, m.Awaited)]
    assert awaited.status.code == Code.DATA_LOSS


def test_a_number_of_a_host_that_was_not_asked_is_ignored():
    play = Chooser()
    sequence = play.switch()
    assert play.report(1, m.ValueReported(sequence, 1)) == []
    assert len(runs(play.number(sequence, 0))) == 1


def test_sequential_dispatch_goes_on_behind_what_is_not_known():
    play = Chooser(dispatch=Dispatch.SEQUENTIAL)
    sequence = play.switch()
    play.send(m.Launch(3, (20,), (21,), ()))
    play.send(m.Launch(3, (10,), (22,), ()))
    (independent,) = runs(play.report(0, m.Enqueued(sequence)))
    assert independent.results == (22,)
    play.number(sequence, 0)
    (chosen,) = runs(play.report(0, m.Enqueued(independent.sequence)))
    play.done(sequence, independent.sequence)
    (dependent,) = runs(play.report(0, m.Enqueued(chosen.sequence)))
    assert (chosen.results, dependent.results) == ((20,), (21,))


def test_sequential_dispatch_does_not_wait_for_what_joins_later_and_is_older():
    play = Chooser(dispatch=Dispatch.SEQUENTIAL)
    sequence = play.switch()
    (one,) = runs(play.report(0, m.Enqueued(sequence)) + play.send(m.Launch(3, (10,), (22,), ())))
    assert play.send(m.Launch(3, (10,), (23,), ())) == []
    assert runs(play.number(sequence, 0)) == []
    (two,) = runs(play.done(sequence) + play.report(0, m.Enqueued(one.sequence)))
    (chosen,) = runs(play.report(0, m.Enqueued(two.sequence)))
    assert (two.results, chosen.results) == ((23,), (20,))


# ---- invalid messages of clients


@pytest.mark.parametrize(
    ("node", "arguments", "text"),
    [
        (m.RegisterSwitch(60, INDEX, (31, 61)), (11, 10), "with equal results"),
        (m.RegisterSwitch(60, INDEX, (31, LAST)), (11, 10), "do not match"),
        (m.RegisterSwitch(60, 31, (31, 32)), (11, 10), "do not match"),
        (m.RegisterSwitch(60, INDEX, (31, INDEX)), (11, 10), "do not match"),
        (m.RegisterSwitch(60, INDEX, (31, 99)), (11, 10), "program 99 does not exist"),
        (m.RegisterSwitch(60, INDEX, (31, 62)), (11, 10), "donates its arrays"),
        (m.RegisterSwitch(60, INDEX, (31, 2)), (11, 10), "takes client bytes"),
        (m.RegisterSwitch(60, INDEX, (31, 63)), (11, 10), "calls Python"),
        (m.RegisterSwitch(60, INDEX, (31, 60)), (11, 10), "program 60 does not exist"),
        (m.RegisterSwitch(60, INDEX, BRANCHES), (11,), "do not match"),
        (m.RegisterSwitch(60, INDEX, BRANCHES), (), "do not match"),
        (m.RegisterLoop(60, 9, FIRST, BEGINS, BEGINS, LAST), (10, 11), "do not match"),
        (m.RegisterLoop(60, 0, LAST, BEGINS, FOLLOWING, FIRST), (10, 11), "do not match"),
        (m.RegisterLoop(60, 0, FIRST, FOLLOWING, BEGINS, LAST), (10, 11), "donates its arrays"),
        (m.RegisterLoop(60, 1, FIRST, BEGINS, FOLLOWING, LAST), (10, 11), "donates its arrays"),
        (m.RegisterSwitch(60, INDEX, BRANCHES), (99, 10), "array 99 does not exist"),
    ],
)
def test_parts_that_do_not_fit_give_errors_and_the_session_goes_on(node, arguments, text):
    play = Chooser()
    play.register(61, single("elsewhere", (on(0),), Transfer((0,), (on(1),), reshard=True)))
    play.register(62, single("donor", (on(0),), Call(1, (0,), (on(0),), (0,), donated=(0,))))
    play.register(63, single("python", (on(0),), Call(1, (0,), (on(0),), (0,), stream=1)))
    play.send(node)
    results = (20,) if isinstance(node, m.RegisterSwitch) else (20, 21)
    assert play.send(m.Launch(60, arguments, results, ())) == [m.CreditReturned(1)]
    (awaited,) = play.send(m.Await(5, results))
    assert text in awaited.status.message
    assert len(runs(play.send(m.Launch(3, (10,), (30,), ())))) == 1


def test_a_client_that_releases_what_a_loop_carries_loses_its_session():
    play = Chooser()
    (first,) = play.send(m.Launch(LOOP, (10, 11), (20, 21), ()))
    one = play.round(first.sequence, 1)
    closing, *_ = play.send(m.Release(one.results))
    assert "Release.handles is" in closing.status.message
    assert play.session not in play.controller.sessions


def test_launches_that_read_the_same_arrays_and_wait_do_not_copy_the_readers_before_them():
    play = Chooser()
    play.switch()
    play.with_call(6, arguments=2)
    work = []
    for number in range(130):
        launch = m.Launch(6, (20, 10), (100 + number,), ())
        event = e.Received(play.now, play.connection_of(play.session), launch)
        work.append(instructions_of(lambda event=event: play.controller.handle(event)))
    assert work[129] < work[66] + 30, "neither has a power of two before it"


def test_a_branch_with_too_many_nodes_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("atoll.launch.control_flow_launches.MAX_PART_NODES", 2)
    play = Chooser()
    (refused,) = [
        each for each in play.send(m.Launch(SWITCH, (11, 10), (20,), (), wait=7)) if isinstance(each, m.Awaited)
    ]
    assert "more than 2 nodes" in refused.status.message
