"""Tests of when work on null devices ends: after its dependencies, and after it has started on all hosts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from atoll.devices.null.model import MODELS
from atoll.devices.null.sim_events import SimEvent, SimTask, all_of


class HandClock:
    """Clock that a test advances."""

    def __init__(self) -> None:
        self.time = 0.0
        self.calls: list[tuple[float, Callable[[], None]]] = []

    def now(self) -> float:
        return self.time

    def call_at(self, when: float, call: Callable[[], None]) -> None:
        self.calls.append((when, call))

    def go_to(self, time: float) -> None:
        self.time = time
        due, self.calls = [c for c in self.calls if c[0] <= time], [c for c in self.calls if c[0] > time]
        for _, call in sorted(due, key=lambda each: each[0]):
            call()


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


def test_work_ends_so_long_after_it_has_begun(clock: HandClock) -> None:
    clock.time = 5.0
    work = SimTask(clock, 2.0)
    work.join(())
    assert work.at == 7.0


def test_work_begins_when_what_it_waits_for_is_over(clock: HandClock) -> None:
    before = SimEvent(clock, 3.0)
    work = SimTask(clock, 2.0)
    work.join((before,))
    assert work.at == 5.0
    assert not work.is_over
    clock.time = 5.0
    assert work.is_over


def test_work_over_several_hosts_begins_with_the_last_of_them(clock: HandClock) -> None:
    work = SimTask(clock, 1.0, parts=2)
    work.join(())
    assert work.at is None
    clock.time = 4.0
    work.join(())
    assert work.at == 5.0


def test_what_waits_for_work_that_not_all_have_begun_is_known_with_it(clock: HandClock) -> None:
    first = SimTask(clock, 1.0, parts=2)
    first.join(())
    second = SimTask(clock, 1.0)
    second.join((first,))
    assert second.at is None
    clock.time = 4.0
    first.join(())
    assert second.at == 6.0


def test_parts_that_wait_for_the_same_are_over_once_each_of_them_is_there(clock: HandClock) -> None:
    first = SimTask(clock, 1.0, parts=2)
    both = SimTask(clock, 1.0, parts=2)
    both.join((first,))
    first.join(())
    both.join((first,))
    assert first.at is None
    first.join(())
    assert (first.at, both.at) == (1.0, 2.0)


def test_callbacks_run_at_the_end_whenever_they_were_added(clock: HandClock) -> None:
    called: list[str] = []
    work = SimTask(clock, 2.0, parts=2)
    work.join(())
    work.when_over(lambda: called.append("added before it was known"))
    work.join(())
    work.when_over(lambda: called.append("added after"))
    clock.go_to(1.9)
    assert called == []
    clock.go_to(2.0)
    assert called == ["added before it was known", "added after"]
    work.when_over(lambda: called.append("added when it was over"))
    clock.go_to(2.1)
    assert called[2:] == ["added when it was over"]


def test_all_of_several_is_over_with_the_last(clock: HandClock) -> None:
    assert all_of(clock, [SimEvent(clock, 1.0), SimEvent(clock, 3.0), SimEvent(clock, 2.0)]).at == 3.0


def test_an_all_reduce_takes_longer_with_more_bytes_and_with_more_devices() -> None:
    model = MODELS["tpu-v3"]
    assert model.all_reduce_seconds(4, 1) == 0.0
    assert 0 < model.all_reduce_seconds(4, 8) < model.all_reduce_seconds(4, 2048) < 1e-4
    large = model.all_reduce_seconds(1 << 30, 8)
    assert large == pytest.approx(2 * (1 << 30) * 7 / 8 / 70e9, rel=0.01)
