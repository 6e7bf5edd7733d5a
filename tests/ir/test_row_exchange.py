"""Tests of sparse exchanges, by running their plans: each row must be in the right place, once, for any shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from atoll.errors import Code, StatusError
from atoll.ir import plan as p
from atoll.ir.lowering import lower
from atoll.ir.program import Program, Route, Unroute, single
from atoll.ir.text import render, render_lowered
from atoll.ir.types import ArraySpec, Replicated, Sharding, Tiled
from tests.ir.machine import Machine, Placement, cluster, contents, placements, steps_of, used_memory
from tests.ir.program_text import parse
from tests.ir.test_types import tilings


@dataclass
class Case:
    """Rows of shape [groups * most, ...], whose sizes send them to blocks of shape [groups * capacity, ...]."""

    placement: Placement
    groups: int
    rows: ArraySpec
    sizes: ArraySpec
    blocks: list[ArraySpec]
    sizes_array: np.ndarray
    rows_array: np.ndarray
    order: ArraySpec | None = None
    order_array: np.ndarray | None = None

    @property
    def line(self) -> np.ndarray:
        """Return the rows in their order."""
        if self.order_array is None:
            return self.rows_array
        each = self.rows.shape[0] // self.groups
        return self.rows_array[(np.arange(self.groups)[:, None] * each + self.order_array).reshape(-1)]

    @property
    def most(self) -> int:
        return len(self.line) // self.groups

    @property
    def pairs(self) -> tuple[ArraySpec, ...]:
        return tuple(each for block in self.blocks for each in (block, _numbers(block, (self.groups, 2))))

    def expected(self, destination: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the expected block and its spans."""
        block = np.zeros(self.blocks[destination].shape, self.rows_array.dtype)
        capacity = block.shape[0] // self.groups
        spans = np.zeros((self.groups, 2), np.int32)
        for group, sizes in enumerate(self.sizes_array):
            first, count = sizes[:destination].sum(), sizes[destination]
            spans[group] = first, count
            at = group * self.most + first
            block[group * capacity :][:count] = self.line[at : at + count]
        return block, spans

    def returned(self) -> np.ndarray:
        """Return the rows that were sent, and zeros."""
        back = self.line.copy()
        for group, sizes in enumerate(self.sizes_array):
            back[group * self.most :][: self.most][sizes.sum() :] = 0
        return back


def _numbers(rows: ArraySpec, shape: tuple[int, int]) -> ArraySpec:
    return ArraySpec("int32", shape, Sharding(rows.sharding.devices, Replicated()))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    placement = draw(placements())
    groups, destinations = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    most, capacity = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    rest = draw(st.lists(st.integers(1, 3), max_size=2).map(tuple))

    def array(rows: int) -> ArraySpec:
        chosen = draw(st.permutations(sorted(placement)))
        devices = tuple(chosen[: draw(st.integers(1, min(8, len(chosen))))])
        return ArraySpec("int64", (rows, *rest), Sharding(devices, draw(tilings(len(devices), 1 + len(rest)))))

    in_order = draw(st.booleans())
    each = draw(st.integers(1, 5)) if in_order else most
    rows = array(groups * each)
    if in_order:  # all rows of a group in one shard
        shards = draw(st.sampled_from([count for count in range(1, groups + 1) if groups % count == 0]))
        devices = tuple(draw(st.permutations(sorted(placement)))[:shards])
        assume(len(devices) == shards)
        tiled = Tiled((shards, *[1] * len(rest)), draw(st.permutations(range(shards)).map(tuple)))
        rows = _changed(rows, sharding=Sharding(devices, tiled))
    sizes = np.zeros((groups, destinations), np.int32)
    for group in range(groups):
        for destination in range(destinations):
            room = min(capacity, most - sizes[group].sum())
            sizes[group, destination] = draw(st.integers(0, int(room)))
    numbers = np.arange(1, 1 + np.prod(rows.shape)).reshape(rows.shape)
    blocks = [array(groups * capacity) for _ in range(destinations)]
    case = Case(placement, groups, rows, _numbers(rows, sizes.shape), blocks, sizes, numbers)
    if in_order:
        places = st.lists(st.integers(0, each - 1), min_size=groups * most, max_size=groups * most)
        case.order = _numbers(rows, (groups, most))
        case.order_array = np.array(draw(places), np.int32).reshape(groups, most)
    return case


def ran(case: Case, program: Program) -> Machine:
    machine = Machine(case.placement)
    machine.load(0, case.rows, contents(case.rows, case.rows_array))
    machine.load(1, case.sizes, contents(case.sizes, case.sizes_array))
    if case.order is not None:
        assert case.order_array is not None
        machine.load(2, case.order, contents(case.order, case.order_array))
    machine.run(lower(program, case.placement, {}))
    return machine


