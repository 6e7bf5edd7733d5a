"""Tests of scheduling policies: selection by name, the order of nodes, and the charges for gangs."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.controller.islands.island_hosts import LAUNCH_NS
from atoll.errors import SettingsError
from atoll.ir.program import Call, HostBuffer, HostToDevice, Transfer, single
from atoll.ir.types import ArraySpec, Sharding, Tiled
from atoll.launch.policies import POLICIES, find_policy
from atoll.launch.policy import Policy
from atoll.protocol import messages as m
from atoll.state.object_dumps import Dump, Ref, dump_of
from atoll.state.queued_nodes import Gang, QueuedNode
from tests.controller.play import Play, on, runs
from tests.launch.pausable_scheduler import Scheduler

# Number of gangs that fill an island while their durations are unknown.
NEW_IN_FLIGHT = 3


class LastComeFirstServed(Policy):
    """Policy that serves the node that became ready last, and records its calls."""

    made: list[LastComeFirstServed]

    def __init__(self) -> None:
        self.ready: list[QueuedNode[Any]] = []
        self.charged: list[tuple[int, int, int]] = []  # (island, session, nanoseconds)
        self.forgotten: list[int] = []
        self.made.append(self)

    def add(self, node: QueuedNode[Any]) -> None:
        self.ready.append(node)

    def take(self) -> QueuedNode[Any] | None:
        return self.ready.pop() if self.ready else None

    def charge(self, gang: Gang[Any], nanoseconds: int) -> None:
        self.charged.append((gang.island, gang.node.session, nanoseconds))

    def forget(self, session: int) -> None:
        self.forgotten.append(session)


@dump_of(LastComeFirstServed, "last come, first served")
class LastComeDump(Dump):
    ready: list[Ref[QueuedNode]]
    charged: list[tuple[int, int, int]]
    forgotten: list[int]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[LastComeFirstServed]:
    """Add a policy named "lifo". Return its instances, by island."""
    monkeypatch.setattr("atoll.launch.policies.POLICIES", {**POLICIES, "lifo": f"{__name__}:LastComeFirstServed"})
    LastComeFirstServed.made = []
    return LastComeFirstServed.made


def launch(number: int, session: int, islands: tuple[int, ...] = (0,)) -> QueuedNode[str]:
    node = QueuedNode[str](number, session)
    node.gangs = tuple(Gang(10 * number + island, island, node, "") for island in islands)
    return node


def started(scheduler: Scheduler[str], island: int = 0) -> list[Gang[str]]:
    found = []
    while (gang := scheduler.start_next(island)) is not None:
        found.append(gang)
    return found


def test_a_policy_decides_which_ready_node_is_committed(made: list[LastComeFirstServed]) -> None:
    scheduler = Scheduler[str](1, 8, find_policy("lifo"))
    for number, session in enumerate((1, 2, 3)):
        scheduler.enqueue(launch(number, session))
    assert [gang.node.session for gang in started(scheduler)] == [3, 2, 1]


def test_islands_agree_on_one_order_for_any_policy(made: list[LastComeFirstServed]) -> None:
    scheduler = Scheduler[str](2, 8, find_policy("lifo"))
    for number, session in enumerate((1, 2, 3)):
        scheduler.enqueue(launch(number, session, islands=(0, 1)))
    assert len(made) == 2
    first = [gang.node.session for gang in started(scheduler, 1)]
    assert first == [gang.node.session for gang in started(scheduler, 0)] == [3, 2, 1]


def test_a_node_that_is_added_again_after_a_pause_starts_once() -> None:
    scheduler = Scheduler[str](2, 8)
    scheduler.enqueue(launch(1, 1, islands=(0, 1)))
    scheduler.pause(0)
    assert started(scheduler, 1) == []  # the policy of island 1 has returned the node, and that of island 0 has not
    scheduler.resume(0)
    assert [len(started(scheduler, island)) for island in (0, 1)] == [1, 1]


def test_a_dropped_node_that_a_policy_takes_is_skipped() -> None:
    scheduler = Scheduler[str](1, 8)
    nodes = [launch(1, 1), launch(2, 2)]
    for node in nodes:
        scheduler.enqueue(node)
    scheduler.drop(nodes[0])
    assert [gang.node.number for gang in started(scheduler)] == [2]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_in_the_table_serves_all_nodes(name: str) -> None:
    scheduler = Scheduler[str](1, 8, find_policy(name))
    for number in range(1, 7):
        scheduler.enqueue(launch(number, session=number % 3))
    assert sorted(gang.node.number for gang in started(scheduler)) == list(range(1, 7))


def test_the_error_for_an_unknown_policy_lists_the_known_ones(made: list[LastComeFirstServed]) -> None:
    known = ", ".join({**POLICIES, "lifo": ""})
    with pytest.raises(SettingsError, match=f"there is no scheduling policy 'random'; the known ones are: {known}$"):
        find_policy("random")
    with pytest.raises(SettingsError, match="'random'"):
        Play("1x1x1", policy="random")


# ---- in the controller


def order_of_sessions(policy: str) -> list[int]:
    """Return the order in which three sessions start after the first session has filled the island."""
    play = Play("1x1x1", policy=policy)
    others = [play.open().number for _ in range(3)]
    buffer = HostToDevice((HostBuffer(0, (2,), None, None),), (on(0),))
    for session in (play.session, *others):
        play.proxy(session, m.RegisterProgram(2, single("put", (), buffer, feeds=1)))
        play.worker(0, m.FeedsArrived(session, tuple(range(NEW_IN_FLIGHT))))
    play.flush()
    for i in range(NEW_IN_FLIGHT):
        play.proxy(play.session, m.Launch(2, (), (100 + i,), (i,)))
    busy = [run.sequence for run in runs(play.outbox())]
    for session in others:
        play.proxy(session, m.Launch(2, (), (100,), (0,)))
    assert runs(play.outbox()) == []
    return [run.session - others[0] for run in runs(play.done(*busy))]


def test_the_policy_of_the_settings_orders_the_gangs_of_sessions(made: list[LastComeFirstServed]) -> None:
    assert order_of_sessions("first-come") == [0, 1, 2]
    assert order_of_sessions("lifo") == [2, 1, 0]


def test_each_island_charges_the_session_for_its_gang(made: list[LastComeFirstServed]) -> None:
    play = Play("2x1x1", policy="lifo")
    play.array(10)
    for policy in made:
        policy.charged.clear()
    play.send(m.RegisterProgram(5, single("copy", (on(0),), Transfer((0,), (on(1),)))))
    send, receive = runs(play.send(m.Launch(5, (10,), (11,), ())))
    play.report(0, m.Done(((send.sequence, 1_000, 4_000),)))
    assert [policy.charged for policy in made[:2]] == [[(0, play.session, 3_000 + LAUNCH_NS)], []]
    play.report(1, m.Done(((receive.sequence, 2_000, 9_000),)))
    assert [policy.charged for policy in made[:2]] == [
        [(0, play.session, 3_000 + LAUNCH_NS)],
        [(1, play.session, 7_000 + LAUNCH_NS)],
    ]


def test_a_gang_of_several_hosts_is_charged_once_for_all_of_its_devices(made: list[LastComeFirstServed]) -> None:
    play = Play("1x2x1", policy="lifo")
    play.with_function(devices=(0, 1))
    spec = ArraySpec("float32", (2,), Sharding((0, 1), Tiled((2,), (0, 1))))
    play.send(m.RegisterProgram(5, single("f", (), Call(1, (), (spec,), (0, 1)))))
    sequence = runs(play.send(m.Launch(5, (), (11,), ())))[0].sequence
    play.report(0, m.Done(((sequence, 1_000, 4_000),)))
    assert made[0].charged == []
    play.report(1, m.Done(((sequence, 70_000, 78_000),)))
    assert made[0].charged == [(0, play.session, 3_000 + 8_000 + 2 * LAUNCH_NS)]


def test_a_session_that_has_ended_is_forgotten(made: list[LastComeFirstServed]) -> None:
    play = Play("1x1x1", policy="lifo")
    play.with_call(arguments=0)
    (run,) = runs(play.send(m.Launch(1, (), (11,), ())))
    play.close(play.session)
    play.report(0, m.Done(((run.sequence, 0, 5_000),)))
    assert made[0].forgotten == [play.session]


def test_islands_that_join_later_have_the_same_policy(made: list[LastComeFirstServed]) -> None:
    play = Play("1x1x1", policy="lifo")
    play.operator(m.AddIslandRequest())
    assert len(made) == 2
