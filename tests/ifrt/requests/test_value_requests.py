"""Tests of queries about the session, and of the description of its devices."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
import pytest

from atoll.cluster.virtual_devices import DeviceInfo, VirtualDevice
from atoll.errors import OK, Code, Status
from atoll.ifrt.ifrt_session import OUT_OF_SEQUENCE
from atoll.ifrt.requests.value_requests import init_reply
from atoll.protocol import messages as m
from atoll.protocol.messages import Welcome
from atoll.protocol.translation.codec import dtype_to
from tests.ifrt.rig import STACK, Rig, check_refused, on

FAILURE = Status(int(Code.DATA_LOSS), "it burnt")


def test_the_first_reply_describes_all_devices_and_is_out_of_sequence(rig: Rig):
    response = rig.ask("init", stack=0)
    assert response.init.session_id == 9
    assert [device.id for device in response.init.all_devices] == [0, 1, 2, 3]
    assert len(response.init.memories) == 8
    assert response.meta.seq_num == OUT_OF_SEQUENCE


@pytest.mark.parametrize("status", [OK, FAILURE])
def test_readiness_is_the_controllers_to_say(rig: Rig, status):
    rig.make(1, on(0))
    op = rig.send("check_value_ready", values=[1, 1])
    (asked,) = sent = rig.take()
    assert asked.handles == (1, 1)
    assert rig.answer(op) is None
    rig.end_waits(sent, status)
    response = rig.answer(op)
    assert response.meta.status.code == status.code
    assert rig.session.arrays.get(1).ready == status.ok


def test_no_values_are_ready_at_once(rig: Rig):
    assert rig.ask("check_value_ready").WhichOneof("kind") == "check_value_ready"


@pytest.mark.parametrize("status", [OK, FAILURE])
def test_a_future_is_answered_when_it_is_resolved(rig: Rig, status):
    handle = rig.session.add_future()
    resolve = rig.session.resolver(handle)
    op = rig.send("check_future", future=handle)
    assert rig.answer(op) is None
    rig.loop.call_soon(resolve, status)
    rig.settle()
    response = rig.answer(op)
    if status.ok:
        assert (response.WhichOneof("kind"), response.meta.seq_num) == ("check_future", 0)
        assert list(response.meta.destroyed_user_context_ids) == [STACK]
    else:
        check_refused(response, Code.DATA_LOSS, "it burnt")


@pytest.mark.parametrize(
    ("replicas", "partitions", "columns"),
    [(1, 1, [[0]]), (2, 2, [[0, 2], [1, 3]]), (1, 4, [[0], [1], [2], [3]])],
)
def test_the_default_assignment_counts_devices(rig: Rig, replicas, partitions, columns):
    response = rig.ask("get_default_device_assignment", num_replicas=replicas, num_partitions=partitions)
    assignment = response.get_default_device_assignment.device_assignment
    assert [list(each.replica_device_ids) for each in assignment.computation_devices] == columns


def test_a_default_assignment_for_too_many_devices_is_refused(rig: Rig):
    response = rig.ask("get_default_device_assignment", num_replicas=5, num_partitions=1)
    check_refused(response, Code.INVALID_ARGUMENT, "cannot be placed on 4 devices")


def test_a_default_layout_is_asked_of_a_worker_once(rig: Rig):
    fields = {"dtype": dtype_to("float32"), "dims": [2, 3], "device_id": 3, "memory_kind": "device"}
    op = rig.send("get_default_layout", **fields)
    (asked,) = rig.take()
    assert (asked.what, asked.device) == ("layout", 3)
    assert msgspec.msgpack.decode(asked.payload) == ["float32", [2, 3], 1]
    rig.receive(m.QueryReply(asked.query, OK, b"{1,0}"))
    assert rig.answer(op).get_default_layout.serialized_pjrt_layout == b"{1,0}"
    again = rig.ask("get_default_layout", **fields)
    assert again.get_default_layout.serialized_pjrt_layout == b"{1,0}"
    assert rig.take() == []


def test_the_layout_of_a_lost_islands_device_is_asked_of_another_island(rig: Rig):
    op = rig.send("get_default_layout", dtype=dtype_to("float32"), dims=[2], device_id=0)
    (asked,) = rig.take()
    rig.receive(m.QueryReply(asked.query, FAILURE, b""))
    (again,) = rig.take()
    assert (asked.device, again.device) == (0, 3)  # an island has two devices here
    rig.receive(m.QueryReply(again.query, OK, b"{0}"))
    assert rig.answer(op).get_default_layout.serialized_pjrt_layout == b"{0}"


def test_a_layout_that_no_worker_knows_is_one_that_jit_can_do_without(rig: Rig):
    """With any other code, jaxlib's jit aborts the user's process."""
    op = rig.send("get_default_layout", dtype=dtype_to("float32"), dims=[2], device_id=0)
    while sent := rig.take():
        rig.receive(m.QueryReply(sent[0].query, FAILURE, b""))
    check_refused(rig.answer(op), Code.UNIMPLEMENTED, "it burnt")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"dtype": dtype_to("float32"), "dims": [2], "device_id": 99}, "device 99 does not exist"),
        ({"dims": [2]}, "unknown dtype"),
        ({"dtype": dtype_to("float32"), "dims": [-1]}, "invalid shape"),
    ],
)
def test_a_layout_of_nothing_is_refused(rig: Rig, fields, text):
    check_refused(rig.ask("get_default_layout", **fields), Code.INVALID_ARGUMENT, text)


def test_strings_have_no_layout(rig: Rig):
    fields = {"dtype": dtype_to("string"), "dims": [2], "device_id": 0}
    check_refused(rig.ask("get_default_layout", **fields), Code.UNIMPLEMENTED, "strings has no layout")
    assert rig.take() == []


def test_a_request_of_an_unknown_kind_is_refused_by_its_number(rig: Rig):
    from atoll.ifrt.requests import handle_request

    # Request.meta.op_id = 500, and a field 99 that no version has.
    rig.loop.call_soon(handle_request, rig.session, b"\x0a\x09\x09\xf4\x01\0\0\0\0\0\0" + b"\x9a\x06\0")
    rig.settle()
    check_refused(rig.answer(500), Code.UNIMPLEMENTED, "[99]")


# ---- the description of the devices


@pytest.mark.parametrize(
    ("hosts", "names"),
    [
        ([(0, 0), (0, 0)], [("CpuDevice(id=0)", "cpu:0"), ("CpuDevice(id=1)", "cpu:1")]),
        (
            [(0, 0), (0, 1)],
            [
                (
                    "AtollDevice(id=0,island=0,host=0,vtask=0,logical_task=0,slice=0)",
                    "cpu:0 (island 0, host 0)",
                ),
                (
                    "AtollDevice(id=1,island=0,host=1,vtask=1,logical_task=1,slice=0)",
                    "cpu:1 (island 0, host 1)",
                ),
            ],
        ),
    ],
)
def test_devices_have_stock_jaxs_names_where_all_are_on_one_host(
    hosts: Sequence[tuple[int, int]], names: Sequence[tuple[str, str]]
) -> None:
    devices = tuple(
        VirtualDevice(number, island, host, DeviceInfo(number, "cpu", "cpu", ("device",), "device", (), 0, number, 0))
        for number, (island, host) in enumerate(hosts)
    )
    reply = init_reply(Welcome(1, "", devices, (), "cpu", "", 1), 1)
    assert [(device.to_string, device.debug_string) for device in reply.all_devices] == names


def test_libraries_find_the_host_of_a_device() -> None:
    """A session may not have all hosts, for example if another session has an exclusive slice."""
    info = DeviceInfo(0, "cpu", "cpu", ("device",), "device", (), 0, 0, 0)
    hosts = [(0, 1), (0, 1), (0, 2), (3, 6), (3, 7)]
    devices = tuple(VirtualDevice(number, island, host, info) for number, (island, host) in enumerate(hosts))
    reply = init_reply(Welcome(1, "", devices, (), "cpu", "", 1), 1)
    attributes = [device.attributes.attributes for device in reply.all_devices]
    assert [(each["slice_index"].int64_value, each["virtual_task_index"].int64_value) for each in attributes] == [
        (0, 0),
        (0, 0),
        (0, 1),
        (3, 0),
        (3, 1),
    ]
    for each, device in zip(attributes, reply.all_devices, strict=True):
        # The patterns are those of Orbax (old and new) and of Tunix.
        task, slice_index = each["virtual_task_index"].int64_value, each["slice_index"].int64_value
        assert re.findall(r"vtask=(\d+),", device.to_string) == [str(task)]
        assert re.findall(r"(?:^|[,(])logical_task=([^,)]+)", device.to_string) == [str(task)]
        assert re.findall(r"(?:^|[,(])slice=([^,)]+)", device.to_string) == [str(slice_index)]


def test_attributes_of_a_platform_reach_the_client() -> None:
    attributes = (("compute_capability", "9.0"), ("core_count", 132))
    info = DeviceInfo(0, "NVIDIA H200", "cuda", ("device",), "device", (), 0, 0, 0, attributes)
    (device,) = init_reply(Welcome(1, "", (VirtualDevice(0, 0, 0, info),), (), "cuda", "", 1), 1).all_devices
    assert device.attributes.attributes["compute_capability"].string_value == b"9.0"
    assert device.attributes.attributes["core_count"].int64_value == 132
    assert device.to_string == "CudaDevice(id=0)"
