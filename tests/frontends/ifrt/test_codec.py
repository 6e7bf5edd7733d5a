"""The codec against JAX's own shardings, and against bytes that nobody meant."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax._src.lib import xla_client as xc
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from atoll.errors import Code, Status, StatusError
from atoll.frontends.ifrt import codec
from atoll.frontends.ifrt.devices import platform_id
from atoll.frontends.ifrt.executables import compile_job, default_assignment
from atoll.ir.types import (
    DTYPE_BITS,
    ArraySpec,
    Box,
    Even,
    Opaque,
    Replicated,
    Sharding,
    Tiled,
    Uneven,
    shard_boxes,
)
from atoll.protocol.ifrt import compile_pb2, executables_pb2, shardings_pb2, values_pb2, xla_pb2

DEVICES = 8


@pytest.fixture(scope="module", autouse=True)
def _devices() -> None:
    assert len(jax.devices()) == DEVICES, "tests/conftest.py sets their number"


# ---- JAX's meshes


def factors(draw: st.DrawFn, count: int) -> list[int]:
    """Sizes of mesh axes, with a product of `count`."""
    sizes = []
    while count > 1:
        size = draw(st.sampled_from([d for d in range(2, count + 1) if count % d == 0]))
        sizes.append(size)
        count //= size
    sizes += [1] * draw(st.integers(0, 2))
    return list(draw(st.permutations(sizes))) or [1]


@st.composite
def placed(draw: st.DrawFn) -> tuple[Mesh, PartitionSpec, tuple[int, ...]]:
    """A mesh of some of the devices in any order, which axes cut which dimensions, and a shape that fits."""
    count = draw(st.sampled_from([1, 2, 4, 6, 8]))
    devices = draw(st.permutations(jax.devices()))[:count]
    sizes = factors(draw, count)
    mesh = Mesh(np.array(devices).reshape(sizes), tuple(f"a{i}" for i in range(len(sizes))))
    rank = draw(st.integers(0, 3))
    groups: list[list[str]] = [[] for _ in range(rank)]
    for name in draw(st.permutations(mesh.axis_names)):
        where = draw(st.integers(-1, rank - 1))
        if where >= 0:
            groups[where].append(name)
    shape = tuple(math.prod(mesh.shape[n] for n in group) * draw(st.integers(1, 3)) for group in groups)
    return mesh, PartitionSpec(*[tuple(group) or None for group in groups]), shape


def boxes_of(sharding: NamedSharding, shape: tuple[int, ...]) -> list[Box]:
    """What each device holds, as JAX says it; in the order of the mesh."""
    held = sharding.devices_indices_map(shape)
    return [
        tuple(s.indices(size)[:2] for s, size in zip(held[device], shape, strict=True))
        for device in sharding.mesh.devices.flat
    ]


def ours(op: Any, devices: int, shape: tuple[int, ...]) -> list[Box]:
    tiling = codec.tiling_from(op, devices, shape)
    return list(shard_boxes(Sharding(tuple(range(devices)), tiling), shape))


@given(placed())
def test_shards_lie_where_jax_says_they_lie(case):
    mesh, spec, shape = case
    sharding = NamedSharding(mesh, spec)
    op = xla_pb2.OpSharding.FromString(sharding._to_xla_hlo_sharding(len(shape)).to_proto().SerializeToString())
    assert ours(op, mesh.size, shape) == boxes_of(sharding, shape)


@given(placed())
def test_a_tile_assignment_that_is_spelt_out_says_the_same_as_one_that_is_counted(case):
    mesh, spec, shape = case
    hlo = NamedSharding(mesh, spec)._to_xla_hlo_sharding(len(shape))
    if not hlo.is_tiled():
        return
    op = xla_pb2.OpSharding.FromString(hlo.to_proto().SerializeToString())
    spelt = xla_pb2.OpSharding(
        type=op.type,
        tile_assignment_dimensions=op.tile_assignment_dimensions,
        tile_assignment_devices=hlo.tile_assignment_devices(),
        replicate_on_last_tile_dim=op.replicate_on_last_tile_dim,
    )
    assert ours(spelt, mesh.size, shape) == ours(op, mesh.size, shape)


def named(mesh: Mesh, spec: PartitionSpec, order: list[int] | None = None) -> Any:
    """The newer form: mesh axes by name. `order` are the mesh's devices as positions in the device list."""
    op = xla_pb2.OpSharding()
    sharding = op.named_sharding
    for name, size in mesh.shape.items():
        sharding.mesh.axes.add(name=name, size=size)
    sharding.mesh.device_ids.extend(order or [])
    for group in spec:
        dim = sharding.dim_shardings.add()
        for name in (group,) if isinstance(group, str) else group or ():
            dim.axes.add(mesh_axis_index=mesh.axis_names.index(name))
    return op


