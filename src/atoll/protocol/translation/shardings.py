"""Translation of shardings of the IFRT protocol.

This module reads XLA's own form without XLA, whose helpers end the process if they do not know a form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from google.protobuf.message import Message

from atoll.errors import invalid, unimplemented
from atoll.ir.types import Even, Opaque, Replicated, Shape, Sharding, Tiled, Tiling, Uneven
from atoll.protocol.ifrt import shardings_pb2, values_pb2, xla_pb2
from atoll.protocol.translation.codec import parse, shape_from
from atoll.quantities import counted


def sharding_from(proto: Any, shape: Shape) -> Sharding:
    """Return the sharding of an array of `shape`."""
    serialized = proto.serialized_sharding
    reader = _SHARDINGS.get(serialized.type_name)
    if reader is None:
        raise invalid(f"unknown kind of sharding {serialized.type_name[:100]!r}")
    kind, convert = reader
    message = parse(kind, serialized.data)
    devices, tiling = convert(message, shape)
    if not devices or len(set(devices)) != len(devices):
        raise invalid("a sharding must have devices, each of them once")
    return Sharding(devices, tiling, message.memory_kind)


def _single(message: Any, _: Shape) -> tuple[tuple[int, ...], Tiling]:
    return (message.device_id,), Replicated()


def _hlo(message: Any, shape: Shape) -> tuple[tuple[int, ...], Tiling]:
    devices = tuple(message.devices.device_ids)
    return devices, tiling_from(message.xla_op_sharding, len(devices), shape)


def _even(message: Any, shape: Shape) -> tuple[tuple[int, ...], Tiling]:
    if message.is_fully_replicated:
        return tuple(message.devices.device_ids), Replicated()
    return tuple(message.devices.device_ids), Even(shape_from(message.shard_shape))


def _concrete(message: Any, _: Shape) -> tuple[tuple[int, ...], Tiling]:
    if message.HasField("dynamic_shape") or message.shard_dynamic_shapes:
        raise unimplemented("arrays of dynamic shape are not supported; pad them to a static shape")
    devices = tuple(message.devices.device_ids)
    shapes = tuple(shape_from(each) for each in message.shard_shapes)
    if len(shapes) != len(devices):
        raise invalid(
            f"sharding across {counted(len(devices), 'device')} has shapes of {counted(len(shapes), 'shard')}"
        )
    return devices, Even(shapes[0]) if len(set(shapes)) == 1 else Uneven(shapes)


def _opaque(message: Any, _: Shape) -> tuple[tuple[int, ...], Tiling]:
    return tuple(message.devices.device_ids), Opaque()


def _param(message: Any, shape: Shape) -> tuple[tuple[int, ...], Tiling]:
    devices = tuple(message.devices.device_ids)
    param = message.sharding_param
    axes = tuple(param.permutation), tuple(param.axis_sizes)
    tiling = tiling_of_param(len(devices), shape, tuple(param.dim_shards), *axes)
    return devices, partial_sums(tiling, shape) if param.unreduced_axes else tiling


def tiling_of_param(
    devices: int, shape: Shape, counts: tuple[int, ...], permutation: tuple[int, ...], sizes: tuple[int, ...]
) -> Tiling:
    """Return the tiling for `counts` shards per dimension, on axes of `sizes` in the order `permutation`.

    Devices are numbered along the axes from minor to major, and dimensions use the axes in permuted order. See
    `xla/python/ifrt/ir/sharding_param.h` in openxla/xla.
    """
    if (
        len(counts) != len(shape)
        or min((*counts, *sizes), default=1) < 1
        or math.prod(sizes) != devices
        or devices % math.prod(counts)
        or sorted(permutation) != list(range(len(sizes)))
    ):
        raise invalid("the axes of a sharding do not match its devices")
    order = _transposed(tuple(reversed(sizes)), tuple(len(sizes) - 1 - p for p in reversed(permutation)))
    replicas = devices // math.prod(counts)
    return Tiled((*counts, replicas), order) if math.prod(counts) > 1 else Replicated()


_SHARDINGS: dict[str, tuple[Any, Any]] = {
    "xla::ifrt::SingleDeviceSharding": (shardings_pb2.SingleDeviceSharding, _single),
    "xla::ifrt::HloSharding": (shardings_pb2.HloSharding, _hlo),
    "xla::ifrt::ConcreteEvenSharding": (shardings_pb2.ConcreteEvenSharding, _even),
    "xla::ifrt::ConcreteSharding": (shardings_pb2.ConcreteSharding, _concrete),
    "xla::ifrt::OpaqueSharding": (shardings_pb2.OpaqueSharding, _opaque),
    "xla::ifrt::ShardingParamSharding": (shardings_pb2.ShardingParamSharding, _param),
}


def tiling_from(op: Any, devices: int, shape: Shape | None) -> Tiling:
    """Return the tiling for a sharding in XLA's own form.

    Shards that are partial sums (JAX calls such arrays unreduced) are no parts of the array, so only their shape is
    known.
    """
    tiling = tiles_from(op, devices, shape)
    return partial_sums(tiling, shape) if has_partial_sums(op) else tiling


def has_partial_sums(op: Any) -> bool:
    """Return whether the sum of several shards is a part of the array, besides the type UNREDUCED of all axes."""
    if op.HasField("named_sharding"):
        return bool(op.named_sharding.unreduced_axes)
    return xla_pb2.OpSharding.UNREDUCED in op.last_tile_dims


def partial_sums(tiling: Tiling, shape: Shape | None) -> Tiling:
    """Return the tiling of arrays of `shape` whose shards are partial sums of these tiles."""
    if shape is None:
        return Opaque()
    if not isinstance(tiling, Tiled):
        return Even(shape)
    return Even(tuple(-(-size // parts) for size, parts in zip(shape, tiling.dims, strict=False)))


def tiles_from(op: Any, devices: int, shape: Shape | None) -> Tiling:
    """Return the tiles of a sharding in XLA's own form, also if they are divided into partial sums."""
    if op.HasField("named_sharding"):
        return _named(op.named_sharding, devices, shape)
    kind = xla_pb2.OpSharding
    if op.type in (kind.REPLICATED, kind.MAXIMAL) or devices == 1:
        return Replicated()
    if op.type in (kind.MANUAL, kind.UNREDUCED):
        return Even(shape) if shape is not None else Opaque()
    if op.type != kind.OTHER:
        return Opaque()
    dims = tuple(op.tile_assignment_dimensions)
    if math.prod(dims) != devices or min(dims, default=1) < 1:
        raise invalid(f"tile assignment {list(dims)} does not match {devices} devices")
    if op.tile_assignment_devices:
        order = tuple(op.tile_assignment_devices)
    elif op.iota_reshape_dims:
        order = _iota(tuple(op.iota_reshape_dims), tuple(op.iota_transpose_perm), devices)
    else:
        order = tuple(range(devices))
    if sorted(order) != list(range(devices)):
        raise invalid("a tile assignment must name each of its devices once")
    replicas = 1 if op.replicate_on_last_tile_dim else len(op.last_tile_dims)
    if shape is not None and len(dims) - replicas < len(shape):
        raise invalid(f"tile assignment {list(dims)} does not match an array of {counted(len(shape), 'dimension')}")
    if math.prod(dims[: len(dims) - replicas]) == 1:
        return Replicated()
    return Tiled(dims, order)


