"""Tests that a controller acquires its lease before it starts, and does not start with the journal of an earlier
holder.
"""

from __future__ import annotations

import asyncio
import os

import msgspec
import pytest

from atoll.cluster.settings import ClusterSettings
from atoll.controller_process.controller_main import serve
from atoll.controller_process.controller_options import ControllerFailedError, ControllerOptions
from atoll.controller_process.lease_start import acquire_lease, lease_of
from atoll.errors import AtollError, LeaseError, SupersededError
from atoll.leadership.election import Claim
from atoll.leadership.lease_keeper import LeaseKeeper
from atoll.leadership.lease_record import LeaseRecord
from tests.leadership.lease_in_memory import Clock, LeaseInMemory

OPTIONS = ControllerOptions("", ClusterSettings("1x1x1"), 1)
LEASED = msgspec.structs.replace(OPTIONS, lease="etcd://one:2379/atoll", lease_holder="one")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> LeaseInMemory:
    """Return the lease, for any address."""
    store = LeaseInMemory()
    monkeypatch.setattr("atoll.controller_process.lease_start.open_lease", lambda address: store)
    return store


def test_a_cluster_without_a_lease_has_no_keeper():
    async def main() -> None:
        async with lease_of(OPTIONS) as keeper:
            assert keeper is None

    asyncio.run(main())


def test_a_lease_is_acquired_before_the_controller_begins_and_released_after_its_end(store):
    async def main() -> None:
        async with lease_of(LEASED) as keeper:
            assert keeper is not None
            await acquire_lease(keeper, Claim(), LEASED, asyncio.Event())
            assert store.record.holder == "one"
        assert store.record.holder == ""

    asyncio.run(main())


@pytest.mark.parametrize("error", [ControllerFailedError, SupersededError])
def test_a_lease_is_not_released_if_another_process_of_the_cluster_continues(store, error):
    async def main() -> None:
        async with lease_of(LEASED) as keeper:
            await acquire_lease(keeper, Claim(), LEASED, asyncio.Event())
            raise error("it continues elsewhere")

    with pytest.raises(error):
        asyncio.run(main())
    assert store.record.holder == "one"


def test_a_controller_that_cannot_listen_releases_its_lease(store, tmp_path):
    options = msgspec.structs.replace(LEASED, listen=f"unix:{tmp_path / 'none' / 'socket'}", parent=os.getpid())
    with pytest.raises(AtollError, match="cannot listen"):
        asyncio.run(serve(options, asyncio.Event()))
    assert (store.record.holder, store.record.transitions) == ("", 0)


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
