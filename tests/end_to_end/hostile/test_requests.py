"""Tests of hostile and malformed requests to the proxy: each gets a status, or ends only its own session."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import Code
from atoll.protocol.ifrt import arrays_pb2, executables_pb2, shardings_pb2, transport_pb2, values_pb2, xla_pb2
from tests.end_to_end.hostile.hostile_requests import (
    HUGE,
    REFUSED,
    asking,
    assemble,
    assignment,
    compile_options,
    compile_request,
    copies,
    error_arrays,
    makes,
    makes_both,
    outcome,
    program,
    remap,
    reshard,
    shards,
    spec,
    tiled,
)
from tests.end_to_end.raw_client import RawClient, on_device, sharding

Fill = Callable[[Any], Any]

# ---- a session's stream


@pytest.mark.parametrize(
    "data",
    [b"\xff" * 100, b"\x0a", bytes(range(256)), b"\x12\xff\xff\xff\xff\x0f", os.urandom(5000)],
    ids=["ones", "half", "all", "too long", "random"],
)
def test_garbage_ends_the_session_with_a_status(client: RawClient, data: bytes) -> None:
    client.send(data)
    assert client.end()[0] in (Code.INVALID_ARGUMENT, Code.UNIMPLEMENTED)


def test_a_request_of_no_kind_is_answered(client: RawClient) -> None:
    assert client.status(lambda request: None)[0] == Code.UNIMPLEMENTED
    client.send(b"\x0a\x09\x09\x07\x00\x00\x00\x00\x00\x00\x00\xba\x3e\x00")
    assert client.answer(7).meta.status.code == Code.UNIMPLEMENTED


NAMED = sharding(
    "HloSharding",
    shardings_pb2.HloSharding(
        devices={"device_ids": [0, 1]},
        xla_op_sharding={
            "type": xla_pb2.OpSharding.OTHER,
            "named_sharding": {
                "mesh": {"axes": [{"name": "x", "size": 2}]},
                "dim_shardings": [{"axes": [{"mesh_axis_index": 0, "sub_axis_info": {"pre_size": 0, "size": 0}}]}],
            },
        },
    ),
)

HOSTILE: dict[str, Any] = {
    "handle 0": lambda: makes(0, buffer=50),
    "a handle above 2^62": lambda: makes(HUGE + 5),
    "the largest handle": lambda: makes((1 << 64) - 1),
    "a handle twice": lambda: makes(1, buffer=50),
    "a negative dimension": lambda: makes(9, shape=(-4,)),
    "a dimension that is too large for its buffer": lambda: makes(9, shape=(1 << 30,), buffer=50),
    "very many dimensions": lambda: makes(9, shape=(1,) * 1000),
    "strides out of range": lambda: makes(9, strides=(1 << 40,), buffer=50),
    "negative strides out of range": lambda: makes(9, strides=(-(1 << 62),), buffer=50),
    "too many strides": lambda: makes(9, strides=(4, 4, 4), buffer=50),
    "too many strides for the second array": lambda: makes_both(9, 10, (4, 4, 4)),
    "a device that does not exist": lambda: makes(9, where=on_device(1000)),
    "a negative device": lambda: makes(9, where=on_device(-1)),
    "a device twice": lambda: makes(9, where=tiled([0, 0], [2]), buffer=50),
    "no devices": lambda: makes(9, where=tiled([], [])),
    "tiles that do not count": lambda: makes(9, where=tiled([0, 1], [3])),
    "tiles of negative count": lambda: makes(9, where=tiled([0, 1], [-2, -1]), buffer=50),
    "a tile order out of range": lambda: makes(9, where=tiled([0, 1], [2], [0, 7])),
    "more tiled dimensions than there are": lambda: makes(9, shape=(), where=tiled([0, 1], [0, 2])),
    "a sub-axis of size 0": lambda: makes(9, where=NAMED),
    "an unknown sharding": lambda: makes(9, where=sharding("NoSuch", shardings_pb2.SingleDeviceSharding())),
    "a sharding that is garbage": lambda: makes(
        9, where=values_pb2.Sharding(serialized_sharding={"type_name": "xla::ifrt::HloSharding", "data": b"\xff\xff"})
    ),
    "an unknown dtype": lambda: (
        asking(
            "make_array_from_host_buffer",
            arrays_pb2.MakeArrayFromHostBuffer(dtype={"kind": 999}, sharding=on_device(0), array=9),
        ),
        [9],
    ),
    "shards of a position that is not there": lambda: shards(9, [[0], [5]]),
    "shards of a negative position": lambda: shards(9, [[0], [-1]]),
    "one shard twice": lambda: shards(9, [[0, 1], [1]]),
    "a missing shard": lambda: shards(9, [[0]]),
    "a copy of nothing that is known": lambda: copies([777], [1], [9]),
    "a copy to too many devices": lambda: copies([1], [0, 1, 2], [9]),
    "a copy to a negative device": lambda: copies([1], [-3], [9]),
    "a copy with two handles for one array": lambda: copies([1], [1], [9, 10]),
    "two copies with one handle": lambda: copies([1, 2], [1], [9, 9]),
    "a copy to an unknown memory": lambda: copies([1], [1], [9], memory_kind="no such memory"),
    "a copy of arrays on other devices to one device twice": lambda: copies([3], [1, 1], [9]),
    "a reshard to another shape": lambda: reshard([1], [spec(on_device(1), (5,))], [9]),
    "a reshard to too few shardings": lambda: reshard([1, 2], [spec(on_device(1))], [9, 10]),
    "a reshard to no such device": lambda: reshard([1], [spec(on_device(99))], [9]),
    "a remap from shards that are not there": lambda: remap((0, 0, 5, 6, 1, 0, 1, 1), (1, 0, 0, 1, 1, 1, 2, 1)),
    "a remap that overlaps": lambda: remap((0, 0, 0, 1, 1, 0, 1, 1), (1, 0, 0, 1, 1, 0, 1, 1)),
    "a remap with a hole": lambda: remap((0, 0, 0, 1, 1, 0, 1, 1)),
    "a remap of unknown inputs": lambda: remap((7, 0, 0, 1, 1, 0, 1, 1), (1, 0, 0, 1, 1, 1, 2, 1)),
    "a remap of a negative input": lambda: remap((-1, 0, 0, 1, 1, 0, 1, 1), (1, 0, 0, 1, 1, 1, 2, 1)),
    "a remap to an unknown output": lambda: remap((0, 3, 0, 1, 1, 0, 1, 1)),
    "a remap with a step of 0": lambda: remap((0, 0, 0, 1, 0, 0, 1, 1)),
    "a remap with a step of -1": lambda: remap((0, 0, 1, 0, -1, 1, 0, -1)),
    "a remap over the whole of int64": lambda: remap((0, 0, -(1 << 63), (1 << 63) - 1, 1, 0, 1, 1)),
    "a remap of very many shards": lambda: remap((0, 0, 0, 1 << 40, 1, 0, 1 << 40, 1)),
    "a remap in a circle": lambda: remap((0, 0, 0, 1, 1, 1, 2, 1), (1, 0, 0, 1, 1, 0, 1, 1), inputs=(9, 9)),
    "a remap that moves shards": lambda: remap((0, 0, 0, 1, 1, 1, 2, 1), (1, 0, 0, 1, 1, 0, 1, 1)),
    "an assembly of nothing": lambda: assemble([], 9, on_device(0)),
    "an assembly of too few": lambda: assemble([1], 9, tiled([0, 1], [2])),
    "an assembly of other shapes": lambda: assemble([1, 2], 9, tiled([0, 1], [2]), (80,)),
    "an assembly in the wrong order": lambda: assemble([2, 1], 9, tiled([0, 1], [2])),
    "an assembly of the unknown": lambda: assemble([1, 888], 9, tiled([0, 1], [2])),
    "error arrays of no error": lambda: error_arrays(0, [9]),
    "error arrays of an unknown error": lambda: error_arrays(4711, [9]),
    "error arrays of a negative error": lambda: error_arrays(-1, [9]),
    "a bitcast to another size": lambda: (
        asking("bitcast_arrays", arrays_pb2.BitcastArrays(arrays=[1], results=[9], specs=[spec(on_device(0), (5,))])),
        [9],
    ),
    "a disassembly into too many": lambda: (
        asking(
            "disassemble_into_single_device_arrays",
            arrays_pb2.DisassembleIntoSingleDeviceArrays(array=3, results=[9, 10, 11]),
        ),
        [9],
    ),
}  # fmt: skip


TOO_LARGE: dict[str, Any] = {
    "huge dimensions": lambda: makes(9, shape=(1 << 40, 1 << 40)),
    "a dimension of 2^63 - 1": lambda: makes(9, shape=((1 << 63) - 1,)),
}


@pytest.mark.parametrize("name", [*HOSTILE, *TOO_LARGE])
def test_a_hostile_request_gets_a_status_and_the_session_goes_on(client: RawClient, name: str) -> None:
    for buffer in (50, 100, 101):
        assert client.store(buffer, bytes(16)) == (0, "")
    request, results = (HOSTILE | TOO_LARGE)[name]()
    code = outcome(client, request, results)
    assert code in (REFUSED if name in HOSTILE else {Code.RESOURCE_EXHAUSTED}), code
    assert client.ask(lambda into: setattr(into.is_array_deleted, "array", 1)).is_array_deleted.deleted is False
    assert client.status(lambda into: into.check_value_ready.values.append(3)) == (0, "")


UNKNOWN: dict[str, Fill] = {
    "check_future": lambda r: setattr(r.check_future, "future", 5),
    "check_value_ready": lambda r: r.check_value_ready.values.extend([1, 12345]),
    "copy_to_host_buffer": lambda r: setattr(r.copy_to_host_buffer, "array", 12345),
    "disassemble": lambda r: setattr(r.disassemble_into_single_device_arrays, "array", HUGE + 1),
    "shard": lambda r: setattr(r.fully_replicated_shard, "array", 0),
    "is_array_deleted": lambda r: setattr(r.is_array_deleted, "array", 12345),
    "destruct_array": lambda r: r.destruct_array.arrays.extend([12345, (1 << 64) - 1]),
    "executable_metadata": lambda r: setattr(r.executable_metadata, "executable", 5),
    "executable_cost_analysis": lambda r: setattr(r.executable_cost_analysis, "executable", 5),
    "executable_program_text": lambda r: setattr(r.executable_program_text, "executable", 5),
    "executable_destruct": lambda r: setattr(r.executable_destruct, "executable", 5),
    "execute": lambda r: setattr(r.execute, "executable", 5),
    "fetch_execute_result": lambda r: setattr(r.fetch_execute_result, "status_handle", 5),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_handle_is_not_found(client: RawClient, name: str) -> None:
    assert client.status(UNKNOWN[name])[0] == Code.NOT_FOUND


@pytest.mark.parametrize(
    ("replicas", "partitions"), [(0, 0), (0, 1), (1 << 30, 1 << 30), (5, 1)], ids=["none", "zero", "many", "five"]
)
def test_a_device_assignment_that_does_not_fit_is_refused(client: RawClient, replicas: int, partitions: int) -> None:
    def fill(request: Any) -> None:
        request.get_default_device_assignment.num_replicas = replicas
        request.get_default_device_assignment.num_partitions = partitions

    assert client.status(fill)[0] == Code.INVALID_ARGUMENT


@pytest.mark.parametrize("strides", [(1 << 60,), (4, 4), (), (-(1 << 40),)])
def test_contents_are_not_laid_out_by_impossible_strides(client: RawClient, strides: tuple[int, ...]) -> None:
    def fill(request: Any) -> None:
        request.copy_to_host_buffer.array = 1
        request.copy_to_host_buffer.host_buffer = 60
        request.copy_to_host_buffer.byte_strides.strides.extend(strides)
        request.copy_to_host_buffer.byte_strides.SetInParent()

    assert client.status(fill)[0] in REFUSED | {Code.RESOURCE_EXHAUSTED}


# ---- programs


PROGRAMS: dict[str, Callable[[], tuple[bytes, bytes]]] = {
    "no program": lambda: (b"", compile_options()),
    "garbage for a program": lambda: (os.urandom(2000), compile_options()),
    "half a program": lambda: (program()[: len(program()) // 2], compile_options()),
    "garbage for options": lambda: (program(), b"\xff" * 50),
    "an assignment of nothing": lambda: (program(), assignment(1 << 31 - 1, 0, [])),
    "an assignment that does not count": lambda: (program(), assignment(2, 1, [[0]])),
    "an assignment of a device twice": lambda: (program(), assignment(2, 1, [[1, 1]])),
    "an assignment of no such device": lambda: (program(), assignment(1, 1, [[-4]])),
    "very many replicas": lambda: (program(), assignment(1 << 30, 1 << 30, [])),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_no_program_is_not_compiled(client: RawClient, name: str) -> None:
    request = compile_request(*PROGRAMS[name]())
    code, text = client.status(lambda into: into.compile.CopyFrom(request))
    assert code in (Code.INVALID_ARGUMENT, Code.UNIMPLEMENTED, Code.INTERNAL), (code, text)
    assert text


EXECUTIONS: dict[str, dict[str, Any]] = {
    "too few arguments": {"arguments": []},
    "too many arguments": {"arguments": [1, 1]},
    "an argument on another device": {"arguments": [2]},
    "an argument over other devices": {"arguments": [3]},
    "an unknown argument": {"arguments": [4711]},
    "a result's handle that is taken": {"arguments": [1], "results": [2]},
    "too many results": {"arguments": [1], "results": [30, 31]},
    "other devices": {"arguments": [1], "results": [30], "device_ids": [3]},
}


@pytest.mark.parametrize("name", EXECUTIONS)
def test_a_function_is_not_run_with_what_does_not_fit(client: RawClient, name: str) -> None:
    request = compile_request(program(), compile_options())
    compiled = client.ask(lambda into: into.compile.CopyFrom(request))
    assert compiled.meta.status.code == 0, compiled.meta.status.message
    options = {"results": [30], **EXECUTIONS[name]}
    execute = asking("execute", executables_pb2.Execute(executable=compiled.compile.executable, **options))
    assert outcome(client, execute, options["results"][:1] if options["results"] != [2] else []) in REFUSED


# ---- host buffers


def test_host_buffers_of_another_size_than_announced_are_refused(client: RawClient) -> None:
    assert client.store(70, b"1234", size=3)[0] == Code.INVALID_ARGUMENT
    assert client.store(71, b"1234", size=5)[0] == Code.INVALID_ARGUMENT
    assert client.store(72, b"", size=-1)[0] == Code.INVALID_ARGUMENT
    assert client.store(73, b"", size=1 << 62)[0] == Code.INVALID_ARGUMENT
    metadata = transport_pb2.HostBufferStoreMetadata(session_id=client.session_id, handle=74, buffer_size=4)
    for message in (b"\x12\x01x", b"\x0a\xff", b"\x0a" + b"\xff" * 12, b"\xff"):
        assert client.store_messages(metadata.SerializeToString(), [message])[0] == Code.INVALID_ARGUMENT
    assert client.store_messages(b"\xff\xff", [])[0] in REFUSED
    other = transport_pb2.HostBufferStoreMetadata(session_id=99, handle=1, buffer_size=0)
    assert client.store_messages(other.SerializeToString(), [])[0] == Code.NOT_FOUND


def test_files_of_others_are_not_read(client: RawClient, module_directory: Path) -> None:
    def read(handle: int, size: int) -> int:
        request = transport_pb2.HostBufferReadFromDisk()
        request.metadata.session_id, request.metadata.handle = client.session_id, handle
        request.metadata.buffer_size = size
        return client.unary("HostBufferReadFromDisk", request)[0]

    shared = module_directory / "shared"
    (module_directory / "secret").write_bytes(b"1234")
    (shared / "lt_80").symlink_to(module_directory / "secret")
    (shared / "lt_81").write_bytes(b"12345678")
    (shared / "lt_82").mkdir()
    os.mkfifo(shared / "lt_83")
    assert read(80, 4) == Code.NOT_FOUND
    assert read(81, 4) == Code.INVALID_ARGUMENT
    assert read(82, 0) in REFUSED
    assert read(84, 0) == Code.NOT_FOUND
    assert read((1 << 64) - 1, 1) == Code.NOT_FOUND
    assert (module_directory / "secret").read_bytes() == b"1234"
    assert read(83, 0) in REFUSED


@pytest.mark.parametrize("method", ["GetVersion", "HostBufferDelete", "HostBufferReadFromDisk", "NoSuchMethod"])
def test_calls_with_garbage_are_refused(client: RawClient, method: str) -> None:
    expected = Code.UNIMPLEMENTED if method == "NoSuchMethod" else Code.INVALID_ARGUMENT
    assert client.unary_bytes(method, b"\xff\xfe\xfd")[0] == expected
