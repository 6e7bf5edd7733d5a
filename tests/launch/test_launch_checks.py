"""Tests of the checks of a launch that need no cluster: the session's window, and islands that are lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from atoll.cluster.lifecycle import Island, IslandState
from atoll.errors import Code, Status, StatusError
from atoll.launch.launch_checks import LAUNCH_WINDOW, MAX_UNWANTED, check_window, island_problem
from atoll.protocol import messages as m
from atoll.state.session import Session

LOST = Status(int(Code.UNAVAILABLE), "island 0 has failed")
GONE = Status(int(Code.UNAVAILABLE), "island 0 is not restarted")


def session(credits: int = 0, unwanted: int = 0, waits: bool = False) -> Session:
    """Return a session with so many credits in use, whose program 7 costs 3."""
    feeds = SimpleNamespace(unwanted=range(unwanted))
    return cast(Session, SimpleNamespace(credits=credits, feeds=feeds, costs={7: 3}, waits_for_islands=waits))


def launch(program: int = 1, credits: int = 1) -> m.Launch:
    return m.Launch(program, (), (), (), credits=credits)


@pytest.mark.parametrize(("before", "message"), [(0, launch()), (LAUNCH_WINDOW, launch()), (0, launch(7, 3))])
def test_a_launch_within_the_window_is_admitted(before: int, message: m.Launch) -> None:
    check_window(session(before), message)


def test_launches_that_were_on_their_way_may_exceed_the_window_once() -> None:
    check_window(session(LAUNCH_WINDOW + 1), launch(credits=LAUNCH_WINDOW - 1))
    with pytest.raises(StatusError, match=f"{LAUNCH_WINDOW + 1} of {LAUNCH_WINDOW} launches in flight"):
        check_window(session(LAUNCH_WINDOW + 1), launch(credits=LAUNCH_WINDOW))


def test_a_launch_larger_than_the_window_is_admitted_if_no_other_is_in_flight() -> None:
    check_window(session(), launch(credits=5 * LAUNCH_WINDOW))


@pytest.mark.parametrize(("program", "credits"), [(1, 0), (7, 2)])
def test_a_launch_takes_the_credits_that_its_program_costs(program: int, credits: int) -> None:
    with pytest.raises(StatusError, match=f"not the {credits} that its proxy says"):
        check_window(session(), launch(program, credits))


def test_a_session_that_does_not_send_what_failed_launches_need_is_refused() -> None:
    check_window(session(unwanted=MAX_UNWANTED), launch())
    with pytest.raises(StatusError, match="has not sent") as refused:
        check_window(session(unwanted=MAX_UNWANTED + 1), launch())
    assert refused.value.status.code == Code.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("state", "waits", "expected"),
    [
        (IslandState.READY, False, None),
        (IslandState.RESTARTING, False, LOST),
        (IslandState.RESTARTING, True, None),
    ],
)
def test_a_session_fails_on_an_island_that_restarts_unless_it_waits(
    state: IslandState, waits: bool, expected: Any
) -> None:
    island = Island(0, state)
    island.last_failure = LOST
    assert island_problem(session(waits=waits), island) == expected


def test_a_session_fails_on_a_removed_island_even_if_it_waits() -> None:
    island = Island(0, IslandState.REMOVED)
    island.last_failure = GONE
    assert island_problem(session(waits=True), island) == GONE
