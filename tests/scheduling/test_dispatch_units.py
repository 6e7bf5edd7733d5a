"""Short nodes that share a turn, as tables; and programs whose launches do so."""

from __future__ import annotations

from typing import Any

from atoll.ir.program import Call, HostBuffer, HostToDevice, Program, single
from atoll.protocol import messages as m
from atoll.scheduling.dispatch_units import MOST_SEGMENTS, UNIT_NS, UnitBuilder, shared
from atoll.scheduling.gangs import GangSpec
from tests.controller.play import Play, on

SHORT = 100_000


def node(number: int, estimate: int = SHORT, **changes: Any) -> tuple[GangSpec, ...]:
    """A call that makes value `number` and drops the one before."""
    fields: dict[str, Any] = {
        "island": 0,
        "hosts": (0,),
        "work": "call",
        "functions": ("f",),
        "awaited": (),
        "incoming": (),
        "handles": (),
        "makes": ((number, (((0, 0), 8),), frozenset()),),
        "consumes": (),
        "drops": (number - 1,),
        "scratch": (((0, 0), 50),),
        "collective": False,
        "estimate": estimate,
        "runs": 9,
    }
    return (GangSpec(**fields | changes),)


def segments(*nodes: tuple[GangSpec, ...]) -> list[int]:
    return [turn[0].segments for turn in shared(nodes)]


def test_short_nodes_of_the_same_devices_share_a_turn_up_to_a_bound():
    assert segments(*(node(i) for i in range(MOST_SEGMENTS + 2))) == [MOST_SEGMENTS, 2]


def test_a_turn_has_no_more_work_than_others_may_wait_for():
    assert segments(node(1, UNIT_NS // 2), node(2, UNIT_NS // 2), node(3, UNIT_NS // 2)) == [2, 1]
    assert segments(node(1, 2 * UNIT_NS), node(2)) == [1, 1]


def test_nodes_that_are_not_known_yet_have_turns_of_their_own():
    assert segments(node(1, runs=0), node(2), node(3)) == [1, 2]


def test_what_waits_for_others_or_is_elsewhere_has_a_turn_of_its_own():
    assert segments(node(1), node(2, incoming=((0, (1,)),), work="receive"), node(3)) == [1, 1, 1]
    assert segments(node(1), node(2, work="send"), node(3)) == [1, 1, 1]
    assert segments(node(1), node(2, island=1, hosts=(1,)), node(3)) == [1, 1, 1]
    assert segments(node(1), node(2) + node(2, island=1), node(3)) == [1, 1, 1]


def test_what_is_made_and_dropped_within_a_turn_is_part_of_what_it_needs_while_it_runs():
    ((turn,),) = shared((node(1), node(2), node(3)))
    assert [value for value, _, _ in turn.makes] == [3]
    assert turn.drops == (0,)
    assert turn.scratch == (((0, 0), 50 + 8 + 8),)


def test_what_a_view_looks_at_outlives_the_turn():
    view = node(2, makes=((2, (), frozenset({1})),), work="rearrange", drops=(1,))
    ((turn,),) = shared((node(1), view))
    assert [value for value, _, _ in turn.makes] == [1, 2]


def test_nodes_learn_from_the_turns_that_they_share():
    nodes = (node(1), node(2))
    turns = UnitBuilder(nodes)
    for _ in range(4):
        (first,) = turns.next_launch(may_share=True)[0]
    assert first.segments == 2
    first.estimate, first.runs = 4 * UNIT_NS, 1
    for _ in range(4):
        after = turns.next_launch(may_share=True)
    assert [turn[0].segments for turn in after] == [1, 1]
    assert [each[0].estimate for each in nodes] == [2 * UNIT_NS] * 2


# ---- in the controller


def chained(play: Play, length: int) -> None:
    nodes = tuple(Call(1, (i,), (on(0),), (0,)) for i in range(length))
    play.say(m.RegisterProgram(5, Program("chain", (on(0),), nodes, (length,))))


def launched(play: Play, handle: int) -> list[int]:
    """How many nodes each turn of a launch has; they take 100 us each."""
    now = 1_000_000_000 * handle
    found: list[int] = []
    messages = play.say(m.Launch(5, (10,), (handle,), ()))
    while messages:
        turns = [(each.sequence, each.segments) for each in messages if isinstance(each, m.Run)]
        turns += [turn for each in messages if isinstance(each, m.Dispatch) for turn in each.turns]
        found += [segments for _, segments in turns]
        runs = []
        for sequence, segments in turns:
            runs.append((sequence, now, now + segments * SHORT))
            now += segments * SHORT
        messages = play.hear(0, m.Done(tuple(runs))) if runs else []
    return found


def test_after_some_launches_short_nodes_share_turns():
    play = Play()
    play.with_function()
    play.array(10)
    chained(play, 2 * MOST_SEGMENTS)
    assert [launched(play, 100 + i) for i in range(3)] == [[1] * 2 * MOST_SEGMENTS] * 3
    assert launched(play, 104) == [MOST_SEGMENTS, MOST_SEGMENTS]


def test_while_others_wait_each_node_has_a_turn_of_its_own():
    play = Play()
    play.with_function()
    play.array(10)
    chained(play, 12)
    for i in range(4):
        launched(play, 100 + i)
    other = play.open(7, "other.py").number
    play.outbox()
    play.controller.scheduler.exclude(0, other)  # so that it waits
    body = single("put", (), HostToDevice((HostBuffer(0, (2,), None, None),), (on(0),)), feeds=1)
    play.proxy(other, m.RegisterProgram(1, body))
    play.worker(0, m.FeedsArrived(other, (5,)))
    play.proxy(other, m.Launch(1, (), (1,), (5,)))
    play.outbox()
    assert launched(play, 105) == [1] * 12
