"""Tests of the ranges of numbers that several processes choose."""

from __future__ import annotations

from itertools import pairwise

import pytest

from atoll.protocol import number_ranges


@pytest.mark.parametrize("suffix", ["HANDLES", "FEEDS", "DEVICES"])
def test_ranges_of_one_kind_are_disjoint_and_fit_signed_numbers_of_64_bits(suffix: str):
    ranges = sorted(
        (each for name, each in vars(number_ranges).items() if name.endswith(suffix)), key=lambda each: each.start
    )
    assert len(ranges) > 1
    assert all(before.stop <= after.start for before, after in pairwise(ranges))
    assert ranges[-1].stop <= 1 << 63


def test_every_range_is_of_a_kind():
    names = [name for name, each in vars(number_ranges).items() if isinstance(each, range)]
    assert all(name.endswith(("HANDLES", "FEEDS", "DEVICES")) for name in names)


def test_the_first_handle_of_the_controller_is_found_among_those_of_a_session() -> None:
    clients, proxies = number_ranges.CLIENT_HANDLES, number_ranges.PROXY_HANDLES
    valid = [clients[0], proxies[-1], clients[-1], proxies[0]]
    assert number_ranges.first_of_others(valid) is None
    assert number_ranges.first_of_others([]) is None
    for other in (-1, number_ranges.LOOP_HANDLES[0], number_ranges.SHARED_HANDLES[-1], proxies.stop):
        assert not number_ranges.is_client_handle(other)
        assert number_ranges.first_of_others([*valid, other, -2]) == other
