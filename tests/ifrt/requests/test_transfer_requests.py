"""Transfers to other devices, memories and shardings: programs of one `Transfer`."""

from __future__ import annotations

import msgspec
import pytest

from atoll.errors import Code
from atoll.ir.program import Transfer
from atoll.ir.types import ArraySpec, Sharding
from atoll.protocol.ifrt import arrays_pb2
from tests.ifrt.rig import STACK, Rig, check_refused, node_of, on, spec_proto

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
        ("copy_arrays", {"arrays": [1], "device_ids": [2, 2]}, Code.INVALID_ARGUMENT, "each device once"),
        ("copy_arrays", {"arrays": [1], "device_ids": [2, 99]}, Code.INVALID_ARGUMENT, "device 99 does not exist"),
        ("reshard_arrays", {"arrays": [1]}, Code.INVALID_ARGUMENT, "0 shardings for 1 arrays"),
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
    assert payload == b"11"  # the stack of the request that failed first


def test_a_copy_without_a_kind_goes_to_the_default_memory(rig: Rig):
    rig.make(1, moved(0, 1, memory="pinned_host"))
    rig.ask("copy_arrays", arrays=[1], device_ids=[0, 1], results=[5])
    assert rig.session.arrays.spec(5) == moved(0, 1)