@given(cases())
def test_rows_go_where_their_sizes_say_and_come_back(case: Case) -> None:
    arguments = (case.rows, case.sizes, *([] if case.order is None else [case.order]))
    first, last = len(arguments), len(arguments) + len(case.pairs)
    there = Route(tuple(range(first)), case.pairs, case.groups)
    returned = _changed(case.rows, shape=case.line.shape)
    back = Unroute(tuple(range(first, last)), (returned,), case.groups)
    machine = ran(case, Program("route", arguments, (there, back), tuple(range(first, last + 1))))
    for destination in range(len(case.blocks)):
        for value, want in enumerate(case.expected(destination), start=first + 2 * destination):
            spec = case.pairs[value - first]
            for got, part in zip(machine.shards(value, spec), contents(spec, want), strict=True):
                np.testing.assert_array_equal(got, part)
    for got, part in zip(machine.shards(last, returned), contents(returned, case.returned()), strict=True):
        np.testing.assert_array_equal(got, part)


def test_one_message_goes_from_a_host_to_another_with_the_bytes_of_its_rows() -> None:
    """Exchange four groups on two hosts, whose rows belong to four devices on two other hosts."""
    tiled = Tiled((4, 1), (0, 1, 2, 3))
    rows = ArraySpec("int64", (12, 5), Sharding((0, 1, 2, 3), tiled))
    block = ArraySpec("int64", (8, 5), Sharding((4, 5, 6, 7), tiled))
    sizes = np.array([[0], [2], [0], [0]], np.int32)
    contents = np.arange(60).reshape(12, 5)
    case = Case(cluster(2, 2, 2), 4, rows, _numbers(rows, (4, 1)), [block], sizes, contents)
    machine = ran(case, single("route", (case.rows, case.sizes), Route((0, 1), case.pairs, 4)))
    row, header = 5 * 8, 2 * 12
    found = sorted((host, array.nbytes) for (host, _), array in machine.host_feeds.items())
    assert found == [(2, header), (2, header + 2 * row), (3, header), (3, header)]


