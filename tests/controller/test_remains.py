"""Tests that the controller releases the remains of a closed session step by step, over several flushes."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.controller.controller_dumps import load_controller
from atoll.errors import OK, Code
from atoll.protocol import events as e
from atoll.protocol import messages as m
from atoll.state.buffer_directory import Entry
from atoll.state.buffer_states import BufferState
from atoll.state.stepped_work import SMALL_ITEMS
from atoll.telemetry.consistency import contradictions
from tests.controller.dumps import dumped
from tests.controller.play import BROKEN, Play, runs
from tests.controller.test_lowering_in_steps import Blocks, Slow, without_collector

COUNT = 5000
SIZE = 8  # bytes of an array


def with_arrays(count: int) -> Slow:
    """Give the session this many arrays, which are errors."""
    play = Slow()
    for first in range(0, count, 256):
        handles = tuple(range(1000 + first, 1000 + min(first + 256, count)))
        play.proxy(play.session, m.MakeError(handles, BROKEN))
    play.flush()
    return play


def end(play: Slow) -> None:
    play.close(play.session)


@pytest.mark.parametrize("count", [COUNT, 4 * COUNT])
def test_no_flush_frees_more_objects_after_the_end_of_a_session_than_its_steps_do(count: int):
    play = with_arrays(count)
    with without_collector():
        blocks = Blocks()
        end(play)
        blocks.turns(play)
    assert blocks.limit < 8 * e.STEPS_PER_FLUSH * 4


def test_the_memory_of_many_arrays_is_free_after_the_end_of_their_session():
    play = Slow()
    session = play.controller.sessions[play.session]
    for handle in range(100, 100 + 2 * SMALL_ITEMS):
        play.array(handle)
    used = play.controller.ledger.total
    assert used > SMALL_ITEMS
    end(play)
    assert play.controller.ledger.total == used, "it is released later"
    assert contradictions(play.controller) == []
    restored = load_controller(dumped(play.controller))
    assert len(restored.launches.remains.left(Entry)) == len(session.directory.entries)
    play.flush()
    while play.controller.has_work:
        play.flush()
    assert play.controller.ledger.total == 0
    assert contradictions(play.controller) == []


def test_many_arrays_of_a_lost_island_are_errors_at_once_and_their_memory_is_released_in_steps():
    play = Play("2x1x1")
    play.with_put(2, 0)
    play.with_put(3, 1)
    handles = range(100, 100 + 3 * SMALL_ITEMS)
    for handle in handles:
        play.array(handle)
    play.report(1, m.FeedsArrived(play.session, (1,)))
    (run,) = runs(play.send(m.Launch(3, (), (50,), (1,))))
    play.done(run.sequence, host=1)
    play.with_call()
    used = play.controller.ledger.total
    play.lose(0, "it burnt")
    entries = play.controller.sessions[play.session].directory.entries
    assert {entries[each].state for each in handles} == {BufferState.FAILED}
    assert {entries[each].error.code for each in handles} == {Code.DATA_LOSS}
    assert entries[50].state is BufferState.READY
    assert play.controller.ledger.total == used, "it is released later"
    assert contradictions(play.controller) == []
    assert len(load_controller(dumped(play.controller)).launches.remains.left(Entry)) == len(handles)
    play.proxy(play.session, m.Launch(1, (100,), (51,), ()))
    assert entries[51].error.code == Code.DATA_LOSS
    play.proxy(play.session, m.Release((100,)))
    before, turns = used, 0
    while play.controller.has_work:
        play.event(e.Flush(play.now))
        assert before - play.controller.ledger.total <= 4 * e.STEPS_PER_FLUSH * SIZE
        before, turns = play.controller.ledger.total, turns + 1
    assert play.controller.ledger.total == SIZE
    assert contradictions(play.controller) == []


def plans_dropped(messages: list[Any]) -> int:
    return sum(isinstance(each, m.DropPlan) for each in messages)


def test_many_programs_are_dropped_over_several_flushes():
    play = Slow()
    count = 3 * e.STEPS_PER_FLUSH
    for number in range(100, 100 + count):
        play.with_call(program=number)
    end(play)
    first = plans_dropped(play.turn())
    assert first <= e.STEPS_PER_FLUSH
    dropped = first
    while play.controller.has_work:
        dropped += plans_dropped(play.turn())
    assert play.controller.programs.plans == {}
    assert dropped > count


def test_functions_of_a_session_with_many_are_dropped_over_several_flushes():
    play = Slow()
    count = 2 * SMALL_ITEMS
    for number in range(100, 100 + count):
        play.with_function(number)
    end(play)
    first = sum(isinstance(each, m.DropFunction) for each in play.turn())
    assert first < count
    rest = [each for each in play.outbox() if isinstance(each, m.DropFunction)]
    while play.controller.has_work:
        rest += [each for each in play.outbox() if isinstance(each, m.DropFunction)]
    assert first + len(rest) == count + 1


def test_launches_in_line_of_a_closed_session_end_over_several_flushes_and_none_of_them_starts():
    play = Slow()
    count = 2 * SMALL_ITEMS
    for each in range(count):
        play.proxy(play.session, m.Launch(1, (10,), (500 + each,), ()))
    play.flush()
    in_flight = len(play.controller.launches.in_flight)
    assert in_flight < count
    end(play)
    assert play.controller.has_work
    while play.controller.has_work:
        play.flush()
        assert len(play.controller.launches.in_flight) <= in_flight
    while live := list(play.controller.launches.in_flight):
        play.done(*live)
    assert play.controller.ledger.total == 0
    assert play.controller.tenants.default.running == 0
    assert contradictions(play.controller) == []


def test_another_session_is_served_meanwhile():
    play = with_arrays(COUNT)
    end(play)
    play.proxy(play.other, m.Await(7, ()))
    assert m.Awaited(7, OK) in play.turn()
    assert play.controller.has_work
