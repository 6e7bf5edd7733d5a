"""How long gangs have devices: never more than there is time."""

from __future__ import annotations

import random

from atoll.state.device_clocks import DeviceClocks

ALL, FIRST, LAST = {0: (0, 1)}, {0: (0,)}, {0: (1,)}


def test_one_after_another_on_the_same_devices():
    clocks = DeviceClocks()
    assert clocks.ended((0,), ALL, (0, 10))[0] == 20
    assert clocks.ended((0,), ALL, (2, 15))[0] == 10, "it was dispatched while the one before ran"
    assert clocks.ended((0,), ALL, (20, 25))[0] == 10


def test_at_once_on_different_devices():
    clocks = DeviceClocks()
    assert clocks.ended((0,), FIRST, (0, 10))[0] == 10
    assert clocks.ended((0,), LAST, (0, 10))[0] == 10
    assert clocks.ended((0,), ALL, (0, 15))[0] == 10


def test_a_gang_has_its_devices_once_the_last_of_them_is_free():
    clocks = DeviceClocks()
    assert clocks.ended((0,), FIRST, (0, 30))[0] == 30
    assert clocks.ended((0,), ALL, (0, 40))[0] == 20


def test_hosts_have_clocks_of_their_own_and_start_anew():
    clocks = DeviceClocks()
    devices = {0: (0,), 1: (0,)}
    assert clocks.ended((0, 1), devices, (0, 10, 1000, 1010))[0] == 20
    clocks.forget(1)
    assert clocks.ended((0, 1), devices, (10, 20, 0, 10))[0] == 20


def test_what_a_host_has_counted_is_what_each_of_its_gangs_would_have_been_charged():
    ends, apart, together = [(0, 10), (2, 15), (20, 25)], DeviceClocks(), DeviceClocks()
    for clocks in (apart, together):
        clocks.ended((0,), ALL, (0, 7))
    busy = [apart.ended((0,), ALL, each)[0] // 2 for each in ends]
    assert together.busy_together(0, (0, 1), sum(busy), 0, 7, 25) == sum(busy)
    assert apart.ended((0,), ALL, (20, 30))[0] == together.ended((0,), ALL, (20, 30))[0] == 10


def test_a_host_does_not_count_what_ran_there_before_its_delegated_run():
    clocks = DeviceClocks()
    clocks.ended((0,), ALL, (0, 7))
    assert clocks.busy_together(0, (0, 1), 20, 2, 0, 25) == 15, "the devices were free at 7 only"
    assert clocks.busy_together(0, (0, 1), 1, 20, 0, 24) == 0


def test_devices_are_never_busy_for_longer_than_there_is_time():
    rng, clocks, now, busy = random.Random(0), DeviceClocks(), 0, 0
    for _ in range(1000):
        now += rng.randrange(20)
        times, computes = (max(0, now - rng.randrange(50)), now), rng.random() < 0.6
        busy += clocks.ended((0,), rng.choice((ALL, FIRST, LAST)), times, computes)[0]
        assert busy <= 2 * now


def test_a_transfer_that_ends_while_something_computes_takes_no_more_than_its_own_time():
    clocks = DeviceClocks()
    small = [clocks.ended((0,), ALL, (each, each + 1), computes=False) for each in (50, 100, 150)]
    assert small == [(2, 1)] * 3
    assert clocks.ended((0,), ALL, (0, 200)) == (2 * (200 - 3), 200 - 3)


def test_what_computes_is_not_charged_for_the_transfer_that_it_waited_for():
    clocks = DeviceClocks()
    assert clocks.ended((0,), ALL, (0, 500), computes=False) == (1000, 500)
    assert clocks.ended((0,), ALL, (10, 520)) == (40, 20)


def test_a_long_transfer_is_charged_for_what_others_have_left_of_its_time():
    clocks = DeviceClocks()
    assert clocks.ended((0,), ALL, (10, 20)) == (20, 10)
    assert clocks.ended((0,), ALL, (0, 50), computes=False) == (60, 30)
    assert clocks.ended((0,), LAST, (30, 60), computes=False) == (10, 10), "after the other"