def many(shards: int) -> tuple[Program, Placement]:
    """Exchange rows on this many shards and one block on as many others, with eight devices per host."""
    here, there = tuple(range(shards)), tuple(range(shards, 2 * shards))
    tiled = Tiled((shards, 1), tuple(range(shards)))
    rows = ArraySpec("float32", (8 * shards, 4), Sharding(here, tiled))
    block = ArraySpec("float32", (2 * shards, 4), Sharding(there, tiled))
    sizes = ArraySpec("int32", (shards, 1), Sharding(here, tiled))
    node = Route((0, 1), (block, _numbers(block, (shards, 2))), shards)
    return single("route", (rows, sizes), node), cluster(2, shards // 8, 8)


def test_a_plan_does_not_grow_with_shards_and_messages_grow_with_hosts() -> None:
    sizes = {}
    for shards in (64, 512):
        lowered = lower(*many(shards), {})
        sizes[shards] = max(len(msgspec.msgpack.encode(plan)) for plan in lowered.plans.values())
        assert lowered.host_feeds == (shards // 8) ** 2
    assert sizes[512] < sizes[64] + 80  # larger numbers need more bytes


@pytest.mark.parametrize("numbers", [[5], [-1], [2**31 - 1], [-(2**31)]])
def test_numbers_of_rows_that_do_not_fit_are_refused(numbers: list[int]) -> None:
    place = cluster(2, 1, 1)
    rows = ArraySpec("int64", (4,), Sharding((0,)))
    block = ArraySpec("int64", (4,), Sharding((1,)))
    sizes = _numbers(rows, (1, 1))
    program = single("route", (rows, sizes), Route((0, 1), (block, _numbers(block, (1, 2))), 1))
    case = Case(place, 1, rows, sizes, [block], np.array([numbers], np.int32), np.arange(4))
    with pytest.raises(StatusError, match="rows of group 0") as failure:
        ran(case, program)
    assert failure.value.status.code == Code.INVALID_ARGUMENT


@pytest.mark.parametrize("row", [3, -1, 2**31 - 1, -(2**31)])
def test_an_order_of_rows_that_are_not_there_is_refused(row: int) -> None:
    rows = ArraySpec("int64", (6, 2), Sharding((0,)))
    block = ArraySpec("int64", (4, 2), Sharding((1,)))
    sizes, order = _numbers(rows, (2, 1)), _numbers(rows, (2, 4))
    program = Program("f", (rows, sizes, order), (Route((0, 1, 2), (block, _numbers(block, (2, 2))), 2),), (3,))
    places = np.array([[0, 1, 2, 0], [0, row, 0, 0]], np.int32)
    case = Case(
        cluster(2, 1, 1), 2, rows, sizes, [block], np.array([[1], [2]]), np.arange(12).reshape(6, 2), order, places
    )
    with pytest.raises(StatusError, match="of group 1, which has 3 rows") as failure:
        ran(case, program)
    assert failure.value.status.code == Code.INVALID_ARGUMENT


def test_a_message_of_another_length_than_it_says_is_refused() -> None:
    program, place = many(8)
    lowered = lower(program, place, {})
    (step,) = [s for plan in lowered.plans.values() for s in steps_of(plan) if isinstance(s, p.ReceiveRows)]
    from atoll.host_services.row_messages import unpacked

    spans = np.array([[0, 0, 1]] * 8, "<i4").tobytes()
    for content in (b"", spans[:-1], spans, spans + bytes(8 * 16 + 1)):
        with pytest.raises(StatusError) as failure:
            unpacked(step, [content], used_memory)
        assert failure.value.status.code == Code.INTERNAL
    shards, _, nbytes = unpacked(step, [spans + bytes(8 * 16)], used_memory)
    assert (len(shards), nbytes) == (8, 8 * 12 + 8 * 16)


def test_as_text_a_route_is_one_node_that_becomes_sends_and_receives() -> None:
    there = Route((0, 1), (BLOCK, SPANS, BLOCK, SPANS), 2)
    back = Unroute((2, 3, 4, 5), (ROWS,), 2)
    program = Program("f", (ROWS, _changed(SIZES, shape=(2, 2))), (there, back), (6,))
    text = render(program, [])
    assert "%2, %3, %4, %5 = atoll.route %0, %1 groups 2 : " in text
    assert "%6 = atoll.unroute %2, %3, %4, %5 groups 2 : " in text
    assert parse(text, []) == program
    assert (
        render_lowered(program, cluster(2, 1, 2), [])
        == """\
program @f: 2 arguments, returns (%6), 0 feeds
gang 0: node 0 on island 0, hosts [0]
gang 1: node 0 on island 1, hosts [1], makes (%2, %3, %4, %5)
gang 2: node 1 on island 0, hosts [0], makes (%6)
gang 3: node 1 on island 1, hosts [1], drops (%2, %3, %4, %5)
plan of hosts [0]: takes (%0, %1)
  gang 0, drops (%0, %1)
    send rows of %0 by %1 to host 1 as host feed 0, to host 1 as host feed 1
  gang 2, returns (%6), drops (%6)
    %6 = receive rows on devices [0:2], host feeds [2:4]
plan of hosts [1]: takes ()
  gang 1
    %2, %3 = receive rows on devices [0:2], host feeds [0]
    %4, %5 = receive rows on devices [0:2], host feeds [1]
  gang 3, drops (%2, %3, %4, %5)
    send rows of %2 by %3 to host 0 as host feed 2
    send rows of %4 by %5 to host 0 as host feed 3
"""
    )


def test_as_text_a_route_in_order_has_a_third_input() -> None:
    program = Program("f", (ROWS, SIZES, ORDER), (Route((0, 1, 2), (BLOCK, SPANS), 2),), (3,))
    text = render(program, [])
    assert "%3, %4 = atoll.route %0, %1, %2 groups 2 : " in text
    assert parse(text, []) == program
    (step,) = (each for each in steps_of(lower(program, cluster(2, 1, 2), {}).plans[0]) if isinstance(each, p.SendRows))
    assert step.exchanges[0].source.shape == (14, 3)  # seven places of each group
    assert "send rows of %0 by %1, %2 to host 1" in render_lowered(program, cluster(2, 1, 2), [])


def test_rows_that_nobody_uses_are_not_sent() -> None:
    route = Route((0, 1), (BLOCK, SPANS), 2)
    assert not lower(Program("f", (ROWS, SIZES), (route,), ()), cluster(2, 1, 2), {}).gangs
    used = lower(Program("f", (ROWS, SIZES), (route,), (3,)), cluster(2, 1, 2), {})
    assert [gang.makes for gang in used.gangs] == [(), (2, 3)]


def _changed(spec: ArraySpec, **changes: Any) -> ArraySpec:
    return msgspec.structs.replace(spec, **changes)


ROWS = ArraySpec("float32", (8, 3), Sharding((0, 1), Tiled((2, 1), (0, 1))))
SIZES = ArraySpec("int32", (2, 1), Sharding((0, 1), Tiled((2, 1), (0, 1))))
BLOCK = ArraySpec("float32", (4, 3), Sharding((2, 3), Tiled((2, 1), (0, 1))))
SPANS = ArraySpec("int32", (2, 2), Sharding((2, 3)))
ORDER = _changed(SIZES, shape=(2, 7))
SWAPPED = Sharding((0, 1), Tiled((2, 1), (1, 0)))
BY_COLUMNS = Sharding((0, 1), Tiled((1, 2), (0, 1)))


@pytest.mark.parametrize(
    ("rows", "sizes", "order", "groups", "message"),
    [
        (ROWS, SIZES, _changed(ORDER, dtype="int64"), 2, "expected sizes, spans or an order"),
        (ROWS, SIZES, _changed(ORDER, shape=(14,)), 2, "expected sizes, spans or an order"),
        (ROWS, SIZES, _changed(ORDER, shape=(4, 7)), 2, "expected sizes, spans or an order"),
        (ROWS, SIZES, _changed(ORDER, shape=(2, 0)), 2, "must have places"),
        (ROWS, SIZES, _changed(ORDER, sharding=Sharding((2, 3))), 2, "expected sizes, spans or an order"),
        (ROWS, SIZES, _changed(ORDER, sharding=SWAPPED), 2, "without the group's sizes"),
        (ROWS, SIZES, _changed(ORDER, sharding=Sharding((0, 1))), 2, "the sharding of the sizes"),
        (ROWS, _changed(SIZES, sharding=BY_COLUMNS), ORDER, 2, "without the group's sizes"),
        (ROWS, _numbers(ROWS, (1, 1)), _numbers(ROWS, (1, 7)), 1, "must contain whole groups"),
        (_changed(ROWS, shape=(12, 3)), _numbers(ROWS, (3, 1)), _numbers(ROWS, (3, 7)), 3, "must contain whole groups"),
    ],
)
def test_an_order_that_does_not_fit_is_refused(
    rows: ArraySpec, sizes: ArraySpec, order: ArraySpec, groups: int, message: str
) -> None:
    outputs = (_changed(BLOCK, shape=(12, 3)), _changed(SPANS, shape=(groups, 2)))
    program = single("route", (rows, sizes, order), Route((0, 1, 2), outputs, groups))
    with pytest.raises(StatusError, match=message) as failure:
        lower(program, cluster(2, 1, 2), {})
    assert failure.value.status.code == Code.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("rows", "sizes", "outputs", "groups", "message"),
    [
        (ROWS, SIZES, (BLOCK, SPANS), 0, "a route takes rows, sizes"),
        (ROWS, SIZES, (BLOCK,), 2, "a route takes rows, sizes"),
        (ROWS, SIZES, (), 2, "a route takes rows, sizes"),
        (ROWS, SIZES, (BLOCK, SPANS), 3, "does not have rows in 3 groups"),
        (ROWS, SIZES, (BLOCK, SPANS), 1 << 40, "at most 16384 are allowed"),
        (_changed(ROWS, shape=(7, 3)), SIZES, (BLOCK, SPANS), 2, "does not have rows in 2 groups"),
        (_changed(ROWS, shape=(0, 3)), SIZES, (BLOCK, SPANS), 2, "does not have rows in 2 groups"),
        (_changed(ROWS, shape=()), SIZES, (BLOCK, SPANS), 2, "does not have rows in 2 groups"),
        (_changed(ROWS, dtype="string"), SIZES, (_changed(BLOCK, dtype="string"), SPANS), 2, "does not have rows in"),
        (ROWS, _changed(SIZES, dtype="float32"), (BLOCK, SPANS), 2, "expected sizes, spans or an order"),
        (ROWS, _changed(SIZES, sharding=SWAPPED), (BLOCK, SPANS), 2, "without the group's sizes"),
        (ROWS, _changed(SIZES, sharding=Sharding((2, 3))), (BLOCK, SPANS), 2, "expected sizes, spans or an order"),
        (ROWS, SIZES, (_changed(BLOCK, shape=(4, 2)), SPANS), 2, "cannot be rows of"),
        (ROWS, SIZES, (_changed(BLOCK, dtype="int8"), SPANS), 2, "cannot be rows of"),
        (ROWS, SIZES, (BLOCK, _changed(SPANS, shape=(2, 1))), 2, "expected sizes, spans or an order"),
    ],
)
def test_what_cannot_be_routed_is_refused(
    rows: ArraySpec, sizes: ArraySpec, outputs: tuple[ArraySpec, ...], groups: int, message: str
) -> None:
    with pytest.raises(StatusError, match=message) as failure:
        lower(single("route", (rows, sizes), Route((0, 1), outputs, groups)), cluster(2, 1, 2), {})
    assert failure.value.status.code == Code.INVALID_ARGUMENT
