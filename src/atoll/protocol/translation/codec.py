"""Messages, dtypes, shapes and statuses of the IFRT protocol, to and from those of `atoll.ir`.

Here and in `shardings` and `array_specs` everything that a client sends is checked: what cannot be understood raises
INVALID_ARGUMENT or UNIMPLEMENTED, never anything else.
"""

from __future__ import annotations

import math
from typing import Any

from google.protobuf.message import DecodeError

from atoll.errors import Status, invalid
from atoll.ir.types import Shape
from atoll.protocol.ifrt import status_pb2, values_pb2
from atoll.protocol.translation.memory_report import client_payload

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


def dtype_from(proto: Any) -> str:
    name = _DTYPE_OF_KIND.get(proto.kind)
    if name is None:
        raise invalid(f"unknown dtype {proto.kind}")
    return name


def dtype_of_xla(name: str) -> str:
    """The dtype that XLA calls by this name, such as F32."""
    dtype = _KINDS.get(name)
    if dtype is None:
        raise invalid(f"unknown dtype {name[:40]!r}")
    return dtype


def dtype_to(name: str) -> Any:
    return values_pb2.DType(kind=_KIND_OF_DTYPE[name])


def shape_from(proto: Any) -> Shape:
    return checked_shape(tuple(proto.dims))


def checked_shape(dims: Shape) -> Shape:
    """These sizes, if an array can have them."""
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
