"""Tests of sequential dispatch: a node of a session is dispatched when all hosts have enqueued the one before."""

from __future__ import annotations

from atoll.launch.sequential import SequentialDispatch
from atoll.state.gang_states import Reason
from atoll.state.queued_nodes import Gang, QueuedNode
from tests.launch.pausable_scheduler import Scheduler
from tests.launch.test_scheduler import launch


class Rig:
    """Two islands with sequential dispatch."""

    def __init__(self, window: int = 24) -> None:
        self.scheduler: Scheduler[str] = Scheduler(2, window)
        self.dispatch = SequentialDispatch(self.scheduler)

    def enqueue(self, *nodes: QueuedNode[str]) -> None:
        for node in nodes:
            self.dispatch.enqueue(node)

    def start(self, hosts: int = 1) -> list[Gang[str]]:
        """Start the gangs that can start. Each is sent to this number of hosts."""
        found = []
        for island in range(2):
            while (gang := self.scheduler.start_next(island)) is not None:
                self.dispatch.started(gang, hosts)
                found.append(gang)
        return found


def numbers(gangs: list[Gang[str]]) -> list[int]:
    return [gang.node.number for gang in gangs]


def test_a_node_waits_until_all_hosts_have_enqueued_the_one_before() -> None:
    rig = Rig()
    second = launch(2)
    rig.enqueue(launch(1, islands=(0, 1)), second, launch(3, session=2))
    first, *others = rig.start(hosts=2)
    assert numbers([first, *others]) == [1, 3, 1], "that of another session does not wait"
    assert second.lacks is Reason.OWN
    for gang in (first, first, others[1]):
        rig.dispatch.enqueued(gang)
        assert rig.start() == []
    rig.dispatch.enqueued(others[1])
    assert numbers(rig.start()) == [2]


def test_the_end_of_a_gang_stands_for_the_acknowledgments_of_its_hosts() -> None:
    rig = Rig()
    rig.enqueue(launch(1), launch(2))
    (first,) = rig.start(hosts=16)
    rig.dispatch.ended(first)
    assert numbers(rig.start()) == [2]


def test_a_node_is_not_dispatched_before_all_of_its_gangs_have_started() -> None:
    rig = Rig(window=1)
    second = launch(2)
    rig.enqueue(launch(9, session=2, islands=(1,)))
    (other,) = rig.start()
    rig.enqueue(launch(1, islands=(0, 1)), second)
    (first,) = rig.start()
    assert first.island == 0, "island 1 is full"
    rig.dispatch.enqueued(first)
    assert second.missing == 1
    rig.scheduler.finished(other)
    (last,) = rig.start()
    rig.dispatch.enqueued(last)
    assert second.missing == 0


def test_dropped_nodes_are_skipped() -> None:
    rig = Rig()
    nodes = [launch(number) for number in (1, 2, 3)]
    rig.enqueue(*nodes)
    for node in nodes[1::-1]:
        rig.scheduler.drop(node)
        rig.dispatch.finish(node)
    assert numbers(rig.start()) == [3]


def test_nodes_that_replace_dropped_ones_are_dispatched_before_those_in_line() -> None:
    rig = Rig()
    lost, current, later = launch(1), launch(2), launch(3)
    rig.enqueue(lost, current, later)
    (gang,) = rig.start()
    rig.dispatch.enqueued(gang)  # the next one begins, and is not committed
    rig.dispatch.withdraw(lost)
    again = launch(4)
    again.age = lost.age
    rig.dispatch.precede([again])
    rig.scheduler.enqueue(again)
    order = []
    while gangs := rig.start():
        order += numbers(gangs)
        for each in gangs:
            rig.dispatch.enqueued(each)
    assert order == [4, 2, 3]


def test_a_session_that_has_ended_leaves_nothing() -> None:
    rig = Rig()
    rig.enqueue(launch(1), launch(2))
    rig.dispatch.forget(1)
    rig.scheduler.drop_session(1)
    rig.enqueue(launch(3))
    assert numbers(rig.start()) == [3]
