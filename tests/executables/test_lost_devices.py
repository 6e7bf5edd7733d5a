"""Tests of which devices compile a function in place of lost ones."""

from __future__ import annotations

from atoll.executables.lost_devices import replace_islands
from atoll.protocol.messages import VirtualDevice
from tests.session.fake_cluster import welcome

DEVICES = welcome(hosts=3, devices_per_host=2).devices  # three islands with one host each


def test_devices_of_a_lost_island_are_replaced_by_position():
    assert replace_islands(((5,), (4,)), DEVICES, {2}) == ((1,), (0,))


def test_devices_of_other_islands_stay():
    assert replace_islands(((0, 1, 2, 3),), DEVICES, {1}) == ((0, 1, 4, 5),)


def test_a_lost_island_is_not_a_replacement():
    assert replace_islands(((4,),), DEVICES, {0, 2}) == ((2,),)


def test_there_is_no_replacement_if_all_islands_are_used():
    assert replace_islands(((0, 2, 4),), DEVICES, {1}) is None


def test_an_assignment_without_lost_islands_has_no_replacement():
    assert replace_islands(((0,),), DEVICES, {1}) is None


def test_an_island_of_another_shape_is_not_a_replacement():
    two_hosts = tuple(VirtualDevice(each.id, min(each.island, 1), each.host, each.info) for each in DEVICES)
    assert replace_islands(((0,),), two_hosts, {0}) is None
