"""Dispatch units: which short nodes are joined, in tables and in launches of the controller."""

from __future__ import annotations

from typing import Any

from atoll.ir.program import Call, HostBuffer, HostToDevice, Program, single
from atoll.protocol import messages as m
from atoll.state.dispatch_units import MAX_SEGMENTS, UNIT_NS, UnitBuilder, join
from atoll.state.gang_specs import DurationEstimate, GangSpec, HostFeeds, MadeValue
from tests.controller.play import Play, on

SHORT = 100_000


def node(number: int, estimate: int = SHORT, runs: int = 9, **changes: Any) -> tuple[GangSpec, ...]:
    """Return a call that makes the value `number` and drops the one before."""
    fields: dict[str, Any] = {
        "island": 0,
        "hosts": (0,),
        "kind": "call",
        "functions": ("f",),
        "awaited": (),
        "incoming": (),
        "handles": (),
        "makes": (MadeValue(number, (((0, 0), 8),), frozenset()),),
        "consumes": (),
        "drops": (number - 1,),
        "scratch": (((0, 0), 50),),
        "collective": False,
        "devices": {0: (0,), 1: (0,)},
        "duration_estimate": DurationEstimate(estimate, runs),
    }
    return (GangSpec(**fields | changes),)


def segments(*nodes: tuple[GangSpec, ...]) -> list[int]:
    return [unit[0].segments for unit in join(nodes)]


def test_short_nodes_of_the_same_devices_are_joined_up_to_a_bound():
    assert segments(*(node(i) for i in range(MAX_SEGMENTS + 2))) == [MAX_SEGMENTS, 2]


def test_the_expected_duration_of_a_unit_is_bounded():
    assert segments(node(1, UNIT_NS // 2), node(2, UNIT_NS // 2), node(3, UNIT_NS // 2)) == [2, 1]
    assert segments(node(1, 2 * UNIT_NS), node(2)) == [1, 1]


def test_nodes_that_have_never_run_are_not_joined():
    assert segments(node(1, runs=0), node(2), node(3)) == [1, 2]


def test_nodes_that_exchange_data_or_run_elsewhere_are_not_joined():
    assert segments(node(1), node(2, incoming=(HostFeeds(0, (1,)),), kind="receive"), node(3)) == [1, 1, 1]
    assert segments(node(1), node(2, kind="send"), node(3)) == [1, 1, 1]
    assert segments(node(1), node(2, island=1, hosts=(1,)), node(3)) == [1, 1, 1]
    assert segments(node(1), node(2) + node(2, island=1), node(3)) == [1, 1, 1]


def test_values_that_are_made_and_dropped_within_a_unit_are_scratch_memory():
    ((gang,),) = join((node(1), node(2), node(3)))
    assert [each.value for each in gang.makes] == [3]
    assert gang.drops == (0,)
    assert gang.scratch == (((0, 0), 50 + 8 + 8),)


def test_a_viewed_value_outlives_the_unit():
    view = node(2, makes=(MadeValue(2, (), frozenset({1})),), kind="rearrange", drops=(1,))
    ((gang,),) = join((node(1), view))
    assert [each.value for each in gang.makes] == [1, 2]


def test_units_are_samples_for_the_nodes_that_they_join():
    nodes = (node(1), node(2))
    builder = UnitBuilder(nodes)
    for _ in range(4):
        (first,) = builder.next_launch(may_join=True)[0]
    assert first.segments == 2
    first.duration_estimate = DurationEstimate(4 * UNIT_NS, 1)
    for _ in range(4):
        after = builder.next_launch(may_join=True)
    assert [unit[0].segments for unit in after] == [1, 1]
    assert [each[0].duration_estimate.nanoseconds for each in nodes] == [2 * UNIT_NS] * 2


# ---- in the controller


def chained(play: Play, length: int) -> None:
    nodes = tuple(Call(1, (i,), (on(0),), (0,)) for i in range(length))
    play.send(m.RegisterProgram(5, Program("chain", (on(0),), nodes, (length,))))


def launched(play: Play, handle: int) -> list[int]:
    """Launch the program. Return the number of nodes of each dispatch unit. A node takes 100 us."""
    now = 1_000_000_000 * handle
    found: list[int] = []
    messages = play.send(m.Launch(5, (10,), (handle,), ()))
    while messages:
        units = [(each.sequence, each.segments) for each in messages if isinstance(each, m.Run)]
        units += [unit for each in messages if isinstance(each, m.Dispatch) for unit in each.units]
        found += [segments for _, segments in units]
        runs = []
        for sequence, segments in units:
            runs.append((sequence, now, now + segments * SHORT))
            now += segments * SHORT
        messages = play.report(0, m.Done(tuple(runs))) if runs else []
    return found


def test_short_nodes_are_joined_after_some_launches():
    play = Play()
    play.with_function()
    play.array(10)
    chained(play, 2 * MAX_SEGMENTS)
    assert [launched(play, 100 + i) for i in range(3)] == [[1] * 2 * MAX_SEGMENTS] * 3
    assert launched(play, 104) == [MAX_SEGMENTS, MAX_SEGMENTS]


def test_no_nodes_are_joined_while_another_session_waits():
    play = Play()
    play.with_function()
    play.array(10)
    chained(play, 12)
    for i in range(4):
        launched(play, 100 + i)
    other = play.open(7, "other.py").number
    play.outbox()
    body = single("put", (), HostToDevice((HostBuffer(0, (2,), None, None),), (on(0),)), feeds=1)
    play.proxy(other, m.RegisterProgram(1, body))
    play.proxy(other, m.Launch(1, (), (1,), (5,)))  # waits for its bytes
    play.outbox()
    assert launched(play, 105) == [1] * 12
