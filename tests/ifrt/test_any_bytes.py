"""Tests of arbitrary bytes from a client: they are handled, or rejected with a status."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atoll.errors import StatusError
from atoll.executables.compile_requests import compile_job
from atoll.ir.types import (
    Sharding,
    shard_boxes,
)
from atoll.protocol.ifrt import executables_pb2, values_pb2, xla_pb2
from atoll.protocol.translation import codec
from atoll.protocol.translation.array_specs import layout_from, layout_proto_from_text, spec_from
from atoll.protocol.translation.shardings import _SHARDINGS, sharding_from, sharding_to, tiling_from
from tests.protocol.translation.wire import Op, compile_request, shape
from tests.thoroughness import examples


def fuzzed(read: Callable[[], Any]) -> None:
    """Send bytes, and fail if they cause any other exception than a status."""
    try:
        read()
    except StatusError:
        return


@settings(max_examples=examples(70))
@given(st.binary(max_size=80), st.sampled_from(sorted(_SHARDINGS)), st.integers(0, 3))
@example(b"", "xla::ifrt::HloSharding", 1)
def test_any_bytes_are_a_sharding_or_refused(data, name, rank):
    proto = values_pb2.Sharding(serialized_sharding={"type_name": name, "data": data})

    def read() -> None:
        sharding = sharding_from(proto, (4,) * rank)
        shard_boxes(sharding, (4,) * rank)

    fuzzed(read)


small = st.integers(-2, 8) | st.sampled_from([1 << 40, -(1 << 62)])


def lists(of: st.SearchStrategy[Any] = small) -> st.SearchStrategy[list[Any]]:
    return st.lists(of, max_size=4)


refs = st.builds(
    lambda index, part: xla_pb2.AxisRef(
        mesh_axis_index=index, sub_axis_info=part and {"pre_size": part[0], "size": part[1]}
    ),
    small,
    st.none() | st.tuples(small, small),
)


meshes = st.builds(
    lambda sizes, ids, iota: xla_pb2.Mesh(
        axes=[{"size": size} for size in sizes],
        device_ids=ids,
        iota_transform=iota and {"reshape_dims": iota[0], "transpose_perm": iota[1]},
    ),
    lists(st.sampled_from([1, 2, 4, 8, 0, -2])),
    lists(),
    st.none() | st.tuples(lists(), lists()),
)


tile_assignments = st.builds(
    lambda kind, dims, devices, iota, permutation, last, last_dims: Op(
        type=kind,
        tile_assignment_dimensions=dims,
        tile_assignment_devices=devices,
        iota_reshape_dims=iota,
        iota_transpose_perm=permutation,
        replicate_on_last_tile_dim=last,
        last_tile_dims=last_dims,
    ),
    st.sampled_from([Op.OTHER, Op.OTHER, Op.OTHER, Op.REPLICATED, Op.MANUAL, Op.UNKNOWN, 99]),
    lists(),
    lists(),
    lists(),
    lists(st.integers(-1, 3)),
    st.booleans(),
    lists(st.integers(0, 6)),
)


named_shardings = st.builds(
    lambda mesh, groups: Op(named_sharding={"mesh": mesh, "dim_shardings": [{"axes": g} for g in groups]}),
    meshes,
    lists(lists(refs)),
)


@settings(max_examples=examples(130))
@given(tile_assignments | named_shardings, st.sampled_from([1, 2, 4, 8]), st.integers(0, 3))
def test_any_numbers_in_a_sharding_cover_the_array_or_are_refused(op, devices, rank):
    def read() -> None:
        tiling = tiling_from(op, devices, (4,) * rank)
        boxes = shard_boxes(Sharding(tuple(range(devices)), tiling), (4,) * rank)
        covered = np.zeros((4,) * rank, int)
        for box in boxes:
            covered[tuple(slice(start, stop) for start, stop in box)] += 1
        assert covered.min() >= 1

    fuzzed(read)


@given(st.binary(max_size=60), st.sampled_from(["CompactLayout", "PjRtLayout", "Other"]))
def test_any_bytes_are_a_layout_or_refused(data, kind):
    layout = values_pb2.Layout(serialized_layout={"type_name": f"xla::ifrt::{kind}", "data": data})
    fuzzed(lambda: layout_from(layout))


@given(st.text("{}(),:*TESD0123456789-x", max_size=30) | st.text(max_size=10))
def test_any_text_is_a_layout_or_refused(text):
    fuzzed(lambda: layout_proto_from_text(text))


@given(st.binary(max_size=100))
def test_any_bytes_are_an_array_spec_or_refused(data):
    fuzzed(lambda: spec_from(codec.parse(values_pb2.ArraySpec, data)))


@given(st.binary(max_size=30))
def test_any_bytes_for_the_layout_of_an_array_spec_are_understood_or_refused(data):
    spec = values_pb2.ArraySpec(
        dtype=codec.dtype_to("float32"), shape=shape(4, 4), sharding=sharding_to(Sharding((0,)), (), None)
    )
    spec.layout = data
    fuzzed(lambda: spec_from(spec))


@given(st.binary(max_size=120))
def test_any_bytes_are_a_compile_request_or_refused(data):
    fuzzed(lambda: compile_job(codec.parse(executables_pb2.Compile, data), 8))


@given(st.binary(max_size=120))
def test_any_bytes_are_compile_options_or_refused(data):
    request = compile_request()
    request.compile_options.data = data
    fuzzed(lambda: compile_job(request, 8))
