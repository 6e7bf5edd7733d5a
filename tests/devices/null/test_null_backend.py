"""Tests of which work each of a host's null devices waits for."""

from __future__ import annotations

from atoll.devices.null.model import MODELS
from atoll.devices.null.null_backend import Collectives, NullBackend
from atoll.devices.null.sim_events import SimTask
from tests.devices.null.test_sim_events import HandClock


def ends(*work: tuple[tuple[int, ...], float]) -> list[float | None]:
    """Return when each of these runs ends, given its devices and seconds, if they start in this order at time 0."""
    clock = HandClock()
    backend = NullBackend(0, 4, MODELS["instant"], clock, Collectives())
    begun = []
    for devices, seconds in work:
        each = SimTask(clock, seconds)
        backend.begin(devices, each, ())
        begun.append(each)
    return [each.at for each in begun]


def test_a_device_does_one_thing_after_the_other():
    assert ends(((0, 1), 1.0), ((0, 1), 2.0), ((0, 1), 4.0)) == [1.0, 3.0, 7.0]


def test_other_devices_do_not_wait():
    assert ends(((0, 1), 1.0), ((2, 3), 2.0), ((0, 1), 4.0)) == [1.0, 2.0, 5.0]


def test_work_on_devices_that_did_different_things_waits_for_the_last_of_them():
    assert ends(((0, 1), 1.0), ((1, 2), 2.0), ((0, 1, 2, 3), 4.0), ((3,), 1.0)) == [1.0, 3.0, 7.0, 8.0]
