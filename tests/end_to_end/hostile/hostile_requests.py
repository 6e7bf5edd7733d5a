"""Hand-made requests of the IFRT proxy protocol. Depending on its arguments, each function makes a valid or an invalid
request.

If a function returns a pair, the second item contains the handles of the results that the request promises.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jax._src.lib import xla_client

from atoll.errors import Code
from atoll.protocol.ifrt import (
    arrays_pb2,
    compile_pb2,
    executables_pb2,
    session_pb2,
    shardings_pb2,
    values_pb2,
    xla_pb2,
)
from tests.end_to_end.raw_client import RawClient, on_device, sharding

F32 = values_pb2.DType(kind=values_pb2.DType.KIND_F32)
HUGE = 1 << 62


REFUSED = {Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.UNIMPLEMENTED}


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
    """Return the code of the reply to a request or, if that is OK, of a wait for its results."""
    code, _ = client.status(lambda into: into.MergeFrom(request))
    if code == 0 and results:
        code, _ = client.status(lambda into: into.check_value_ready.values.extend(results))
    return code


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


def makes_both(good: int, bad: int, strides: tuple[int, ...]) -> tuple[Any, list[int]]:
    """Return a request that makes two arrays. The buffer of the second one has these strides."""
    request = arrays_pb2.MakeArraysFromHostBufferShards(arrays=[good, bad])
    for buffer in (100, 101):
        each = request.specs.add(array_spec=spec(on_device(0)))
        each.addressable_shard_indices.add(indices=[0])
        each.host_buffers.add(dtype=F32, shape={"dims": (4,)}, host_buffer=buffer)
    each.host_buffers[0].byte_strides.strides.extend(strides)
    return asking("make_arrays_from_host_buffer_shards", request), [good, bad]


def assignment(replicas: int, partitions: int, rows: list[list[int]]) -> bytes:
    options = compile_pb2.XlaCompileOptions()
    build = options.compile_options.executable_build_options
    build.num_replicas, build.num_partitions = max(replicas, 0), max(partitions, 0)
    build.device_assignment.replica_count = replicas
    build.device_assignment.computation_count = partitions
    for row in rows:
        build.device_assignment.computation_devices.add(replica_device_ids=row)
    return bytes(options.SerializeToString())
