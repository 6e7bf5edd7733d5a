"""Device time of gangs, which never exceeds the time that has passed."""

from __future__ import annotations

import random

import pytest

from atoll.state.device_clocks import DeviceClocks

ALL, FIRST, LAST = {0: (0, 1)}, {0: (0,)}, {0: (1,)}


def test_gangs_on_the_same_devices_run_one_after_another():
    clocks = DeviceClocks()
    assert clocks.ended((0,), ALL, (0, 10))[0] == 20
    assert clocks.ended((0,), ALL, (2, 15))[0] == 10, "it was dispatched while the previous gang ran"
    assert clocks.ended((0,), ALL, (20, 25))[0] == 10


def test_gangs_on_different_devices_run_at_the_same_time():
    clocks = DeviceClocks()
    assert clocks.ended((0,), FIRST, (0, 10))[0] == 10
    assert clocks.ended((0,), LAST, (0, 10))[0] == 10
    assert clocks.ended((0,), ALL, (0, 15))[0] == 10


def test_a_gang_has_its_devices_once_the_last_of_them_is_free():
    clocks = DeviceClocks()
    assert clocks.ended((0,), FIRST, (0, 30))[0] == 30
    assert clocks.ended((0,), ALL, (0, 40))[0] == 20


def test_each_host_has_its_own_clock_which_restarts_with_it():
    clocks = DeviceClocks()
    devices = {0: (0,), 1: (0,)}
    assert clocks.ended((0, 1), devices, (0, 10, 1000, 1010))[0] == 20
    clocks.forget(1)
    assert clocks.ended((0, 1), devices, (10, 20, 0, 10))[0] == 20


def test_a_host_counts_as_much_as_its_gangs_are_charged_one_by_one():
    ends, apart, together = [(0, 10), (2, 15), (20, 25)], DeviceClocks(), DeviceClocks()
    for clocks in (apart, together):
        clocks.ended((0,), ALL, (0, 7))
    busy = [apart.ended((0,), ALL, each)[0] // 2 for each in ends]
    assert together.busy_together(0, (0, 1), sum(busy), 0, 7, 25) == sum(busy)
    assert apart.ended((0,), ALL, (20, 30))[0] == together.ended((0,), ALL, (20, 30))[0] == 10


def test_time_before_a_delegated_run_is_not_counted_for_it():
    clocks = DeviceClocks()
    clocks.ended((0,), ALL, (0, 7))
    assert clocks.busy_together(0, (0, 1), 20, 2, 0, 25) == 15, "the devices were busy until 7"
    assert clocks.busy_together(0, (0, 1), 1, 20, 0, 24) == 0


def test_devices_are_never_busy_for_longer_than_the_time_that_has_passed():
    rng, clocks, now, busy = random.Random(0), DeviceClocks(), 0, 0
    for _ in range(1000):
        now += rng.randrange(20)
        times, computes = (max(0, now - rng.randrange(50)), now), rng.random() < 0.6
        busy += clocks.ended((0,), rng.choice((ALL, FIRST, LAST)), times, computes)[0]
        assert busy <= 2 * now


def test_a_transfer_that_ends_during_a_computation_is_charged_its_own_time():
    clocks = DeviceClocks()
    small = [clocks.ended((0,), ALL, (each, each + 1), computes=False) for each in (50, 100, 150)]
    assert small == [(2, 1)] * 3
    assert clocks.ended((0,), ALL, (0, 200)) == (2 * (200 - 3), 200 - 3)


def test_a_computation_is_not_charged_for_a_transfer_that_it_waited_for():
    clocks = DeviceClocks()
    assert clocks.ended((0,), ALL, (0, 500), computes=False) == (1000, 500)
    assert clocks.ended((0,), ALL, (10, 520)) == (40, 20)


def test_a_long_transfer_is_charged_for_time_that_others_were_not_charged_for():
    clocks = DeviceClocks()
    assert clocks.ended((0,), ALL, (10, 20)) == (20, 10)
    assert clocks.ended((0,), ALL, (0, 50), computes=False) == (60, 30)
    assert clocks.ended((0,), LAST, (30, 60), computes=False) == (10, 10), "it began after the other transfer"


def test_a_computation_that_a_relay_reports_after_a_later_transfer_is_not_charged_for_the_time_of_both():
    clocks = DeviceClocks()
    assert clocks.ended((0,), ALL, (10, 50), computes=False) == (80, 40)
    assert clocks.ended((0,), ALL, (0, 20)) == (20, 10), "until the transfer began"
    assert clocks.ended((0,), ALL, (20, 60)) == (20, 10), "after the transfer had ended"


def test_a_transfer_is_remembered_for_its_other_devices_after_a_computation_on_some_of_them():
    clocks = DeviceClocks()
    assert clocks.ended((0,), ALL, (0, 10), computes=False) == (20, 10)
    assert clocks.ended((0,), LAST, (10, 20)) == (10, 10)
    assert clocks.ended((0,), FIRST, (0, 30))[0] == 20, "since the transfer had the first device until 10"


def test_a_delegated_run_is_not_charged_for_transfers_that_its_host_does_not_know_of():
    clocks = DeviceClocks()
    assert clocks.ended((0,), ALL, (0, 10), computes=False) == (20, 10)
    assert clocks.ended((0,), LAST, (0, 15), computes=False) == (5, 5)
    assert clocks.busy_together(0, (0, 1), 30, 5, 0, 35) == 20, "from 15 to 35"
    assert clocks.ended((0,), ALL, (20, 40), computes=False) == (10, 5), "what it was charged for is not free again"


def test_a_delegated_run_with_pauses_is_charged_in_full_beside_a_transfer():
    clocks = DeviceClocks()
    assert clocks.ended((0,), ALL, (0, 10), computes=False) == (20, 10)
    assert clocks.busy_together(0, (0, 1), 12, 0, 0, 30) == 12


@pytest.mark.parametrize("seed", range(20))
def test_hosts_that_report_together_are_charged_as_one_by_one(seed: int) -> None:
    """Some have had a transfer, other devices, or a later end before."""
    rng, together, apart, now = random.Random(seed), DeviceClocks(), DeviceClocks(), 0
    for _ in range(300):
        now += rng.randrange(20)
        hosts = tuple(rng.sample(range(6), rng.randint(1, 6)))
        devices = {host: (0,) if rng.random() < 0.05 else (0, 1)[: 1 + host % 2] for host in hosts}
        times = tuple(each for _ in hosts for each in (max(0, now - rng.randrange(60)), now - rng.randrange(10)))
        computes = rng.random() < 0.9
        found = [apart.ended((host,), devices, times[2 * i :][:2], computes) for i, host in enumerate(hosts)]
        expected = sum(took for took, _ in found), max(longest for _, longest in found)
        assert together.ended(hosts, devices, times, computes) == expected
