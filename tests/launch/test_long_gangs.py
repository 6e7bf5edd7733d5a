"""Tests of the charges of gangs while they run."""

from __future__ import annotations

import pytest

from atoll.launch.long_gangs import LongGangs, settled
from atoll.state.gang_specs import GangSpec
from atoll.state.queued_nodes import Gang, HostCallKind
from atoll.state.session import GangRun
from tests.launch.gang_stand_ins import gang_of, spec

SECOND = 1_000_000_000


def charged(ticks: list[list[Gang[GangRun]]]) -> dict[int, int]:
    """Return the seconds that each gang is charged after ticks with these gangs in flight, one second apart.

    The first two ticks only find out which gangs were in flight and first on their devices.
    """
    long_gangs = LongGangs()
    for now, gangs in enumerate(ticks, start=1):
        long_gangs.tick(float(now), {gang.sequence: gang for gang in gangs})
    seen = {gang.sequence: gang for gangs in ticks for gang in gangs}
    for gang in seen.values():
        assert gang.run.launch.program.account.device_ns == gang.run.advance_ns
    return {number: gang.run.advance_ns // SECOND for number, gang in seen.items()}


def test_a_gang_is_charged_for_each_device_that_it_has_had_since_the_last_tick() -> None:
    both, behind = gang_of(1, spec({0: (0, 1)})), gang_of(2, spec({0: (0,)}))
    assert charged([[both, behind]] * 4) == {1: 4, 2: 0}


def test_a_gang_that_moves_up_is_charged_from_the_next_tick_on() -> None:
    first, behind = gang_of(1, spec({0: (0,)})), gang_of(2, spec({0: (0,)}))
    assert charged([*[[first, behind]] * 3, *[[behind]] * 2]) == {1: 1, 2: 1}


def test_hosts_that_have_ended_their_parts_are_not_charged() -> None:
    gang = gang_of(1, spec({0: (0,), 1: (0,)}))
    gang.run.hosts_left.discard(1)
    assert charged([[gang]] * 3) == {1: 1}


@pytest.mark.parametrize("made", [spec({0: (0,)}, host_call=HostCallKind.PYTHON), None])
def test_host_calls_and_delegated_runs_are_not_charged_and_take_no_device(made: GangSpec | None) -> None:
    first, behind = gang_of(1, made or spec({0: (0,)})), gang_of(2, spec({0: (0,)}))
    first.node.is_delegated = made is None
    assert charged([[first, behind]] * 3) == {1: 0, 2: 1}


def test_the_end_of_a_gang_charges_what_was_not_charged_in_advance() -> None:
    run = gang_of(1, spec({0: (0,)})).run
    run.advance_ns = 5
    assert settled(run, 3) == 0
    assert settled(run, 3) == 1
    assert settled(run, 3) == 3
