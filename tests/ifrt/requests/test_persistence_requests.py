"""Tests of pathwaysutils' persistence: plugin programs that become calls of Python next to the devices."""

from __future__ import annotations

import base64
import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import Code, StatusError
from atoll.executables.persistence import persistence_executable
from atoll.ir.types import ArraySpec, Replicated, Sharding, Tiled
from atoll.protocol.ifrt import executables_pb2, xla_pb2
from atoll.protocol.messages.python_messages import PythonHosts, ReadArrays, StoredArray, WriteArrays
from tests.ifrt.requests.test_python_requests import compiled, ready, registered
from tests.ifrt.rig import Rig, check_refused, node_of, program_of
from tests.session.fake_cluster import FakeCluster
from tests.thoroughness import examples

PARTS = xla_pb2.OpSharding(
    type=xla_pb2.OpSharding.OTHER, tile_assignment_dimensions=(2,), tile_assignment_devices=(0, 1)
)
WHOLE = xla_pb2.OpSharding(type=xla_pb2.OpSharding.REPLICATED)
# Devices 2 and 3 are a separate island.
SHARDING = Sharding((2, 3), Tiled((2,), (0, 1)))
ARRAY = ArraySpec("bfloat16", (4,), SHARDING)


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def array(shape: Any = (4,), op: Any = PARTS, **fields: Any) -> dict[str, Any]:
    return {
        "b64_location": b64(b"/a/directory"),
        "b64_name": b64(b"layer.w"),
        "b64_hlo_sharding_string": b64(op.SerializeToString()),
        "shape": shape,
        "devices": {"device_ids": [2, 3]},
        "timeout": {"seconds": 3, "nanos": 500_000_000},
    } | fields


def f32(*dimensions: int) -> dict[str, Any]:
    return {"xla_primitive_type_str": "F32", "dimensions": dimensions}


def request(content: Any) -> Any:
    compile_ = executables_pb2.Compile()
    compile_.program.type_name = "xla::ifrt::PluginProgram"
    compile_.program.data = b"__serialized_plugin_program " + json.dumps(content).encode()
    return compile_


def writes(*arrays: Any) -> Any:
    return request({"bulk_persistence_write_request": {"write_requests": arrays}})


def reads(*arrays: Any) -> Any:
    return request({"bulk_persistence_read_request": {"read_requests": arrays}})


STORED = StoredArray("/a/directory", "layer.w", (4,), SHARDING)


@pytest.mark.parametrize(
    ("sent", "source"),
    [
        (request({"persistenceWriteRequest": array()}), WriteArrays("persistence write", (STORED,), 3.5)),
        (writes(array(), array()), WriteArrays("persistence write", (STORED, STORED), 3.5)),
        (
            reads(array(f32(4), WHOLE)),
            ReadArrays(
                "persistence read",
                (StoredArray("/a/directory", "layer.w", (4,), Sharding((2, 3), Replicated()), "float32"),),
                3.5,
            ),
        ),
    ],
)
def test_the_processes_of_the_devices_hosts_are_told_what_to_store_or_to_bring(rig: Rig, sent: Any, source: Any):
    rig.send("compile", sent)
    message, start = registered(rig)
    assert isinstance(start, PythonHosts)
    ready(rig, message)
    message, found = registered(rig)
    assert (message.assignment, found) == (((2, 3),), source)


def test_a_write_takes_arrays_and_tells_when_it_has_ended(rig: Rig):
    handle = compiled(rig, writes(array(), array()))
    rig.make(40, ARRAY)
    rig.make(41, ARRAY)
    reply = rig.ask("execute", executable=handle, arguments=[40, 41], options={"fill_status": True}).execute
    assert (len(reply.outputs), reply.status_handle > 0) == (0, True)
    registered_program, launch, *_ = rig.take()
    call: Any = node_of(program_of(registered_program)[1])
    assert (launch.arguments, call.completion, call.outputs) == ((40, 41), True, ())


def test_a_read_gives_arrays_of_the_shardings_that_it_names(rig: Rig):
    handle = compiled(rig, reads(array(f32(4)), array(f32(8), WHOLE)))
    outputs = rig.ask("execute", executable=handle).execute.outputs
    specs = [rig.session.arrays.spec(each.array) for each in outputs]
    assert specs == [
        ArraySpec("float32", (4,), SHARDING),
        ArraySpec("float32", (8,), Sharding((2, 3), Replicated())),
    ]


def test_requests_have_a_stream_of_their_own_whatever_thread_sends_them(rig: Rig):
    handle = compiled(rig, reads(array(f32(4))))
    rig.send("execute", executable=handle, options={"execution_stream_id": 5}, results=[45])
    program, _ = rig.take_launch()
    rig.send("execute", executable=handle, options={"execution_stream_id": 6}, results=[46])
    assert len(rig.take()) == 1  # the program is known
    call: Any = node_of(program)
    assert (call.stream, call.devices, call.inputs) == (-1, (2, 3), ())


