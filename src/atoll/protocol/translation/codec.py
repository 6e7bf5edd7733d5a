"""Translation of dtypes, shapes, statuses, host buffers and platform IDs of the IFRT protocol."""

from __future__ import annotations

import math
import time
from typing import Any

import msgspec
from google.protobuf.message import DecodeError

from atoll.decodable import decodable
from atoll.errors import DETAILS, Details, Status, details_in, exhausted, invalid
from atoll.ir.types import Shape
from atoll.protocol.ifrt import status_pb2, values_pb2
from atoll.protocol.messages import MEMORY_REPORT, MemoryReport
from atoll.protocol.protobuf_fields import header

MAX_RANK = 64
MAX_ELEMENTS = 1 << 48

_DUMP_URL = "type.googleapis.com/ifrt_proxy_contrib_pathways.ObjectStoreDumpProto"

# Constants of farm hash.
_MASK = (1 << 64) - 1
_K0, _K2 = 0xC3A5C85C97CB3127, 0x9AE16A3B2F90404F

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
    """Parse a message of type `kind`."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise invalid(f"cannot parse {kind.DESCRIPTOR.name} from {len(data)} bytes") from None


def dtype_from(proto: Any) -> str:
    name = _DTYPE_OF_KIND.get(proto.kind)
    if name is None:
        raise invalid(f"unknown dtype {proto.kind}")
    return name


def dtype_of_xla(name: str) -> str:
    """Return the dtype with this name in XLA, such as F32."""
    dtype = _KINDS.get(name)
    if dtype is None:
        raise invalid(f"unknown dtype {name[:40]!r}")
    return dtype


def dtype_to(name: str) -> Any:
    return values_pb2.DType(kind=_KIND_OF_DTYPE[name])


def shape_from(proto: Any) -> Shape:
    return checked_shape(tuple(proto.dims))


def checked_shape(dims: Shape) -> Shape:
    """Return `dims`. Raise INVALID_ARGUMENT if no array can have this shape, or RESOURCE_EXHAUSTED if it is too large.

    A platform's own client reports any array that does not fit as exhausted memory, so scripts expect that.
    """
    if len(dims) > MAX_RANK or any(size < 0 for size in dims):
        raise invalid(f"invalid shape {list(dims[:MAX_RANK])}")
    if math.prod(dims) > MAX_ELEMENTS:
        raise exhausted(f"out of memory: an array has at most {MAX_ELEMENTS} elements, not the shape {list(dims)}")
    return dims


def strides_from(proto: Any) -> tuple[int, ...] | None:
    """Return the byte strides in a request's optional field `byte_strides`."""
    return tuple(proto.byte_strides.strides) if proto.HasField("byte_strides") else None


def status_to(status: Status) -> Any:
    """Return the status for jaxlib's client, which shows no payloads to Python: the message contains the details."""
    proto = status_pb2.Status(code=status.code, message=status.details.in_text(status.message))
    for each in status.payloads.items():
        if each[0] != DETAILS:
            key, value = _client_payload(*each)
            proto.payload[key] = value
    return proto


def status_from(proto: Any) -> Status:
    message, details = details_in(proto.message)
    status = Status(proto.code, message, {key: value for key, value in proto.payload.items() if key != DETAILS})
    return status if details == Details() else status.with_details(details)


def _client_payload(key: str, value: bytes) -> tuple[str, bytes]:
    """Translate the controller's memory report to the payload that jaxlib's client prints, and keep other payloads."""
    if key != MEMORY_REPORT:
        return key, value
    report = msgspec.msgpack.decode(value, type=decodable(MemoryReport))
    proto = status_pb2.ObjectStoreDump(device=report.device, dump_timestamp_ns=time.time_ns())
    for holder in report.holders:
        stack = proto.dump.per_error_context.add(error_context_id=holder.traceback_id)
        stack.per_creator.add(
            creator=holder.producer,
            ready_obj_count=holder.ready,
            ready_total_size=holder.ready_bytes,
            not_ready_obj_count=holder.unready,
            not_ready_total_size=holder.unready_bytes,
        )
    return _DUMP_URL, proto.SerializeToString()


def contents_header(nbytes: int) -> bytes:
    """Return the header of a message whose only field, field 1, holds `nbytes` bytes."""
    return header(1, nbytes)


def contents_of(data: bytes | memoryview) -> memoryview:
    """Return the bytes in field 1 of a message that has no other field, without copying them."""
    view = memoryview(data)
    if not view.nbytes:
        return view
    if view[0] != 0x0A:
        raise invalid("invalid host buffer contents")
    size = shift = 0
    position = 1
    while True:
        if position >= view.nbytes or shift > 63:
            raise invalid("invalid host buffer contents")
        byte = view[position]
        position += 1
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    if position + size != view.nbytes:
        raise invalid("invalid host buffer contents")
    return view[position:]


def platform_id(name: str) -> int:
    """Return XLA's ID of a platform, the 64-bit farm hash of its name of up to 16 bytes."""
    data = name.encode()
    size = len(data)
    if size >= 8:
        mul = (_K2 + size * 2) & _MASK
        a = (int.from_bytes(data[:8], "little") + _K2) & _MASK
        b = int.from_bytes(data[-8:], "little")
        c = (_rotate(b, 37) * mul + a) & _MASK
        d = ((_rotate(a, 25) + b) * mul) & _MASK
        return _mix16(c, d, mul)
    if size >= 4:
        mul = (_K2 + size * 2) & _MASK
        low = int.from_bytes(data[:4], "little")
        return _mix16((size + (low << 3)) & _MASK, int.from_bytes(data[-4:], "little"), mul)
    if size:
        y = data[0] + (data[size >> 1] << 8)
        z = size + (data[-1] << 2)
        return (_shift_mix((y * _K2 & _MASK) ^ (z * _K0 & _MASK)) * _K2) & _MASK
    return _K2


def _rotate(value: int, count: int) -> int:
    return ((value >> count) | (value << (64 - count))) & _MASK


def _shift_mix(value: int) -> int:
    return value ^ (value >> 47)


def _mix16(u: int, v: int, mul: int) -> int:
    a = _shift_mix(((u ^ v) * mul) & _MASK)
    b = _shift_mix(((v ^ a) * mul) & _MASK)
    return (b * mul) & _MASK
