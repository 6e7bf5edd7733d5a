"""Tests of unbounded launches: launches that need their results are deferred, and do not block others."""

from __future__ import annotations

import gc

import pytest

from atoll.launch.dependency_tracker import (
    MAX_IN_XLA_PER_ISLAND,
    MAX_IN_XLA_PER_SESSION,
    MAX_PER_ISLAND,
    MAX_PER_SESSION,
    DependencyTracker,
)
from atoll.state.buffer_directory import Entry
from atoll.state.gang_specs import GangSpec
from atoll.state.queued_nodes import Dependency, Gang, HostCallKind, QueuedNode
from tests.launch.pausable_scheduler import Scheduler

PYTHON, CLIENT = HostCallKind.PYTHON, HostCallKind.CLIENT


def gang_spec(host_call: HostCallKind | None, function: str, devices: int) -> GangSpec:
    return GangSpec(
        island=0,
        hosts=(0,),
        kind="call",
        functions=(function,),
        awaited=(),
        incoming=(),
        handles=(),
        makes=(),
        consumes=(),
        drops=(),
        scratch=(),
        collective=False,
        devices={0: tuple(range(devices))},
        host_call=host_call,
    )


class Launches:
    """Launches on one island. Each makes one array, with the number of the launch."""

    def __init__(self) -> None:
        self.scheduler = Scheduler[str](1, 100)
        self.dependencies = DependencyTracker[str](self.scheduler, self.scheduler.enqueue)
        self.arrays: dict[int, Entry] = {0: Entry((0,), 0)}
        self.nodes: dict[int, tuple[QueuedNode[str], ...]] = {}

    def launch(
        self,
        number: int,
        *arguments: int,
        host_call: HostCallKind | None = None,
        program_nodes: tuple[HostCallKind | None, ...] = (),
        donated: tuple[int, ...] = (),
        function: str = "",
        devices: int = 1,
        session: int = 1,
    ) -> Dependency[str] | None:
        units = [(gang_spec(each, function or f"f{number}", devices),) for each in program_nodes or (host_call,)]
        nodes = tuple(QueuedNode[str](number + i, session) for i in range(len(units)))
        for node, (spec,) in zip(nodes, units, strict=True):
            node.gangs = (Gang(node.number, 0, node, "run", spec.duration_estimate.nanoseconds, weight=spec.weight),)
        self.nodes[number] = nodes
        inputs = [self.arrays[each] for each in arguments]
        dependency = None
        if host_call or any(program_nodes) or self.dependencies.has_some(session):
            dependency = self.dependencies.order(nodes, units, inputs, [self.arrays[each] for each in donated])
        if dependency is None:
            for node in nodes:
                self.scheduler.enqueue(node)
        self.arrays[number] = Entry((0,), 0, dependency=dependency)
        return dependency

    def end(self, number: int) -> None:
        for node in self.nodes[number]:
            if node.dependency is not None:
                self.dependencies.resolve(node.dependency)

    def started(self) -> list[int]:
        found = []
        while (gang := self.scheduler.start_next(0)) is not None:
            found.append(gang.node.number)
            self.scheduler.finished(gang)
        return found


@pytest.fixture
def launches() -> Launches:
    return Launches()


@pytest.mark.parametrize("host_call", HostCallKind)
def test_a_session_continues_while_an_unbounded_launch_runs(launches: Launches, host_call: HostCallKind):
    launches.launch(1, host_call=host_call)
    launches.launch(2, 1, 0)  # and another array
    launches.launch(3, 0)
    assert launches.started() == [1, 3]
    launches.end(1)
    assert launches.started() == [2]


def test_nodes_of_a_launch_are_deferred_together(launches: Launches):
    launches.launch(1, host_call=PYTHON)
    launches.launch(2, 1, program_nodes=(None, None))
    launches.launch(4)
    assert launches.started() == [1, 4]
    launches.end(1)
    assert launches.started() == [2, 3]


