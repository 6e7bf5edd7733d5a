"""Tests of translating dtypes, shapes, layouts, statuses and platform IDs."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import Code, Status, StatusError
from atoll.ir.types import (
    DTYPE_BITS,
    ArraySpec,
    Sharding,
)
from atoll.protocol.ifrt import shardings_pb2, values_pb2, xla_pb2
from atoll.protocol.translation import codec
from atoll.protocol.translation.array_specs import (
    layout_from,
    layout_proto_from_text,
    order_of_layout,
    spec_from,
    xla_layout,
)
from atoll.protocol.translation.shardings import sharding_to
from tests.protocol.translation.wire import shape


def test_every_dtype_of_the_wire_is_one_of_ours():
    kinds = values_pb2.DType.Kind
    for number in kinds.values():
        if number == kinds.Value("KIND_UNSPECIFIED"):
            continue
        name = codec.dtype_from(values_pb2.DType(kind=number))
        assert name in DTYPE_BITS
        assert codec.dtype_to(name).kind == number


@pytest.mark.parametrize("number", [0, 9999])
def test_an_unknown_dtype_is_refused(number):
    with pytest.raises(StatusError, match=f"unknown dtype {number}"):
        codec.dtype_from(values_pb2.DType(kind=number))


@pytest.mark.parametrize("dims", [(), (0,), (3, 4), (1 << 47,), (0, 1 << 62)])
def test_shapes_are_read(dims):
    assert codec.shape_from(shape(*dims)) == dims


@pytest.mark.parametrize("dims", [(-1,), (1,) * 65, (-1, -1)])
def test_shapes_that_no_array_has_are_refused(dims):
    with pytest.raises(StatusError, match="INVALID_ARGUMENT: invalid shape"):
        codec.shape_from(shape(*dims))


@pytest.mark.parametrize("dims", [(1 << 49,), (1 << 30, 1 << 30)])
def test_shapes_of_arrays_that_are_too_large_are_refused(dims):
    with pytest.raises(StatusError, match="RESOURCE_EXHAUSTED: out of memory"):
        codec.shape_from(shape(*dims))


@pytest.mark.parametrize(
    ("text", "order", "tiles", "bits", "memory"),
    [
        ("{}", [], [], 0, 0),
        ("{0}", [0], [], 0, 0),
        ("{1,0}", [1, 0], [], 0, 0),
        ("{0,1,2}", [0, 1, 2], [], 0, 0),
        ("{1,0:T(8,128)(2,1)E(4)S(5)}", [1, 0], [[8, 128], [2, 1]], 4, 5),
        ("{0:T(*)}", [0], [[-(2**63)]], 0, 0),
    ],
)
def test_layouts_are_read_from_xlas_text(text, order, tiles, bits, memory):
    proto = layout_proto_from_text(text)
    assert list(proto.minor_to_major) == order
    assert [list(tile.dimensions) for tile in proto.tiles] == tiles
    assert (proto.element_size_in_bits, proto.memory_space) == (bits, memory)


@given(st.permutations(range(4)))
def test_xlas_own_text_of_a_layout_is_understood(order):
    text = "{" + ",".join(map(str, order)) + "}"
    assert xla_layout(layout_proto_from_text(text)) == tuple(reversed(order))


@pytest.mark.parametrize(
    "text", ["{x}", "{1,a}", "{0:T(}", "{0:T(x)}", "{0:E()}", "{0:S(-)}", "{99999999999999999999}"]
)
def test_texts_that_are_no_layout_are_refused(text):
    with pytest.raises(StatusError, match="invalid layout") as caught:
        layout_proto_from_text(text)
    assert caught.value.status.code == Code.INVALID_ARGUMENT


@pytest.mark.parametrize(("text", "order"), [("{}", None), ("{0}", None), ("{1,0:T(8,128)}", None), ("{0,1}", (1, 0))])
def test_only_an_unusual_order_of_an_outputs_dimensions_is_kept(text, order):
    assert order_of_layout(text) == order


@pytest.mark.parametrize("order", [[1, 1], [1], [0, 2], [-1, 0]])
def test_an_order_of_dimensions_that_is_none_is_refused(order):
    with pytest.raises(StatusError, match="not a permutation"):
        xla_layout(xla_pb2.XlaLayout(minor_to_major=order))
    compact = shardings_pb2.CompactLayout(major_to_minor=order).SerializeToString()
    layout = values_pb2.Layout(serialized_layout={"type_name": "xla::ifrt::CompactLayout", "data": compact})
    with pytest.raises(StatusError, match="not a permutation"):
        layout_from(layout)


@given(st.builds(Status, st.integers(0, 16), st.text(), st.dictionaries(st.text(), st.binary(), max_size=3)))
def test_statuses_survive_the_wire(status):
    assert codec.status_from(codec.status_to(status)) == status


def test_a_spec_is_read_whole():
    proto = values_pb2.ArraySpec(
        dtype=codec.dtype_to("bfloat16"),
        shape=shape(4, 2),
        sharding=sharding_to(Sharding((3,)), (4, 2), None),
    )
    assert spec_from(proto) == ArraySpec("bfloat16", (4, 2), Sharding((3,)))


@pytest.mark.parametrize(
    ("text", "signed"),
    [
        # Published values of the same hash (FARM_FINGERPRINT in BigQuery's reference), one per branch of lengths.
        ("foo", 6150913649986995171),
        ("3true", -4880158226897771312),
        ("1footrue", -1541654101129638711),
        ("2applefalse", 2794438866806483259),
    ],
)
def test_the_number_of_a_platform_is_its_names_farm_fingerprint(text, signed):
    assert codec.platform_id(text) == signed % (1 << 64)


def test_the_numbers_of_platforms_differ():
    numbers = sorted(codec.platform_id(name) for name in ("cpu", "cuda", "rocm", "tpu", "METAL", ""))
    assert all(a < b for a, b in pairwise(numbers))
