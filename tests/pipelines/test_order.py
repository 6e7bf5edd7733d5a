"""Tests of the order of a step's nodes: each stage follows its schedule, and transfers are between producer
and user.
"""

from __future__ import annotations

import pytest

from atoll.pipelines.entries import Entry, Kind
from atoll.pipelines.order import Action, Move, Run, order, replicated
from atoll.pipelines.schedule import Schedule
from atoll.pipelines.schedules import SCHEDULES, schedule


def chain(table: Schedule) -> list[Action]:
    return order(table, {part: [part + 1] for part in range(table.parts - 1)})


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 2), (2, 4), (4, 8), (8, 16)])
def test_each_stage_runs_its_row_in_order(name: str, stages: int, microbatches: int) -> None:
    table = schedule(name, stages, microbatches)
    ran: list[list[Entry]] = [[] for _ in range(stages)]
    for action in chain(table):
        if isinstance(action, Run):
            entry = action.entry
            ran[table.stage_of(entry.part)].append(entry)
            if action.whole:
                ran[table.stage_of(entry.part)].append(Entry(entry.part, Kind.BACKWARD, entry.microbatch))
    assert tuple(map(tuple, ran)) == table.rows


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (8, 16)])
def test_what_crosses_is_moved_once_after_it_is_made_and_before_it_is_used(
    name: str, stages: int, microbatches: int
) -> None:
    table = schedule(name, stages, microbatches)
    at: dict[Action | Entry, int] = {}
    for i, action in enumerate(chain(table)):
        assert action not in at
        at[action] = i
        if isinstance(action, Run):
            at[action.entry] = i
            if action.whole:
                at[Entry(action.entry.part, Kind.BACKWARD, action.entry.microbatch)] = i
    moves = [action for action in at if isinstance(action, Move)]
    assert len(moves) == 2 * (table.parts - 1) * microbatches
    for move in moves:
        kinds = (Kind.BACKWARD, Kind.INPUT) if move.gradients else (Kind.FORWARD,)
        ends = [
            at[entry]
            for part in (move.source, move.target)
            for kind in kinds
            if (entry := Entry(part, kind, move.microbatch)) in at
        ]
        assert ends[0] < at[move] < ends[1]


def test_parts_of_one_stage_move_nothing_between_them() -> None:
    assert not any(isinstance(action, Move) for action in chain(schedule("interleaved", 1, 2, virtual=2)))


def test_a_value_that_skips_a_stage_goes_straight_to_its_user() -> None:
    actions = order(schedule("gpipe", 3, 1), {0: [1, 2], 1: [2]})
    assert [action for action in actions if isinstance(action, Move)] == [
        Move(0, 1, 0, False),
        Move(0, 2, 0, False),
        Move(1, 2, 0, False),
        Move(2, 1, 0, True),
        Move(2, 0, 0, True),
        Move(1, 0, 0, True),
    ]


def test_the_last_part_computes_both_ways_at_once_where_they_follow_one_another() -> None:
    whole = [action.entry for action in chain(schedule("1f1b", 2, 2)) if isinstance(action, Run) and action.whole]
    assert whole == [Entry(1, Kind.FORWARD, 0), Entry(1, Kind.FORWARD, 1)]
    assert not any(isinstance(action, Run) and action.whole for action in chain(schedule("gpipe", 2, 2)))


def test_a_stage_sends_before_it_waits_for_what_comes_at_the_same_time() -> None:
    actions = chain(schedule("gpipe", 3, 2))
    assert actions.index(Move(1, 2, 0, False)) < actions.index(Move(0, 1, 1, False))


def test_replicas_run_side_by_side_with_numbers_of_their_own() -> None:
    table = schedule("1f1b", 2, 2)
    one = chain(table)
    two = replicated(one, 2, 2, 2)
    assert two[0::2] == one
    assert two[1::2] == [
        Run(Entry(each.entry.part + 2, each.entry.kind, each.entry.microbatch + 2), each.whole)
        if isinstance(each, Run)
        else Move(each.source + 2, each.target + 2, each.microbatch + 2, each.gradients)
        for each in one
    ]
