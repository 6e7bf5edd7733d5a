"""Tests of shardings, compared with JAX's own and with tables."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax._src.lib import xla_client as xc
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from atoll.errors import Code, StatusError
from atoll.ir.types import (
    Box,
    Even,
    Opaque,
    Replicated,
    Sharding,
    Tiled,
    Uneven,
    shard_boxes,
)
from atoll.protocol.ifrt import shardings_pb2, values_pb2, xla_pb2
from atoll.protocol.translation.shardings import sharding_from, sharding_to, tiling_from
from tests.protocol.translation.wire import Op, shape, wire

DEVICES = 8


@pytest.fixture(scope="module", autouse=True)
def _devices() -> None:
    assert len(jax.devices()) == DEVICES, "tests/conftest.py sets their number"


def factors(draw: st.DrawFn, count: int) -> list[int]:
    """Generate sizes of mesh axes with a product of `count`."""
    sizes = []
    while count > 1:
        size = draw(st.sampled_from([d for d in range(2, count + 1) if count % d == 0]))
        sizes.append(size)
        count //= size
    sizes += [1] * draw(st.integers(0, 2))
    return list(draw(st.permutations(sizes))) or [1]


@st.composite
def placed(draw: st.DrawFn) -> tuple[Mesh, PartitionSpec, tuple[int, ...]]:
    """Generate a mesh of some devices in any order, the axes that divide each dimension, and a shape that fits."""
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
    """Return the part of each device according to JAX, in the order of the mesh."""
    held = sharding.devices_indices_map(shape)
    return [
        tuple(s.indices(size)[:2] for s, size in zip(held[device], shape, strict=True))
        for device in sharding.mesh.devices.flat
    ]


def ours(op: Any, devices: int, shape: tuple[int, ...]) -> list[Box]:
    tiling = tiling_from(op, devices, shape)
    return list(shard_boxes(Sharding(tuple(range(devices)), tiling), shape))


@given(placed())
def test_shards_are_where_jax_says_they_are(case):
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
    """Return the newer form with named mesh axes.

    `order` contains the mesh's devices as positions in the device list.
    """
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
    """Compare one axis of eight, used in parts, with a mesh whose axes are these parts."""
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


@pytest.mark.parametrize(
    ("op", "shard"),
    [
        (Op(type=Op.UNREDUCED), (3, 4)),
        (Op(type=Op.OTHER, tile_assignment_dimensions=[1, 1, 4], last_tile_dims=[Op.UNREDUCED]), (3, 4)),
        (Op(type=Op.OTHER, tile_assignment_dimensions=[1, 2, 2], last_tile_dims=[Op.UNREDUCED]), (3, 2)),
        (
            Op(type=Op.OTHER, tile_assignment_dimensions=[1, 1, 2, 2], last_tile_dims=[Op.REPLICATED, Op.UNREDUCED]),
            (3, 4),
        ),
    ],
)
def test_partial_sums_are_no_parts_of_an_array(op, shard):
    assert tiling_from(op, 4, (3, 4)) == Even(shard)
    assert op.type == Op.UNREDUCED or tiling_from(op, 4, None) == Opaque()


def test_partial_sums_on_a_named_mesh_are_no_parts_of_an_array():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    for spec, shard in ((PartitionSpec(None, "a"), (3, 2)), (PartitionSpec(), (3, 4))):
        op = named(mesh, spec)
        op.named_sharding.unreduced_axes.add(mesh_axis_index=1)
        assert tiling_from(op, 4, (3, 4)) == Even(shard)


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
    assert tiling_from(op, 2, (4,)) == tiling


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
        tiling_from(op, 2, (4,))
    assert caught.value.status.code == Code.INVALID_ARGUMENT


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
    assert sharding_from(proto, (4, 4)) == expected


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
        sharding_from(proto, (4, 4))
    assert caught.value.status.code == code


@given(st.data())
def test_sharding_params_cut_dimensions_by_axes_from_minor_to_major(data):
    """Compare with NumPy: devices are numbered with the first axis fastest, then transposed by the permutation."""
    sizes = factors(data.draw, DEVICES)
    permutation = list(data.draw(st.permutations(range(len(sizes)))))
    grid = np.arange(DEVICES).reshape(sizes[::-1]).transpose([len(sizes) - 1 - axis for axis in reversed(permutation)])
    message = shardings_pb2.ShardingParamSharding(
        devices={"device_ids": range(DEVICES)},
        sharding_param={"dim_shards": [DEVICES], "permutation": permutation, "axis_sizes": sizes},
    )
    sharding = sharding_from(wire("ShardingParamSharding", message), (DEVICES,))
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
def test_shardings_that_we_send_are_read_back(sharding):
    assert sharding_from(sharding_to(sharding, (4,), None), (4,)) == sharding


def test_an_outputs_own_sharding_is_sent_as_xla_made_it():
    op = Op(type=Op.OTHER, tile_assignment_dimensions=[2]).SerializeToString()
    sharding = Sharding((4, 6), Tiled((2,), (0, 1)), "device")
    assert sharding_from(sharding_to(sharding, (4,), op), (4,)) == sharding


@pytest.mark.parametrize(
    "tiling", [Tiled((2, 1), (0, 1)), Tiled((2, 1), (1, 0)), Tiled((1, 2), (0, 1)), Tiled((1, 1, 2), (0, 1))]
)
def test_tiles_without_xlas_form_are_written_as_tiles(tiling: Tiled) -> None:
    sharding = Sharding((3, 5), tiling)
    found = sharding_from(sharding_to(sharding, (5, 4), None), (5, 4))
    assert shard_boxes(found, (5, 4)) == shard_boxes(sharding, (5, 4))
