"""The token buckets that limit rates of tenants."""

from __future__ import annotations

import pytest

from atoll.state.rates import Bucket


def test_a_bucket_in_debt_returns_the_seconds_until_it_is_paid():
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


def test_a_bucket_without_a_rate_has_no_debt():
    bucket = Bucket(0.0, 10.0)
    bucket.take(1e12, 0.0)
    assert bucket.wait(0.0) == 0.0


@pytest.mark.parametrize(("rate", "wait"), [(0.0, 0.0), (1.0, 5.0), (5.0, 1.0)])
def test_a_debt_stays_when_the_rate_changes(rate: float, wait: float):
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
