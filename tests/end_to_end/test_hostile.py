"""Hostile and malformed messages: each gets a status, or ends only the session or connection that it came on."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import export
from jax._src.lib import xla_client

from atoll.errors import Code
from atoll.ir.program import Call, Mapping, Program, Rearrange
from atoll.ir.types import ArraySpec, Sharding
from atoll.protocol import messages as m
from atoll.protocol.ifrt import (
    arrays_pb2,
    compile_pb2,
    executables_pb2,
    session_pb2,
    shardings_pb2,
    transport_pb2,
    values_pb2,
    xla_pb2,
)
from atoll.transfers.channel import Open
from atoll.transfers.files import FilePiece
from atoll.transfers.shared_memory import SharedMemoryPiece
from atoll.transfers.sockets import SocketPiece
from tests.end_to_end.raw_client import RawClient, on_device, sharding
from tests.end_to_end.remote_python import RemotePython, StartPython
from tests.end_to_end.standing_cluster import StandingCluster

F32 = values_pb2.DType(kind=values_pb2.DType.KIND_F32)
HUGE = 1 << 62
CLOSED_SECONDS = 30.0
REFUSED = {Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.UNIMPLEMENTED}

Fill = Callable[[Any], Any]


# ---- the honest part


@pytest.fixture(scope="module")
def address(cluster: StandingCluster, module_directory: Path) -> str:
    """A proxy of the module's cluster, for any client."""
    shared = module_directory / "shared"
    shared.mkdir()
    cluster.start_proxy(module_directory / "proxy.sock", shared)
    return f"unix:{module_directory}/proxy.sock"


@pytest.fixture(scope="module")
def neighbour(start_python: StartPython, cluster: StandingCluster) -> RemotePython:
    """An honest client of the same cluster."""
    return start_python(ATOLL_ADDRESS=cluster.address)


def honest_work() -> list[float]:
    value = jax.device_put(np.arange(4, dtype=np.float32), jax.devices()[2])
    return [float(x) for x in jax.jit(lambda x: x * 2)(value)]


@pytest.fixture(autouse=True)
def _all_others_live(cluster: StandingCluster, address: str, neighbour: RemotePython) -> Iterator[None]:
    assert neighbour.call(honest_work) == [0, 2, 4, 6]
    before = [*cluster.processes().values(), *cluster.proxies()]
    yield
    assert all(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in before)
    assert neighbour.call(honest_work) == [0, 2, 4, 6]
    with contextlib.closing(RawClient(address)) as client:
        assert len(client.open().all_devices) == 4


@pytest.fixture
def client(address: str) -> Iterator[RawClient]:
    """A session with arrays 1 and 2 on devices 0 and 1, and array 3 over both."""
    with contextlib.closing(RawClient(address)) as raw:
        raw.open()
        for request in preparation():
            assert raw.store(request.make_array_from_host_buffer.host_buffer, bytes(16)) == (0, "")
            assert raw.status(lambda into, request=request: into.MergeFrom(request)) == (0, "")
        yield raw


def put(array: int, *, shape: tuple[int, ...] = (4,), where: Any = None, strides: Any = None, buffer: int = 0) -> Any:
    request = arrays_pb2.MakeArrayFromHostBuffer(
        dtype=F32, shape={"dims": shape}, sharding=where or on_device(0), host_buffer=buffer or array, array=array
    )
    if strides is not None:
        request.byte_strides.strides.extend(strides)
    return request


def preparation() -> list[Any]:
    return [
        asking("make_array_from_host_buffer", put(1)),
        asking("make_array_from_host_buffer", put(2, where=on_device(1))),
        asking("make_array_from_host_buffer", put(3, where=tiled([0, 1], [2]))),
    ]


def asking(kind: str, message: Any) -> Any:
    return session_pb2.Request(**{kind: message})


def tiled(devices: list[int], dims: list[int], order: list[int] | None = None) -> Any:
    op = xla_pb2.OpSharding(
        type=xla_pb2.OpSharding.OTHER,
        tile_assignment_dimensions=dims,
        tile_assignment_devices=range(len(devices)) if order is None else order,
    )
    return sharding("HloSharding", shardings_pb2.HloSharding(devices={"device_ids": devices}, xla_op_sharding=op))


def spec(where: Any, shape: tuple[int, ...] = (4,)) -> Any:
    return values_pb2.ArraySpec(dtype=F32, shape={"dims": shape}, sharding=where)


