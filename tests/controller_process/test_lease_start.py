"""A controller acquires its lease before it begins, and not with the journal of an earlier holder."""

from __future__ import annotations

import asyncio
import os

import pytest

from atoll.cluster.settings import ClusterSettings
from atoll.controller_process.controller_options import ControllerOptions, SupersededError
from atoll.controller_process.lease_start import acquire_lease, keeper_of, release
from atoll.errors import LeaseError
from atoll.leadership.election import Claim
from atoll.leadership.lease_keeper import LeaseKeeper
from atoll.leadership.lease_record import LeaseRecord
from tests.leadership.lease_in_memory import Clock, LeaseInMemory

OPTIONS = ControllerOptions("", ClusterSettings("1x1x1"), 1)


def test_a_cluster_without_a_lease_has_no_keeper():
    assert keeper_of(OPTIONS) is None


def test_a_lease_is_acquired_before_the_controller_begins_and_released_after_its_end():
    async def main() -> None:
        store = LeaseInMemory()
        keeper = LeaseKeeper(store, "one", Clock())
        await acquire_lease(keeper, Claim(), OPTIONS, asyncio.Event())
        assert store.record.holder == "one"
        await release(keeper, is_free=True)
        assert store.record.holder == ""

    asyncio.run(main())


def test_a_controller_with_the_journal_of_an_earlier_holder_ends_as_superseded_and_says_why():
    async def main() -> None:
        store = LeaseInMemory()
        store.write(LeaseRecord("two", 2), "")
        readable, writable = os.pipe()
        try:
            options = ControllerOptions("", ClusterSettings("1x1x1"), 1, ready_fd=writable)
            with pytest.raises(SupersededError, match="the controller of term 2000 has taken over"):
                await acquire_lease(LeaseKeeper(store, "one", Clock()), Claim(1), options, asyncio.Event())
            assert os.read(readable, 1000).startswith(b"cannot two has acquired the lease of a test since")
        finally:
            os.close(readable)
            os.close(writable)

    asyncio.run(main())


def test_a_controller_that_is_ended_while_it_waits_for_its_lease_does_not_begin():
    async def main() -> None:
        store = LeaseInMemory()
        store.write(LeaseRecord("two"), "")
        stop = asyncio.Event()
        stop.set()
        with pytest.raises(LeaseError):
            await acquire_lease(LeaseKeeper(store, "one", Clock()), Claim(), OPTIONS, stop)
        assert store.record.holder == "two"

    asyncio.run(main())
