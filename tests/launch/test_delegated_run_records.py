"""Tests of the index of delegated runs: by session, and by island in the order of the session."""

from __future__ import annotations

from typing import Any, cast

import pytest

from atoll.launch.delegated_run_records import DelegatedRun, DelegatedRunIndex
from atoll.state.gang_states import GangState
from tests.launch.gang_stand_ins import launch_stand_in, node_of, spec

S = GangState


def run(
    first: int, session: int = 1, state: GangState = S.COMMITTED, islands: tuple[int, ...] = (0, 1)
) -> DelegatedRun:
    """Return a run whose gangs are in this state. The host of an island has the island's number."""
    node = node_of(first, *[spec({island: (0,)}, island=island) for island in islands], state=state)
    gangs = {gang.island: gang for gang in node.gangs}
    return DelegatedRun(launch_stand_in(session), cast(Any, None), first, gangs, len(gangs))


@pytest.fixture
def index() -> DelegatedRunIndex:
    return DelegatedRunIndex()


def end(index: DelegatedRunIndex, run: DelegatedRun, *islands: int) -> None:
    for island in islands:
        run.gangs[island].state = S.DONE
        run.ending -= 1
        index.gang_ended(run, island, is_last=not run.ending)


def test_runs_are_those_of_their_session_in_order(index: DelegatedRunIndex) -> None:
    runs = [run(10), run(20, session=2), run(30)]
    for each in runs:
        index.add(each)
    assert index.of(1) == [runs[0], runs[2]]
    assert index.of(2) == [runs[1]]
    assert index.of(3) == []


@pytest.mark.parametrize("state", [S.COMMITTED, S.HELD, S.GRANTED, S.REVOKED])
def test_committed_runs_are_those_ahead_of_the_runs_in_line(index: DelegatedRunIndex, state: GangState) -> None:
    runs = [run(10, state=state), run(20), run(30, state=S.READY), run(40, state=S.WAITING)]
    for each in (*runs, run(50, session=2), run(60, islands=(5,))):
        index.add(each)
    assert index.committed(1, 0) == runs[:2]
    assert index.committed(1, 5) != []
    assert index.committed(2, 5) == index.committed(3, 0) == []


def test_a_run_whose_hosts_have_ended_is_not_committed_there_any_more(index: DelegatedRunIndex) -> None:
    first, second = run(10, state=S.REVOKED), run(20)
    for each in (first, second):
        index.add(each)
    first.gangs[0].run.hosts_left.clear()
    assert index.committed(1, 0) == [second]
    assert index.committed(1, 1) == [first, second]
    first.gangs[0].state = S.DROPPED
    assert index.committed(1, 0) == [second], "a gang that was dropped hides none behind it"


def test_a_run_leaves_with_its_last_gang(index: DelegatedRunIndex) -> None:
    first, second = run(10), run(20)
    for each in (first, second):
        index.add(each)
    index.limit(first, {0: 1, 1: 0})
    assert first.limits == {0: 1, 1: 0}
    end(index, first, 0)
    assert index.of(1) == [first, second]
    assert index.has_limited(1)
    end(index, first, 1)
    assert index.of(1) == [second]
    assert not index.has_limited(1)
    index.validate([second])
    end(index, second, 1, 0)
    index.validate([])


def test_the_limits_of_a_run_that_has_ended_hold_up_no_other(index: DelegatedRunIndex) -> None:
    """Hosts may end a run before they answer that they start no more of it."""
    first, second = run(10), run(20)
    for each in (first, second):
        index.add(each)
    end(index, first, 0, 1)
    index.limit(first, {0: 1, 1: 1})
    assert not index.has_limited(1)


def test_a_restored_index_has_the_gangs_that_have_not_ended(index: DelegatedRunIndex) -> None:
    first, second = run(10), run(20)
    for each in (first, second):
        index.add(each)
    index.limit(first, {0: 1, 1: 1})
    end(index, first, 1)
    restored = DelegatedRunIndex()
    for each in (first, second):
        restored.restore(each)
    assert restored.committed(1, 0) == [first, second]
    assert restored.committed(1, 1) == [second]
    assert restored.has_limited(1)
    restored.validate([first, second])
    with pytest.raises(AssertionError):
        restored.validate([second])