@functools.cache
def program() -> bytes:
    exported = export.export(jax.jit(lambda x: x + 1), platforms=["cpu"])(jax.ShapeDtypeStruct((4,), jnp.float32))
    return bytes(exported.mlir_module_serialized)


def compile_request(program_bytes: bytes, options: bytes) -> Any:
    return executables_pb2.Compile(
        program={"type_name": "xla::ifrt::XlaProgram", "data": program_bytes},
        compile_options={"type_name": "xla::ifrt::XlaCompileOptions", "data": options},
    )


def compile_options() -> bytes:
    own = xla_client.CompileOptions().SerializeAsString()
    return bytes(
        compile_pb2.XlaCompileOptions(compile_options=compile_pb2.CompileOptions.FromString(own)).SerializeToString()
    )


def outcome(client: RawClient, request: Any, results: list[int]) -> int:
    """The code of a request, or else of waiting for what it has made."""
    code, _ = client.status(lambda into: into.MergeFrom(request))
    if code == 0 and results:
        code, _ = client.status(lambda into: into.check_value_ready.values.extend(results))
    return code


# ---- the stream of a session


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


def makes(array: int, **options: Any) -> tuple[Any, list[int]]:
    return asking("make_array_from_host_buffer", put(array, **options)), [array]


def remap(*mappings: tuple[int, ...], inputs: tuple[int, ...] = (1, 2), results: tuple[int, ...] = (9,)) -> Any:
    request = arrays_pb2.RemapArrays(arrays=inputs, results=results, copy_semantics=arrays_pb2.REUSE_INPUT)
    request.plan.output_specs.add().CopyFrom(spec(tiled([0, 1], [2]), (8,)))
    for source, target, *interval in mappings:
        names = ("from_start", "from_end", "from_step", "to_start", "to_end", "to_step")
        each = request.plan.mappings.add(in_array=source, out_array=target)
        for name, value in zip(names, interval, strict=True):
            getattr(each, name).append(value)
    return asking("remap_arrays", request), [*results]


def copies(arrays: list[int], devices: list[int], results: list[int], **options: Any) -> Any:
    request = arrays_pb2.CopyArrays(
        arrays=arrays, device_ids=devices, results=results, copy_semantics=arrays_pb2.ALWAYS_COPY, **options
    )
    return asking("copy_arrays", request), results


def reshard(arrays: list[int], specs: list[Any], results: list[int]) -> Any:
    request = arrays_pb2.ReshardArrays(
        arrays=arrays, specs=specs, results=results, copy_semantics=arrays_pb2.ALWAYS_COPY
    )
    return asking("reshard_arrays", request), results


def assemble(arrays: list[int], result: int, where: Any, shape: tuple[int, ...] = (8,)) -> Any:
    request = arrays_pb2.AssembleArrayFromSingleDeviceArrays(
        arrays=arrays, result=result, sharding=where, shape={"dims": shape}, copy_semantics=arrays_pb2.REUSE_INPUT
    )
    return asking("assemble_array_from_single_device_arrays", request), [result]


def error_arrays(code: int, results: list[int]) -> Any:
    request = arrays_pb2.MakeErrorArrays(error={"code": code, "message": "x"}, arrays=results)
    for _ in results:
        request.specs.add().CopyFrom(spec(on_device(0)))
    return asking("make_error_arrays", request), results


def shards(array: int, positions: list[list[int]]) -> Any:
    request = arrays_pb2.MakeArraysFromHostBufferShards(arrays=[array])
    each = request.specs.add(array_spec=spec(tiled([0, 1], [2]), (8,)))
    for i, indices in enumerate(positions):
        each.addressable_shard_indices.add(indices=indices)
        each.host_buffers.add(dtype=F32, shape={"dims": (4,)}, host_buffer=100 + i)
    return asking("make_arrays_from_host_buffer_shards", request), [array]


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
    "huge dimensions": lambda: makes(9, shape=(1 << 40, 1 << 40)),
    "a dimension that is too large for its buffer": lambda: makes(9, shape=(1 << 30,), buffer=50),
    "a dimension of 2^63 - 1": lambda: makes(9, shape=((1 << 63) - 1,)),
    "very many dimensions": lambda: makes(9, shape=(1,) * 1000),
    "strides out of range": lambda: makes(9, strides=(1 << 40,), buffer=50),
    "negative strides out of range": lambda: makes(9, strides=(-(1 << 62),), buffer=50),
    "too many strides": lambda: makes(9, strides=(4, 4, 4), buffer=50),
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


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_request_gets_a_status_and_the_session_goes_on(client: RawClient, name: str) -> None:
    for buffer in (50, 100, 101):
        assert client.store(buffer, bytes(16)) == (0, "")
    request, results = HOSTILE[name]()
    code = outcome(client, request, results)
    assert code in REFUSED, code
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


