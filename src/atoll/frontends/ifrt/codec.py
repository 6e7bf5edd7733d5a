"""IFRT's values as the wire has them, to and from the words of `atoll.ir`.

Everything a client sends is checked here: what cannot be understood raises INVALID_ARGUMENT, never anything else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from google.protobuf.message import DecodeError, Message

from atoll.errors import Status, invalid, unimplemented
from atoll.frontends.ifrt.memory_report import client_payload
from atoll.ir.types import (
    ArraySpec,
    Even,
    Opaque,
    Replicated,
    Shape,
    Sharding,
    Tiled,
    Tiling,
    Uneven,
)
from atoll.protocol.ifrt import shardings_pb2, status_pb2, values_pb2, xla_pb2

MAX_RANK = 64
MAX_ELEMENTS = 1 << 48

_KINDS = {
    "PRED": "bool",
    "S1": "int1",
    "S2": "int2",
    "S4": "int4",
    "S8": "int8",
    "S16": "int16",
    "S32": "int32",
    "S64": "int64",
    "U1": "uint1",
    "U2": "uint2",
    "U4": "uint4",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "BF16": "bfloat16",
    "C64": "complex64",
    "C128": "complex128",
    "TOKEN": "token",
    "OPAQUE": "opaque",
    "F8E3M4": "float8_e3m4",
    "F8E4M3": "float8_e4m3",
    "F8E4M3FN": "float8_e4m3fn",
    "F8E4M3B11FNUZ": "float8_e4m3b11fnuz",
    "F8E4M3FNUZ": "float8_e4m3fnuz",
    "F8E5M2": "float8_e5m2",
    "F8E5M2FNUZ": "float8_e5m2fnuz",
    "F8E8M0FNU": "float8_e8m0fnu",
    "F4E2M1FN": "float4_e2m1fn",
    "F6E2M3FN": "float6_e2m3fn",
    "F6E3M2FN": "float6_e3m2fn",
    "STRING": "string",
}
_DTYPE_OF_KIND = {values_pb2.DType.Kind.Value(f"KIND_{kind}"): name for kind, name in _KINDS.items()}
_KIND_OF_DTYPE = {name: number for number, name in _DTYPE_OF_KIND.items()}


def parse(kind: type[Any], data: bytes) -> Any:
    """The message of that kind in `data`."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise invalid(f"{len(data)} bytes that are no {kind.DESCRIPTOR.name}") from None


# ---- dtypes, shapes, statuses


def dtype_from(proto: Any) -> str:
    name = _DTYPE_OF_KIND.get(proto.kind)
    if name is None:
        raise invalid(f"unknown dtype {proto.kind}")
    return name


def dtype_to(name: str) -> Any:
    return values_pb2.DType(kind=_KIND_OF_DTYPE[name])


def shape_from(proto: Any) -> Shape:
    dims = tuple(proto.dims)
    if len(dims) > MAX_RANK or any(size < 0 for size in dims) or math.prod(dims) > MAX_ELEMENTS:
        raise invalid(f"no such shape: {list(dims[:MAX_RANK])}")
    return dims


def strides_from(proto: Any) -> tuple[int, ...] | None:
    """The byte strides of a request's optional field `byte_strides`."""
    return tuple(proto.byte_strides.strides) if proto.HasField("byte_strides") else None


def status_to(status: Status) -> Any:
    proto = status_pb2.Status(code=status.code, message=status.message)
    for each in status.payloads.items():
        key, value = client_payload(*each)
        proto.payload[key] = value
    return proto


def status_from(proto: Any) -> Status:
    return Status(proto.code, proto.message, dict(proto.payload))


# ---- shardings


def sharding_from(proto: Any, shape: Shape) -> Sharding:
    """The sharding of an array of `shape`."""
    serialized = proto.serialized_sharding
    reader = _SHARDINGS.get(serialized.type_name)
    if reader is None:
        raise invalid(f"unknown kind of sharding {serialized.type_name[:100]!r}")
    kind, convert = reader
    message = parse(kind, serialized.data)
    devices, tiling = convert(message, shape)
    if not devices or len(set(devices)) != len(devices):
        raise invalid("a sharding needs devices, each once")
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
        raise invalid(f"a sharding over {len(devices)} devices with {len(shapes)} shard shapes")
    return devices, Even(shapes[0]) if len(set(shapes)) == 1 else Uneven(shapes)


