"""Tests of the sessions that wait for an island, with the reasons."""

from __future__ import annotations

from atoll.state.gang_states import Reason
from atoll.state.queued_nodes import Gang, QueuedNode
from tests.launch.pausable_scheduler import Scheduler
from tests.launch.test_scheduler import launch
from tests.work_counts import instructions_of


def node(number: int, session: int, *islands: int, missing: int = 0, exclusive: bool = False) -> QueuedNode[str]:
    made: QueuedNode[str] = QueuedNode(number, session, missing)
    made.gangs = tuple(
        Gang(10 * number + island, island, made, f"{number} on {island}", exclusive=exclusive, hosts=(island,))
        for island in islands or (0,)
    )
    return made


def waits(scheduler: Scheduler[str], island: int = 0) -> list[tuple[int, int, Reason]]:
    return [(wait.session, wait.gangs, wait.reason) for wait in scheduler.waits().get(island, ())]


def test_nothing_waits_if_the_island_is_not_full():
    scheduler: Scheduler[str] = Scheduler(1, 4)
    scheduler.enqueue(node(1, 1))
    assert scheduler.start_next(0) is not None
    assert waits(scheduler) == []


def test_nodes_behind_a_full_window_wait_for_their_turn():
    scheduler: Scheduler[str] = Scheduler(1, 1)
    for number, session in enumerate((1, 1, 2, 2, 2), start=1):
        scheduler.enqueue(node(number, session))
    assert scheduler.start_next(0) is not None
    assert scheduler.start_next(0) is None
    assert waits(scheduler) == [(1, 1, Reason.ORDER), (2, 3, Reason.ORDER)]
    assert scheduler.waits()[0][1].first.run == "3 on 0"


def test_a_node_without_its_bytes_waits_for_bytes():
    scheduler: Scheduler[str] = Scheduler(1, 4)
    scheduler.enqueue(node(1, 1, missing=1))
    assert scheduler.start_next(0) is None
    assert waits(scheduler) == [(1, 1, Reason.BYTES)]


def test_a_node_waits_for_an_input_that_has_not_arrived():
    scheduler: Scheduler[str] = Scheduler(1, 4)
    waiting = node(1, 1, missing=2)
    scheduler.enqueue(waiting)
    scheduler.lacks(waiting, Reason.PLAN)
    scheduler.lacks(waiting, Reason.RATE)
    found = []
    for kind in (Reason.RATE, Reason.BYTES, Reason.PLAN, Reason.BYTES):
        scheduler.arrived(waiting, kind)
        found += [reason for _, _, reason in waits(scheduler)]
    assert found == [Reason.PLAN, Reason.PLAN, Reason.BYTES, Reason.ORDER]
    assert scheduler.start_next(0) is waiting.gangs[0]


def test_a_node_that_lacks_an_input_again_waits_for_it_until_it_has_arrived():
    scheduler: Scheduler[str] = Scheduler(1, 4)
    waiting = node(1, 1, missing=1)
    scheduler.enqueue(waiting)
    for lacking in (Reason.PLAN, Reason.BYTES):
        scheduler.lacks(waiting, lacking)
    for kind in (Reason.BYTES, Reason.BYTES):
        scheduler.arrived(waiting, kind)
    assert waits(scheduler) == [(1, 1, Reason.PLAN)]


def test_a_node_of_a_paused_island_waits_for_the_island():
    scheduler: Scheduler[str] = Scheduler(2, 4)
    scheduler.pause(0)
    scheduler.enqueue(node(1, 1, 0, 1))
    assert waits(scheduler) == [(1, 1, Reason.ISLAND)]


def test_a_session_whose_functions_are_compiled_again_waits_for_them():
    scheduler: Scheduler[str] = Scheduler(1, 4)
    scheduler.exclude(0, 1)
    scheduler.enqueue(node(1, 1))
    assert waits(scheduler) == [(1, 1, Reason.FUNCTIONS)]


def test_a_gang_that_runs_alone_waits_until_nothing_runs_and_others_wait_for_it():
    scheduler: Scheduler[str] = Scheduler(1, 4)
    scheduler.enqueue(node(1, 1))
    scheduler.enqueue(node(2, 1, exclusive=True))
    scheduler.enqueue(node(3, 2))
    assert scheduler.start_next(0) is not None
    while scheduler.start_next(0) is not None:
        pass
    assert {reason for _, _, reason in waits(scheduler)} == {Reason.ALONE}


def test_a_deferred_node_waits_for_python():
    scheduler: Scheduler[str] = Scheduler(1, 4)
    scheduler.defer(node(1, 1))
    assert waits(scheduler) == [(1, 1, Reason.PYTHON)]


def deferring(count: int) -> Scheduler[str]:
    """Defer this many nodes on as many islands. Each has a joint gang on all islands."""
    scheduler: Scheduler[str] = Scheduler(count, 4)
    for number in range(1, count + 1):
        scheduler.defer(launch(number, islands=tuple(range(count)), joint=True))
    return scheduler


def test_deferred_nodes_wait_on_each_of_their_islands():
    scheduler = deferring(3)
    scheduler.defer(node(10, 1, 1))
    scheduler.defer(node(11, 2, 1, 2))
    found = [waits(scheduler, island) for island in range(3)]
    assert found == [
        [(1, 3, Reason.PYTHON)],
        [(1, 4, Reason.PYTHON), (2, 1, Reason.PYTHON)],
        [(1, 3, Reason.PYTHON), (2, 1, Reason.PYTHON)],
    ]
    assert scheduler.waits()[1][0].first.run == "run 1"


def test_all_nodes_are_found_once():
    scheduler = deferring(2)
    for number in range(10, 14):
        scheduler.enqueue(launch(number, session=number % 2, islands=(0, 1), joint=number > 11))

    assert scheduler.start_next(0) is not None, "10 has its place on island 1, too"
    assert [each.number for each in scheduler.all_nodes()] == [12, 11, 13, 1, 2, 10]
    assert sorted(each.node.number for each in scheduler.drop_session(1)) == [1, 2, 11, 13]
    assert {each.number for each in scheduler.all_nodes()} == {10, 12}


def test_the_work_to_find_waits_grows_with_islands_and_nodes_and_not_with_their_product():
    few, many = deferring(16), deferring(128)
    assert instructions_of(many.waits) < 10 * instructions_of(few.waits)
    assert instructions_of(many.all_nodes) < 10 * instructions_of(few.all_nodes)


def test_the_work_to_drop_a_session_grows_with_islands_and_nodes_and_not_with_their_product():
    few, many = deferring(16), deferring(128)
    assert instructions_of(lambda: many.drop_session(1)) < 10 * instructions_of(lambda: few.drop_session(1))
