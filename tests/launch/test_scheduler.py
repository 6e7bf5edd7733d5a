"""Tests of the scheduler: events, and the gangs that start.

`test_scheduler_properties` tests random sequences of events.
"""

from __future__ import annotations

import pytest

from atoll.state.gang_states import Reason
from atoll.state.queued_nodes import UNKNOWN_NS, Gang, QueuedNode
from tests.launch.pausable_scheduler import Scheduler
from tests.work_counts import instructions_of

MS = 1_000_000


def launch(
    number: int,
    *,
    session: int = 1,
    islands: tuple[int, ...] = (0,),
    missing: int = 0,
    estimate: int = UNKNOWN_NS,
    exclusive: bool = False,
    weight: int = 1,
    hosts: tuple[int, ...] = (0,),
    joint: bool = False,
    together: bool = False,
) -> QueuedNode[str]:
    node = QueuedNode[str](number, session, missing, starts_together=together)
    if joint:
        gang = Gang(10 * number, islands[0], node, f"run {number}", estimate, exclusive, weight, hosts)
        gang.islands, gang.places = islands, (hosts,) * len(islands)
        node.gangs = (gang,)
        return node
    node.gangs = tuple(
        Gang(10 * number + island, island, node, f"run {number}", estimate, exclusive, weight, hosts)
        for island in islands
    )
    return node


def started(scheduler: Scheduler[str], island: int = 0) -> list[int]:
    """Return the numbers of the launches whose gangs may start, in order."""
    return [gang.node.number for gang in gangs(scheduler, island)]


def gangs(scheduler: Scheduler[str], island: int = 0) -> list[Gang[str]]:
    found = []
    while (gang := scheduler.start_next(island)) is not None:
        found.append(gang)
    return found


def scheduler_with(*nodes: QueuedNode[str], islands: int = 1, window: int = 8) -> Scheduler[str]:
    scheduler = Scheduler[str](islands, window, busy_ns=4 * MS)
    for node in nodes:
        scheduler.enqueue(node)
    return scheduler


def test_the_node_that_has_been_ready_for_longest_starts_first():
    scheduler = scheduler_with(launch(1, session=7), launch(2, session=5), launch(3, session=7), launch(4, session=6))
    # Node 3 is older than 4, but was not ready before node 1 of its session was committed.
    assert started(scheduler) == [1, 2, 4, 3]


def test_sessions_with_long_programs_alternate_node_by_node():
    scheduler = scheduler_with(
        *(launch(i, session=1) for i in range(1, 4)), *(launch(i, session=2) for i in range(4, 7))
    )
    assert started(scheduler) == [1, 4, 2, 5, 3, 6]


def test_a_ready_launch_can_wait_again():
    ready = launch(1)
    scheduler = scheduler_with(ready, launch(2, session=2))
    scheduler.lacks(ready, Reason.PLAN)
    assert started(scheduler) == [2]
    scheduler.arrived(ready, Reason.PLAN)
    assert started(scheduler) == [1]


def test_a_launch_that_waits_blocks_only_its_own_session():
    waiting = launch(1, missing=1)
    scheduler = scheduler_with(waiting, launch(2), launch(3, session=2))
    assert started(scheduler) == [3]
    scheduler.arrived(waiting, Reason.BYTES)
    assert started(scheduler) == [1, 2]


def test_a_launch_that_waits_blocks_its_session_only_on_its_own_islands():
    scheduler = scheduler_with(launch(1, islands=(0,), missing=1), launch(2, islands=(1,)), islands=2)
    assert started(scheduler, 1) == [2]


def test_a_launch_starts_when_its_last_missing_input_has_arrived():
    waiting = launch(1, missing=3)
    scheduler = scheduler_with(waiting)
    for _ in range(2):
        scheduler.arrived(waiting, Reason.BYTES)
        assert started(scheduler) == []
    scheduler.arrived(waiting, Reason.BYTES)
    assert started(scheduler) == [1]


