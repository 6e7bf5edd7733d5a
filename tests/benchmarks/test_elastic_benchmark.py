"""Tests of how the benchmark of elastic trainings evaluates the lines of its processes."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.elastic.timeline import Phase, describe


def step(at: float, number: int, devices: int) -> dict[str, Any]:
    return {"what": "step", "at": at, "step": number, "devices": devices}


def test_a_phase_is_described_by_its_steps() -> None:
    lines = [step(9.0, 4, 4), step(9.5, 5, 4)]
    lines += [step(13.0, 4, 3), step(13.5, 5, 3), step(14.0, 6, 3), step(14.5, 7, 3), step(20.0, 8, 2)]
    found = describe(Phase("one lost", 3, began=10.0, ended=15.0), lines)
    assert found == {
        "happened": "one lost",
        "devices": 3,
        "seconds_until_on_them": 3.0,
        "longest_pause_seconds": 3.5,
        "steps_a_second": 2.0,
        "steps_again": 2,
        "steps": 2,
    }


def test_steps_that_a_run_repeats_without_a_word_are_counted_by_what_it_says_of_its_changes() -> None:
    change = {"what": "change", "at": 11.0, "repeated": 7}
    found = describe(Phase("one lost", 3, 10.0, 15.0), [step(9.0, 4, 4), change, step(12.0, 5, 3)])
    assert found["steps_again"] == 7
    assert found["steps_a_second"] is None


@pytest.mark.parametrize("devices", [4, 2])
def test_a_phase_without_a_step_on_its_devices_says_so(devices: int) -> None:
    assert describe(Phase("lost", devices, 10.0, 15.0), [step(12.0, 5, 3)])["seconds_until_on_them"] is None
