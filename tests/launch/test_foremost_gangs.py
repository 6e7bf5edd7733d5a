"""Tests of the gangs that others in flight wait for."""

from __future__ import annotations

import pytest

from atoll.cluster.topology import IslandShape
from atoll.launch.foremost_gangs import foremost_gangs, with_foremost
from atoll.state.queued_nodes import Gang, HostCallKind
from atoll.state.session import GangRun
from tests.launch.gang_stand_ins import gang_of, spec


def ahead(gangs: list[Gang[GangRun]], platform: str = "cpu") -> list[int]:
    """Return for each gang the number of the gang that it waits for, or 0."""
    found = with_foremost(gangs, [IslandShape(2, 2, platform)])
    return [0 if first is None else first.sequence for _, first in found]


def test_a_gang_is_foremost_if_it_is_the_first_on_all_hosts_where_it_has_not_ended() -> None:
    gangs = [gang_of(1, spec({0: (0,)})), gang_of(2, spec({0: (0,), 1: (0,)})), gang_of(3, spec({1: (0,)}))]
    assert [gang.sequence for gang in foremost_gangs(gangs)] == [1]
    gangs[1].run.hosts_left.discard(0)
    assert [gang.sequence for gang in foremost_gangs(gangs)] == [1, 2]
    gangs[1].run.hosts_left.clear()
    assert [gang.sequence for gang in foremost_gangs(gangs)] == [1, 2, 3]


def test_a_gang_waits_for_the_one_that_the_others_on_its_hosts_wait_for() -> None:
    gangs = [gang_of(1, spec({0: (0,)})), gang_of(2, spec({0: (0,), 1: (0,)})), gang_of(3, spec({1: (0,)}))]
    assert ahead(gangs) == [0, 1, 1], "2 waits for 1, and 3 behind it"


@pytest.mark.parametrize(
    ("call", "platform", "expected"),
    [
        (HostCallKind.CLIENT, "cpu", [0, 0, 1]),
        (HostCallKind.CLIENT, "cuda", [0, 1, 1]),
        (HostCallKind.PYTHON, "cuda", [0, 0, 0]),
        (None, "cpu", [0, 1, 1]),
    ],
)
def test_a_gang_that_calls_python_holds_up_only_those_that_wait_meanwhile(
    call: HostCallKind | None, platform: str, expected: list[int]
) -> None:
    """On CPUs, gangs on one device run while the client's Python does, and gangs on several devices wait."""
    of_several = {0: (0, 1)}
    gangs = [
        gang_of(1, spec(of_several, host_call=call)),
        gang_of(2, spec({0: (0,)}, host_call=HostCallKind.PYTHON)),
        gang_of(3, spec(of_several, host_call=HostCallKind.PYTHON)),
    ]
    assert ahead(gangs, platform) == expected
