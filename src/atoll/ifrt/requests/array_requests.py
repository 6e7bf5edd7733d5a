"""Requests that make arrays from other arrays, or end arrays.

Views are programs of one `Rearrange`, which moves no bytes. Copies to other devices, memories or shardings are programs
of one `Transfer`. The client batches deletions and destructions, and never finishes their responses, so they are sent
out of sequence (see `ResponseStream`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import msgspec

from atoll.errors import OK, StatusError, invalid, not_found
from atoll.executables.session_arrays import Memory
from atoll.ifrt.pending_request import Handler, PendingRequest
from atoll.ir.program import Mapping, Rearrange, Transfer, single
from atoll.ir.types import ArraySpec, Replicated, Sharding, nbytes, shard_shape
from atoll.protocol.ifrt import arrays_pb2
from atoll.protocol.translation import codec
from atoll.protocol.translation.array_specs import spec_from
from atoll.protocol.translation.shardings import sharding_from
from atoll.quantities import counted


@functools.cache
def _jaxlib() -> str:
    """Return the version of jaxlib."""
    from importlib.metadata import version  # takes long to import, and few sessions need it

    return version("jaxlib")


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
            raise invalid("a mapping names an array that does not exist")
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


def _shard_spec(spec: ArraySpec, position: int) -> ArraySpec:
    """Return the type of one shard as a separate array."""
    sharding = Sharding((spec.sharding.devices[position],), Replicated(), spec.sharding.memory_kind)
    return ArraySpec(spec.dtype, shard_shape(spec.sharding, spec.shape, position), sharding, spec.layout)


def _assemble(pending: PendingRequest, request: Any) -> None:
    session = pending.session
    given = [request.result] if request.result else []
    with pending.making(given):
        inputs = list(request.arrays)
        if not inputs:
            raise invalid("an array must be assembled from at least one shard")
        shape = codec.shape_from(request.shape)
        sharding = sharding_from(request.sharding, shape)
        known = request.HasField("dtype")
        dtype = codec.dtype_from(request.dtype) if known else session.arrays.spec(inputs[0]).dtype
        handles = session.handles(given, 1)
        placed = [session.arrays.spec(handle).sharding.devices for handle in inputs]
        _check_places([device for devices in placed for device in devices], sharding.devices)
        mappings = []
        position = 0
        for i, count in enumerate(map(len, placed)):
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


def _check_places(shards: Sequence[int], wanted: Sequence[int]) -> None:
    """Raise an error if `shards`, devices of shards in order, are not the devices of the array to assemble.

    For arrays of numbers, JAX checks the shards before it calls the client, but not for those of random keys.
    """
    if len(shards) != len(wanted):
        # This is the text of stock JAX.
        raise invalid(
            "Number of addressable output shards must match the number of single-shard arrays: "
            f"{len(wanted)} vs. {len(shards)}"
        )
    for i, (device, other) in enumerate(zip(shards, wanted, strict=True)):
        if device != other:
            raise invalid(f"an array with shard {i} on device {other} cannot be assembled from one on device {device}")


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
                raise invalid("the intervals of a remap plan have different lengths")
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
    """Return the mappings of a plan that names devices, as of JAX 0.12.

    The plan has the devices on which shards of an input become shards of an output. A shard stays on its device, which
    determines its positions in both arrays.
    """
    mappings = []
    for output in plan.input_devices_for_output:
        for given in output.input_devices:
            i, o = given.in_array, output.out_array
            if not (0 <= i < len(inputs) and 0 <= o < len(outputs)):
                raise invalid(f"a remap plan names input {i} of {len(inputs)} and output {o} of {len(outputs)}")
            taken = {device: place for place, device in enumerate(inputs[i])}
            made = {device: place for place, device in enumerate(outputs[o])}
            for device in given.device_list.device_ids:
                if device not in taken or device not in made:
                    raise invalid(
                        f"a remap plan maps a shard on device {device}, where input {i} or output {o} has no shard"
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
            raise invalid(f"{counted(len(specs), 'type')} for {counted(len(inputs), 'array')}")
        handles = session.handles(given, len(specs))
        mappings = []
        for i, (handle, spec) in enumerate(zip(inputs, specs, strict=True)):
            source = session.arrays.spec(handle)
            if nbytes(source) != nbytes(spec) or source.sharding.devices != spec.sharding.devices:
                raise invalid("a bitcast must keep the devices and the number of bytes")
            count = len(spec.sharding.devices)
            mappings.append(Mapping(i, i, (0, count, 1), (0, count, 1)))
        donate = request.copy_semantics == arrays_pb2.DONATE_INPUT
        _rearrange(pending, "bitcast", inputs, specs, mappings, handles, donate=donate, bitcast=True)
    pending.reply_arrays("bitcast_arrays", handles)


def _copy_arrays(pending: PendingRequest, request: Any) -> None:
    session = pending.session
    given = list(request.results)
    with pending.making(given):
        handles = session.handles(given, len(request.arrays))
        devices, kind = tuple(request.device_ids), request.memory_kind if request.HasField("memory_kind") else None
        copies: dict[ArraySpec, ArraySpec] = {}  # by source: a tree has many arrays of one type
        targets = []
        for record in session.arrays.get_all(request.arrays):
            source = record.spec
            assert source is not None
            target = copies.get(source)
            if target is None:
                target = copies[source] = _copy_of(source, devices, kind)
            targets.append(target)
        _transfer(pending, "device_put", list(request.arrays), targets, handles, request.copy_semantics, False)
    pending.reply_arrays("copy_arrays", handles)


def _copy_of(source: ArraySpec, devices: tuple[int, ...], kind: str | None) -> ArraySpec:
    """Return the type of a copy on these devices, or on the same ones, in a kind of memory or in an omitted one."""
    devices = devices or source.sharding.devices
    if len(devices) != len(source.sharding.devices):
        raise invalid(
            f"an array on {counted(len(source.sharding.devices), 'device')} cannot be copied to {len(devices)}"
        )
    if len(set(devices)) != len(devices):
        raise invalid("an array can be copied to a device only once")
    if kind is None:
        kind = omitted_kind(source.sharding.memory_kind, _jaxlib())
    return msgspec.structs.replace(source, sharding=Sharding(devices, source.sharding.tiling, kind))


def omitted_kind(source: str, jaxlib: str) -> str:
    """Return the kind of memory of a copy whose request has none, for an array in memory of the kind `source`.

    The client of jaxlib 0.11 omits the kind of the default memory, and that of later versions a kind that remains the
    same. The client of 0.10 does not omit it. All processes of a cluster have the same version.
    """
    return "" if tuple(map(int, jaxlib.split(".")[:2])) < (0, 12) else source


def _reshard(pending: PendingRequest, request: Any) -> None:
    given = list(request.results)
    with pending.making(given):
        handles = pending.session.handles(given, len(request.arrays))
        targets = [spec_from(each) for each in request.specs]
        if len(targets) != len(request.arrays):
            raise invalid(f"{counted(len(targets), 'sharding')} for {counted(len(request.arrays), 'array')}")
        _transfer(pending, "reshard", list(request.arrays), targets, handles, request.copy_semantics, True)
    pending.reply_arrays("reshard_arrays", handles)


def _transfer(
    pending: PendingRequest,
    name: str,
    inputs: list[int],
    targets: list[ArraySpec],
    handles: list[int],
    semantics: int,
    reshard: bool,
) -> None:
    session = pending.session
    donate = semantics == arrays_pb2.DONATE_INPUT
    session.cluster.hosts_of([device for target in targets for device in target.sharding.devices])
    sources = tuple(session.arrays.spec(handle) for handle in inputs)
    node = Transfer(tuple(range(len(inputs))), tuple(targets), donate, reshard)
    program = session.cluster.programs.number((name, sources, node), lambda: single(name, sources, node))
    session.launch(program, inputs, handles, traceback_id=pending.context)
    if donate:
        for handle in inputs:
            session.arrays.get(handle).memory.delete()
    session.define(handles, targets, pending.context)


def _delete_array(pending: PendingRequest, request: Any) -> None:
    session = pending.session
    status = OK
    alive = []
    for handle in request.arrays:
        try:
            session.arrays.get(handle).memory.delete()
            alive.append(handle)
        except StatusError as error:
            status = error.status
    if alive:
        session.cluster.release(alive, delete=True)
    future = session.cluster.mint()
    session.deletions[future] = status
    response = pending.response()
    response.delete_array.deletion_future_handle = future
    pending.reply_out_of_sequence(response)


def _is_array_deleted(pending: PendingRequest, request: Any) -> None:
    response = pending.response()
    response.is_array_deleted.deleted = pending.session.arrays.get(request.array).memory.is_deleted
    pending.reply(response)


def _destruct_array(pending: PendingRequest, request: Any) -> None:
    session = pending.session
    released, missing = session.arrays.remove(request.arrays)
    if released:
        session.cluster.release(released)
    if missing:
        raise not_found(f"unknown array handles {missing[:10]}")
    response = pending.response()
    response.destruct_array.SetInParent()
    pending.reply_out_of_sequence(response)


HANDLERS: dict[str, Handler] = {
    "assemble_array_from_single_device_arrays": _assemble,
    "disassemble_into_single_device_arrays": _disassemble,
    "fully_replicated_shard": _fully_replicated_shard,
    "remap_arrays": _remap,
    "bitcast_arrays": _bitcast,
    "copy_arrays": _copy_arrays,
    "reshard_arrays": _reshard,
    "delete_array": _delete_array,
    "is_array_deleted": _is_array_deleted,
    "destruct_array": _destruct_array,
}