def check_parts(op: Any, devices: int, shapes: Sequence[Shape]) -> None:
    """Raise INVALID_ARGUMENT if a sharding in XLA's own form does not fit arrays of these shapes on all devices.

    XLA ends the process if a custom call has such a sharding. For several arrays, `op` is the sharding of a tuple.
    """
    parts = list(op.tuple_shardings) or [op]
    if len(parts) != len(shapes):
        raise invalid(f"sharding of {len(parts)} arrays for {len(shapes)} arrays")
    for part, shape in zip(parts, shapes, strict=True):
        dims = list(part.tile_assignment_dimensions)
        subgroups = 1 if part.replicate_on_last_tile_dim else len(part.last_tile_dims)
        if not isinstance(tiling_from(part, devices, shape), Replicated | Tiled):
            raise invalid("the arrays of a custom partitioning must be replicated or tiled")
        if part.type == xla_pb2.OpSharding.MAXIMAL and list(part.tile_assignment_devices) != [0]:
            raise invalid("the arrays of a custom partitioning must be on all of its devices")
        if part.type == xla_pb2.OpSharding.OTHER and len(dims) != len(shape) + subgroups:
            raise invalid(f"tile assignment {dims} does not match an array of {counted(len(shape), 'dimension')}")


def _transposed(sizes: tuple[int, ...], permutation: tuple[int, ...]) -> tuple[int, ...]:
    """Return the numbers 0, 1, 2, ... in an array of `sizes`, transposed by `permutation`, in row-major order."""
    if sorted(permutation) != list(range(len(sizes))):
        raise invalid(f"invalid permutation of {len(sizes)} axes of a tile assignment")
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    order = [0]
    for axis in permutation:
        order = [base + i * strides[axis] for base in order for i in range(sizes[axis])]
    return tuple(order)


def _iota(sizes: tuple[int, ...], permutation: tuple[int, ...], devices: int) -> tuple[int, ...]:
    """Return the numbers of all devices in an array of `sizes`, transposed by `permutation`."""
    if math.prod(sizes) != devices or min(sizes, default=1) < 1:
        raise invalid(f"iota dimensions {list(sizes)} do not match {devices} devices")
    return _transposed(sizes, permutation)


