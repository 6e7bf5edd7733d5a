"""Tests that launches of large programs are enqueued over several flushes, so that other sessions continue."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.controller.admission import ENGINE_SAYS_SECONDS
from atoll.controller.controller_dumps import load_controller
from atoll.errors import OK, Code
from atoll.ir.program import Call, Program
from atoll.protocol import events as e
from atoll.protocol import messages as m
from atoll.state.gang_states import Reason
from atoll.state.stepped_work import TurnFailedError
from tests.controller.dumps import dumped
from tests.controller.play import BROKEN, chain_of, on, runs
from tests.controller.test_lowering_in_steps import Blocks, Slow, without_collector
from tests.work_counts import instructions_of

NODES = 1000
# Before the launch is enqueued, while it is, and while its nodes run.
FLUSHES = [0, 12, 40, *(pytest.param(flushes, marks=pytest.mark.thorough) for flushes in (5, 20, 30))]


class Registered(Slow):
    """Session whose program 5 has many nodes and is registered on its hosts."""

    def __init__(self, nodes: int = NODES, donated: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.register(5, chain_of(nodes))
        (plan,) = [each for each in self.outbox() if isinstance(each, m.RegisterPlan)]
        self.worker(0, m.PlanRegistered(plan.plan))
        self.cost = self.controller.sessions[self.session].costs[5]
        self.flush()

    def launch(self, result: int = 11, released: tuple[int, ...] = (), wait: int = 0) -> None:
        self.proxy(self.session, m.Launch(5, (10,), (result,), (), credits=self.cost, released=released, wait=wait))

    def run(self) -> list[Any]:
        """End all runs until nothing is in flight. Return all messages."""
        sent = self.outbox()
        while live := list(self.controller.launches.in_flight):
            self.worker(0, m.Done(tuple((each, 0, 1) for each in live)))
            sent += self.outbox()
        return sent


def test_a_large_launch_runs_all_of_its_nodes_in_order():
    play = Registered()
    play.launch()
    play.proxy(play.session, m.Await(7, (11,)))
    sent = play.run()
    assert m.Awaited(7, OK) in sent
    (run,) = runs(sent)
    units = [unit for each in sent if isinstance(each, m.Dispatch) for unit in each.units]
    assert run.segments + sum(segments for _, segments in units) == NODES
    assert [sequence for sequence, _ in units] == sorted(sequence for sequence, _ in units)
    assert any(isinstance(each, m.CreditReturned) and each.launches == play.cost for each in sent)


def test_no_flush_makes_or_frees_more_objects_than_its_steps_do():
    """Count memory blocks, because durations depend on the machine."""

    def max_blocks(nodes: int) -> int:
        play = Registered(nodes)
        blocks = Blocks()
        play.launch()
        blocks.turns(play)
        while live := list(play.controller.launches.in_flight):
            play.worker(0, m.Done(tuple((each, 0, 1) for each in live)))
            blocks.turns(play)
        return blocks.limit

    with without_collector():
        assert max_blocks(2 * NODES) < 2 * max_blocks(NODES // 2)


def test_other_sessions_are_served_meanwhile_and_later_messages_of_the_session_wait():
    play = Registered()
    play.launch()
    play.turn()
    assert play.controller.has_work
    play.proxy(play.other, m.Await(7, ()))
    play.proxy(play.session, m.Await(8, ()))
    sent = play.turn()
    assert m.Awaited(7, OK) in sent
    assert m.Awaited(8, OK) not in sent
    assert m.Awaited(8, OK) in play.outbox()


def test_the_wait_of_a_large_launch_is_answered_at_its_end():
    play = Registered()
    play.launch(wait=7)
    sent = play.run()
    assert sent.count(m.Awaited(7, OK)) == 1
    assert [each for each in sent if isinstance(each, m.Free) and 11 in each.handles]
    assert play.controller.sessions[play.session].directory.entries.keys() == {10}


@pytest.mark.parametrize("ends", [True, False])
def test_a_large_launch_that_needs_the_result_of_python_joins_its_line_when_that_has_ended(ends: bool):
    play = Registered()
    play.with_call(6, stream=1)
    play.proxy(play.session, m.Launch(6, (10,), (20,), ()))
    (python,) = runs(play.outbox())
    play.proxy(play.session, m.Launch(5, (20,), (11,), (), credits=play.cost, wait=7))
    assert runs(play.outbox()) == []
    nodes = play.controller.scheduler.nodes(0)
    assert {node.reason for node in nodes} == {Reason.PYTHON}
    assert len(nodes) == NODES
    play.worker(0, m.Done(((python.sequence, 0, 1),)) if ends else m.Failed(python.sequence, BROKEN))
    sent = play.run()
    (awaited,) = [each for each in sent if isinstance(each, m.Awaited)]
    assert awaited.status.ok is ends
    assert not play.controller.scheduler.nodes(0)


def test_a_large_launch_that_calls_python_runs():
    play = Registered()
    call = Call(1, (0,), (on(0),), (0,))
    nodes = (*(call for _ in range(NODES - 1)), Call(1, (1,), (on(0),), (0,), stream=1))
    play.register(6, Program("python", (on(0),), nodes, (NODES,)))
    play.flush()
    cost = play.controller.sessions[play.session].costs[6]
    play.proxy(play.session, m.Launch(6, (10,), (12,), (), credits=cost, wait=7))
    assert m.Awaited(7, OK) in play.run()


def test_a_bug_while_a_launch_is_put_in_line_is_that_of_its_session(monkeypatch: pytest.MonkeyPatch):
    play = Registered()
    play.launch()
    monkeypatch.setattr(play.controller.launches.builder, "make_entries", lambda *_: 1 // 0)
    with pytest.raises(TurnFailedError) as failed:
        play.turn()
    assert failed.value.sessions == (play.session,)


def test_the_failure_of_an_island_looks_at_each_node_in_line_a_few_times():
    def work(nodes: int) -> int:
        play = Registered(nodes)
        play.launch()
        play.flush()
        play.event(e.ConnectionLost(play.now, play._hosts[0], "it ended"))
        return instructions_of(lambda: play.end_timers(ENGINE_SAYS_SECONDS))

    few, many = work(NODES), work(2 * NODES)
    assert many < 3 * few


def failing(flushes: int) -> Registered:
    """The large launch has failed, and so many flushes have ended some of its dropped gangs."""
    play = Registered()
    play.launch(wait=7)
    play.flush()
    (first, *others) = play.controller.launches.in_flight
    play.worker(0, m.Failed(first, BROKEN))
    play.worker(0, m.Done(tuple((each, 0, 1) for each in others)))
    for _ in range(flushes):
        play.turn()
    return play


def test_the_gangs_of_a_large_launch_that_fails_end_over_several_flushes():
    play = failing(0)
    assert not play.controller.scheduler.nodes(0), "they have left their line"
    play.proxy(play.other, m.Await(9, ()))
    play.proxy(play.session, m.Release((10,)))
    turns = [play.turn()]
    assert m.Awaited(9, OK) in turns[0]
    assert sum(isinstance(each, m.DropRun) for each in turns[0]) == 1
    while play.controller.has_work:
        turns.append(play.turn())
    assert len(turns) > NODES // (4 * e.STEPS_PER_FLUSH)
    sent = [each for turn in turns for each in turn]
    (awaited,) = [each for each in sent if isinstance(each, m.Awaited) and each.wait == 7]
    assert BROKEN.message in awaited.status.message
    assert sum(each.launches for each in sent if isinstance(each, m.CreditReturned)) == play.cost
    assert 10 in [handle for each in sent if isinstance(each, m.Free) for handle in each.handles]
    assert not play.controller.sessions[play.session].directory.entries
    assert play.controller.ledger.total == 0


def test_the_turn_in_which_a_large_launch_fails_does_little_for_each_node():
    def work(nodes: int) -> int:
        play = Registered(nodes)
        play.launch()
        play.flush()
        (first, *_) = play.controller.launches.in_flight
        return instructions_of(lambda: play.worker(0, m.Failed(first, BROKEN)))

    validated = 2  # `Play` validates the controller after each event
    assert work(2 * NODES) - work(NODES) < 400 * validated * NODES


@pytest.mark.parametrize("flushes", [0, 2])
def test_a_session_that_ends_while_a_large_launch_fails_leaves_nothing(flushes: int):
    play = failing(flushes)
    play.proxy(play.session, m.ReleaseProgram(5))
    play.close(play.session)
    play.flush()
    assert play.controller.programs.plans == {}
    assert not play.controller.scheduler.nodes(0)
    assert play.controller.ledger.total == 0
    assert not play.controller.has_work


@pytest.mark.parametrize("flushes", [0, 2])
def test_an_island_that_is_lost_while_a_large_launch_fails_changes_nothing(flushes: int):
    play = failing(flushes)
    play.lose(0, "it ended")
    (awaited,) = [each for each in play.outbox() if isinstance(each, m.Awaited)]
    assert BROKEN.message in awaited.status.message
    assert not play.controller.launches.in_flight
    assert not play.controller.has_work


@pytest.mark.parametrize("flushes", [1, 2])
def test_a_controller_that_is_restored_continues_to_fail_a_large_launch(flushes: int):
    play = failing(flushes)
    restored = load_controller(dumped(play.controller))
    assert play.controller.launches.remains.waiting
    while play.controller.has_work:
        event = e.Flush(play.now)
        assert restored.handle(event) == play.controller.handle(event)
    assert not restored.has_work


def test_an_argument_that_is_released_with_the_launch_is_freed_after_its_last_use():
    play = Registered()
    play.launch(released=(10,))
    for _ in range(3):
        assert not [each for each in play.turn() if isinstance(each, m.Free)]
    sent = play.run()
    (free,) = [each for each in sent if isinstance(each, m.Free) and 10 in each.handles]
    assert sent.index(free) > sent.index(runs(sent)[0])


@pytest.mark.parametrize("flushes", FLUSHES)
def test_a_session_that_ends_meanwhile_leaves_nothing(flushes: int):
    play = Registered()
    play.launch()
    for _ in range(flushes):
        play.turn()
    play.close(play.session)
    play.flush()
    while live := list(play.controller.launches.in_flight):
        play.worker(0, m.Done(tuple((each, 0, 1) for each in live)))
        play.flush()
    assert play.controller.programs.plans == {}
    assert not play.controller.scheduler.nodes(0)
    assert play.controller.ledger.statistics((0, 0))["bytes_in_use"] == 0
    assert not play.controller.has_work


@pytest.mark.parametrize("flushes", FLUSHES)
def test_a_launch_whose_island_fails_meanwhile_fails_with_the_loss_of_its_argument(flushes: int):
    play = Registered()
    play.launch()
    for _ in range(flushes):
        play.turn()
    play.proxy(play.session, m.Await(7, (11,)))
    play.lose(0, "it ended")
    (awaited,) = [each for each in play.outbox() if isinstance(each, m.Awaited)]
    assert awaited.status.code == Code.DATA_LOSS
    assert not play.controller.launches.in_flight
    assert not play.controller.scheduler.nodes(0)
    assert not play.controller.has_work


def test_a_launch_that_fails_while_it_is_put_in_line_fails_once():
    play = Registered()
    play.launch()
    play.proxy(play.session, m.Await(7, (11,)))
    while not play.controller.launches.in_flight:
        play.turn()
    (first, *_) = play.controller.launches.in_flight
    assert play.controller.launches.large_launches.beginning, "it is only partly enqueued"
    play.worker(0, m.Failed(first, BROKEN))
    sent = play.run()
    (awaited,) = [each for each in sent if isinstance(each, m.Awaited)]
    assert BROKEN.message in awaited.status.message
    assert sum(each.launches for each in sent if isinstance(each, m.CreditReturned)) == play.cost
    assert not play.controller.scheduler.nodes(0)
    play.launch(12)
    play.proxy(play.session, m.Await(8, (12,)))
    assert m.Awaited(8, OK) in play.run()


@pytest.mark.parametrize("flushes", FLUSHES)
def test_a_controller_that_is_restored_goes_on_with_the_same_messages(flushes: int):
    play = Registered()
    play.launch()
    for _ in range(flushes):
        play.turn()
    restored = load_controller(dumped(play.controller))
    while play.controller.has_work:
        event = e.Flush(play.now)
        assert restored.handle(event) == play.controller.handle(event)
    assert not restored.has_work