@given(placed())
def test_shardings_by_name_say_the_same_as_those_by_tiles(case):
    mesh, spec, shape = case
    assert ours(named(mesh, spec), mesh.size, shape) == boxes_of(NamedSharding(mesh, spec), shape)


@given(placed(), st.data())
def test_a_named_mesh_may_list_its_devices_in_any_order(case, data):
    mesh, spec, shape = case
    order = list(data.draw(st.permutations(range(mesh.size))))
    expected = boxes_of(NamedSharding(mesh, spec), shape)
    got = ours(named(mesh, spec, order), mesh.size, shape)
    assert [got[position] for position in order] == expected


@given(placed(), st.data())
def test_a_named_mesh_may_count_its_devices_transposed(case, data):
    mesh, spec, shape = case
    sizes = list(mesh.devices.shape)
    permutation = list(data.draw(st.permutations(range(len(sizes)))))
    order = np.arange(mesh.size).reshape(sizes).transpose(permutation).reshape(-1)
    op = named(mesh, spec)
    op.named_sharding.mesh.iota_transform.reshape_dims.extend(sizes)
    op.named_sharding.mesh.iota_transform.transpose_perm.extend(permutation)
    assert ours(op, mesh.size, shape) == ours(named(mesh, spec, order.tolist()), mesh.size, shape)


@given(st.data())
def test_a_part_of_a_named_axis_is_an_axis_of_its_own(data):
    """One axis of eight, used in parts, against a mesh whose axes are these parts."""
    sizes = factors(data.draw, DEVICES)
    fine = Mesh(np.array(jax.devices()).reshape(sizes), tuple(f"a{i}" for i in range(len(sizes))))
    used = list(data.draw(st.permutations(fine.axis_names)))[: data.draw(st.integers(0, len(sizes)))]
    cut = data.draw(st.integers(0, len(used)))
    groups = [tuple(used[:cut]), tuple(used[cut:])]
    op = xla_pb2.OpSharding()
    op.named_sharding.mesh.axes.add(name="all", size=DEVICES)
    for group in groups:
        dim = op.named_sharding.dim_shardings.add()
        for name in group:
            index = fine.axis_names.index(name)
            ref = dim.axes.add(mesh_axis_index=0)
            ref.sub_axis_info.pre_size = math.prod(sizes[:index])
            ref.sub_axis_info.size = sizes[index]
    shape = (DEVICES, 2 * DEVICES)
    spec = PartitionSpec(*[group or None for group in groups])
    assert ours(op, DEVICES, shape) == boxes_of(NamedSharding(fine, spec), shape)


@pytest.mark.parametrize("types", [["REPLICATED"], ["MANUAL"], ["REPLICATED", "MANUAL"]])
def test_trailing_tiles_that_have_a_kind_of_their_own_are_replicas(types):
    sizes = [2] * len(types)
    grid = np.arange(2 * math.prod(sizes)).reshape(1, 2, *sizes)
    kinds = [getattr(xc.OpSharding.Type, name) for name in types]
    hlo = xc.HloSharding.subgroup_with_device_ordering(grid, subgroup_types=kinds)
    op = xla_pb2.OpSharding.FromString(hlo.to_proto().SerializeToString())
    each = math.prod(sizes)
    left, right = ((0, 3), (0, 2)), ((0, 3), (2, 4))
    assert ours(op, grid.size, (3, 4)) == [left] * each + [right] * each