def test_arrivals_for_a_launch_behind_another_are_remembered():
    first, second = launch(1, missing=1), launch(2, missing=1)
    scheduler = scheduler_with(first, second)
    scheduler.arrived(second, Reason.BYTES)
    assert started(scheduler) == []
    scheduler.arrived(first, Reason.BYTES)
    assert started(scheduler) == [1, 2]


# ---- several islands


def test_all_parts_of_a_launch_start_at_once():
    scheduler = scheduler_with(launch(1, islands=(0, 2)), islands=3)
    assert (started(scheduler, 0), started(scheduler, 1), started(scheduler, 2)) == ([1], [], [1])


def test_a_launch_takes_its_place_on_all_islands_when_the_first_of_them_starts_it():
    scheduler = scheduler_with(
        launch(1, session=1, islands=(0, 1)), launch(2, session=2, islands=(0, 1)), islands=2, window=1
    )
    assert started(scheduler, 0) == [1]
    # Island 1 was not asked before, and must follow this order.
    (first,) = gangs(scheduler, 1)
    assert first.node.number == 1
    scheduler.finished(first)
    assert started(scheduler, 1) == [2]
    assert started(scheduler, 0) == []


def test_a_committed_launch_goes_before_an_older_one_that_becomes_ready_later():
    late = launch(1, session=1, islands=(1,), missing=1)
    both = launch(2, session=2, islands=(0, 1))
    scheduler = scheduler_with(late, both, islands=2)
    assert started(scheduler, 0) == [2]
    scheduler.arrived(late, Reason.BYTES)
    assert started(scheduler, 1) == [2, 1]


# ---- bounds


def test_the_window_bounds_the_gangs_in_flight():
    scheduler = scheduler_with(*(launch(i) for i in range(1, 11)), window=4)
    first = gangs(scheduler)
    assert [gang.node.number for gang in first] == [1, 2, 3, 4]
    for gang in first:
        scheduler.finished(gang)
    assert started(scheduler) == [5, 6, 7, 8]


def test_each_island_has_its_own_window():
    nodes = [launch(i, session=i, islands=(i % 2,)) for i in range(20)]
    scheduler = scheduler_with(*nodes, islands=2, window=4)
    scheduler.set_limits(1, 2)
    assert [len(started(scheduler, island)) for island in (0, 1)] == [4, 2]
    assert [scheduler.statistics(island).window for island in (0, 1)] == [4, 2]