def assignment(replicas: int, partitions: int, rows: list[list[int]]) -> bytes:
    options = compile_pb2.XlaCompileOptions()
    build = options.compile_options.executable_build_options
    build.num_replicas, build.num_partitions = max(replicas, 0), max(partitions, 0)
    build.device_assignment.replica_count = replicas
    build.device_assignment.computation_count = partitions
    for row in rows:
        build.device_assignment.computation_devices.add(replica_device_ids=row)
    return bytes(options.SerializeToString())


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
def test_a_program_that_is_none_is_not_compiled(client: RawClient, name: str) -> None:
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


def test_host_buffers_that_do_not_keep_their_word_are_refused(client: RawClient) -> None:
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


# ---- mutations of what is valid


@functools.cache
def recorded() -> list[bytes]:
    """One valid request of each kind that changes something, for the session of the fixture `client`."""
    requests = [
        makes(20, buffer=50)[0],
        shards(21, [[0], [1]])[0],
        copies([1], [1], [22])[0],
        reshard([3], [spec(on_device(2))], [23])[0],
        remap((0, 0, 0, 1, 1, 0, 1, 1), (1, 0, 0, 1, 1, 1, 2, 1), results=(24,))[0],
        assemble([1, 2], 25, tiled([0, 1], [2]))[0],
        error_arrays(3, [26])[0],
        asking("copy_to_host_buffer", arrays_pb2.CopyToHostBuffer(array=3, host_buffer=61)),
        asking(
            "disassemble_into_single_device_arrays",
            arrays_pb2.DisassembleIntoSingleDeviceArrays(array=3, results=[27, 28]),
        ),
        asking("delete_array", arrays_pb2.DeleteArray(arrays=[2])),
        asking("destruct_array", arrays_pb2.DestructArray(arrays=[2])),
        asking("compile", compile_request(program(), assignment(1, 1, [[0]]))),
        asking("execute", executables_pb2.Execute(executable=HUGE, arguments=[1], results=[29])),
    ]
    for number, request in enumerate(requests):
        request.meta.op_id = 1000 + number
    assert len(requests) == RECORDED
    return [request.SerializeToString() for request in requests]


RECORDED = 13


def mutated(data: bytes, seed: int, times: int) -> bytes:
    """`data` with some bytes changed, left out, doubled, or cut off."""
    chance = random.Random(seed)
    out = bytearray(data)
    for _ in range(times):
        if not out:
            break
        position = chance.randrange(len(out))
        match chance.randrange(6):
            case 0:
                out[position] = chance.randrange(256)
            case 1:
                out[position] ^= 1 << chance.randrange(8)
            case 2:
                out[position] = chance.choice((0x00, 0x7F, 0x80, 0xFF))
            case 3:
                del out[position]
            case 4:
                out[position:position] = out[position : position + chance.randrange(1, 12)]
            case _:
                del out[chance.randrange(len(out)) + 1 :]
    return bytes(out)


EXTREMES = (0, 1, 2, 3, -1, -4, 7, 255, 1 << 20, 1 << 31, (1 << 31) - 1, -(1 << 31), 1 << 40, HUGE, (1 << 63) - 1)


def twisted(data: bytes, seed: int, times: int) -> bytes:
    """A valid message with the values of some fields changed, taken out or doubled; still well-formed."""
    chance = random.Random(seed)
    request = session_pb2.Request.FromString(data)
    for _ in range(times):
        message: Any = request
        while True:
            fields = [each for each in message.DESCRIPTOR.fields if each.number != 1 or message is not request]
            given = [field for field, _ in message.ListFields() if field in fields]
            if not fields:
                break
            field = chance.choice(given or fields)
            value = getattr(message, field.name)
            repeated = field.is_repeated
            if repeated and len(value) and chance.random() < 0.3:
                if chance.random() < 0.5:
                    del value[chance.randrange(len(value))]
                else:
                    value.extend(list(value)[:1])
                break
            if field.message_type is None:
                _twist(message, field, value, chance)
                break
            if field.message_type.GetOptions().map_entry or (repeated and not len(value)):
                break
            if chance.random() < 0.1:
                message.ClearField(field.name)
                break
            message = value[chance.randrange(len(value))] if repeated else value
    return bytes(request.SerializeToString())


