"""Tests of islands that share their queues: when sharing starts and stops, and that it does not change any decision."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.cluster.tenant_settings import TenantSettings
from atoll.launch.island_lines import SharedLines
from atoll.launch.policies import find_policy
from atoll.launch.policies.fair import FairShares
from atoll.state.gang_states import Reason
from atoll.state.queued_nodes import Gang, QueuedNode
from atoll.state.tenants import Tenant
from tests.launch.pausable_scheduler import Scheduler
from tests.launch.test_policies import LastComeFirstServed
from tests.launch.test_scheduler import MS, launch, started
from tests.launch.test_scheduler_properties import agree
from tests.work_counts import instructions_of

ALL = (0, 1, 2, 3)


def shares(scheduler: Scheduler[str]) -> list[tuple[int, ...]]:
    """Return the islands that share their queues."""
    return [lines.islands for lines in scheduler._lines.all()]


def joint(number: int, islands: tuple[int, ...] = ALL, **options: Any) -> QueuedNode[str]:
    return launch(number, islands=islands, joint=True, **options)


def end(scheduler: Scheduler[str], *nodes: QueuedNode[str]) -> None:
    for node in nodes:
        for gang in node.gangs:
            scheduler.finished(gang)
    scheduler.validate()


def run(scheduler: Scheduler[str], node: QueuedNode[str]) -> None:
    """Run a node from its launch to its end, without other work."""
    scheduler.enqueue(node)
    for island in node.islands:
        started(scheduler, island)
    end(scheduler, node)


def sharing(**options: Any) -> Scheduler[str]:
    """Return four islands that share their queues."""
    scheduler = Scheduler[str](4, 8, busy_ns=4 * MS, **options)
    run(scheduler, joint(1))
    assert shares(scheduler) == [ALL]
    return scheduler


def test_a_joint_gang_on_idle_islands_has_one_line_for_all_of_them():
    scheduler = sharing()
    scheduler.enqueue(joint(2))
    assert started(scheduler, 3) == [2], "the lines are those of each island"
    assert [scheduler.statistics(island).in_flight for island in ALL] == [1] * 4
    assert [scheduler.statistics(island).started for island in ALL] == [2] * 4


def test_a_gang_on_one_island_has_a_line_of_its_own_behind_those_in_line_before():
    scheduler = sharing(policy=find_policy("first-come"))
    first, second, alone = joint(2, missing=1), joint(3), launch(4, islands=(2,))
    scheduler.enqueue(first)
    scheduler.enqueue(second)
    scheduler.enqueue(alone)
    assert shares(scheduler) == [(0, 1, 3), (2,)]
    scheduler.validate()
    assert started(scheduler, 2) == []
    scheduler.arrived(first, Reason.BYTES)
    assert started(scheduler, 0) == [2, 3]
    assert started(scheduler, 2) == [4]
    scheduler.validate()


def test_gangs_in_flight_count_on_islands_that_stop_sharing():
    scheduler = sharing()
    before = joint(2)
    scheduler.enqueue(before)
    assert started(scheduler) == [2]
    alone = launch(3, session=2, islands=(1,))
    scheduler.enqueue(alone)
    assert [scheduler.statistics(island).in_flight for island in ALL] == [1] * 4
    assert started(scheduler, 1) == [3]
    end(scheduler, before)
    assert [scheduler.statistics(island).in_flight for island in ALL] == [0, 1, 0, 0]
    assert not list(scheduler.count_differences(alone.gangs))


def test_a_joint_gang_on_some_of_the_islands_divides_the_lines_into_two():
    scheduler = sharing()
    scheduler.enqueue(joint(2, (1, 2)))
    assert shares(scheduler) == [(0, 3), (1, 2)]


def test_a_joint_gang_that_does_not_use_all_hosts_shares_nothing():
    scheduler = Scheduler[str](4, 8, hosts=[2] * 4)
    run(scheduler, joint(1, hosts=(0, 1)))
    assert shares(scheduler) == [ALL]
    run(scheduler, joint(2, hosts=(1,)))
    assert len(shares(scheduler)) == 4


def test_islands_of_which_a_joint_gang_uses_all_hosts_still_share():
    scheduler = Scheduler[str](6, 8, hosts=[2] * 6)
    every = tuple(range(6))
    run(scheduler, joint(1, every, hosts=(0, 1)))
    node = joint(2, (0, 1, 2, 3), hosts=(0, 1))
    (gang,) = node.gangs
    gang.places = ((0, 1), (0, 1), (0,), (1,))
    scheduler.enqueue(node)
    assert shares(scheduler) == [(0, 1), (2,), (3,), (4, 5)]
    scheduler.validate()
    assert started(scheduler, 3) == [2]


def test_the_work_to_divide_lines_grows_with_the_islands_and_not_with_their_square():
    def work(islands: int) -> int:
        scheduler, every = Scheduler[str](islands, 8, hosts=[2] * islands), tuple(range(islands))
        run(scheduler, joint(1, every, hosts=(0, 1)))
        assert shares(scheduler) == [every]
        return instructions_of(lambda: scheduler.enqueue(joint(2, every, hosts=(0,))))

    assert work(128) < 10 * work(16)


def test_an_island_that_fails_or_lacks_functions_leaves():
    scheduler = sharing()
    scheduler.pause(1)
    assert shares(scheduler) == [(0, 2, 3), (1,)]
    scheduler.exclude(2, 7)
    assert shares(scheduler) == [(0, 3), (1,), (2,)]
    scheduler.enqueue(joint(2))
    assert [started(scheduler, island) for island in ALL] == [[], [], [], []]
    scheduler.resume(1)
    assert started(scheduler, 1) == [2]


def test_a_session_that_ends_takes_its_deferred_nodes_from_shared_islands():
    scheduler = sharing()
    alone = launch(2, islands=(2,))
    scheduler.defer(alone)
    assert shares(scheduler) == [ALL]
    assert [each.node for each in scheduler.drop_session(1)] == [alone]
    assert scheduler.waits() == {}


def test_an_island_with_other_limits_leaves():
    scheduler = sharing()
    scheduler.set_limits(0, 8)
    assert shares(scheduler) == [ALL], "these are the same limits"
    scheduler.set_limits(0, 2)
    assert shares(scheduler) == [(0,), (1, 2, 3)]


def test_islands_that_stop_sharing_share_again_after_more_and_more_joint_gangs():
    scheduler, number, gaps = Scheduler[str](4, 8), 0, []
    while len(gaps) < 9:
        gap = 0
        while len(shares(scheduler)) > 1:
            number, gap = number + 1, gap + 1
            run(scheduler, joint(number))
        gaps.append(gap)
        for island in ALL:
            number += 1
            run(scheduler, launch(number, islands=(island,)))
    assert gaps == [1, 2, 4, 8, 16, 32, 64, 64, 64]


def test_islands_share_their_lines_with_those_that_are_like_them():
    scheduler, every = Scheduler[str](7, 8), tuple(range(7))
    scheduler.set_limits(0, 2)
    for island in (3, 4):
        scheduler.set_limits(island, 4)
    run(scheduler, joint(1, every))
    assert shares(scheduler) == [(0,), (1, 2, 5, 6), (3, 4)]
    scheduler.enqueue(joint(2, every))
    assert started(scheduler, 6) == [2]
    assert [scheduler.statistics(island).window for island in every] == [2, 8, 8, 4, 4, 8, 8]
    scheduler.validate()


def test_a_policy_that_cannot_be_copied_is_not_shared():
    LastComeFirstServed.made = []
    scheduler = Scheduler[str](4, 8, LastComeFirstServed)
    run(scheduler, joint(1))
    assert len(shares(scheduler)) == 4


def test_islands_with_other_debts_are_not_shared():
    scheduler = Scheduler[str](2, 1, FairShares)
    for number, session in enumerate((1, 2, 1, 2), start=1):
        run(scheduler, launch(number, session=session, islands=(0,), estimate=number * MS))
    run(scheduler, joint(9, (0, 1), session=3))
    assert shares(scheduler) == [(0,), (1,)]


def test_a_compilation_on_a_shared_island_is_charged_in_equal_parts():
    scheduler = sharing()
    scheduler.enqueue(joint(2, session=5))
    scheduler.compiled(3, 5, Tenant(TenantSettings("a")), 400)
    policy = scheduler.policy_of(0)
    assert isinstance(policy, FairShares)
    assert policy._sessions[5].owed == 100


@pytest.mark.parametrize("name", ["fair", "first-come"])
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 60))
def test_a_copy_of_a_policy_decides_like_it(name, seed, steps):
    rng = random.Random(seed)
    policy = find_policy(name)()
    tenants = [Tenant(TenantSettings(each, share=share)) for each, share in (("a", 1), ("b", 3))]

    def play(policy: Any, rng: random.Random, first: int, steps: int) -> list[int]:
        taken = []
        for number in range(first, first + steps):
            node = launch(number, session=rng.randrange(4), estimate=rng.choice([1, MS, 9 * MS]))
            node.tenant = tenants[node.session % 2]
            policy.add(node)
            if rng.random() < 0.7 and (found := policy.take()) is not None:
                taken.append(found.number)
                policy.commit(found.gangs[0])
                if rng.random() < 0.8:
                    policy.charge(found.gangs[0], rng.choice([0, MS, 5 * MS]))
            if rng.random() < 0.1:
                policy.compiled(rng.randrange(4), tenants[0], MS)
        return taken

    play(policy, rng, 1, steps)
    copy = policy.copy()
    assert copy.is_like(policy)
    later = rng.getrandbits(32)
    assert play(policy, random.Random(later), 1000, 40) == play(copy, random.Random(later), 1000, 40)


@given(st.integers(0, 2**32), st.integers(1, 80), st.integers(1, 4))
def test_a_scheduler_with_shared_lines_starts_the_gangs_that_one_without_them_starts(seed, steps, window):
    """Two schedulers get the same events, and are asked in the same order. One of them never shares queues.

    Each must start all gangs, and its islands must agree on one order.
    """
    islands = range(4)
    one, other = Scheduler[str](4, window, busy_ns=4 * MS), Scheduler[str](4, window, busy_ns=4 * MS)
    other._lines = _Separate(other._islands, other._started)
    found = [_Player(each, random.Random(seed)) for each in (one, other)]
    for player in found:
        player.play(steps)
    for player in found:
        numbers = [[node.number for node in line] for line in player.order]
        assert agree(player.order)
        assert sorted(numbers[0] + numbers[1] + numbers[2] + numbers[3]) == sorted(
            node.number for node in player.nodes for gang in node.gangs for _ in gang.all_islands
        )
    assert [one.statistics(island).started for island in islands] == [
        other.statistics(island).started for island in islands
    ]


class _Separate(SharedLines[str]):
    """Queues that are never shared."""

    def _unite(self, *arguments: Any) -> bool:
        return False


class _Player:
    """Makes mostly joint gangs on all islands, with some others in between. Sometimes all of them end."""

    def __init__(self, scheduler: Scheduler[str], rng: random.Random) -> None:
        self.scheduler, self.rng = scheduler, rng
        self.nodes: list[QueuedNode[str]] = []
        self.order: list[list[QueuedNode[str]]] = [[] for _ in ALL]
        self.flying: list[Gang[str]] = []

    def play(self, steps: int) -> None:
        rng = self.rng
        for number in range(1, steps + 1):
            places = ALL if rng.random() < 0.8 else tuple(sorted(rng.sample(ALL, rng.randint(1, 3))))
            is_joint = len(places) > 1 and rng.random() < 0.95
            estimate = rng.choice([1, MS, 9 * MS])
            node = launch(number, session=rng.randrange(3), islands=places, joint=is_joint, estimate=estimate)
            self.nodes.append(node)
            self.scheduler.enqueue(node)
            self.scheduler.validate()
            self._start()
            if rng.random() < 0.2:
                self._end_all()
        self._end_all()

    def _start(self) -> None:
        while self.scheduler.touched:
            for island in sorted(self.scheduler.touched):
                self.scheduler.touched.discard(island)
                while (gang := self.scheduler.start_next(island)) is not None:
                    self.flying.append(gang)
                    for each in gang.all_islands:
                        self.order[each].append(gang.node)

    def _end_all(self) -> None:
        while self.flying:
            assert not list(self.scheduler.count_differences(self.flying))
            self.scheduler.finished(self.flying.pop(0))
            self._start()
