"""Views: programs of one `Rearrange`, whose arrays share memory with those they were made of."""

from __future__ import annotations

import pytest

from atoll.errors import Code
from atoll.ir.program import Mapping, Rearrange
from atoll.protocol.ifrt import arrays_pb2
from atoll.protocol.translation.codec import dtype_to
from atoll.protocol.translation.shardings import sharding_to
from tests.ifrt.rig import Rig, check_refused, node_of, on, spec_proto

PAIR = on(0, 1)
ONE = (0, 1, 1)


def assemble(rig: Rig, **changes):
    fields = {
        "shape": {"dims": PAIR.shape},
        "sharding": sharding_to(PAIR.sharding, PAIR.shape, None),
        "arrays": [1, 2],
        "result": 9,
        "dtype": dtype_to("float32"),
    }
    return rig.ask("assemble_array_from_single_device_arrays", **(fields | changes))


def test_an_array_is_assembled_of_shards_in_order(rig: Rig):
    rig.make(1, on(0, shape=(2,)))
    rig.make(2, on(1, shape=(2,)))
    response = assemble(rig)
    assert response.assemble_array_from_single_device_arrays.array == 9
    program, launch = rig.take_launch()
    mappings = (Mapping(0, 0, ONE, ONE), Mapping(1, 0, ONE, (1, 2, 1)))
    assert node_of(program) == Rearrange((0, 1), (PAIR,), mappings)
    assert (launch.arguments, launch.results) == ((1, 2), (9,))
    assert rig.session.arrays.spec(9) == PAIR


def test_an_array_is_disassembled_into_one_for_each_shard(rig: Rig):
    rig.make(1, PAIR)
    response = rig.ask("disassemble_into_single_device_arrays", array=1, results=[5, 6])
    assert list(response.disassemble_into_single_device_arrays.arrays) == [5, 6]
    program, launch = rig.take_launch()
    shards = (on(0, shape=(2,)), on(1, shape=(2,)))
    assert node_of(program) == Rearrange((0,), shards, (Mapping(0, 0, ONE, ONE), Mapping(0, 1, (1, 2, 1), ONE)))
    assert (launch.arguments, launch.results) == ((1,), (5, 6))


def test_the_first_shard_of_a_replicated_array_is_an_array(rig: Rig):
    rig.make(1, PAIR)
    assert rig.ask("fully_replicated_shard", array=1, result=5).fully_replicated_shard.array == 5
    program, _ = rig.take_launch()
    assert node_of(program) == Rearrange((0,), (on(0, shape=(2,)),), (Mapping(0, 0, ONE, ONE),))


def test_a_remap_takes_intervals_of_shards(rig: Rig):
    rig.make(1, PAIR)
    plan = arrays_pb2.RemapPlan()
    plan.output_specs.append(spec_proto(on(1, shape=(2,))))
    plan.mappings.add(
        in_array=0, out_array=0, from_start=[1], from_end=[2], from_step=[1], to_start=[0], to_end=[1], to_step=[1]
    )
    response = rig.ask("remap_arrays", plan=plan, arrays=[1], results=[5])
    assert list(response.remap_arrays.arrays) == [5]
    program, _ = rig.take_launch()
    assert node_of(program).mappings == (Mapping(0, 0, (1, 2, 1), ONE),)


def test_a_remap_may_say_on_which_devices_shards_are_taken_over(rig: Rig):
    rig.make(1, PAIR)
    plan = arrays_pb2.RemapPlan()
    plan.output_specs.append(spec_proto(on(1, 0)))
    taken = plan.input_devices_for_output.add(out_array=0).input_devices.add(in_array=0)
    taken.device_list.device_ids.extend([0, 1])
    rig.ask("remap_arrays", plan=plan, arrays=[1], results=[5])
    program, _ = rig.take_launch()
    assert node_of(program).mappings == (Mapping(0, 0, (0, 1, 1), (1, 2, 1)), Mapping(0, 0, (1, 2, 1), (0, 1, 1)))


def test_a_bitcast_keeps_shards_where_they_are(rig: Rig):
    rig.make(1, PAIR)
    target = on(0, 1, dtype="int32")
    response = rig.ask("bitcast_arrays", arrays=[1], specs=[spec_proto(target)], results=[5])
    assert list(response.bitcast_arrays.arrays) == [5]
    program, _ = rig.take_launch()
    assert node_of(program) == Rearrange((0,), (target,), (Mapping(0, 0, (0, 2, 1), (0, 2, 1)),), bitcast=True)