def _named(sharding: Any, devices: int, shape: Shape | None) -> Tiling:
    """Return the tiling for a sharding with named mesh axes. Sub-axes split an axis of the mesh into several."""
    mesh = sharding.mesh
    sizes = [axis.size for axis in mesh.axes]
    if math.prod(sizes) != devices or min(sizes, default=1) < 1:
        raise invalid(f"mesh {sizes} does not match {devices} devices")
    cuts: list[set[int]] = [{1, size} for size in sizes]
    groups = [list(dim.axes) for dim in sharding.dim_shardings]
    for ref in (ref for group in groups for ref in group):
        if not 0 <= ref.mesh_axis_index < len(sizes):
            raise invalid("a sharding names an axis that is not in its mesh")
        if ref.HasField("sub_axis_info"):
            info = ref.sub_axis_info
            if info.pre_size < 1 or info.size < 1 or sizes[ref.mesh_axis_index] % (info.pre_size * info.size):
                raise invalid(
                    f"invalid sub-axis {info.pre_size}:{info.size} of an axis of {sizes[ref.mesh_axis_index]}"
                )
            cuts[ref.mesh_axis_index] |= {info.pre_size, info.pre_size * info.size}
    axes: list[tuple[int, int, int]] = []  # (mesh axis, elements before it, size), major to minor
    for number, points in enumerate(cuts):
        ordered = sorted(points)
        if any(high % low for low, high in pairwise(ordered)):
            raise invalid(f"incompatible sub-axes of an axis: cannot split it at {ordered}")
        axes.extend((number, low, high // low) for low, high in pairwise(ordered))

    def pieces(ref: Any) -> list[int]:
        low, high = 1, sizes[ref.mesh_axis_index]
        if ref.HasField("sub_axis_info"):
            low = ref.sub_axis_info.pre_size
            high = low * ref.sub_axis_info.size
        return [i for i, (axis, pre, _) in enumerate(axes) if axis == ref.mesh_axis_index and low <= pre < high]

    used = [[piece for ref in group for piece in pieces(ref)] for group in groups]
    flat = [piece for group in used for piece in group]
    if len(set(flat)) != len(flat):
        raise invalid("a sharding uses an axis twice")
    rest = [i for i in range(len(axes)) if i not in flat]
    dims = tuple(math.prod(axes[i][2] for i in group) for group in used)
    if shape is not None:
        dims += (1,) * (len(shape) - len(dims))
        if len(dims) > len(shape):
            raise invalid(
                f"sharding of {counted(len(dims), 'dimension')} for an array of {counted(len(shape), 'dimension')}"
            )
    if math.prod(dims) == 1:
        return Replicated()
    order = _transposed(tuple(size for _, _, size in axes), tuple(flat + rest))
    if mesh.device_ids:
        ids = tuple(mesh.device_ids)
    elif mesh.HasField("iota_transform"):
        transform = mesh.iota_transform
        ids = _iota(tuple(transform.reshape_dims), tuple(transform.transpose_perm), devices)
    else:
        ids = tuple(range(devices))
    if sorted(ids) != list(range(devices)):
        raise invalid("a mesh must name each of its devices once")
    return Tiled((*dims, devices // math.prod(dims)), tuple(ids[i] for i in order))


def _op_sharding(tiling: Tiled, rank: int) -> xla_pb2.OpSharding:
    """Return tiles in XLA's form, in which one further dimension enumerates the replicas of a tile."""
    dims, replicas = tiling.dims[:rank], tiling.dims[rank:]
    return xla_pb2.OpSharding(
        type=xla_pb2.OpSharding.OTHER,
        tile_assignment_dimensions=[*dims, math.prod(replicas)] if replicas else dims,
        tile_assignment_devices=tiling.order,
        replicate_on_last_tile_dim=bool(replicas),
    )


def sharding_to(sharding: Sharding, shape: Shape, op_sharding: bytes | None) -> Any:
    """Return the message for an output's sharding. `op_sharding` is its form in XLA, if it has one."""
    message: Message
    if op_sharding is None and isinstance(sharding.tiling, Tiled):
        op_sharding = _op_sharding(sharding.tiling, len(shape)).SerializeToString()
    kind = sharding.memory_kind or None
    devices = values_pb2.DeviceList(device_ids=sharding.devices)
    if len(sharding.devices) == 1:
        name = "xla::ifrt::SingleDeviceSharding"
        message = shardings_pb2.SingleDeviceSharding(device_id=sharding.devices[0], memory_kind=kind)
    elif op_sharding is not None:
        name = "xla::ifrt::HloSharding"
        message = shardings_pb2.HloSharding(
            devices=devices, memory_kind=kind, xla_op_sharding=xla_pb2.OpSharding.FromString(op_sharding)
        )
    else:
        name = "xla::ifrt::ConcreteEvenSharding"
        each = sharding.tiling.shard_shape if isinstance(sharding.tiling, Even) else shape
        message = shardings_pb2.ConcreteEvenSharding(
            devices=devices,
            memory_kind=kind,
            shape=values_pb2.Shape(dims=shape),
            shard_shape=values_pb2.Shape(dims=each),
            is_fully_replicated=isinstance(sharding.tiling, Replicated),
        )
    return values_pb2.Sharding(
        serialized_sharding=values_pb2.Serialized(type_name=name, data=message.SerializeToString())
    )
