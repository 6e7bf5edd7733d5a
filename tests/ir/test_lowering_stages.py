"""Tests of the last stages of lowering: placement, and the steps of hosts for transfers."""

from __future__ import annotations

import pytest

from atoll.cluster.locations import DeviceLocation, Placement
from atoll.errors import Code, StatusError
from atoll.ir.geometry import Located
from atoll.ir.place import place
from atoll.ir.steps import finish
from atoll.ir.text import render_lowered
from tests.ir.program_text import parse

# Two islands of one host with two devices each, and one island of two hosts with one device each.
LOCATIONS = [
    DeviceLocation(0, 0, 0),
    DeviceLocation(0, 0, 1),
    DeviceLocation(1, 1, 0),
    DeviceLocation(1, 1, 1),
    DeviceLocation(2, 2, 0),
    DeviceLocation(2, 3, 0),
]
PLACEMENT: Placement = dict(enumerate(LOCATIONS))

A = "!atoll.array<int8[4], devices = [0:2], tiled = [2]>"
B = "!atoll.array<int8[4], devices = [2:4], tiled = [2]>"
C = "!atoll.array<int8[4], devices = [4:6], tiled = [2]>"
WHOLE = "!atoll.array<int8[4], devices = [4:6]>"
SWAPPED = "!atoll.array<int8[4], devices = [1, 0], tiled = [2]>"


def module(body: str, argument: str, feeds: int = 0) -> str:
    return f"builtin.module {{ atoll.program @f(%0: {argument}) feeds {feeds} {{ {body} }} }}"


def test_placing_gives_arrays_calls_and_completions_their_hosts():
    body = f"""
        %1, %2 = atoll.call @g(%0) on [4, 5] donate [0] : {C}, !atoll.completion
        %3 = atoll.transfer %1 : {B}
        %4 = atoll.get %3 feed 0 : !atoll.completion
        atoll.return (%2, %4)
        """
    placed = finish(place(parse(module(body, C, 1), ["g"]), PLACEMENT))
    places = [each.locations if isinstance(each, Located) else each for each in placed.values]
    at_b, at_c = tuple(LOCATIONS[2:4]), tuple(LOCATIONS[4:6])
    assert places == [at_c, at_c, (2, 3), at_b, (1,)]
    assert placed.hosts_of == {(4, 5): (2, 3)}
    assert placed.island_of == {1: 1, 2: 2, 3: 2}


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ("atoll.call @g() on []", Code.INVALID_ARGUMENT, "on no devices"),
        ("atoll.call @g() on [6]", Code.INVALID_ARGUMENT, "'f' names device 6, which this session does not have"),
        ("%1 = atoll.transfer %0 : !atoll.array<int8[4], devices = [0, 7]>", Code.INVALID_ARGUMENT, "device 7"),
        (
            f"%1 = atoll.rearrange %0 [0 at 0:2 -> 0 at 0:2] : {B}",
            Code.INVALID_ARGUMENT,
            "cannot move shards to another device",
        ),
        ("%1 = atoll.get %0 feed 0 : !atoll.completion", Code.UNIMPLEMENTED, "shard by shard"),
    ],
)
def test_what_cannot_be_placed_is_refused_with_a_reason(body, code, message):
    program = parse(module(f"{body} atoll.return ()", C, 1), ["g"])
    with pytest.raises(StatusError, match=message) as caught:
        finish(place(program, PLACEMENT))
    assert caught.value.status.code == code


EXPLICIT = {
    "what stays on its host is moved": (
        f"%1 = atoll.transfer %0 donate : {SWAPPED} atoll.return (%1)",
        """
        gang 0: node 0 on island 0, hosts [0], makes (%1)
        plan of hosts [0]: takes (%0)
        gang 0, returns (%1), drops (%0, %1)
        %1 = move %0 to devices [1, 0]
        """,
    ),
    "shards that go to another host are sent and received": (
        f"%1 = atoll.transfer %0 : {B} atoll.return (%1)",
        """
        gang 0: node 0 on island 0, hosts [0]
        gang 1: node 0 on island 1, hosts [1], makes (%1)
        plan of hosts [0]: takes (%0)
        gang 0, drops (%0)
        send of %0 shards 0 [0:2] to host 1 as host feed 0, 1 [0:2] to host 1 as host feed 1
        plan of hosts [1]: takes ()
        gang 1, returns (%1), drops (%1)
        %1 = receive on devices [0:2], host feeds [0:2]
        """,
    ),
    "each host of several gets its shards": (
        f"%1 = atoll.transfer %0 donate : {C} atoll.return (%1)",
        """
        gang 0: node 0 on island 0, hosts [0]
        gang 1: node 0 on island 2, hosts [2:4], makes (%1)
        plan of hosts [0]: takes (%0)
        gang 0, drops (%0)
        send of %0 shards 0 [0:2] to host 2 as host feed 0, 1 [0:2] to host 3 as host feed 1
        plan of hosts [2]: takes ()
        gang 1, returns (%1), drops (%1)
        %1 = receive on devices [0], host feeds [0]
        plan of hosts [3]: takes ()
        gang 1, returns (%1), drops (%1)
        %1 = receive on devices [0], host feeds [1]
        """,
    ),
    "a reshard sends the parts that each shard is made of": (
        f"%1 = atoll.transfer %0 reshard : {WHOLE} atoll.return (%1)",
        """
        gang 0: node 0 on island 0, hosts [0]
        gang 1: node 0 on island 2, hosts [2:4], makes (%1)
        plan of hosts [0]: takes (%0)
        gang 0, drops (%0)
        send of %0 shards 0 [0:2] to host 2 as host feed 0, 1 [0:2] to host 2 as host feed 1, \
0 [0:2] to host 3 as host feed 2, 1 [0:2] to host 3 as host feed 3
        plan of hosts [2]: takes ()
        gang 1, returns (%1), drops (%1)
        %1 = receive on devices [0], host feeds [0:2]
        plan of hosts [3]: takes ()
        gang 1, returns (%1), drops (%1)
        %1 = receive on devices [0], host feeds [2:4]
        """,
    ),
    "of several arrays some are sent and some moved, which are numbered first": (
        f"%1, %2 = atoll.transfer %0, %0 : {B}, {SWAPPED} atoll.return (%1, %2)",
        """
        gang 0: node 0 on island 0, hosts [0], makes (%1)
        gang 1: node 0 on island 1, hosts [1], makes (%2)
        plan of hosts [0]: takes (%0)
        gang 0, returns (%1), drops (%0, %1)
        send of %0 shards 0 [0:2] to host 1 as host feed 0, 1 [0:2] to host 1 as host feed 1
        %1 = move %0 to devices [1, 0]
        plan of hosts [1]: takes ()
        gang 1, returns (%2), drops (%2)
        %2 = receive on devices [0:2], host feeds [0:2]
        """,
    ),
}


@pytest.mark.parametrize("case", EXPLICIT)
def test_transfers_made_explicit(case):
    body, lowered = EXPLICIT[case]
    lines = render_lowered(parse(module(body, A), []), PLACEMENT, []).splitlines()
    assert [line.strip() for line in lines[1:]] == [line.strip() for line in lowered.strip().splitlines()]