def test_a_node_that_calls_the_client_is_awaited_by_the_next_one(launches: Launches):
    launches.launch(1, program_nodes=(None, CLIENT, None))
    launches.launch(4, 1)
    launches.launch(5)
    assert launches.started() == [1, 2, 5]
    launches.end(1)
    assert launches.started() == [3, 4]


def test_results_of_a_deferred_launch_are_dependencies(launches: Launches):
    launches.launch(1, host_call=PYTHON)
    launches.launch(2, 1)
    launches.launch(3, 2)
    launches.launch(4)
    assert launches.started() == [1, 4]
    launches.end(1)
    assert launches.started() == [2, 3]


def test_a_launch_that_was_enqueued_after_a_wait_defers_no_other(launches: Launches):
    launches.launch(1, host_call=PYTHON)
    launches.launch(2, 1)
    launches.end(1)
    assert launches.launch(3, 2) is None
    assert not launches.dependencies.has_some(1)


def test_a_launch_waits_for_the_results_of_both_calls_that_it_reads(launches: Launches):
    launches.launch(1, host_call=PYTHON)
    launches.launch(2, host_call=CLIENT)
    launches.launch(3, 1, 2)
    launches.end(1)
    launches.launch(4)
    assert launches.started() == [1, 2, 4]
    launches.end(2)
    assert launches.started() == [3]


def test_donation_waits_for_a_deferred_launch_that_reads_the_array(launches: Launches):
    launches.launch(1, host_call=PYTHON)
    launches.launch(2, 1, 0)
    launches.launch(3, 0, donated=(0,))
    launches.launch(4, 3)
    launches.launch(5)
    assert launches.started() == [1, 5]
    launches.end(1)
    assert launches.started() == [2, 3, 4]


def test_a_launch_that_consumes_an_array_waits_for_a_run_that_reads_it_and_calls_its_client(launches: Launches):
    """Otherwise, the devices would wait for that run, and so would launches that the callback may need."""
    launches.launch(1, 0, host_call=CLIENT)
    launches.launch(2, 0, donated=(0,))
    assert launches.started() == [1]
    launches.end(1)
    assert launches.started() == [2]


def test_a_launch_that_consumes_an_array_does_not_wait_for_python_that_reads_it(launches: Launches):
    """The host keeps arrays while Python reads them, so that a checkpoint does not block a step."""
    launches.launch(1, 0, host_call=PYTHON)
    launches.launch(2, 0, donated=(0,))
    assert launches.started() == [1, 2]


def test_a_call_of_python_starts_without_waiting_for_the_call_that_makes_its_argument(launches: Launches):
    launches.launch(1, host_call=PYTHON)
    launches.launch(2, 1, host_call=PYTHON)
    assert launches.started() == [1, 2]


def test_calls_of_python_keep_their_order_behind_a_deferred_one(launches: Launches):
    launches.launch(1, host_call=PYTHON)
    launches.launch(2, 1)
    launches.launch(3, 2, host_call=PYTHON)
    launches.launch(4, host_call=PYTHON)
    launches.launch(5, host_call=PYTHON)
    launches.launch(6)
    assert launches.started() == [1, 6]
    launches.end(1)
    assert launches.started() == [2, 3, 4, 5]


def test_python_calls_do_not_block_other_launches(launches: Launches):
    for number in range(1, 100):
        launches.launch(number, host_call=PYTHON)
    launches.launch(100)
    assert launches.started() == list(range(1, 101))


@pytest.mark.parametrize(("devices", "limit"), [(1, MAX_PER_SESSION), (2, MAX_IN_XLA_PER_SESSION)])
def test_runs_beyond_a_bound_that_call_their_clients_are_deferred(launches: Launches, devices: int, limit: int):
    count = limit + 2
    for number in range(1, count + 1):
        launches.launch(number, host_call=CLIENT, devices=devices)
    launches.launch(100)
    assert launches.started() == [*range(1, limit + 1), 100]
    launches.end(3)
    assert launches.started() == [limit + 1]
    launches.end(1)
    assert launches.started() == [count]