@pytest.mark.parametrize(
    "given",
    [
        [ARRAY, ARRAY],
        [],
        [ArraySpec("float32", (8,), SHARDING)],
        [ArraySpec("float32", (4,), Sharding((2, 3), Replicated()))],
        [ArraySpec("float32", (4,), Sharding((0, 1), SHARDING.tiling))],
    ],
)
def test_arrays_that_are_not_those_of_the_request_are_refused(rig: Rig, given: list[ArraySpec]):
    handle = compiled(rig, writes(array()))
    handles = [rig.make(40 + i, spec) for i, spec in enumerate(given)]
    response = rig.ask("execute", executable=handle, arguments=handles, results=[])
    check_refused(response, Code.INVALID_ARGUMENT, "persistence")


def test_a_request_that_ran_takes_more_arrays_of_the_same_dtype_alone(rig: Rig):
    handle = compiled(rig, writes(array()))
    rig.make(40, ARRAY)
    rig.make(41, ArraySpec("float32", (4,), SHARDING))
    rig.ask("execute", executable=handle, arguments=[40])
    rig.ask("execute", executable=handle, arguments=[40])
    response = rig.ask("execute", executable=handle, arguments=[41])
    check_refused(response, Code.INVALID_ARGUMENT, "takes bfloat16[4] on devices [2, 3] as argument 0, got float32[4]")


def test_arrays_with_shards_of_different_shapes_are_refused(rig: Rig):
    handle = compiled(rig, writes(array((5,))))
    rig.make(40, ArraySpec("float32", (5,), SHARDING))
    response = rig.ask("execute", executable=handle, arguments=[40])
    check_refused(response, Code.UNIMPLEMENTED, "shards differ in shape")


MANUAL = xla_pb2.OpSharding(type=xla_pb2.OpSharding.MANUAL)


@pytest.mark.parametrize(
    ("sent", "code", "text"),
    [
        (writes(), Code.INVALID_ARGUMENT, "not write 0 and read 0"),
        (
            request({"persistenceWriteRequest": array(), "persistenceReadRequest": array(f32(4))}),
            Code.INVALID_ARGUMENT,
            "not write 1 and read 1",
        ),
        (request({"persistenceWriteRequest": 7}), Code.INVALID_ARGUMENT, "cannot be read"),
        (writes({"b64_location": b64(b"/a")}), Code.INVALID_ARGUMENT, "cannot be read"),
        (writes(array(b64_location="no base64")), Code.INVALID_ARGUMENT, "cannot be read"),
        (writes(array(b64_location=b64(b"a/directory"))), Code.INVALID_ARGUMENT, "absolute path or a URL"),
        (writes(array(b64_location=b64(b"/a" * 4096))), Code.INVALID_ARGUMENT, "1 to 4096 bytes"),
        (writes(array(b64_name=b64(b""))), Code.INVALID_ARGUMENT, "1 to 4096 bytes"),
        (writes(array(b64_name=b64(b"a\0b"))), Code.INVALID_ARGUMENT, "1 to 4096 bytes"),
        (writes(array(b64_name=b64(b"\xff"))), Code.INVALID_ARGUMENT, "in UTF-8"),
        (writes(array(b64_hlo_sharding_string=b64(b"\xff"))), Code.INVALID_ARGUMENT, "cannot parse OpSharding"),
        (writes(array((4,), MANUAL)), Code.UNIMPLEMENTED, "does not specify where its shards are"),
        (writes(array((1 << 47, 1 << 47))), Code.RESOURCE_EXHAUSTED, "out of memory"),
        (writes(array((-4,))), Code.INVALID_ARGUMENT, "cannot be read"),
        (writes(array((0, 1 << 70))), Code.INVALID_ARGUMENT, "cannot be read"),
        (writes(array(devices={"device_ids": []})), Code.INVALID_ARGUMENT, "one or more distinct devices"),
        (writes(array(devices={"device_ids": [2, 2]})), Code.INVALID_ARGUMENT, "one or more distinct devices"),
        (writes(array(devices={"device_ids": [2, 99]})), Code.INVALID_ARGUMENT, "device 99 does not exist"),
        (writes(array(), array(devices={"device_ids": [1, 2]})), Code.INVALID_ARGUMENT, "on different devices"),
        (writes(array(timeout={"seconds": 1 << 80})), Code.INVALID_ARGUMENT, "cannot be read"),
        (reads(array(f32(4) | {"xla_primitive_type_str": "X1"})), Code.INVALID_ARGUMENT, "unknown dtype 'X1'"),
        (reads(array(f32(4) | {"xla_primitive_type_str": "TOKEN"})), Code.INVALID_ARGUMENT, "contains no data"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(rig: Rig, sent: Any, code: Code, text: str):
    check_refused(rig.ask("compile", sent), code, text)
    assert rig.take() == []


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=8).map(b64),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
strange_arrays = st.tuples(st.sampled_from([(4,), f32(4)]), st.sampled_from(sorted(array())), anything).map(
    lambda parts: array(parts[0]) | {parts[1]: parts[2]}
)
strange_requests = st.sampled_from(
    ["persistenceWriteRequest", "persistenceReadRequest", "bulk_persistence_write_request"]
).flatmap(lambda name: st.fixed_dictionaries({name: strange_arrays | anything}))


@settings(max_examples=examples(70))
@given(strange_requests.map(lambda content: json.dumps(content).encode()) | st.binary(max_size=40))
def test_whatever_a_request_says_it_is_understood_or_refused(payload: bytes):
    with contextlib.suppress(StatusError):
        persistence_executable(payload, FakeCluster().session)