def _twist(message: Any, field: Any, value: Any, chance: random.Random) -> None:
    kind = field.cpp_type
    new: Any
    if kind == field.CPPTYPE_STRING:
        old = value[0] if field.is_repeated and len(value) else b"" if field.is_repeated else value
        if isinstance(old, str):
            new = chance.choice(("", "x", "xla::ifrt::SingleDeviceSharding", "xla::ifrt::HloSharding", "device"))
        else:
            new = mutated(bytes(old), chance.randrange(1 << 32), 2)
    elif kind == field.CPPTYPE_BOOL:
        new = True
    elif kind in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        new = chance.choice((0.0, float("inf"), -1.0))
    else:
        new = chance.choice(EXTREMES)
    with contextlib.suppress(ValueError, TypeError):  # the field does not hold such a value
        if not field.is_repeated:
            setattr(message, field.name, new)
        elif len(value):
            value[chance.randrange(len(value))] = new
        else:
            value.append(new)


@pytest.mark.parametrize("change", [mutated, twisted])
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    picks=st.lists(
        st.tuples(st.integers(0, RECORDED - 1), st.integers(0, 2**32 - 1), st.integers(1, 4)),
        min_size=1,
        max_size=8,
    )
)
def test_a_mutated_request_is_answered_or_ends_its_session(
    address: str, change: Callable[[bytes, int, int], bytes], picks: list[Any]
) -> None:
    with contextlib.closing(RawClient(address)) as client:
        client.open()
        for request in preparation():
            client.store(request.make_array_from_host_buffer.host_buffer, bytes(16))
            client.status(lambda into, request=request: into.MergeFrom(request))
        client.store(50, bytes(16))
        for which, seed, times in picks:
            client.send(change(recorded()[which], seed, times))
        # Whatever came of them, the session answers the next request, or has ended with a status.
        code, text = client.status(lambda into: setattr(into.is_array_deleted, "array", 1))
        assert code in (0, *REFUSED), text


# ---- the controller's socket and the data port


def connected(address: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(CLOSED_SECONDS)
    sock.connect(address.removeprefix("unix:"))
    return sock


def frame(message: Any) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "little") + body


def assert_closed(sock: socket.socket) -> bytes:
    """What still came before the other side closed the connection; fails where it does not."""
    received = b""
    with sock, contextlib.suppress(ConnectionResetError):
        while part := sock.recv(65536):
            received += part
    return received


def hello(role: str, protocol: int = m.PROTOCOL) -> bytes:
    return frame(m.Hello(protocol, role, "", os.getpid(), "0", "hostile"))