Op = xla_pb2.OpSharding


@pytest.mark.parametrize(
    ("op", "tiling"),
    [
        (Op(type=Op.REPLICATED), Replicated()),
        (Op(type=Op.MAXIMAL, tile_assignment_devices=[1]), Replicated()),
        (Op(type=Op.MANUAL), Even((4,))),
        (Op(type=Op.UNREDUCED), Even((4,))),
        (Op(type=Op.UNKNOWN), Opaque()),
        (Op(type=Op.TUPLE), Opaque()),
        (Op(type=Op.OTHER, tile_assignment_dimensions=[2]), Tiled((2,), (0, 1))),
        (Op(type=Op.OTHER, tile_assignment_dimensions=[1, 2], replicate_on_last_tile_dim=True), Replicated()),
    ],
)
def test_other_kinds_of_tiles_as_a_table(op, tiling):
    assert codec.tiling_from(op, 2, (4,)) == tiling


@pytest.mark.parametrize(
    "op",
    [
        Op(type=Op.OTHER, tile_assignment_dimensions=[3]),
        Op(type=Op.OTHER, tile_assignment_dimensions=[-1, -2]),
        Op(type=Op.OTHER, tile_assignment_dimensions=[2], tile_assignment_devices=[0, 0]),
        Op(type=Op.OTHER, tile_assignment_dimensions=[2], tile_assignment_devices=[0]),
        Op(type=Op.OTHER, tile_assignment_dimensions=[2], tile_assignment_devices=[1, 2]),
        Op(type=Op.OTHER, tile_assignment_dimensions=[2], iota_reshape_dims=[2]),
        Op(type=Op.OTHER, tile_assignment_dimensions=[2], iota_reshape_dims=[-1, -2]),
        Op(type=Op.OTHER, tile_assignment_dimensions=[2], iota_reshape_dims=[1 << 60]),
        Op(type=Op.OTHER, tile_assignment_dimensions=[2], replicate_on_last_tile_dim=True),
        Op(named_sharding={}),
        Op(named_sharding={"mesh": {"axes": [{"size": 4}]}}),
        Op(named_sharding={"mesh": {"axes": [{"size": -1}, {"size": -2}]}}),
        Op(named_sharding={"mesh": {"axes": [{"size": 2}]}, "dim_shardings": [{"axes": [{"mesh_axis_index": 1}]}]}),
        Op(
            named_sharding={
                "mesh": {"axes": [{"size": 2}]},
                "dim_shardings": [{"axes": [{"mesh_axis_index": 0}, {"mesh_axis_index": 0}]}],
            }
        ),
        *(
            Op(
                named_sharding={
                    "mesh": {"axes": [{"size": 2}]},
                    "dim_shardings": [{"axes": [{"sub_axis_info": {"pre_size": pre, "size": size}}]}],
                }
            )
            for pre, size in ((0, 0), (0, 2), (1, 0), (2, 2), (1, 4), (-1, -2), (1 << 40, 1 << 40))
        ),
        Op(
            named_sharding={
                "mesh": {"axes": [{"size": 2}], "device_ids": [0, 2]},
                "dim_shardings": [{"axes": [{"mesh_axis_index": 0}]}],
            }
        ),
        Op(
            named_sharding={
                "mesh": {"axes": [{"size": 2}], "iota_transform": {"reshape_dims": [1 << 60]}},
                "dim_shardings": [{"axes": [{"mesh_axis_index": 0}]}],
            }
        ),
        Op(
            named_sharding={
                "mesh": {"axes": [{"size": 2}]},
                "dim_shardings": [{"axes": []}, {"axes": [{"mesh_axis_index": 0}]}],
            }
        ),
    ],
)  # fmt: skip
def test_tiles_that_make_no_sense_are_refused(op):
    with pytest.raises(StatusError) as caught:
        codec.tiling_from(op, 2, (4,))
    assert caught.value.status.code == Code.INVALID_ARGUMENT


