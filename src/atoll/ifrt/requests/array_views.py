"""Arrays made of the shards of other arrays, without moving a byte: programs of one `Rearrange`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atoll.errors import invalid
from atoll.executables.session_arrays import Memory
from atoll.ifrt.pending_request import Handler, PendingRequest
from atoll.ir.program import Mapping, Rearrange, single
from atoll.ir.types import ArraySpec, Replicated, Sharding, nbytes, shard_shape
from atoll.protocol.ifrt import arrays_pb2
from atoll.protocol.translation import codec
from atoll.protocol.translation.array_specs import spec_from
from atoll.protocol.translation.shardings import sharding_from


def _rearrange(
    pending: PendingRequest,
    name: str,
    inputs: Sequence[int],
    specs: Sequence[ArraySpec],
    mappings: Sequence[Mapping],
    handles: list[int],
    *,
    donate: bool = False,
    bitcast: bool = False,
) -> None:
    session = pending.session
    sources = tuple(session.arrays.spec(handle) for handle in inputs)
    for mapping in mappings:
        if not (0 <= mapping.input < len(inputs) and 0 <= mapping.output < len(specs)):
            raise invalid("a mapping names an array that is not there")
    node = Rearrange(tuple(range(len(sources))), tuple(specs), tuple(mappings), donate, bitcast)
    program = session.cluster.programs.number((name, sources, node), lambda: single(name, sources, node))
    memories = [session.arrays.get(handle).memory for handle in inputs]
    session.launch(program, inputs, handles)
    if donate:
        for memory in memories:
            memory.delete()
        session.define(handles, specs, pending.context)
        return
    shared = [
        Memory(tuple({id(memories[x.input]): memories[x.input] for x in mappings if x.output == i}.values()))
        for i in range(len(specs))
    ]
    session.define(handles, specs, pending.context, shared)


def _assemble(pending: PendingRequest, request: Any) -> None:
    session = pending.session
    given = [request.result] if request.result else []
    with pending.making(given):
        inputs = list(request.arrays)
        if not inputs:
            raise invalid("an array is assembled of one shard at least")
        shape = codec.shape_from(request.shape)
        sharding = sharding_from(request.sharding, shape)
        known = request.HasField("dtype")
        dtype = codec.dtype_from(request.dtype) if known else session.arrays.spec(inputs[0]).dtype
        handles = session.handles(given, 1)
        mappings = []
        position = 0
        for i, handle in enumerate(inputs):
            count = len(session.arrays.spec(handle).sharding.devices)
            mappings.append(Mapping(i, 0, (0, count, 1), (position, position + count, 1)))
            position += count
        _rearrange(
            pending,
            "assemble",
            inputs,
            [ArraySpec(dtype, shape, sharding)],
            mappings,
            handles,
            donate=request.copy_semantics == arrays_pb2.DONATE_INPUT,
        )
    pending.reply_arrays("assemble_array_from_single_device_arrays", handles, one=True)


def _disassemble(pending: PendingRequest, request: Any) -> None:
    session = pending.session
    given = list(request.results)
    with pending.making(given):
        spec = session.arrays.spec(request.array)
        count = len(spec.sharding.devices)
        handles = session.handles(given, count)
        specs = [_shard_spec(spec, i) for i in range(count)]
        mappings = [Mapping(0, i, (i, i + 1, 1), (0, 1, 1)) for i in range(count)]
        _rearrange(pending, "disassemble", [request.array], specs, mappings, handles)
    pending.reply_arrays("disassemble_into_single_device_arrays", handles)


def _fully_replicated_shard(pending: PendingRequest, request: Any) -> None:
    session = pending.session
    given = [request.result] if request.result else []
    with pending.making(given):
        spec = session.arrays.spec(request.array)
        handles = session.handles(given, 1)
        mapping = Mapping(0, 0, (0, 1, 1), (0, 1, 1))
        _rearrange(pending, "take one shard", [request.array], [_shard_spec(spec, 0)], [mapping], handles)
    pending.reply_arrays("fully_replicated_shard", handles, one=True)


def _remap(pending: PendingRequest, request: Any) -> None:
    session = pending.session
    given = list(request.results)
    with pending.making(given):
        specs = [spec_from(each) for each in request.plan.output_specs]
        handles = session.handles(given, len(specs))
        mappings = []
        if not request.plan.mappings:
            held = [session.arrays.spec(handle).sharding.devices for handle in request.arrays]
            mappings = _by_devices(request.plan, held, [spec.sharding.devices for spec in specs])
        for each in request.plan.mappings:
            columns = (
                each.from_start, each.from_end, each.from_step, each.to_start, each.to_end, each.to_step
            )  # fmt: skip
            if len({len(column) for column in columns}) != 1:
                raise invalid("a remap plan's intervals do not agree")
            for a, b, c, d, e, f in zip(*columns, strict=True):
                mappings.append(Mapping(each.in_array, each.out_array, (a, b, c), (d, e, f)))
        _rearrange(
            pending,
            "remap",
            list(request.arrays),
            specs,
            mappings,
            handles,
            donate=request.copy_semantics == arrays_pb2.DONATE_INPUT,
        )
    pending.reply_arrays("remap_arrays", handles)


def _by_devices(plan: Any, inputs: Sequence[tuple[int, ...]], outputs: Sequence[tuple[int, ...]]) -> list[Mapping]:
    """As JAX 0.12 has it: on which devices the shards of an input become those of an output. A shard stays on its
    device, which tells its place in both.
    """
    mappings = []
    for output in plan.input_devices_for_output:
        for given in output.input_devices:
            i, o = given.in_array, output.out_array
            if not (0 <= i < len(inputs) and 0 <= o < len(outputs)):
                raise invalid(f"a remap plan for input {i} of {len(inputs)} and output {o} of {len(outputs)}")
            taken = {device: place for place, device in enumerate(inputs[i])}
            made = {device: place for place, device in enumerate(outputs[o])}
            for device in given.device_list.device_ids:
                if device not in taken or device not in made:
                    raise invalid(
                        f"a remap plan takes a shard of input {i} to output {o} on device {device}, without both"
                    )
                a, b = taken[device], made[device]
                mappings.append(Mapping(i, o, (a, a + 1, 1), (b, b + 1, 1)))
    return mappings


def _bitcast(pending: PendingRequest, request: Any) -> None:
    session = pending.session
    given = list(request.results)
    with pending.making(given):
        inputs = list(request.arrays)
        specs = [spec_from(each) for each in request.specs]
        if len(specs) != len(inputs):
            raise invalid(f"{len(specs)} types for {len(inputs)} arrays")
        handles = session.handles(given, len(specs))
        mappings = []
        for i, (handle, spec) in enumerate(zip(inputs, specs, strict=True)):
            source = session.arrays.spec(handle)
            if nbytes(source) != nbytes(spec) or source.sharding.devices != spec.sharding.devices:
                raise invalid("a bitcast keeps the devices and the number of bytes")
            count = len(spec.sharding.devices)
            mappings.append(Mapping(i, i, (0, count, 1), (0, count, 1)))
        donate = request.copy_semantics == arrays_pb2.DONATE_INPUT
        _rearrange(pending, "bitcast", inputs, specs, mappings, handles, donate=donate, bitcast=True)
    pending.reply_arrays("bitcast_arrays", handles)


def _shard_spec(spec: ArraySpec, position: int) -> ArraySpec:
    """The type of one shard as an array of its own."""
    sharding = Sharding((spec.sharding.devices[position],), Replicated(), spec.sharding.memory_kind)
    return ArraySpec(spec.dtype, shard_shape(spec.sharding, spec.shape, position), sharding, spec.layout)


HANDLERS: dict[str, Handler] = {
    "assemble_array_from_single_device_arrays": _assemble,
    "disassemble_into_single_device_arrays": _disassemble,
    "fully_replicated_shard": _fully_replicated_shard,
    "remap_arrays": _remap,
    "bitcast_arrays": _bitcast,
}