GARBAGE = {
    "zeros": bytes(64),
    "ones": b"\xff" * 64,
    "a frame that is too long": b"\xff\xff\xff\x7f",
    "no msgpack": (8).to_bytes(4, "little") + b"\xc1" * 8,
    "no message": frame([999, 1, 2]),
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_on_the_controllers_socket_closes_it(cluster: StandingCluster, name: str) -> None:
    sock = connected(cluster.address)
    sock.sendall(GARBAGE[name])
    assert_closed(sock)


def test_the_controller_wants_a_proper_greeting(cluster: StandingCluster) -> None:
    for first, words in [
        (frame(m.StopRequest()), b"first message"),
        (hello("proxy", 999), b"speaks protocol"),
        (hello("nobody") + frame(m.StopRequest()), b"'nobody' is no role"),
        (hello("worker") + frame(m.StopRequest()), b"StopRequest"),
    ]:
        sock = connected(cluster.address)
        sock.sendall(first)
        assert words in assert_closed(sock)


def test_nobody_takes_the_place_of_a_worker(cluster: StandingCluster) -> None:
    for host in (0, 7, -1):
        sock = connected(cluster.address)
        ready = m.WorkerReady(0, host, (), "cpu", "", "unix:/nowhere", 24)
        sock.sendall(hello("worker") + frame(ready))
        assert b"host" in assert_closed(sock)
    assert cluster.report()["islands"][0]["hosts"][0]["state"] == "ready"


ARRAY = ArraySpec("float32", (4,), Sharding((0,)))
CONTROL: dict[str, list[Any]] = {
    "a launch of nothing": [m.Launch(5, (1,), (2,), ())],
    "a worker's message": [m.Done(((1, 2, 3),))],
    "a second greeting": [m.Hello(m.PROTOCOL, "worker", "", 1, "0")],
    "a question of no device": [m.Query(1, "layout", -5, -1, b"")],
    "a question of no kind": [m.Query(1, "nonsense", 0, -1, b"")],
    "a layout of garbage": [m.Query(1, "layout", 0, -1, b"\xc1")],
    "a function of no devices": [m.RegisterFunction(1, "x", 1, ())],
    "a function of no such device": [m.RegisterFunction(1, "x", 1, ((99,),))],
    "a program that returns an argument": [m.RegisterProgram(1, Program("p", (ARRAY,), (), (0,)))],
    "a program with a cycle": [
        m.RegisterProgram(1, Program("p", (ARRAY,), (Call(1, (1,), (ARRAY,), (0,)),), (1,))),
        m.Launch(1, (1,), (2,), ()),
    ],
    "a program of very many shards": [
        m.RegisterProgram(
            1,
            Program(
                "p",
                (ARRAY,),
                (Rearrange((0,), (ARRAY,), (Mapping(0, 0, (-(1 << 63), (1 << 63) - 1, 1), (0, 1 << 62, 1)),)),),
                (1,),
            ),
        )
    ],
    "a result twice": [m.MakeError((5, 5), m.Status(3, "x")), m.Release((5, 5, 5))],
    "a function released twice": [m.ReleaseFunction(1), m.ReleaseFunction(1), m.ReleaseProgram(3)],
}


@pytest.mark.parametrize("name", CONTROL)
def test_a_hostile_proxy_harms_itself_alone(cluster: StandingCluster, name: str) -> None:
    with connected(cluster.address) as sock:
        sock.sendall(hello("proxy") + b"".join(frame(message) for message in CONTROL[name]))
        sock.shutdown(socket.SHUT_WR)
        assert_closed(sock)
    cluster.until(lambda report: all(s["label"] != "hostile" for s in report["sessions"]), 10)


def data_port(cluster: StandingCluster) -> str:
    return f"unix:{cluster.directory}/data-0.sock"


def welcome(sock: socket.socket) -> m.Welcome:
    sock.sendall(hello("proxy"))
    length = int.from_bytes(sock.recv(4, socket.MSG_WAITALL), "little")
    message = msgspec.msgpack.decode(sock.recv(length, socket.MSG_WAITALL), type=m.ToProxy)
    assert isinstance(message, m.Welcome)
    return message


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_on_the_data_port_closes_it(cluster: StandingCluster, name: str) -> None:
    sock = connected(data_port(cluster))
    sock.sendall(GARBAGE[name])
    sock.shutdown(socket.SHUT_WR)
    assert_closed(sock)


def test_the_data_port_wants_the_sessions_secret(cluster: StandingCluster) -> None:
    with connected(cluster.address) as control:
        session = welcome(control)
        for first in (Open(session.session, "wrong"), Open(session.session, "wröng"), Open(0, ""), Open(0, "x")):
            sock = connected(data_port(cluster))
            sock.sendall(frame(first))
            assert_closed(sock)
        sock = connected(data_port(cluster))
        sock.sendall(frame(SocketPiece(session.session, 1, 4)) + b"1234")
        assert_closed(sock)


PIECES: dict[str, bytes] = {
    "a piece of negative size": frame(SocketPiece(1, 1, -5)),
    "a piece of endless size": frame(SocketPiece(1, 1, 1 << 39)),
    "a block that is not known": frame(SharedMemoryPiece(1, 1, 5, False, 77, 100)),
    "a file that does not come along": frame(FilePiece(1, 1, 5)),
    "a second opening": frame(Open(1, "x")),
    **GARBAGE,
}


@pytest.mark.parametrize("name", PIECES)
def test_a_hostile_data_channel_is_closed(cluster: StandingCluster, name: str) -> None:
    with connected(cluster.address) as control:
        session = welcome(control)
        sock = connected(data_port(cluster))
        sock.sendall(frame(Open(session.session, session.secret)) + PIECES[name])
        sock.shutdown(socket.SHUT_WR)
        assert_closed(sock)


def test_half_a_message_and_then_silence_is_not_waited_for(cluster: StandingCluster) -> None:
    halves = [
        (cluster.address, hello("proxy")[:-3]),
        (cluster.address, b""),
        (data_port(cluster), frame(Open(1, "x"))[:-3]),
        (data_port(cluster), b"\x10"),
        (data_port(cluster), frame(Open(1 << 40, "a session that never opens"))),
    ]
    socks = []
    for address, half in halves:
        socks.append(connected(address))
        socks[-1].sendall(half)
    for sock in socks:
        assert_closed(sock)
