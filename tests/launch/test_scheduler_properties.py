"""Tests of the scheduler's guarantees for random sequences of events."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from atoll.state.gang_states import Reason
from atoll.state.queued_nodes import UNKNOWN_NS, Gang, QueuedNode
from tests.launch.pausable_scheduler import Scheduler
from tests.launch.test_scheduler import MS, launch


@given(st.integers(0, 2**32), st.integers(1, 150), st.integers(1, 6), st.integers(1, 3), st.integers(1, 3))
def test_islands_agree_and_each_gang_starts_once(seed, steps, window, islands, hosts):
    """Check these guarantees for a random sequence of events:

    - Each gang starts at most once, and gangs of nodes that were not dropped start in the end.
    - The launches of a session keep their order.
    - The orders of all islands agree with one total order.
    - The bounds on each host hold.
    """
    rng = random.Random(seed)
    order: list[list[QueuedNode[str]]] = [[] for _ in range(islands)]
    flying: list[list[Gang[str]]] = [[] for _ in range(islands)]
    waited: list[QueuedNode[str]] = []
    nodes: list[QueuedNode[str]] = []
    paused: set[int] = set()
    excluded: set[tuple[int, int]] = set()
    closed: set[int] = set()
    lacking: list[QueuedNode[str]] = []

    def reserve(node: QueuedNode[str]) -> Reason | None:
        if rng.random() < 0.1 and not ending:
            lacking.append(node)
            return Reason.MEMORY
        return None

    ending = False
    scheduler = Scheduler[str](islands, window, busy_ns=4 * MS, hosts=[hosts] * islands)

    def start(island: int) -> None:
        while (gang := scheduler.start_next(island, reserve)) is not None:
            assert island in gang.all_islands
            assert not gang.node.dropped
            for each in started_with(gang):
                for place in each.all_islands:
                    begin(place, each)

    def begin(island: int, gang: Gang[str]) -> None:
        assert island not in paused
        order[island].append(gang.node)
        flying[island].append(gang)
        assert not gang.exclusive or len(flying[island]) == 1
        for host in gang.hosts:
            there = [each.estimate for each in flying[island] if host in each.hosts]
            assert len(there) <= window
            assert sum(there[:-1]) < 4 * MS or len(there) <= 3
            assert sum(there[:-1]) < 16 * MS or len(there) <= 2

    def finish(island: int) -> None:
        if flying[island]:
            gang = rng.choice(flying[island])
            for each in gang.all_islands:
                flying[each].remove(gang)
            scheduler.finished(gang)

    for number in range(1, steps):
        island = rng.randrange(islands)
        event = rng.choice(
            ["enqueue"] * 5 + ["arrive"] * 3 + ["finish"] * 4 + ["drop", "pause", "exclude", "close", "memory"]
        )
        session = rng.randrange(4)
        if event == "enqueue" and session not in closed:
            places = tuple(sorted(rng.sample(range(islands), rng.randint(1, islands))))
            missing = rng.choice([0, 0, 1, 2])
            estimate = rng.choice([1, UNKNOWN_NS, 3 * MS, 50 * MS])
            node = launch(
                number,
                session=session,
                islands=places,
                missing=missing,
                estimate=estimate,
                exclusive=rng.random() < 0.1,
                hosts=tuple(sorted(rng.sample(range(hosts), rng.randint(1, hosts)))),
                **(random_kind(rng) if len(places) > 1 else {}),
            )
            nodes.append(node)
            waited.extend([node] * missing)
            scheduler.enqueue(node)
        elif event == "arrive" and waited:
            scheduler.arrived(waited.pop(rng.randrange(len(waited))), Reason.BYTES)
        elif event == "finish":
            finish(island)
        elif event == "drop" and nodes:
            scheduler.drop(rng.choice(nodes))
        elif event == "pause":
            if island in paused:
                paused.discard(island)
                scheduler.resume(island)
            else:
                paused.add(island)
                scheduler.pause(island)
        elif event == "exclude":
            if (island, session) in excluded:
                excluded.discard((island, session))
                scheduler.admit(island, session)
            else:
                excluded.add((island, session))
                scheduler.exclude(island, session)
        elif event == "memory" and lacking:
            scheduler.retry(lacking.pop(rng.randrange(len(lacking))))
        elif event == "close" and rng.random() < 0.2:
            closed.add(session)
            scheduler.drop_session(session)
        if rng.random() < 0.7:
            start(rng.randrange(islands))

    for island in list(paused):
        paused.discard(island)
        scheduler.resume(island)
    for island, session in excluded:
        scheduler.admit(island, session)
    ending = True
    for node in lacking:
        scheduler.retry(node)
    for node in waited:
        scheduler.arrived(node, Reason.BYTES)
    while scheduler.touched or any(flying):
        touched, scheduler.touched = scheduler.touched, set()
        for island in range(islands):
            if island in touched:
                start(island)
            elif not touched:
                finish(island)

    for node in nodes:
        for gang in node.gangs:
            for each in gang.all_islands:
                count = order[each].count(node)
                assert count <= 1
                assert count == 1 or node.dropped, "no gang is forgotten"
    for island, line in enumerate(order):
        for session in range(4):
            numbers = [node.number for node in line if node.session == session]
            assert numbers == sorted(numbers)
        assert scheduler.statistics(island).waiting == 0
        assert scheduler.statistics(island).in_flight == 0
    assert agree(order)


@given(st.integers(0, 2**32), st.integers(1, 8))
def test_each_gang_starts_although_only_ends_of_others_make_room_for_it(seed, window):
    """Some of the gangs call Python, so that other limits hold while they run. Gangs end in any order."""
    rng = random.Random(seed)
    scheduler = Scheduler[str](2, window, busy_ns=4 * MS)
    flying: list[Gang[str]] = []

    def start() -> None:
        while scheduler.touched:
            island = scheduler.touched.pop()
            while (gang := scheduler.start_next(island)) is not None:
                flying.extend(started_with(gang))

    def finish() -> None:
        scheduler.finished(flying.pop(rng.randrange(len(flying))))
        start()

    for number in range(1, 60):
        islands = rng.choice([(0,), (1,), (0, 1)])
        options = {"weight": rng.choice([0, 1, 1, 3]), **(random_kind(rng) if len(islands) > 1 else {})}
        estimate = rng.choice([1, 3 * MS, 50 * MS])
        scheduler.enqueue(launch(number, session=rng.randrange(3), islands=islands, estimate=estimate, **options))
        start()
        if flying and rng.random() < 0.3:
            finish()
    while flying:
        assert not list(scheduler.count_differences(flying))
        finish()
    assert [scheduler.statistics(island).waiting for island in range(2)] == [0, 0]


def random_kind(rng: random.Random) -> dict[str, bool]:
    """Return how a node on several islands starts, as options of `launch`."""
    return rng.choice([{}, {"joint": True}, {"together": True}])


def started_with(gang: Gang[str]) -> tuple[Gang[str], ...]:
    """Return the gangs that have started, as `start_next` returned this one."""
    return gang.node.gangs if gang.node.starts_together else (gang,)


def agree(order: list[list[QueuedNode[str]]]) -> bool:
    """Return whether one total order contains all of the given orders.

    Repeatedly remove a node that is first in all orders that contain it.
    """
    lines = [list(line) for line in order]
    while any(lines):
        for line in lines:
            if line and all(other[0] is line[0] for other in lines if line[0] in other):
                first = line[0]
                for other in lines:
                    if first in other:
                        other.pop(0)
                break
        else:
            return False
    return True


def test_the_check_of_agreement_can_fail():
    first, second = launch(1), launch(2)
    assert agree([[first, second], [first, second], [second]])
    assert not agree([[first, second], [second, first]])
