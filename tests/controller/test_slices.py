"""Tests of slices: what sessions learn about them, and what is on the devices of a slice."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.cluster.locations import DeviceLocation
from atoll.cluster.slice_requests import SliceRequest
from atoll.cluster.virtual_devices import Slice
from atoll.errors import OK, Code
from atoll.protocol import messages as m
from atoll.telemetry.report import report
from atoll.telemetry.snapshot import SliceSnapshot
from tests.controller.play import Play


def add(play: Play, **slice_request: Any) -> m.SliceAdded:
    (added,) = play.send(m.AddSlice(7, SliceRequest(**slice_request)))
    assert isinstance(added, m.SliceAdded)
    return added


def test_a_session_receives_its_slice_and_where_its_devices_are():
    play = Play("2x1x4", mesh="2x2")
    assert add(play, count=2, shape=(2,)) == m.SliceAdded(7, OK, 1, (0, 1), (2,), ((0, 0), (1, 0)))
    hosts = tuple((device, 1) for device in range(4, 8))
    assert add(play, count=4, shape=(2, 2)) == m.SliceAdded(7, OK, 2, (4, 5, 6, 7), (2, 2), hosts)


def test_a_slice_request_that_cannot_be_met_is_refused_at_once():
    play = Play("1x1x2")
    refused = add(play, count=3)
    assert refused.status.code == Code.RESOURCE_EXHAUSTED
    assert "island 0: 0, 1" in refused.status.message
    contradiction = add(play, count=3, shape=(2,))
    assert contradiction.status.code == Code.INVALID_ARGUMENT


def test_devices_have_the_coordinates_of_the_declared_mesh():
    play = Play("1x2x2", mesh="2x2")
    session = play.controller.sessions[play.session]
    assert [device.info.coords for device in session.devices.virtual] == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]


@pytest.mark.parametrize(("used", "host_and_place"), [(False, 1), (True, 0)])
def test_a_virtual_device_that_something_was_made_for_keeps_its_location(used: bool, host_and_place: int):
    play = Play("1x4x1")
    for _ in range(2):  # two slices of other sessions on the first device
        other = play.open(43, "other.py").number
        play.controller.slices.sessions[other].slices[1] = Slice(1, (0,), (1,), False)
    play.outbox()
    if used:
        play.with_put(device=0)
    assert set(add(play, count=3).devices) == {1, 2, 3}
    assert add(play, count=1).hosts == ((0, host_and_place),)


def test_a_released_slice_makes_room():
    play = Play("1x1x2")
    add(play, count=2)
    assert add(play, count=2).status.code == Code.RESOURCE_EXHAUSTED
    assert play.send(m.ReleaseSlice(1)) == []
    assert add(play, count=2).devices == (0, 1)
    assert play.send(m.ReleaseSlice(1)) == []  # the second release has no effect
    assert play.send(m.ReleaseSlice(99)) == []


def test_slices_of_a_session_that_has_ended_are_no_load():
    play = Play("1x1x4")
    other = play.open(43, "other.py").number
    play.proxy(other, m.AddSlice(1, SliceRequest(2)))
    play.close(other)
    play.outbox()
    assert add(play, count=2).devices == (0, 1)


def test_what_lies_on_a_virtual_device_is_where_that_sits():
    play = Play("1x2x1")
    devices = play.controller.sessions[play.session].devices
    devices.relocate({0: DeviceLocation(0, 1, 0), 1: DeviceLocation(0, 0, 0)})
    play.with_put(2, device=0)
    play.report(1, m.FeedsArrived(play.session, (90,)))
    play.proxy(play.session, m.Launch(2, (), (5,), (90,)))
    ((to, run),) = play.sent()
    assert to == ("host", 1)
    assert isinstance(run, m.Run)


def test_a_function_over_devices_that_were_put_on_two_islands_runs_on_both():
    play = Play("2x1x2")
    play.controller.sessions[play.session].devices.relocate({1: DeviceLocation(1, 1, 0)})
    (serve,) = play.send(m.RegisterFunction(7, "hash", 90, ((0, 1),)))
    assert (type(serve), serve.ranks) == (m.JoinWorld, 2)


def test_a_function_over_two_virtual_devices_on_one_device_is_refused():
    play = Play("1x1x2")
    play.controller.sessions[play.session].devices.relocate({1: DeviceLocation(0, 0, 0)})
    (ready,) = play.send(m.RegisterFunction(7, "hash", 90, ((0, 1),)))
    assert "share a physical one" in ready.status.message


def test_the_report_says_which_physical_devices_a_slice_has():
    play = Play("2x1x2")
    add(play, count=2)
    devices = play.controller.sessions[play.session].devices
    devices.relocate({0: DeviceLocation(1, 1, 0), 1: DeviceLocation(1, 1, 1), 3: DeviceLocation(0, 0, 0)})
    (session,) = report(play.controller).sessions
    assert session.slices == (SliceSnapshot(id=1, shape=(2,), island=1, virtual=(0, 1), physical=(2, 3)),)
    assert session.moved == {"3": 0}
