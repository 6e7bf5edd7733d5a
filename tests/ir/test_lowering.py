"""Tests of lowering: plans run on a machine of NumPy arrays must give the right results."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import Code, StatusError
from atoll.ir import plan as p
from atoll.ir.lowering import lower
from atoll.ir.passes.wide_transfers_pass import MAX_ARRAYS
from atoll.ir.plan import LoweredGang
from atoll.ir.program import (
    Call,
    DeviceToHost,
    HostBuffer,
    HostToDevice,
    Mapping,
    Program,
    Rearrange,
    Transfer,
    single,
)
from atoll.ir.types import (
    ArraySpec,
    Even,
    Opaque,
    Replicated,
    Sharding,
    Tiled,
    Uneven,
    nbytes,
    shard_boxes,
    shard_shape,
)
from tests.ir.machine import (
    Machine,
    cluster,
    contents,
    counting,
    placements,
    shapes,
    slices,
    specs,
    steps_of,
)

# ---- transfers


@given(st.data(), placements(), shapes)
def test_any_chain_of_reshards_over_any_islands_gives_every_shard_its_part(data, placement, shape):
    chain = [data.draw(specs(placement, shape)) for _ in range(data.draw(st.integers(2, 4)))]
    nodes = tuple(Transfer((i,), (spec,), reshard=True) for i, spec in enumerate(chain[1:]))
    results = tuple(range(1, len(chain)))
    program = Program("reshard", (chain[0],), nodes, results)
    lowered = lower(program, placement, {})

    machine = Machine(placement)
    machine.load(0, chain[0], contents(chain[0], counting(shape)))
    machine.run(lowered)

    for value, spec in enumerate(chain[1:], start=1):
        expected = contents(spec, counting(shape))
        for got, want in zip(machine.shards(value, spec), expected, strict=True):
            np.testing.assert_array_equal(got, want)
    for value, spec in enumerate(chain):
        assert lowered.values[value].nbytes == nbytes(spec)
        assert lowered.values[value].hosts == tuple(sorted({placement[d].host for d in spec.sharding.devices}))


@given(st.data(), placements(), shapes)
def test_a_copy_to_other_devices_keeps_shard_i_shard_i(data, placement, shape):
    source = data.draw(specs(placement, shape))
    count = len(source.sharding.devices)
    devices = tuple(data.draw(st.permutations(sorted(placement)))[:count])
    target = ArraySpec("int64", shape, Sharding(devices, source.sharding.tiling))
    lowered = lower(single("copy", (source,), Transfer((0,), (target,))), placement, {})

    machine = Machine(placement)
    machine.load(0, source, contents(source, counting(shape)))
    machine.run(lowered)

    for got, want in zip(machine.shards(1, target), contents(source, counting(shape)), strict=True):
        np.testing.assert_array_equal(got, want)
    on_one_host = all(
        placement[a].host == placement[b].host for a, b in zip(source.sharding.devices, devices, strict=True)
    )
    kinds = {type(step) for plan in lowered.plans.values() for step in steps_of(plan)}
    assert kinds == ({p.Move} if on_one_host else {p.Send, p.Receive})


def test_a_transfer_of_many_arrays_is_lowered_in_short_steps():
    count = 3 * MAX_ARRAYS
    source, target = (ArraySpec("int64", (2,), Sharding((device,), Replicated())) for device in (0, 1))
    transfer = Transfer(tuple(range(count)), (target,) * count)
    placement = cluster(1, 1, 2)
    lowered = lower(single("move", (source,) * count, transfer), placement, {})
    moves = [step for step in steps_of(lowered.plans[0]) if isinstance(step, p.Move)]
    assert [len(move.inputs) for move in moves] == [MAX_ARRAYS] * 3

    machine = Machine(placement)
    for value in range(count):
        machine.load(value, source, [np.array([value, -value])])
    machine.run(lowered)
    for value in range(count):
        np.testing.assert_array_equal(machine.shards(count + value, target), [[value, -value]])


@pytest.mark.parametrize("tiling", [Even((2, 3)), Uneven(((2, 3), (1, 3)))])
def test_shards_of_unknown_location_are_copied_between_islands_all_the_same(tiling):
    placement = cluster(2, 1, 2)
    source = ArraySpec("int64", (4, 3), Sharding((0, 1), tiling))
    target = ArraySpec("int64", (4, 3), Sharding((3, 2), tiling))
    shards = [np.full(shard_shape(source.sharding, source.shape, i), i) for i in range(2)]
    machine = Machine(placement)
    machine.load(0, source, shards)
    machine.run(lower(single("copy", (source,), Transfer((0,), (target,))), placement, {}))
    got = machine.shards(1, target)
    assert [shard.shape for shard in got] == [shard.shape for shard in shards]
    assert [set(shard.ravel()) for shard in got] == [{0}, {1}]


def test_a_reshard_takes_replicas_from_its_own_host_and_else_from_all_alike():
    placement = cluster(3, 1, 2)
    everywhere = ArraySpec("int64", (4,), Sharding((0, 2)))
    here = ArraySpec("int64", (4,), Sharding((1, 3, 4, 5)))
    lowered = lower(single("f", (everywhere,), Transfer((0,), (here,), reshard=True)), placement, {})
    senders = Counter(
        (host, piece.host)
        for host, plan in lowered.plans.items()
        for step in steps_of(plan)
        if isinstance(step, p.Send)
        for piece in step.pieces
    )
    assert senders == {(0, 0): 1, (1, 1): 1, (0, 2): 1, (1, 2): 1}


@pytest.mark.parametrize("hosts", [1, 2, 8])
def test_a_reshard_of_eight_ways_to_eight_ways_moves_no_byte_twice(hosts):
    placement = cluster(2 * hosts, 1, 8 // hosts)
    rows = ArraySpec("int64", (64, 64), Sharding(tuple(range(8)), Tiled((8, 1), tuple(range(8)))))
    columns = ArraySpec("int64", (64, 64), Sharding(tuple(range(8, 16)), Tiled((1, 8), tuple(range(8)))))
    lowered = lower(single("f", (rows,), Transfer((0,), (columns,), reshard=True)), placement, {})
    sends = [step for plan in lowered.plans.values() for step in steps_of(plan) if isinstance(step, p.Send)]
    pieces = [piece for send in sends for piece in send.pieces]
    moved = sum(math.prod(stop - start for start, stop in piece.box) for piece in pieces)
    assert moved == 64 * 64, "each element is needed by one shard of the target, and sent once"


def test_plans_do_not_grow_with_the_pairs_of_shards_that_exchange_something():
    placement, order = cluster(2, 32, 8), tuple(range(256))
    rows = ArraySpec("int64", (256, 256), Sharding(order, Tiled((256, 1), order)))
    columns = ArraySpec("int64", (256, 256), Sharding(tuple(range(256, 512)), Tiled((1, 256), order)))
    lowered = lower(single("f", (rows,), Transfer((0,), (columns,), reshard=True)), placement, {})
    assert len(lowered.plans) == 64
    for plan in lowered.plans.values():
        (step,) = steps_of(plan)
        assert isinstance(step, p.Send | p.Receive)
        assert len(step.pieces) == 8 * 256
        assert len(msgspec.msgpack.encode(plan)) < 256


def test_a_host_waits_for_another_when_it_has_sent_what_that_waits_for():
    placement = cluster(2, 1, 1)
    source = ArraySpec("int64", (4,), Sharding((0, 1), Tiled((2,), (0, 1))))
    target = ArraySpec("int64", (4,), Sharding((1, 0), Tiled((2,), (0, 1))))
    program = single("swap", (source,), Transfer((0,), (target,), reshard=True))
    lowered = lower(program, placement, {})
    # Each sends first. If either received first, both would wait forever.
    for plan in lowered.plans.values():
        assert [type(step) for step in steps_of(plan)] == [p.Send, p.Receive]
    machine = Machine(placement)
    machine.load(0, source, contents(source, counting((4,))))
    machine.run(lowered)
    assert [list(s) for s in machine.shards(1, target)] == [[0, 1], [2, 3]]


def test_a_transfer_of_several_arrays_moves_some_and_sends_others():
    placement = cluster(2, 1, 2)
    a = ArraySpec("int64", (2,), Sharding((0,)))
    b = ArraySpec("int64", (3,), Sharding((1,)))
    to = (
        ArraySpec("int64", (2,), Sharding((1,))),
        ArraySpec("int64", (3,), Sharding((2,))),
    )
    lowered = lower(single("f", (a, b), Transfer((0, 1), to, donate=True)), placement, {})
    assert lowered.donated == {0, 1}
    machine = Machine(placement)
    machine.load(0, a, [counting((2,))])
    machine.load(1, b, [counting((3,))])
    machine.run(lowered)
    assert list(machine.shards(2, to[0])[0]) == [0, 1]
    assert list(machine.shards(3, to[1])[0]) == [0, 1, 2]


# ---- host ends


@given(st.data(), placements(), shapes)
def test_bytes_from_the_client_reach_every_shard_and_come_back_whole(data, placement, shape):
    spec = data.draw(specs(placement, shape))
    devices = spec.sharding.devices
    whole = counting(shape)
    boxes = shard_boxes(spec.sharding, spec.shape)
    if data.draw(st.booleans()):
        buffers = (HostBuffer(0, shape, None, None),)
        fed = {0: whole}
    else:
        # Shards with the same part may share a buffer.
        groups: dict[Any, list[int]] = {}
        for position, box in enumerate(boxes):
            groups.setdefault(box, []).append(position)
        buffers = tuple(
            HostBuffer(feed, whole[slices(box)].shape, None, tuple(positions))
            for feed, (box, positions) in enumerate(groups.items())
        )
        fed = {feed: whole[slices(box)] for feed, box in enumerate(groups)}
    machine = Machine(placement)
    hosts = {placement[device].host for device in devices}
    machine.feeds.update(((host, feed), content) for host in hosts for feed, content in fed.items())
    lowered = lower(single("put", (), HostToDevice(buffers, (spec,)), feeds=len(buffers)), placement, {})
    machine.run(lowered)
    for got, want in zip(machine.shards(0, spec), contents(spec, whole), strict=True):
        np.testing.assert_array_equal(got, want)

    get = single("get", (spec,), DeviceToHost((0,), 0, None), feeds=1)
    if len(hosts) > 1 and not isinstance(spec.sharding.tiling, Replicated):
        with pytest.raises(StatusError, match="shard by shard"):
            lower(get, placement, {})
        return
    machine.run(lower(get, placement, {}))
    np.testing.assert_array_equal(machine.to_client[0], whole)


def on_devices(*devices: int, tiling: Any = None) -> ArraySpec:
    return ArraySpec("int64", (4,), Sharding(devices, tiling or Replicated()))


def put_of(*specs: ArraySpec, size: int) -> Program:
    node = HostToDevice((HostBuffer(0, (size,), None, None),), specs)
    return Program("put", (), (node,), tuple(range(len(specs))), 1)


def test_arrays_of_one_host_are_made_of_one_buffer_by_one_step():
    machine = Machine(cluster(1, 1, 2))
    machine.feeds[0, 0] = np.arange(8)
    specs = on_devices(1), on_devices(0)
    lowered = lower(put_of(*specs, size=64), cluster(1, 1, 2), {})
    (plan,) = lowered.plans.values()
    assert [type(step) for step in plan.segments[0].steps] == [p.PutAll]
    machine.run(lowered)
    assert [machine.shards(value, specs[value])[0].tolist() for value in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_arrays_of_several_buffers_are_made_in_one_gang():
    machine = Machine(cluster(1, 2, 1))
    for host in range(2):
        for feed in range(3):
            machine.feeds[host, feed] = np.arange(4) + 10 * feed
    rows = ArraySpec("int64", (8,), Sharding((0, 1), Tiled((2,), (0, 1))))
    buffers = (
        HostBuffer(0, (4,), None, (0, 1), output=0),
        HostBuffer(1, (4,), None, (0,), output=1),
        HostBuffer(2, (4,), None, (1,), output=1),
    )
    specs = on_devices(0, 1), rows
    lowered = lower(single("put", (), HostToDevice(buffers, specs), feeds=3), cluster(1, 2, 1), {})
    assert len(lowered.gangs) == 1
    machine.run(lowered)
    assert [each.tolist() for each in machine.shards(0, specs[0])] == [[0, 1, 2, 3]] * 2
    assert [each.tolist() for each in machine.shards(1, rows)] == [[10, 11, 12, 13], [20, 21, 22, 23]]


@pytest.mark.parametrize(
    ("outputs", "error"),
    [
        ((0, 0), "do not fill each shard exactly once"),
        ((0, 2), "makes output 2 of 2 of a host buffer"),
        ((0, -1), "makes output -1 of 2 of a host buffer"),
    ],
)
def test_each_of_several_arrays_needs_its_buffers(outputs: tuple[int, ...], error: str):
    buffers = tuple(HostBuffer(feed, (4,), None, None, output) for feed, output in enumerate(outputs))
    program = single("put", (), HostToDevice(buffers, (on_devices(0), on_devices(1))), feeds=2)
    with pytest.raises(StatusError, match=error):
        lower(program, cluster(1, 1, 2), {})


@pytest.mark.parametrize(
    ("program", "error"),
    [
        (put_of(on_devices(0), on_devices(2), size=64), "must be on one host, but these are on 2 hosts"),
        (put_of(on_devices(0), on_devices(0, 1), size=64), "must be on one device"),
        (put_of(on_devices(0), on_devices(1), size=60), "must have the shape of their bytes"),
    ],
)
def test_other_arrays_cannot_be_made_of_one_buffer(program: Program, error: str):
    with pytest.raises(StatusError, match=error):
        lower(program, cluster(1, 2, 2), {})


def test_whole_arrays_of_one_host_are_read_by_one_step():
    specs = (on_devices(1), on_devices(0, 1), on_devices(1))
    program = Program("get", specs, (DeviceToHost((0, 1, 2), 0, None),), (3,), 1)
    lowered = lower(program, cluster(1, 1, 2), {})
    (plan,) = lowered.plans.values()
    assert plan.segments[0].steps == (p.GetAll((0, 1, 2), 3, 0, (0, 0, 0)),)


def test_shards_of_one_host_are_read_by_one_step():
    tiled = on_devices(1, 2, 3, 0, tiling=Tiled((4,), (0, 1, 2, 3)))
    read = DeviceToHost((0, 0, 1), 0, None, (), (1, 2, 0))
    program = Program("get", (tiled, on_devices(3)), (read,), (2,), 1)
    lowered = lower(program, cluster(1, 2, 2), {})
    (plan,) = lowered.plans.values()
    assert plan.segments[0].steps == (p.GetAll((0, 0, 1), 2, 0, (0, 1, 0)),)


@pytest.mark.parametrize(
    ("positions", "error"),
    [
        ((0, 1, 0), "must be on one host, but these are on 2 hosts"),
        ((1, 4, 0), "shard 4 of an array of 4 shards cannot be read"),
        ((-1, 1, 0), "shard -1 of an array of 4 shards cannot be read"),
    ],
)
def test_other_shards_cannot_be_read_together(positions: tuple[int, ...], error: str):
    tiled = on_devices(1, 2, 3, 0, tiling=Tiled((4,), (0, 1, 2, 3)))
    read = DeviceToHost((0, 0, 1), 0, None, (), positions)
    program = Program("get", (tiled, on_devices(3)), (read,), (2,), 1)
    with pytest.raises(StatusError, match=error):
        lower(program, cluster(1, 2, 2), {})


@pytest.mark.parametrize(
    ("specs", "error"),
    [
        ((on_devices(0), on_devices(2)), "must be on one host, but these are on 2 hosts"),
        ((on_devices(0), on_devices(0, 1, tiling=Tiled((2,), (0, 1)))), "must be whole on one device"),
    ],
)
def test_other_arrays_cannot_be_read_together(specs: tuple[ArraySpec, ...], error: str):
    program = Program("get", specs, (DeviceToHost((0, 1), 0, None),), (2,), 1)
    with pytest.raises(StatusError, match=error):
        lower(program, cluster(1, 2, 2), {})


@pytest.mark.parametrize(
    "buffers",
    [
        (),
        (HostBuffer(0, (2,), None, (0,)),),  # shard 1 gets nothing
        (HostBuffer(0, (2,), None, (0, 1)), HostBuffer(0, (2,), None, (1,))),  # shard 1 comes twice
        (HostBuffer(0, (4,), None, None), HostBuffer(0, (2,), None, (0,))),
    ],
)
def test_host_buffers_must_fill_each_shard_once(buffers):
    spec = ArraySpec("int64", (4,), Sharding((0, 1), Tiled((2,), (0, 1))))
    with pytest.raises(StatusError, match="each shard exactly once"):
        lower(single("put", (), HostToDevice(buffers, (spec,)), feeds=1), cluster(1, 1, 2), {})


# ---- rearranging


@given(st.data(), placements())
def test_rearranged_shards_are_the_very_shards_that_the_mappings_name(data, placement):
    shape = (2,)
    inputs = []
    for _ in range(data.draw(st.integers(1, 3))):
        count = data.draw(st.integers(1, len(placement)))
        devices = tuple(data.draw(st.permutations(sorted(placement)))[:count])
        inputs.append(ArraySpec("int64", (2 * count,), Sharding(devices, Even(shape))))
    everything = [(i, s) for i, spec in enumerate(inputs) for s in range(len(spec.sharding.devices))]
    outputs, mappings, wanted = [], [], []
    for o in range(data.draw(st.integers(1, 3))):
        picks, devices_used = [], set()
        for i, s in data.draw(st.permutations(everything)):
            if inputs[i].sharding.devices[s] not in devices_used:
                devices_used.add(inputs[i].sharding.devices[s])
                picks.append((i, s))
        picks = picks[: data.draw(st.integers(1, len(picks)))]
        devices = tuple(inputs[i].sharding.devices[s] for i, s in picks)
        outputs.append(ArraySpec("int64", (2 * len(picks),), Sharding(devices, Even(shape))))
        mappings.extend(
            Mapping(i, o, (s, s + 1, 1), (position, position + 1, 1)) for position, (i, s) in enumerate(picks)
        )
        wanted.append([10 * i + s for i, s in picks])
    program = single(
        "remap",
        tuple(inputs),
        Rearrange(tuple(range(len(inputs))), tuple(outputs), tuple(data.draw(st.permutations(mappings)))),
    )
    lowered = lower(program, placement, {})
    machine = Machine(placement)
    for i, spec in enumerate(inputs):
        machine.load(i, spec, [np.full(shape, 10 * i + s) for s in range(len(spec.sharding.devices))])
    machine.run(lowered)
    for o, spec in enumerate(outputs):
        assert [shard[0] for shard in machine.shards(len(inputs) + o, spec)] == wanted[o]
    assert machine.sent == {}


def test_mappings_step_over_shards():
    placement = cluster(1, 1, 4)
    spec = ArraySpec("int64", (8,), Sharding((0, 1, 2, 3), Even((2,))))
    halves = tuple(ArraySpec("int64", (4,), Sharding(d, Even((2,)))) for d in ((0, 2), (3, 1)))
    node = Rearrange(
        (0,),
        halves,
        (
            Mapping(0, 0, (0, 4, 2), (0, 2, 1)),
            Mapping(0, 1, (1, 2, 1), (1, 2, 1)),
            Mapping(0, 1, (3, 4, 1), (0, 1, 1)),
        ),
    )
    machine = Machine(placement)
    machine.load(0, spec, [np.full((2,), i) for i in range(4)])
    machine.run(lower(single("halves", (spec,), node), placement, {}))
    assert [s[0] for s in machine.shards(1, halves[0])] == [0, 2]
    assert [s[0] for s in machine.shards(2, halves[1])] == [3, 1]


PAIR = ArraySpec("int64", (4,), Sharding((0, 1), Even((2,))))


@pytest.mark.parametrize(
    ("outputs", "mappings", "text"),
    [
        ((PAIR,), [Mapping(0, 0, (0, 1, 1), (0, 1, 1))], "exactly once"),
        ((PAIR,), [Mapping(0, 0, (0, 2, 1), (0, 1, 1))], "takes 2 shards and returns 1"),
        ((PAIR,), [Mapping(0, 0, (0, 3, 1), (0, 3, 1))], "a shard that does not exist"),
        ((PAIR,), [Mapping(0, 0, (0, 2, 1), (0, 2, 1)), Mapping(0, 0, (0, 1, 1), (0, 1, 1))], "a target shard twice"),
        ((PAIR,), [Mapping(0, 0, (-1, 1, 1), (0, 2, 1))], "rearranges shards that do not exist"),
        (
            (ArraySpec("int64", (4,), Sharding((1, 0), Even((2,)))),),
            [Mapping(0, 0, (0, 2, 1), (0, 2, 1))],
            "cannot move shards to another device",
        ),
    ],
)  # fmt: skip
def test_a_rearrangement_that_does_not_fit_is_refused(outputs, mappings, text):
    program = single("remap", (PAIR,), Rearrange((0,), outputs, tuple(mappings)))
    with pytest.raises(StatusError, match=text) as caught:
        lower(program, cluster(1, 1, 2), {})
    assert caught.value.status.code == Code.INVALID_ARGUMENT


# ---- calls


def call(devices: tuple[int, ...], **options: Any) -> Program:
    spec = ArraySpec("float32", (2,), Sharding(devices, Even((2,))))
    return single("train_step", (spec, spec), Call(7, (0, 1), (spec,), devices, **options))


def test_a_call_becomes_the_same_step_on_each_of_its_hosts():
    placement = cluster(2, 2, 2)
    lowered = lower(call((4, 5, 6, 7), donated=(1,), preserved=(0,), completion=True), placement, {7: "abc"})
    step = p.Execute("abc", (0, 1), 2, (1,), (0,), True)
    segment = p.Segment(0, (step,), (2, 3), drops=(0, 1, 2, 3), collective=True)
    plan = p.Plan("train_step", (0, 1), (segment,), (2, 3))
    assert lowered.plans == {2: plan, 3: plan}
    assert lowered.gangs == (LoweredGang(0, 1, (2, 3), "abc", True, makes=(2, 3)),)
    assert lowered.donated == {1}
    assert [lowered.values[value].hosts for value in lowered.results] == [(2, 3), (2, 3)]
    assert [lowered.values[value].nbytes for value in lowered.results] == [4 * 8, 0]


def test_a_call_on_two_islands_is_one_collective_gang_on_each_of_them():
    lowered = lower(call((1, 2)), cluster(2, 1, 2), {7: "abc"})
    assert [(gang.node, gang.island, gang.hosts, gang.collective) for gang in lowered.gangs] == [
        (0, 0, (0,), True),
        (0, 1, (1,), True),
    ]


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (call((0, 9)), "'train_step' names device 9, which this session does not have"),
        (call((0, 1)), "calls function 7, which is not registered"),
        (
            single("f", (PAIR,), Transfer((0,), (ArraySpec("int64", (5,), PAIR.sharding),))),
            "cannot change",
        ),
        (single("f", (PAIR,), Transfer((0,), (ArraySpec("int32", (4,), PAIR.sharding),))), "cannot change"),
        (
            single("f", (PAIR,), Transfer((0,), (ArraySpec("int64", (4,), Sharding((8,))),), reshard=True)),
            "device 8",
        ),
        (
            single("f", (PAIR,), Transfer((0,), (ArraySpec("int64", (4,), Sharding((0, 1, 2))),))),
            "2 devices .* to 3",
        ),
        (
            single("f", (PAIR,), Transfer((0,), (ArraySpec("int64", (4,), Sharding((2,))),))),
            "2 devices .* to 1",
        ),
        (
            single(
                "f",
                (ArraySpec("int64", (4,), Sharding((0, 1), Opaque())),),
                Transfer((0,), (PAIR,), reshard=True),
            ),
            "disassemble|opaque",
        ),
        (
            Program(
                "f",
                (PAIR,),
                (
                    Call(7, (0,), (), (0, 1), completion=True),
                    Transfer((1,), (PAIR,)),
                ),
                (2,),
            ),
            "not registered|completion",
        ),
    ],
)
def test_what_cannot_be_lowered_is_refused_with_a_reason(program, text):
    with pytest.raises(StatusError, match=text) as caught:
        lower(program, cluster(1, 1, 4), {})
    assert caught.value.status.code in (Code.INVALID_ARGUMENT, Code.UNIMPLEMENTED)


def test_a_calls_completion_is_no_array():
    nodes = (Call(7, (0,), (), (0, 1), completion=True), Transfer((1,), (PAIR,)))
    with pytest.raises(StatusError, match="expected an array, not the completion"):
        lower(Program("f", (PAIR,), nodes, (2,)), cluster(1, 1, 2), {7: "abc"})


def test_values_between_nodes_stay_on_their_host_and_do_not_become_results():
    placement = cluster(1, 1, 2)
    other = ArraySpec("int64", (4,), Sharding((1, 0), Even((2,))))
    program = Program("f", (PAIR,), (Transfer((0,), (other,)), Call(7, (1,), (PAIR,), (0, 1))), (2,))
    (plan,) = lower(program, placement, {7: "abc"}).plans.values()
    assert plan.arguments == (0,)
    assert plan.results == (2,)


def test_each_node_is_a_gang_of_its_own_on_each_of_its_islands_and_says_what_goes_with_it():
    placement = cluster(2, 1, 2)
    far = ArraySpec("int64", (4,), Sharding((2, 3), Even((2,))))
    nodes = (
        Call(7, (0,), (PAIR,), (0, 1)),
        Transfer((1,), (far,)),
        Call(8, (2,), (far,), (2, 3), completion=True),
        Call(8, (2,), (far,), (2, 3)),
    )
    lowered = lower(Program("f", (PAIR,), nodes, (5,)), placement, {7: "abc", 8: "def"})
    assert lowered.gangs == (
        LoweredGang(0, 0, (0,), "abc", makes=(1,)),
        LoweredGang(1, 0, (0,), drops=(1,)),
        LoweredGang(1, 1, (1,), makes=(2,)),
        LoweredGang(2, 1, (1,), "def", makes=(3, 4), drops=(3, 4)),
        LoweredGang(3, 1, (1,), "def", makes=(5,), drops=(2,)),
    )
    assert {host: [segment.gang for segment in plan.segments] for host, plan in lowered.plans.items()} == {
        0: [0, 1],
        1: [2, 3, 4],
    }
    assert [segment.drops for segment in lowered.plans[1].segments] == [(), (3, 4), (2, 5)]
