"""Translation of layouts and array specs of the IFRT protocol."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from atoll.errors import invalid, unimplemented
from atoll.ir.types import ArraySpec
from atoll.protocol.ifrt import shardings_pb2, xla_pb2
from atoll.protocol.translation.codec import dtype_from, parse, shape_from
from atoll.protocol.translation.shardings import sharding_from


def layout_from(proto: Any) -> tuple[int, ...] | None:
    """Return the major-to-minor order of an optional layout message. None stands for the default layout."""
    serialized = proto.serialized_layout
    if serialized.type_name.endswith("CompactLayout"):
        return _order_of_dimensions(parse(shardings_pb2.CompactLayout, serialized.data).major_to_minor)
    if serialized.type_name.endswith("PjRtLayout"):
        return xla_layout(parse(shardings_pb2.PjRtLayout, serialized.data).xla_layout)
    raise invalid(f"unknown kind of layout {serialized.type_name[:100]!r}")


def xla_layout(proto: Any) -> tuple[int, ...]:
    """Return the major-to-minor order of a layout of XLA."""
    if proto.tiles:
        raise unimplemented("arrays cannot be put with a tiled layout; leave the layout to the platform")
    return _order_of_dimensions(reversed(proto.minor_to_major))


def order_of_layout(text: str) -> tuple[int, ...] | None:
    """Return the major-to-minor order of a layout in XLA's text form, or None if it is row-major."""
    order = tuple(reversed(layout_proto_from_text(text).minor_to_major))
    return None if order == tuple(range(len(order))) else order


def _order_of_dimensions(dimensions: Iterable[int]) -> tuple[int, ...]:
    order = tuple(dimensions)
    if sorted(order) != list(range(len(order))):
        raise invalid(f"invalid layout: {list(order)[:64]} is not a permutation of the dimensions")
    return order


def spec_from(proto: Any) -> ArraySpec:
    shape = shape_from(proto.shape)
    layout = None
    if proto.layout:
        try:
            layout = xla_layout(layout_proto_from_text(proto.layout.decode()))
        except ValueError:
            raise invalid(f"invalid layout {proto.layout[:100]!r}") from None
    return ArraySpec(dtype_from(proto.dtype), shape, sharding_from(proto.sharding, shape), layout)


def layout_proto_from_text(text: str) -> Any:
    """Return XLA's layout message for its text form, such as {1,0:T(8,128)(2,1)E(4)S(5)}."""
    try:
        return _layout_proto(text.strip().removeprefix("{").removesuffix("}"))
    except ValueError:
        raise invalid(f"invalid layout {text[:100]!r}") from None


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