# ---- shardings


def wire(name: str, message: Any) -> Any:
    return values_pb2.Sharding(
        serialized_sharding={"type_name": f"xla::ifrt::{name}", "data": message.SerializeToString()}
    )


def shape(*dims: int) -> Any:
    return values_pb2.Shape(dims=dims)


PAIR = values_pb2.DeviceList(device_ids=[5, 3])


@pytest.mark.parametrize(
    ("proto", "expected"),
    [
        (
            wire("SingleDeviceSharding", shardings_pb2.SingleDeviceSharding(device_id=7, memory_kind="device")),
            Sharding((7,), Replicated(), "device"),
        ),
        (
            wire(
                "HloSharding",
                shardings_pb2.HloSharding(
                    devices=PAIR,
                    xla_op_sharding=Op(type=Op.OTHER, tile_assignment_dimensions=[2, 1]),
                ),
            ),
            Sharding((5, 3), Tiled((2, 1), (0, 1))),
        ),
        (
            wire(
                "ConcreteEvenSharding",
                shardings_pb2.ConcreteEvenSharding(devices=PAIR, shape=shape(4, 4), shard_shape=shape(2, 4)),
            ),
            Sharding((5, 3), Even((2, 4))),
        ),
        (
            wire(
                "ConcreteEvenSharding",
                shardings_pb2.ConcreteEvenSharding(devices=PAIR, is_fully_replicated=True),
            ),
            Sharding((5, 3), Replicated()),
        ),
        (
            wire(
                "ConcreteSharding",
                shardings_pb2.ConcreteSharding(devices=PAIR, shard_shapes=[shape(1, 4), shape(3, 4)]),
            ),
            Sharding((5, 3), Uneven(((1, 4), (3, 4)))),
        ),
        (
            wire(
                "ConcreteSharding",
                shardings_pb2.ConcreteSharding(devices=PAIR, shard_shapes=[shape(2, 4), shape(2, 4)]),
            ),
            Sharding((5, 3), Even((2, 4))),
        ),
        (wire("OpaqueSharding", shardings_pb2.OpaqueSharding(devices=PAIR)), Sharding((5, 3), Opaque())),
        (
            wire(
                "ShardingParamSharding",
                shardings_pb2.ShardingParamSharding(
                    devices=PAIR,
                    sharding_param={"dim_shards": [2, 1], "permutation": [0], "axis_sizes": [2]},
                ),
            ),
            Sharding((5, 3), Tiled((2, 1, 1), (0, 1))),
        ),
    ],
)
def test_every_kind_of_sharding_is_read(proto, expected):
    assert codec.sharding_from(proto, (4, 4)) == expected


@pytest.mark.parametrize(
    ("proto", "code"),
    [
        (values_pb2.Sharding(), Code.INVALID_ARGUMENT),
        (wire("NewSharding", values_pb2.Shape()), Code.INVALID_ARGUMENT),
        (wire("OpaqueSharding", shardings_pb2.OpaqueSharding()), Code.INVALID_ARGUMENT),
        (
            wire("OpaqueSharding", shardings_pb2.OpaqueSharding(devices={"device_ids": [1, 1]})),
            Code.INVALID_ARGUMENT,
        ),
        (
            wire("ConcreteSharding", shardings_pb2.ConcreteSharding(devices=PAIR, shard_shapes=[shape(1)])),
            Code.INVALID_ARGUMENT,
        ),
        (
            wire("ConcreteSharding", shardings_pb2.ConcreteSharding(devices=PAIR, shard_dynamic_shapes=[{}])),
            Code.UNIMPLEMENTED,
        ),
        *(
            (
                wire(
                    "ShardingParamSharding",
                    shardings_pb2.ShardingParamSharding(
                        devices=PAIR,
                        sharding_param={"dim_shards": counts, "permutation": order, "axis_sizes": sizes},
                    ),
                ),
                Code.INVALID_ARGUMENT,
            )
            for counts, order, sizes in (
                ([2], [0], [2]),
                ([2, 1], [1], [2]),
                ([2, 1], [0], [4]),
                ([-2, -1], [0], [2]),
                ([0, 1], [0], [2]),
                ([4, 1], [0], [2]),
                ([2, 1], [0, 1], [-1, -2]),
            )
        ),
    ],
)
def test_a_sharding_that_makes_no_sense_is_refused(proto, code):
    with pytest.raises(StatusError) as caught:
        codec.sharding_from(proto, (4, 4))
    assert caught.value.status.code == code


