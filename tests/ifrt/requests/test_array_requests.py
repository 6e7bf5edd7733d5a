"""Tests of requests that make arrays from other arrays, and that delete or destruct arrays."""

from __future__ import annotations

from importlib.metadata import version

import msgspec
import pytest

from atoll.errors import Code
from atoll.ifrt.ifrt_session import OUT_OF_SEQUENCE
from atoll.ifrt.requests.array_requests import omitted_kind
from atoll.ir.program import Mapping, Rearrange, Transfer
from atoll.ir.types import ArraySpec, Sharding
from atoll.protocol import messages as m
from atoll.protocol.ifrt import arrays_pb2
from atoll.protocol.translation.codec import dtype_to
from atoll.protocol.translation.shardings import sharding_to
from tests.ifrt.rig import STACK, Rig, check_refused, node_of, on, spec_proto

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


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        ([0], "must match the number of single-shard arrays: 2 vs. 1"),
        ([0, 1, 2], "must match the number of single-shard arrays: 2 vs. 3"),
        ([0, 2], "an array with shard 1 on device 1 cannot be assembled from one on device 2"),
        ([1, 0], "an array with shard 0 on device 0 cannot be assembled from one on device 1"),
    ],
)
def test_an_array_is_assembled_only_of_as_many_shards_on_its_devices(rig: Rig, devices: list[int], text: str):
    for handle, device in enumerate(devices, 1):
        rig.make(handle, on(device, shape=(2,)))
    check_refused(assemble(rig, arrays=list(range(1, len(devices) + 1))), Code.INVALID_ARGUMENT, text)
    assert rig.take() == []
    check_refused(rig.ask("is_array_deleted", array=9), Code.INVALID_ARGUMENT, text)


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
        ("assemble_array_from_single_device_arrays", {"result": 5}, Code.INVALID_ARGUMENT, "at least one shard"),
        ("disassemble_into_single_device_arrays", {"array": 8, "results": [5]}, Code.NOT_FOUND, "array handle 8"),
        (
            "disassemble_into_single_device_arrays",
            {"array": 1, "results": [5]},
            Code.INVALID_ARGUMENT,
            "1 handle for 2",
        ),
        ("fully_replicated_shard", {"array": 8, "result": 5}, Code.NOT_FOUND, "array handle 8"),
        ("bitcast_arrays", {"arrays": [1], "results": [5]}, Code.INVALID_ARGUMENT, "0 types for 1 array"),
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
            "on device 7, where",
        ),
        (
            "remap_arrays",
            {
                "plan": {"output_specs": [spec_proto(PAIR)], "mappings": [{"from_start": [0]}]},
                "arrays": [1],
                "results": [5],
            },
            Code.INVALID_ARGUMENT,
            "different lengths",
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
            "an array that does not exist",
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


# ---- transfers to other devices, memories and shardings


SOURCE = on(0, 1)


def moved(*devices: int, memory: str = "") -> ArraySpec:
    return msgspec.structs.replace(SOURCE, sharding=Sharding(devices, SOURCE.sharding.tiling, memory))


@pytest.mark.parametrize(
    ("fields", "target", "donate"),
    [
        ({"device_ids": [2, 3]}, moved(2, 3), False),
        ({"memory_kind": "pinned_host"}, moved(0, 1, memory="pinned_host"), False),
        ({"device_ids": [1, 0], "copy_semantics": arrays_pb2.DONATE_INPUT}, moved(1, 0), True),
    ],
)
def test_a_copy_moves_each_shard(rig: Rig, fields, target, donate):
    rig.make(1, SOURCE)
    response = rig.ask("copy_arrays", arrays=[1], results=[5], **fields)
    assert list(response.copy_arrays.arrays) == [5]
    assert list(response.meta.destroyed_user_context_ids) == []  # the array keeps its stack
    program, launch = rig.take_launch()
    assert (program.name, node_of(program)) == ("device_put", Transfer((0,), (target,), donate))
    assert (launch.arguments, launch.results, launch.traceback_id) == ((1,), (5,), STACK)
    assert rig.session.arrays.spec(5) == target
    assert rig.ask("is_array_deleted", array=1).is_array_deleted.deleted == donate


def test_a_reshard_may_cut_an_array_in_another_way(rig: Rig):
    rig.make(1, SOURCE)
    target = on(0, 1, 2, 3)
    response = rig.ask("reshard_arrays", arrays=[1], specs=[spec_proto(target)], results=[5])
    assert list(response.reshard_arrays.arrays) == [5]
    program, _ = rig.take_launch()
    assert (program.name, node_of(program)) == ("reshard", Transfer((0,), (target,), reshard=True))


def test_several_arrays_travel_in_one_launch(rig: Rig):
    rig.make(1, SOURCE)
    rig.make(2, on(3))
    rig.ask("reshard_arrays", arrays=[1, 2], specs=[spec_proto(on(3)), spec_proto(on(0, 1))], results=[5, 6])
    program, launch = rig.take_launch()
    assert node_of(program).outputs == (on(3), on(0, 1))
    assert (launch.arguments, launch.results) == ((1, 2), (5, 6))


@pytest.mark.parametrize(
    ("kind", "fields", "code", "text"),
    [
        ("copy_arrays", {"arrays": [8]}, Code.NOT_FOUND, "unknown array handle 8"),
        ("copy_arrays", {"arrays": [1], "device_ids": [2]}, Code.INVALID_ARGUMENT, "cannot be copied to 1"),
        ("copy_arrays", {"arrays": [1], "device_ids": [2, 2]}, Code.INVALID_ARGUMENT, "to a device only once"),
        ("copy_arrays", {"arrays": [1], "device_ids": [2, 99]}, Code.INVALID_ARGUMENT, "device 99 does not exist"),
        ("reshard_arrays", {"arrays": [1]}, Code.INVALID_ARGUMENT, "0 shardings for 1 array"),
    ],
)
def test_a_transfer_that_makes_no_sense_is_refused_and_its_result_has_the_error(rig: Rig, kind, fields, code, text):
    rig.make(1, SOURCE)
    check_refused(rig.ask(kind, results=[5], **fields), code, text)
    assert rig.take() == []
    check_refused(rig.ask("is_array_deleted", array=5), code, text)


def test_an_error_travels_with_the_array_that_has_it(rig: Rig):
    rig.make(1, SOURCE)
    rig.ask("copy_arrays", arrays=[1], device_ids=[2], results=[5], stack=11)
    response = rig.ask("copy_arrays", arrays=[5], results=[6], stack=12)
    check_refused(response, Code.INVALID_ARGUMENT, "cannot be copied to 1")
    payload = response.meta.status.payload["type.googleapis.com/ifrt.UserContext"]
    assert payload == b"11"  # the stack of the first request that failed


@pytest.mark.parametrize(
    ("jaxlib", "kind"), [("0.10.2", ""), ("0.11.2", ""), ("0.12.0.1", "pinned_host"), ("1.0", "pinned_host")]
)
def test_a_copy_without_a_kind_goes_to_the_memory_that_the_client_means(jaxlib: str, kind: str):
    assert omitted_kind("pinned_host", jaxlib) == kind


@pytest.mark.parametrize("fields", [{}, {"memory_kind": "device"}, {"memory_kind": ""}])
def test_a_copy_goes_to_the_kind_of_memory_in_the_request(rig: Rig, fields: dict[str, str]):
    rig.make(1, moved(0, 1, memory="pinned_host"))
    rig.ask("copy_arrays", arrays=[1], device_ids=[2, 3], results=[5], **fields)
    kind = fields.get("memory_kind", omitted_kind("pinned_host", version("jaxlib")))
    assert rig.session.arrays.spec(5) == moved(2, 3, memory=kind)


# ---- deleting and destructing arrays


@pytest.mark.parametrize(
    ("kind", "released"),
    [("delete_array", m.Release((1, 2), delete=True)), ("destruct_array", m.Release((1, 2)))],
)
def test_arrays_are_released_together(rig: Rig, kind, released):
    rig.make(1, on(0))
    rig.make(2, on(0, 1))
    response = rig.ask(kind, arrays=[1, 2])
    assert response.WhichOneof("kind") == kind
    assert response.meta.seq_num == OUT_OF_SEQUENCE
    assert rig.take() == [released]


def test_a_deleted_array_says_so_until_it_is_destructed(rig: Rig):
    rig.make(1, on(0))
    assert not rig.ask("is_array_deleted", array=1).is_array_deleted.deleted
    rig.ask("delete_array", arrays=[1])
    assert rig.ask("is_array_deleted", array=1).is_array_deleted.deleted
    rig.ask("destruct_array", arrays=[1])
    check_refused(rig.ask("is_array_deleted", array=1), Code.NOT_FOUND, "unknown array handle 1")


@pytest.mark.parametrize(("arrays", "code"), [([1], 0), ([1, 2], Code.NOT_FOUND), ([2], Code.NOT_FOUND)])
def test_the_future_of_a_deletion_has_its_status(rig: Rig, arrays, code):
    rig.make(1, on(0))
    future = rig.ask("delete_array", arrays=arrays).delete_array.deletion_future_handle
    assert [message.handles for message in rig.take()] == ([(1,)] if 1 in arrays else [])
    response = rig.ask("check_future", future=future)
    assert (response.meta.status.code, response.meta.seq_num) == (code, OUT_OF_SEQUENCE)
    check_refused(rig.ask("check_future", future=future), Code.NOT_FOUND, "unknown future")


def test_arrays_that_are_not_there_are_named_and_the_others_destructed(rig: Rig):
    rig.make(1, on(0))
    check_refused(rig.ask("destruct_array", arrays=[1, 8, 9]), Code.NOT_FOUND, "unknown array handles [8, 9]")
    assert rig.take() == [m.Release((1,))]


def test_an_array_that_was_never_made_is_destructed_without_the_controller(rig: Rig):
    check_refused(rig.ask("copy_arrays", arrays=[7], results=[1]), Code.NOT_FOUND, "unknown array handle 7")
    assert rig.ask("destruct_array", arrays=[1]).meta.status.code == 0
    assert rig.take() == []


def test_the_stack_of_an_array_is_named_with_the_first_response_after_its_end(rig: Rig):
    rig.make(1, on(0), stack=5)
    destructed = rig.ask("destruct_array", arrays=[1], stack=0)
    assert list(destructed.meta.destroyed_user_context_ids) == []
    rig.make(2, on(0))
    response = rig.ask("is_array_deleted", array=2, stack=STACK)
    assert sorted(response.meta.destroyed_user_context_ids) == [5, STACK]
