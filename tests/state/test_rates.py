"""Token buckets: what a tenant may use per second besides device time."""

from __future__ import annotations

import pytest

from atoll.state.rates import Bucket


def test_a_bucket_goes_into_debt_and_says_how_long_that_takes_to_pay():
    bucket = Bucket(2.0, 10.0)
    bucket.take(20.0, 0.0)
    assert bucket.wait(0.0) == 0.0
    bucket.take(4.0, 0.0)
    assert bucket.wait(0.0) == 2.0
    assert bucket.wait(1.5) == 0.5
    assert bucket.wait(2.0) == 0.0


def test_a_bucket_holds_no_more_than_its_burst():
    bucket = Bucket(2.0, 10.0)
    bucket.take(1.0, 1000.0)
    bucket.take(19.0, 1000.0)
    assert bucket.wait(1000.0) == 0.0
    bucket.take(1.0, 1000.0)
    assert bucket.wait(1000.0) == 0.5


def test_without_a_rate_nothing_waits():
    bucket = Bucket(0.0, 10.0)
    bucket.take(1e12, 0.0)
    assert bucket.wait(0.0) == 0.0


@pytest.mark.parametrize(("rate", "wait"), [(0.0, 0.0), (1.0, 5.0), (5.0, 1.0)])
def test_another_rate_keeps_the_debt(rate: float, wait: float):
    bucket = Bucket(2.0, 10.0)
    bucket.take(25.0, 0.0)
    bucket.changed(rate)
    assert bucket.wait(0.0) == wait


def test_a_new_limit_begins_with_a_full_bucket():
    bucket = Bucket(0.0, 10.0)
    bucket.take(1e12, 0.0)
    bucket.changed(2.0)
    bucket.take(20.0, 0.0)
    assert bucket.wait(0.0) == 0.0