@given(st.data())
def test_sharding_params_cut_dimensions_by_axes_from_minor_to_major(data):
    """Against numpy: devices counted over the axes with the first one fastest, then transposed by the permutation."""
    sizes = factors(data.draw, DEVICES)
    permutation = list(data.draw(st.permutations(range(len(sizes)))))
    grid = np.arange(DEVICES).reshape(sizes[::-1]).transpose([len(sizes) - 1 - axis for axis in reversed(permutation)])
    message = shardings_pb2.ShardingParamSharding(
        devices={"device_ids": range(DEVICES)},
        sharding_param={"dim_shards": [DEVICES], "permutation": permutation, "axis_sizes": sizes},
    )
    sharding = codec.sharding_from(wire("ShardingParamSharding", message), (DEVICES,))
    boxes = shard_boxes(sharding, (DEVICES,))
    assert [boxes[position] for position in grid.reshape(-1)] == [((i, i + 1),) for i in range(DEVICES)]


@pytest.mark.parametrize(
    "sharding",
    [
        Sharding((7,), Replicated(), "device"),
        Sharding((0, 1), Replicated()),
        Sharding((0, 1), Even((2,)), "pinned_host"),
    ],
)
def test_shardings_that_we_say_are_read_back(sharding):
    assert codec.sharding_from(codec.sharding_to(sharding, (4,), None), (4,)) == sharding


def test_an_outputs_own_sharding_is_told_as_xla_made_it():
    op = Op(type=Op.OTHER, tile_assignment_dimensions=[2]).SerializeToString()
    sharding = Sharding((4, 6), Tiled((2,), (0, 1)), "device")
    assert codec.sharding_from(codec.sharding_to(sharding, (4,), op), (4,)) == sharding


# ---- dtypes, shapes, layouts, statuses


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


@pytest.mark.parametrize("dims", [(-1,), (1 << 49,), (1 << 30, 1 << 30), (1,) * 65, (-1, -1)])
def test_shapes_that_no_array_has_are_refused(dims):
    with pytest.raises(StatusError, match="no such shape"):
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
    proto = codec.layout_proto_from_text(text)
    assert list(proto.minor_to_major) == order
    assert [list(tile.dimensions) for tile in proto.tiles] == tiles
    assert (proto.element_size_in_bits, proto.memory_space) == (bits, memory)


@given(st.permutations(range(4)))
def test_xlas_own_text_of_a_layout_is_understood(order):
    text = "{" + ",".join(map(str, order)) + "}"
    assert codec.xla_layout(codec.layout_proto_from_text(text)) == tuple(reversed(order))


@pytest.mark.parametrize(
    "text", ["{x}", "{1,a}", "{0:T(}", "{0:T(x)}", "{0:E()}", "{0:S(-)}", "{99999999999999999999}"]
)
def test_texts_that_are_no_layout_are_refused(text):
    with pytest.raises(StatusError, match="no layout") as caught:
        codec.layout_proto_from_text(text)
    assert caught.value.status.code == Code.INVALID_ARGUMENT


@pytest.mark.parametrize(("text", "order"), [("{}", None), ("{0}", None), ("{1,0:T(8,128)}", None), ("{0,1}", (1, 0))])
def test_only_an_unusual_order_of_an_outputs_dimensions_is_told(text, order):
    assert codec.order_of_layout(text) == order