@pytest.mark.parametrize(
    ("devices", "max_per_session", "limit"),
    [(1, MAX_PER_SESSION, MAX_PER_ISLAND), (2, MAX_IN_XLA_PER_SESSION, MAX_IN_XLA_PER_ISLAND)],
)
def test_the_callbacks_of_several_sessions_on_an_island_are_bounded(
    launches: Launches, devices: int, max_per_session: int, limit: int
):
    sessions = limit // max_per_session + 1
    for number in range(1, 1 + sessions * max_per_session):
        launches.launch(number, host_call=CLIENT, session=1 + (number - 1) // max_per_session, devices=devices)
    assert sorted(launches.started()) == list(range(1, limit + 1))
    launches.end(1)
    assert launches.started() == [limit + 1]


def test_runs_that_consume_their_arguments_wait_for_one_another(launches: Launches):
    for number in range(1, MAX_IN_XLA_PER_SESSION + 2):
        launches.launch(number, 0, host_call=CLIENT, donated=(0,))
    launches.launch(100, host_call=CLIENT)
    assert launches.started() == [1, 100]  # each of the others waits for the previous one, which reads the array
    for number in range(1, MAX_IN_XLA_PER_SESSION + 1):
        launches.end(number)
        assert launches.started() == [number + 1]


def test_a_function_on_several_devices_that_calls_its_client_runs_once_at_a_time(launches: Launches):
    launches.launch(1, host_call=CLIENT, function="f", devices=2)
    launches.launch(2, host_call=CLIENT, function="f", devices=2)
    launches.launch(3, host_call=CLIENT, function="g", devices=2)
    assert launches.started() == [1, 3]
    launches.end(1)
    assert launches.started() == [2]


def test_a_run_that_waits_for_its_input_does_not_count_for_the_bound_on_callbacks(launches: Launches):
    """A callback may launch programs that have callbacks."""
    launches.launch(1, host_call=CLIENT)
    for number in range(2, 2 + MAX_PER_SESSION):
        launches.launch(number, number - 1, host_call=CLIENT)
    launches.launch(50, host_call=CLIENT)
    assert launches.started() == [1, 50]


def test_the_end_of_a_session_drops_its_deferred_nodes(launches: Launches):
    launches.launch(1, host_call=PYTHON)
    launches.launch(2, 1)
    assert launches.started() == [1]
    assert [each.node.number for each in launches.scheduler.drop_session(1)] == [2]
    launches.end(1)
    assert launches.started() == []
    assert launches.scheduler.nodes(0) == []


def test_a_dropped_run_does_not_count_for_the_bound_on_callbacks(launches: Launches):
    for number in range(1, MAX_PER_SESSION + 3):
        launches.launch(number, host_call=CLIENT)
    (node,) = launches.nodes[MAX_PER_SESSION + 1]
    launches.scheduler.drop(node)
    launches.end(MAX_PER_SESSION + 1)
    launches.started()
    launches.end(1)
    assert launches.started() == [MAX_PER_SESSION + 2]


def test_a_dropped_deferred_launch_never_starts(launches: Launches):
    launches.launch(1, host_call=PYTHON)
    launches.launch(2, 1)
    launches.started()
    (node,) = launches.scheduler.nodes(0)
    launches.scheduler.drop(node)
    launches.end(1)
    assert launches.started() == []


def test_a_chain_as_long_as_a_window_starts_in_order_once_its_first_dependency_is_resolved(launches: Launches):
    launches.launch(1, host_call=PYTHON)
    for number in range(2, 2002):
        launches.launch(number, number - 1)
    assert launches.started() == [1]
    launches.end(1)
    assert launches.started() == list(range(2, 2002))
    assert not launches.dependencies.has_some(1)


def test_an_array_does_not_keep_its_launch_alive(launches: Launches):
    """Otherwise, each step of a training loop would keep all earlier steps alive."""
    dependency = launches.launch(1, 0, host_call=CLIENT)
    launches.started()
    launches.end(1)
    assert dependency is not None
    assert not any(
        isinstance(each, QueuedNode) for held in gc.get_referents(dependency) for each in gc.get_referents(held)
    )
    assert not dependency.nodes