@pytest.mark.parametrize(
    ("deleted", "others"),
    [(1, {5: True, 6: True}), (5, {1: True, 6: False})],
)
def test_a_view_is_deleted_with_the_array_and_the_array_with_its_view(rig: Rig, deleted, others):
    rig.make(1, PAIR)
    rig.ask("disassemble_into_single_device_arrays", array=1, results=[5, 6])
    rig.ask("delete_array", arrays=[deleted])
    for handle, is_deleted in others.items():
        assert rig.ask("is_array_deleted", array=handle).is_array_deleted.deleted == is_deleted, handle


def test_what_is_assembled_of_donated_shards_shares_nothing_with_them(rig: Rig):
    rig.make(1, on(0, shape=(2,)))
    rig.make(2, on(1, shape=(2,)))
    assemble(rig, copy_semantics=arrays_pb2.DONATE_INPUT)
    program, _ = rig.take_launch()
    assert node_of(program).donate
    deleted = [rig.ask("is_array_deleted", array=handle).is_array_deleted.deleted for handle in (1, 2, 9)]
    assert deleted == [True, True, False]


@pytest.mark.parametrize(
    ("kind", "fields", "code", "text"),
    [
        ("assemble_array_from_single_device_arrays", {"result": 5}, Code.INVALID_ARGUMENT, "one shard at least"),
        ("disassemble_into_single_device_arrays", {"array": 8, "results": [5]}, Code.NOT_FOUND, "array handle 8"),
        (
            "disassemble_into_single_device_arrays",
            {"array": 1, "results": [5]},
            Code.INVALID_ARGUMENT,
            "1 handles for 2",
        ),
        ("fully_replicated_shard", {"array": 8, "result": 5}, Code.NOT_FOUND, "array handle 8"),
        ("bitcast_arrays", {"arrays": [1], "results": [5]}, Code.INVALID_ARGUMENT, "0 types for 1 arrays"),
        (
            "bitcast_arrays",
            {"arrays": [1], "specs": [spec_proto(on(0, 1, dtype="int8"))], "results": [5]},
            Code.INVALID_ARGUMENT,
            "the number of bytes",
        ),
        (
            "remap_arrays",
            {
                "plan": {
                    "output_specs": [spec_proto(PAIR)],
                    "input_devices_for_output": [{"input_devices": [{"device_list": {"device_ids": [7]}}]}],
                },
                "arrays": [1],
                "results": [5],
            },
            Code.INVALID_ARGUMENT,
            "on device 7, without both",
        ),
        (
            "remap_arrays",
            {
                "plan": {"output_specs": [spec_proto(PAIR)], "mappings": [{"from_start": [0]}]},
                "arrays": [1],
                "results": [5],
            },
            Code.INVALID_ARGUMENT,
            "do not agree",
        ),
        (
            "remap_arrays",
            {
                "plan": {
                    "output_specs": [spec_proto(PAIR)],
                    "mappings": [
                        {
                            "in_array": 3,
                            "from_start": [0],
                            "from_end": [1],
                            "from_step": [1],
                            "to_start": [0],
                            "to_end": [1],
                            "to_step": [1],
                        }
                    ],
                },
                "arrays": [1],
                "results": [5],
            },
            Code.INVALID_ARGUMENT,
            "an array that is not there",
        ),
    ],
)
def test_a_view_that_makes_no_sense_is_refused_and_its_result_has_the_error(rig: Rig, kind, fields, code, text):
    rig.make(1, PAIR)
    check_refused(rig.ask(kind, **fields), code, text)
    assert rig.take() == []
    check_refused(rig.ask("is_array_deleted", array=5), code, text)


def test_the_same_view_of_another_array_needs_no_other_program(rig: Rig):
    rig.make(1, PAIR)
    rig.make(2, PAIR)
    rig.ask("disassemble_into_single_device_arrays", array=1, results=[5, 6])
    _, first = rig.take_launch()
    rig.ask("disassemble_into_single_device_arrays", array=2, results=[7, 8])
    (second,) = rig.take()
    assert second.program == first.program