@pytest.mark.parametrize("order", [[1, 1], [1], [0, 2], [-1, 0]])
def test_an_order_of_dimensions_that_is_none_is_refused(order):
    with pytest.raises(StatusError, match="no order"):
        codec.xla_layout(xla_pb2.XlaLayout(minor_to_major=order))
    compact = shardings_pb2.CompactLayout(major_to_minor=order).SerializeToString()
    layout = values_pb2.Layout(serialized_layout={"type_name": "xla::ifrt::CompactLayout", "data": compact})
    with pytest.raises(StatusError, match="no order"):
        codec.layout_from(layout)


@given(st.builds(Status, st.integers(0, 16), st.text(), st.dictionaries(st.text(), st.binary(), max_size=3)))
def test_statuses_survive_the_wire(status):
    assert codec.status_from(codec.status_to(status)) == status


# ---- compile requests


def compile_request(**build: Any) -> Any:
    options = compile_pb2.XlaCompileOptions(compile_options={"executable_build_options": build})
    request = executables_pb2.Compile()
    request.program.type_name = "xla::ifrt::XlaProgram"
    request.program.data = b"module"
    request.compile_options.data = options.SerializeToString()
    return request


def assignment(rows: list[list[int]], replicas: int, partitions: int) -> Any:
    return {
        "replica_count": replicas,
        "computation_count": partitions,
        "computation_devices": [{"replica_device_ids": row} for row in rows],
    }


def test_a_compile_request_names_its_devices_by_replica_and_partition():
    request = compile_request(
        num_replicas=2, num_partitions=3, device_assignment=assignment([[0, 1], [2, 3], [4, 5]], 2, 3)
    )
    assert compile_job(request, 8).assignment == ((0, 2, 4), (1, 3, 5))
    assert default_assignment(2, 2, 8) == ((0, 1), (2, 3))


def test_the_same_program_on_other_devices_has_the_same_content():
    requests = [
        compile_request(num_partitions=2, device_assignment=assignment(rows, 1, 2)) for rows in ([[0], [1]], [[3], [2]])
    ]
    jobs = [compile_job(request, 8) for request in requests]
    assert jobs[0].content == jobs[1].content
    assert [job.devices for job in jobs] == [(0, 1), (3, 2)]
    other = compile_request(num_partitions=2)
    other.program.data = b"another"
    assert compile_job(other, 8).content != jobs[0].content


@pytest.mark.parametrize(
    "request_",
    [
        compile_request(num_partitions=9),
        compile_request(num_replicas=1 << 40, num_partitions=1 << 40),
        compile_request(num_partitions=2, device_assignment=assignment([[0]], 1, 1)),
        compile_request(num_partitions=2, device_assignment=assignment([[0], [0]], 1, 2)),
        compile_request(num_partitions=2, device_assignment=assignment([[0], [8]], 1, 2)),
        compile_request(num_partitions=2, device_assignment=assignment([[0], [-1]], 1, 2)),
        compile_request(num_partitions=2, device_assignment=assignment([[0]], 1, 2)),
        compile_request(num_partitions=2, device_assignment=assignment([[0], []], 1, 2)),
        compile_request(device_assignment=assignment([], (1 << 31) - 1, 0)),
        compile_request(device_assignment=assignment([], 0, 0)),
    ],
)
def test_a_compile_request_for_devices_that_do_not_fit_is_refused(request_):
    with pytest.raises(StatusError) as caught:
        compile_job(request_, 8)
    assert caught.value.status.code == Code.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({"type_name": "xla::ifrt::PluginProgram", "data": b'{"x": 1}'}, Code.INVALID_ARGUMENT, "plugin program"),
        ({"type_name": "xla::ifrt::PluginProgram", "data": b"\xff\xfe"}, Code.INVALID_ARGUMENT, "plugin program"),
        ({"type_name": "xla::ifrt::Other"}, Code.UNIMPLEMENTED, "xla::ifrt::Other"),
    ],
)  # fmt: skip
def test_programs_of_other_kinds_are_refused(change, code, text):
    request = compile_request()
    for name, value in change.items():
        setattr(request.program, name, value)
    with pytest.raises(StatusError, match=text) as caught:
        compile_job(request, 8)
    assert caught.value.status.code == code


# ---- bytes that nobody meant