@pytest.mark.parametrize("window", [2, 3, 24])
def test_a_full_window_opens_again_when_half_of_it_has_finished(window):
    scheduler = scheduler_with(*(launch(i, estimate=1) for i in range(100)), window=window)
    first = gangs(scheduler)
    assert len(first) == window
    for gang in first[: window - window // 2]:
        scheduler.finished(gang)
    assert started(scheduler) == list(range(window, 2 * window - window // 2))


def test_work_in_flight_is_bounded_by_the_time_it_takes():
    scheduler = scheduler_with(*(launch(i, estimate=MS) for i in range(20)), window=24)
    first = gangs(scheduler)
    assert len(first) == 4
    scheduler.finished(first[0])
    assert started(scheduler) == [], "not before half of the work is done"
    scheduler.finished(first[1])
    assert started(scheduler) == [4, 5]


def test_two_short_gangs_or_one_long_gang_are_in_flight_behind_the_one_that_runs():
    for milliseconds, behind in ((5, 2), (500, 1)):
        scheduler = scheduler_with(*(launch(i, estimate=milliseconds * MS) for i in range(5)))
        first = gangs(scheduler)
        assert len(first) == 1 + behind
        scheduler.finished(first[0])
        assert started(scheduler) == [1 + behind]


def test_while_an_unbounded_gang_runs_only_the_window_bounds_gangs_in_flight():
    long = [launch(i, estimate=500 * MS) for i in range(1, 20)]
    scheduler = scheduler_with(*long, launch(20, session=2, weight=0), window=8)
    first = gangs(scheduler)
    assert [gang.node.number for gang in first] == [1, 20, 2, 3, 4, 5, 6, 7, 8]
    scheduler.finished(first[1])  # the unbounded gang
    for gang in first[2:]:
        scheduler.finished(gang)
        assert started(scheduler) == ([9] if gang is first[-1] else []), "two gangs at most, as before"


def test_an_island_tries_to_start_gangs_when_an_unbounded_gang_has_ended():
    scheduler = Scheduler[str](1, 8, busy_ns=4 * MS)
    for node in (launch(1, session=2, weight=0), *(launch(i, estimate=1) for i in range(2, 20))):
        scheduler.enqueue(node)
    unbounded, *others = gangs(scheduler)
    assert len(others) == 8, "the window is full"
    scheduler.touched.clear()
    for gang in others[:3]:
        scheduler.finished(gang)
    assert scheduler.touched == set(), "not before half of the window is free"
    scheduler.finished(unbounded)
    for gang in others[3:]:
        scheduler.finished(gang)
    assert scheduler.touched == {0}


def test_the_estimate_of_a_gang_is_read_when_it_is_committed():
    class HasDuration:
        expected = 500 * MS

    source, nodes = HasDuration(), [launch(i, estimate=0) for i in range(20)]
    for node in nodes:
        node.gangs[0].duration_source = source
    scheduler = scheduler_with(*nodes, window=24)
    first = gangs(scheduler)
    assert len(first) == 2
    source.expected = 1
    for gang in first:
        scheduler.finished(gang)
    assert len(started(scheduler)) == 18


def test_the_hosts_of_an_island_have_separate_bounds():
    nodes = [launch(2 * i + host, estimate=500 * MS, hosts=(host,)) for i in range(4) for host in (0, 1)]
    scheduler = Scheduler[str](1, 8, busy_ns=4 * MS, hosts=[2])
    for node in nodes:
        scheduler.enqueue(node)
    first = gangs(scheduler)
    assert [gang.node.number for gang in first] == [0, 1, 2, 3]
    scheduler.finished(first[0])
    assert started(scheduler) == [4]
    scheduler.finished(first[1])
    assert started(scheduler) == [5]


def test_a_new_session_starts_after_gangs_in_flight_and_before_waiting_ones():
    long = [launch(i, estimate=10 * MS) for i in range(2, 12)]
    scheduler = scheduler_with(*long)
    first = gangs(scheduler)
    assert len(first) == 2
    newcomer = launch(12, session=2)
    scheduler.enqueue(newcomer)
    scheduler.finished(first[0])
    assert started(scheduler) == [4], "launch 4 was ready before"
    scheduler.finished(first[1])
    assert started(scheduler)[0] == 12


def test_a_node_without_memory_blocks_only_its_session():
    nodes = [launch(1, session=1), launch(2, session=1), launch(3, session=2)]
    scheduler = scheduler_with(*nodes)
    gang = scheduler.start_next(0, lambda node: Reason.MEMORY if node is nodes[0] else None)
    assert gang is nodes[2].gangs[0]
    assert scheduler.start_next(0, lambda node: Reason.MEMORY) is None
    scheduler.retry(nodes[0])
    assert started(scheduler) == [1, 2]


def test_an_exclusive_gang_waits_for_the_others_and_blocks_them():
    scheduler = scheduler_with(launch(1), launch(2, exclusive=True), launch(3))
    (first,) = gangs(scheduler)
    assert first.node.number == 1
    scheduler.finished(first)
    (second,) = gangs(scheduler)
    assert second.node.number == 2
    scheduler.finished(second)
    assert started(scheduler) == [3]


# ---- drops, pauses, ends


def test_a_dropped_head_does_not_block_the_next_node():
    waiting = launch(1, missing=1)
    scheduler = scheduler_with(waiting, launch(2), window=1)
    scheduler.drop(waiting)
    assert started(scheduler) == [2]
    assert scheduler.statistics(0).in_flight == 1


def test_a_launch_that_was_dropped_behind_another_is_skipped():
    second = launch(2, missing=1)
    scheduler = scheduler_with(launch(1), second, launch(3))
    scheduler.drop(second)
    assert started(scheduler) == [1, 3]


def test_the_missing_input_of_a_dropped_launch_may_still_arrive():
    waiting = launch(1, missing=1)
    scheduler = scheduler_with(waiting, launch(2))
    scheduler.drop(waiting)
    scheduler.arrived(waiting, Reason.BYTES)
    assert started(scheduler) == [2]
    assert started(scheduler) == []


def test_the_rest_of_a_dropped_launch_does_not_start():
    node = launch(1, islands=(0, 1))
    scheduler = scheduler_with(node, islands=2)
    assert started(scheduler, 0) == [1]
    scheduler.drop(node)
    assert started(scheduler, 1) == []


def test_a_paused_island_blocks_only_nodes_that_need_it():
    scheduler = scheduler_with(launch(1, session=1, islands=(0, 1)), launch(2, session=2, islands=(1,)), islands=2)
    scheduler.pause(0)
    assert started(scheduler, 1) == [2]
    scheduler.resume(0)
    assert started(scheduler, 0) == [1]
    assert started(scheduler, 1) == [1]


def test_an_excluded_session_waits_until_it_is_admitted():
    scheduler = scheduler_with(launch(1, session=1), launch(2, session=2))
    scheduler.exclude(0, 1)
    assert started(scheduler) == [2]
    scheduler.admit(0, 1)
    assert started(scheduler) == [1]


def test_a_closed_session_leaves_the_lines_with_all_its_launches():
    mine, other = [launch(1), launch(3)], launch(2, session=2)
    scheduler = scheduler_with(mine[0], other, mine[1])
    assert [each.node for each in scheduler.drop_session(1)] == mine
    assert scheduler.drop_session(1) == []
    assert started(scheduler) == [2]


def test_held_nodes_that_are_dropped_are_forgotten():
    mine, other = launch(1), launch(2, session=2)
    scheduler = Scheduler[str](1, 8)
    scheduler.pause(0)
    scheduler.exclude(0, 2)
    for node in (mine, other):
        scheduler.enqueue(node)
    scheduler.drop(mine)
    scheduler.drop_session(2)
    assert not any(scheduler._barred.values())


def test_a_removed_island_keeps_no_dropped_nodes():
    ready, committed = launch(1, session=1), launch(2, session=2, islands=(0, 1))
    scheduler = scheduler_with(committed, ready, islands=2)
    assert started(scheduler, 1) == [2]
    scheduler.pause(0)
    for node in (ready, committed):
        scheduler.drop(node)
    scheduler.remove_island(0)
    assert scheduler.statistics(0).waiting == 0
    assert scheduler.policy_of(0).take() is None


def test_statistics_count_waiting_gangs_gangs_in_flight_and_starts():
    scheduler = scheduler_with(launch(1), launch(2), launch(3, session=2, missing=1), window=8)
    first = scheduler.start_next(0)
    assert first is not None
    scheduler.finished(first)
    assert scheduler.start_next(0) is not None
    stats = scheduler.statistics(0)
    assert (stats.waiting, stats.in_flight, stats.busy_ns, stats.started, stats.window) == (1, 1, UNKNOWN_NS, 2, 8)


def test_a_dispatch_unit_that_would_exceed_the_window_waits_for_room():
    large = launch(2)
    large.gangs[0].weight = 3
    scheduler = scheduler_with(launch(1, session=7), large, launch(3, session=5), window=3)
    (first,) = gangs(scheduler)
    assert first.node.number == 1, "weights 1 and 3 exceed the window, and later nodes wait as well"
    scheduler.finished(first)
    (second,) = gangs(scheduler)
    assert second.node.number == 2
    scheduler.finished(second)
    assert started(scheduler) == [3]


def test_a_dispatch_unit_that_is_larger_than_the_window_runs_when_nothing_else_does():
    large = launch(1)
    large.gangs[0].weight = 12
    scheduler = scheduler_with(large, launch(2, session=5), window=4)
    (first,) = gangs(scheduler)
    assert first.node.number == 1
    scheduler.finished(first)
    assert started(scheduler) == [2]


@pytest.mark.parametrize("kind", ["joint", "together"])
def test_a_node_starts_on_all_of_its_islands_when_the_last_of_them_has_room(kind: str):
    scheduler = scheduler_with(*(launch(i, islands=(1,)) for i in (1, 2)), islands=2, window=2)
    ahead = gangs(scheduler, 1)
    both, behind = launch(3, islands=(0, 1), **{kind: True}), launch(4, session=2)
    scheduler.enqueue(both)
    scheduler.enqueue(behind)
    assert started(scheduler, 0) == [] == started(scheduler, 1), "island 1 is full, and the order is decided"
    for gang in ahead:
        scheduler.finished(gang)
    assert started(scheduler, 1) == [3]
    assert {0, 1} <= scheduler.touched
    assert started(scheduler, 0) == [4]
    assert [scheduler.statistics(island).in_flight for island in (0, 1)] == [2, 1]


def test_gangs_of_nodes_that_start_together_start_once():
    nodes = [launch(i, islands=islands, together=True) for i, islands in enumerate([(0, 1), (1, 2), (0, 1, 2)], 1)]
    scheduler = scheduler_with(*nodes, islands=3)
    assert started(scheduler, 1) == [1, 2, 3]
    assert started(scheduler, 0) == [] == started(scheduler, 2)
    assert [scheduler.statistics(island).in_flight for island in range(3)] == [2, 3, 2]


@pytest.mark.parametrize("kind", ["joint", "together"])
def test_the_gangs_behind_a_node_that_waited_for_another_island_and_was_dropped_start(kind: str):
    scheduler = scheduler_with(*(launch(i, islands=(1,)) for i in (1, 2)), islands=2, window=2)
    gangs(scheduler, 1)
    both, behind = launch(3, islands=(0, 1), **{kind: True}), launch(4, session=2)
    scheduler.enqueue(both)
    scheduler.enqueue(behind)
    assert started(scheduler, 0) == []
    scheduler.touched.clear()
    scheduler.drop(both)
    assert 0 in scheduler.touched
    assert started(scheduler, 0) == [4]
    scheduler.validate()


def test_a_policy_is_charged_on_each_island_what_it_has_charged_there_in_advance():
    scheduler = scheduler_with(launch(1, session=2), launch(2, session=3), islands=2, window=8)
    joint = launch(3, islands=(0, 1), joint=True, estimate=7)
    scheduler.enqueue(joint)
    found = gangs(scheduler, 0)
    (gang,) = joint.gangs
    assert gang in found
    assert gang.charges == {0: 7}, "the session has competitors on island 0 only"
    scheduler.finished(gang, 20)
    assert gang.charged == 0, "the last charge was that of island 1"


def test_nodes_that_leave_a_line_together_leave_the_others_in_order():
    nodes = [launch(number, missing=number == 1) for number in range(1, 10)]
    scheduler = scheduler_with(*nodes)
    assert started(scheduler) == []
    dropped = scheduler.drop_all([nodes[0], nodes[1], nodes[4], nodes[8]])
    assert [each.node.number for each in dropped] == [1, 2, 5, 9]
    scheduler.validate()
    assert started(scheduler) == [3, 4, 6, 7, 8]


def test_a_node_with_a_lower_age_joins_its_line_without_a_look_at_all_nodes_behind_it():
    def work(count: int) -> int:
        scheduler = scheduler_with(*(launch(number, missing=1) for number in range(2, count)))
        old = launch(count)
        old.age = 1
        return instructions_of(lambda: scheduler.enqueue(old))

    assert work(2000) == work(1000)
