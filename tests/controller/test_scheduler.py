"""The scheduler as tables (events in, gangs out), and its promises for any order of events."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.controller.scheduler import Gang, IslandScheduler


def gang(sequence: int, session: int = 1, missing: int = 0) -> Gang[str]:
    return Gang(sequence, session, f"work {sequence}", missing)


def started(scheduler: IslandScheduler[str]) -> list[int]:
    """Everything that may start now, in order."""
    sequences = []
    while (next_gang := scheduler.next()) is not None:
        sequences.append(next_gang.sequence)
    return sequences


def scheduler_with(*gangs: Gang[str], window: int = 8) -> IslandScheduler[str]:
    scheduler = IslandScheduler[str](window)
    for each in gangs:
        scheduler.enqueue(each)
    return scheduler


def test_ready_gangs_start_first_in_first_out_over_all_sessions():
    scheduler = scheduler_with(gang(1, session=7), gang(2, session=5), gang(3, session=7), gang(4, session=6))
    # By age and not session by session: 3 is older than 4 although its session had a turn already.
    assert started(scheduler) == [1, 2, 3, 4]


def test_a_gang_that_waits_holds_back_its_own_session_and_nobody_else():
    waiting = gang(1, session=1, missing=1)
    scheduler = scheduler_with(waiting, gang(2, session=1), gang(3, session=2))
    assert started(scheduler) == [3]
    scheduler.arrived(waiting)
    assert started(scheduler) == [1, 2]


def test_a_gang_starts_with_the_last_of_what_it_waits_for():
    waiting = gang(1, missing=3)
    scheduler = scheduler_with(waiting)
    for _ in range(2):
        scheduler.arrived(waiting)
        assert started(scheduler) == []
    scheduler.arrived(waiting)
    assert started(scheduler) == [1]


def test_arrivals_for_a_gang_behind_another_are_remembered():
    first, second = gang(1, missing=1), gang(2, missing=1)
    scheduler = scheduler_with(first, second)
    scheduler.arrived(second)
    assert started(scheduler) == []
    scheduler.arrived(first)
    assert started(scheduler) == [1, 2]


def test_no_more_than_the_window_is_in_flight():
    scheduler = scheduler_with(*(gang(i) for i in range(1, 11)), window=4)
    assert started(scheduler) == [1, 2, 3, 4]
    scheduler.finished(4)
    assert started(scheduler) == [5, 6, 7, 8]


@pytest.mark.parametrize("window", [1, 2, 3, 24])
def test_a_full_window_opens_again_when_enough_has_finished(window):
    scheduler = scheduler_with(*(gang(i) for i in range(100)), window=window)
    assert started(scheduler) == list(range(window))
    scheduler.finished(window - window // 2)
    assert started(scheduler) == list(range(window, 2 * window - window // 2))


def test_a_dropped_head_lets_the_next_one_through_and_takes_no_place():
    waiting = gang(1, missing=1)
    scheduler = scheduler_with(waiting, gang(2), window=1)
    scheduler.drop(waiting)
    assert started(scheduler) == [2]
    assert scheduler.statistics().in_flight == 1


def test_a_gang_dropped_behind_another_is_passed_over():
    second = gang(2, missing=1)
    scheduler = scheduler_with(gang(1), second, gang(3))
    scheduler.drop(second)
    assert started(scheduler) == [1, 3]


def test_what_a_dropped_gang_waited_for_may_still_come():
    waiting = gang(1, missing=1)
    scheduler = scheduler_with(waiting, gang(2))
    scheduler.drop(waiting)
    scheduler.arrived(waiting)
    assert started(scheduler) == [2]
    assert started(scheduler) == []


def test_a_closed_session_leaves_the_line_with_all_its_gangs():
    mine, other = [gang(1), gang(3)], gang(2, session=2)
    scheduler = scheduler_with(mine[0], other, mine[1])
    assert scheduler.drop_session(1) == mine
    assert scheduler.drop_session(1) == []
    assert started(scheduler) == [2]


def test_statistics_count_what_waits_what_flies_and_what_started():
    scheduler = scheduler_with(gang(1), gang(2), gang(3, session=2, missing=1), window=8)
    assert scheduler.next() is not None
    scheduler.finished()
    assert scheduler.next() is not None
    stats = scheduler.statistics()
    assert (stats.waiting, stats.in_flight, stats.started, stats.window) == (1, 1, 2, 8)


@given(st.integers(0, 2**32), st.integers(1, 150), st.integers(1, 5))
def test_every_gang_starts_once_in_its_sessions_order_whatever_happens(seed, steps, window):
    """A random play of all events, watched by the simplest model: one list a session."""
    rng = random.Random(seed)
    scheduler = IslandScheduler[str](window)
    lines: dict[int, list[Gang[str]]] = {}
    missing: dict[int, int] = {}  # by sequence
    waited: list[Gang[str]] = []  # one entry for each thing that a gang waits for
    in_flight = sequence = 0

    def is_ready(session: int) -> bool:
        return bool(lines[session]) and missing[lines[session][0].sequence] == 0

    def start_all() -> int:
        count = 0
        for session in list(lines):
            lines[session] = [each for each in lines[session] if not each.dropped]
        while (next_gang := scheduler.next()) is not None:
            ready = {s: lines[s][0].sequence for s in lines if is_ready(s)}
            assert next_gang.sequence == min(ready.values()), "the oldest ready head goes first"
            lines[next_gang.session].pop(0)
            count += 1
            assert in_flight + count <= window
        return count

    closed: set[int] = set()
    for _ in range(steps):
        event = rng.choice(["enqueue"] * 4 + ["arrive"] * 3 + ["finish"] * 3 + ["drop", "close"])
        if event == "enqueue":
            session = rng.randrange(4)
            if session in closed:
                continue
            sequence += 1
            new = gang(sequence, session, rng.choice([0, 0, 1, 2]))
            missing[sequence] = new.missing
            waited.extend([new] * new.missing)
            lines.setdefault(session, []).append(new)
            scheduler.enqueue(new)
        elif event == "arrive" and waited:
            arrived = waited.pop(rng.randrange(len(waited)))
            missing[arrived.sequence] -= 1
            scheduler.arrived(arrived)
        elif event == "finish" and in_flight:
            in_flight -= 1
            scheduler.finished()
        elif event == "drop":
            queued = [each for line in lines.values() for each in line]
            if queued:
                scheduler.drop(rng.choice(queued))
        elif event == "close" and rng.random() < 0.2:
            session = rng.randrange(4)
            closed.add(session)
            assert [g for g in scheduler.drop_session(session) if not g.dropped] == [
                g for g in lines.pop(session, []) if not g.dropped
            ]
        in_flight += start_all()
        assert scheduler.statistics().in_flight == in_flight

    for arrived in waited:
        missing[arrived.sequence] -= 1
        scheduler.arrived(arrived)
    while True:
        in_flight += start_all()
        if not in_flight:
            break
        scheduler.finished()
        in_flight -= 1
    assert not any(lines.values()), "all that was not dropped has started"
    assert scheduler.statistics().waiting == 0