def fuzzed(read: Callable[[], Any]) -> None:
    """Whatever was sent, it is understood or refused with a status; nothing else is raised."""
    try:
        read()
    except StatusError:
        return


@settings(max_examples=200)
@given(st.binary(max_size=80), st.sampled_from(sorted(codec._SHARDINGS)), st.integers(0, 3))
@example(b"", "xla::ifrt::HloSharding", 1)
def test_any_bytes_are_a_sharding_or_refused(data, name, rank):
    proto = values_pb2.Sharding(serialized_sharding={"type_name": name, "data": data})

    def read() -> None:
        sharding = codec.sharding_from(proto, (4,) * rank)
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


@settings(max_examples=400)
@given(tile_assignments | named_shardings, st.sampled_from([1, 2, 4, 8]), st.integers(0, 3))
def test_any_numbers_in_a_sharding_cover_the_array_or_are_refused(op, devices, rank):
    def read() -> None:
        tiling = codec.tiling_from(op, devices, (4,) * rank)
        boxes = shard_boxes(Sharding(tuple(range(devices)), tiling), (4,) * rank)
        covered = np.zeros((4,) * rank, int)
        for box in boxes:
            covered[tuple(slice(start, stop) for start, stop in box)] += 1
        assert covered.min() >= 1

    fuzzed(read)


@given(st.binary(max_size=60), st.sampled_from(["CompactLayout", "PjRtLayout", "Other"]))
def test_any_bytes_are_a_layout_or_refused(data, kind):
    layout = values_pb2.Layout(serialized_layout={"type_name": f"xla::ifrt::{kind}", "data": data})
    fuzzed(lambda: codec.layout_from(layout))


@given(st.text("{}(),:*TESD0123456789-x", max_size=30) | st.text(max_size=10))
def test_any_text_is_a_layout_or_refused(text):
    fuzzed(lambda: codec.layout_proto_from_text(text))


@given(st.binary(max_size=100))
def test_any_bytes_are_an_array_spec_or_refused(data):
    fuzzed(lambda: codec.spec_from(codec.parse(values_pb2.ArraySpec, data)))


@given(st.binary(max_size=30))
def test_any_bytes_for_the_layout_of_an_array_spec_are_understood_or_refused(data):
    spec = values_pb2.ArraySpec(
        dtype=codec.dtype_to("float32"), shape=shape(4, 4), sharding=codec.sharding_to(Sharding((0,)), (), None)
    )
    spec.layout = data
    fuzzed(lambda: codec.spec_from(spec))


@given(st.binary(max_size=120))
def test_any_bytes_are_a_compile_request_or_refused(data):
    fuzzed(lambda: compile_job(codec.parse(executables_pb2.Compile, data), 8))


@given(st.binary(max_size=120))
def test_any_bytes_are_compile_options_or_refused(data):
    request = compile_request()
    request.compile_options.data = data
    fuzzed(lambda: compile_job(request, 8))


def test_a_spec_is_read_whole():
    proto = values_pb2.ArraySpec(
        dtype=codec.dtype_to("bfloat16"),
        shape=shape(4, 2),
        sharding=codec.sharding_to(Sharding((3,)), (4, 2), None),
    )
    assert codec.spec_from(proto) == ArraySpec("bfloat16", (4, 2), Sharding((3,)))


# ---- numbers of platforms


@pytest.mark.parametrize(
    ("text", "signed"),
    [
        # Published values of the same hash (FARM_FINGERPRINT in BigQuery's reference): one for each of its lengths.
        ("foo", 6150913649986995171),
        ("3true", -4880158226897771312),
        ("1footrue", -1541654101129638711),
        ("2applefalse", 2794438866806483259),
    ],
)
def test_the_number_of_a_platform_is_its_names_farm_fingerprint(text, signed):
    assert platform_id(text) == signed % (1 << 64)


def test_the_numbers_of_platforms_differ():
    numbers = sorted(platform_id(name) for name in ("cpu", "cuda", "rocm", "tpu", "METAL", ""))
    assert all(a < b for a, b in pairwise(numbers))
