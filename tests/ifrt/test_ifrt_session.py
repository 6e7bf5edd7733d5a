"""When a client is held back, and what it owns."""

from __future__ import annotations

import pytest

from atoll.errors import StatusError
from atoll.ifrt.ifrt_session import FIRST_MINTED_HANDLE
from atoll.protocol import messages as m
from tests.ifrt.rig import Rig
from tests.session.fake_cluster import WINDOW


def launch(rig: Rig) -> None:
    rig.session.launch(1, (), ())


def test_a_full_window_holds_the_client_back_until_it_is_half_empty(rig: Rig):
    for _ in range(WINDOW - 1):
        launch(rig)
    assert not rig.paused
    launch(rig)
    launch(rig)  # a request may launch several
    assert rig.paused
    for returned in range(WINDOW // 2 + 1):
        assert rig.paused, returned
        rig.receive(m.CreditReturned(1))
    assert not rig.paused


def test_a_quiesced_session_holds_the_client_back(rig: Rig):
    rig.receive(m.Quiesce(1))
    assert rig.paused
    rig.receive(m.Migrated(1, ()))
    assert not rig.paused


@pytest.mark.parametrize("window_first", [False, True])
def test_a_client_goes_on_when_neither_the_window_nor_a_migration_holds_it_back(rig: Rig, window_first: bool):
    ends = [m.CreditReturned(WINDOW), m.Migrated(1, ())]
    for _ in range(WINDOW):
        launch(rig)
    rig.receive(m.Quiesce(1))
    rig.receive(ends[not window_first])
    assert rig.paused
    rig.receive(ends[window_first])
    assert not rig.paused


@pytest.mark.parametrize(
    ("given", "count", "text"),
    [
        ([1], 2, "1 handles for 2"),
        ([1, 1], 2, "2 handles for 2"),
        ([0], 1, "0 is no handle"),
        ([FIRST_MINTED_HANDLE], 1, "is no handle"),
    ],
)
def test_handles_that_a_client_cannot_choose_are_refused(rig: Rig, given, count, text):
    with pytest.raises(StatusError, match=text):
        rig.session.handles(given, count)


def test_a_client_that_chooses_no_handles_gets_fresh_ones(rig: Rig):
    assert rig.session.handles([], 2) == [FIRST_MINTED_HANDLE, FIRST_MINTED_HANDLE + 1]


def test_a_future_is_asked_about_once(rig: Rig):
    handle = rig.session.add_future()
    rig.session.take_future(handle)
    with pytest.raises(StatusError, match="unknown future"):
        rig.session.take_future(handle)