def _opaque(message: Any, _: Shape) -> tuple[tuple[int, ...], Tiling]:
    return tuple(message.devices.device_ids), Opaque()


def _param(message: Any, shape: Shape) -> tuple[tuple[int, ...], Tiling]:
    devices = tuple(message.devices.device_ids)
    param = message.sharding_param
    counts, permutation, sizes = tuple(param.dim_shards), tuple(param.permutation), tuple(param.axis_sizes)
    if (
        len(counts) != len(shape)
        or min((*counts, *sizes), default=1) < 1
        or math.prod(sizes) != len(devices)
        or len(devices) % math.prod(counts)
        or sorted(permutation) != list(range(len(sizes)))
    ):
        raise invalid("a sharding's axes do not fit its devices")
    # Devices count up over the axes from minor to major; the dimensions take the axes in permuted order.
    replicas = len(devices) // math.prod(counts)
    order = _transposed(tuple(reversed(sizes)), tuple(len(sizes) - 1 - p for p in reversed(permutation)))
    return devices, Tiled((*counts, replicas), order) if math.prod(counts) > 1 else Replicated()


_SHARDINGS: dict[str, tuple[Any, Any]] = {
    "xla::ifrt::SingleDeviceSharding": (shardings_pb2.SingleDeviceSharding, _single),
    "xla::ifrt::HloSharding": (shardings_pb2.HloSharding, _hlo),
    "xla::ifrt::ConcreteEvenSharding": (shardings_pb2.ConcreteEvenSharding, _even),
    "xla::ifrt::ConcreteSharding": (shardings_pb2.ConcreteSharding, _concrete),
    "xla::ifrt::OpaqueSharding": (shardings_pb2.OpaqueSharding, _opaque),
    "xla::ifrt::ShardingParamSharding": (shardings_pb2.ShardingParamSharding, _param),
}


def tiling_from(op: Any, devices: int, shape: Shape | None) -> Tiling:
    """XLA's own form. Computed here: XLA's helpers end the process at forms that they do not know."""
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
        raise invalid(f"a tile assignment {list(dims)} over {devices} devices")
    if op.tile_assignment_devices:
        order = tuple(op.tile_assignment_devices)
    elif op.iota_reshape_dims:
        order = _iota(tuple(op.iota_reshape_dims), tuple(op.iota_transpose_perm), devices)
    else:
        order = tuple(range(devices))
    if sorted(order) != list(range(devices)):
        raise invalid("a tile assignment names a device twice, or one that it lacks")
    replicas = 1 if op.replicate_on_last_tile_dim else len(op.last_tile_dims)
    if shape is not None and len(dims) - replicas < len(shape):
        raise invalid(f"a tile assignment {list(dims)} for an array of {len(shape)} dimensions")
    if math.prod(dims[: len(dims) - replicas]) == 1:
        return Replicated()
    return Tiled(dims, order)


def _transposed(sizes: tuple[int, ...], permutation: tuple[int, ...]) -> tuple[int, ...]:
    """0, 1, 2, ... in an array of `sizes`, transposed by `permutation` and read row by row."""
    if sorted(permutation) != list(range(len(sizes))):
        raise invalid("no permutation of a tile assignment's axes")
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    order = [0]
    for axis in permutation:
        order = [base + i * strides[axis] for base in order for i in range(sizes[axis])]
    return tuple(order)


def _iota(sizes: tuple[int, ...], permutation: tuple[int, ...], devices: int) -> tuple[int, ...]:
    """All of `devices` in the order of such an array."""
    if math.prod(sizes) != devices or min(sizes, default=1) < 1:
        raise invalid(f"{list(sizes)} does not count {devices} devices")
    return _transposed(sizes, permutation)


