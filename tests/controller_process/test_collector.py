"""Tests that the controller collects garbage between turns, and never examines all live objects."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from atoll.controller_process.collector import LAST_LOOKS, SECONDS, YOUNG, Collector


class Cycle:
    """Object that only the garbage collector frees."""

    def __init__(self) -> None:
        self.itself = self


def cycle() -> weakref.ref[Cycle]:
    return weakref.ref(Cycle())


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    gc.collect()
    try:
        yield collector
    finally:
        gc.enable()


def test_it_does_nothing_before_it_is_started(collector: Collector) -> None:
    gc.disable()
    garbage = cycle()
    made = [[] for _ in range(2 * YOUNG)]
    collector.turn_ended(1000.0)
    collector.collect_all()
    assert garbage() is not None
    assert made


def test_a_turn_collects_when_much_was_made_and_python_never_does(collector: Collector) -> None:
    collector.start()
    collector.turn_ended(1000.0)
    garbage = cycle()
    collector.turn_ended(1000.0)
    assert garbage() is not None
    made = [[] for _ in range(20 * YOUNG)]
    assert garbage() is not None
    collector.turn_ended(1000.0)
    assert garbage() is None
    assert made


def test_a_turn_collects_after_a_while_although_as_many_old_objects_go_as_new_ones_come(collector: Collector) -> None:
    old = [[] for _ in range(20 * YOUNG)]
    collector.start()
    collector.turn_ended(1000.0)
    new = []
    for _ in range(10 * YOUNG):
        new.append([])
        old.pop()
    assert len(gc.get_objects()) > 5 * YOUNG
    garbage = cycle()
    collector.turn_ended(1000.0 + SECONDS / 2)
    assert garbage() is not None
    collector.turn_ended(1000.0 + SECONDS)
    assert garbage() is None
    assert new


def test_a_collection_looks_at_no_more_the_more_there_is(collector: Collector) -> None:
    collector.start()
    made: list[list[list[object]]] = []
    most = 0
    for _ in range(200):
        made.append([[] for _ in range(YOUNG)])
        most = max(most, len(gc.get_objects()))  # except those that are frozen
        collector.turn_ended(1000.0)
    assert most < 10 * YOUNG


@pytest.mark.thorough
def test_what_becomes_garbage_late_is_found_when_all_is_looked_at(collector: Collector) -> None:
    collector.start()
    late = Cycle()
    garbage = weakref.ref(late)
    for seconds in range(2 * LAST_LOOKS):
        collector.turn_ended(float(seconds))
    del late
    collector.collect_all()
    assert garbage() is not None, "an idle controller does not look at everything again and again"
    for seconds in range(2 * LAST_LOOKS, 4 * LAST_LOOKS):
        collector.turn_ended(float(seconds))
    assert garbage() is not None
    collector.collect_all()
    assert garbage() is None