def _named(sharding: Any, devices: int, shape: Shape | None) -> Tiling:
    """Mesh axes by name. Sub-axes are axes of their own once the mesh is cut along them."""
    mesh = sharding.mesh
    sizes = [axis.size for axis in mesh.axes]
    if math.prod(sizes) != devices or min(sizes, default=1) < 1:
        raise invalid(f"a mesh of {sizes} over {devices} devices")
    cuts: list[set[int]] = [{1, size} for size in sizes]
    groups = [list(dim.axes) for dim in sharding.dim_shardings]
    for ref in (ref for group in groups for ref in group):
        if not 0 <= ref.mesh_axis_index < len(sizes):
            raise invalid("a sharding names an axis that its mesh lacks")
        if ref.HasField("sub_axis_info"):
            info = ref.sub_axis_info
            if info.pre_size < 1 or info.size < 1 or sizes[ref.mesh_axis_index] % (info.pre_size * info.size):
                raise invalid(f"an axis of {sizes[ref.mesh_axis_index]} has no part {info.pre_size}:{info.size}")
            cuts[ref.mesh_axis_index] |= {info.pre_size, info.pre_size * info.size}
    axes: list[tuple[int, int, int]] = []  # (mesh axis, elements before it, size), major to minor
    for number, points in enumerate(cuts):
        ordered = sorted(points)
        if any(high % low for low, high in pairwise(ordered)):
            raise invalid(f"an axis cannot be cut at all of {ordered}")
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
            raise invalid(f"a sharding of {len(dims)} dimensions for an array of {len(shape)}")
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
        raise invalid("a mesh names a device twice, or one that it lacks")
    return Tiled((*dims, devices // math.prod(dims)), tuple(ids[i] for i in order))


def sharding_to(sharding: Sharding, shape: Shape, op_sharding: bytes | None) -> Any:
    """The wire's form of an output's sharding; `op_sharding` is XLA's own where there is one."""
    message: Message
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


# ---- layouts and array specs


def layout_from(proto: Any) -> tuple[int, ...] | None:
    """Major-to-minor of an optional layout message; None stands for the default."""
    serialized = proto.serialized_layout
    if serialized.type_name.endswith("CompactLayout"):
        return _order_of_dimensions(parse(shardings_pb2.CompactLayout, serialized.data).major_to_minor)
    if serialized.type_name.endswith("PjRtLayout"):
        return xla_layout(parse(shardings_pb2.PjRtLayout, serialized.data).xla_layout)
    raise invalid(f"unknown kind of layout {serialized.type_name[:100]!r}")


def xla_layout(proto: Any) -> tuple[int, ...]:
    """Major-to-minor of XLA's layout."""
    if proto.tiles:
        raise unimplemented("arrays cannot be put with a tiled layout; leave the layout to the platform")
    return _order_of_dimensions(reversed(proto.minor_to_major))


def order_of_layout(text: str) -> tuple[int, ...] | None:
    """Major-to-minor of the layout in XLA's text form; None where it is row by row."""
    order = tuple(reversed(layout_proto_from_text(text).minor_to_major))
    return None if order == tuple(range(len(order))) else order


def _order_of_dimensions(dimensions: Iterable[int]) -> tuple[int, ...]:
    order = tuple(dimensions)
    if sorted(order) != list(range(len(order))):
        raise invalid("a layout that is no order of the dimensions")
    return order


def spec_from(proto: Any) -> ArraySpec:
    shape = shape_from(proto.shape)
    layout = None
    if proto.layout:
        try:
            layout = xla_layout(layout_proto_from_text(proto.layout.decode()))
        except ValueError:
            raise invalid(f"no layout: {proto.layout[:100]!r}") from None
    return ArraySpec(dtype_from(proto.dtype), shape, sharding_from(proto.sharding, shape), layout)


def layout_proto_from_text(text: str) -> Any:
    """XLA's layout message for its text form, such as {1,0:T(8,128)(2,1)E(4)S(5)}."""
    try:
        return _layout_proto(text.strip().removeprefix("{").removesuffix("}"))
    except ValueError:
        raise invalid(f"no layout: {text[:100]!r}") from None


def _layout_proto(body: str) -> Any:
    order, _, rest = body.partition(":")
    proto = xla_pb2.XlaLayout(minor_to_major=[int(part) for part in order.split(",") if part])
    position = 0
    tag = ""
    while position < len(rest):
        char = rest[position]
        if char != "(":
            tag = char
            position += 1
            continue
        end = rest.index(")", position)
        values = rest[position + 1 : end].split(",")
        if tag == "T":
            proto.tiles.add(dimensions=[-(2**63) if v == "*" else int(v) for v in values if v])
        elif tag == "E":
            proto.element_size_in_bits = int(values[0])
        elif tag == "S":
            proto.memory_space = int(values[0])
        position = end + 1
    return proto
