from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import Code, StatusError
from atoll.ir.types import (
    DTYPE_BITS,
    ArraySpec,
    Even,
    Opaque,
    Replicated,
    Sharding,
    Tiled,
    Tiling,
    Uneven,
    contents_nbytes,
    nbytes,
    shard_boxes,
    shard_shape,
)


@st.composite
def tilings(draw: st.DrawFn, devices: int, rank: int) -> Tiling:
    """Generate a replicated or tiled rule on this many devices, sometimes with replicas of tiles."""
    if draw(st.integers(0, 3)) == 0:
        return Replicated()
    dims = []
    left = devices
    for _ in range(rank):
        count = draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0]))
        dims.append(count)
        left //= count
    if left > 1 or draw(st.booleans()):
        dims.append(left)
    return Tiled(tuple(dims), tuple(draw(st.permutations(range(devices)))))


shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)


@given(st.data(), shapes, st.integers(1, 12))
def test_tiles_cover_every_element_once_for_each_replica(data, shape, devices):
    tiling = data.draw(tilings(devices, len(shape)))
    sharding = Sharding(tuple(range(devices)), tiling)
    covered = np.zeros(shape, int)
    boxes = shard_boxes(sharding, shape)
    assert len(boxes) == devices
    for position, box in enumerate(boxes):
        assert all(0 <= start <= stop <= size for (start, stop), size in zip(box, shape, strict=True))
        assert shard_shape(sharding, shape, position) == tuple(stop - start for start, stop in box)
        covered[tuple(slice(start, stop) for start, stop in box)] += 1
    replicas = devices
    if isinstance(tiling, Tiled):
        replicas = math.prod(tiling.dims[len(shape) :])
    assert (covered == replicas).all()


@pytest.mark.parametrize(
    ("dims", "order", "shape", "boxes"),
    [
        ((2,), (0, 1), (4,), [((0, 2),), ((2, 4),)]),
        ((2,), (1, 0), (4,), [((2, 4),), ((0, 2),)]),
        # XLA's tiles have the size of the first one. The last one may be smaller, or empty.
        ((2,), (0, 1), (5,), [((0, 3),), ((3, 5),)]),
        ((4,), (0, 1, 2, 3), (5,), [((0, 2),), ((2, 4),), ((4, 5),), ((5, 5),)]),
        ((2, 1), (0, 1), (2, 3), [((0, 1), (0, 3)), ((1, 2), (0, 3))]),
        # One dimension more than the array has, for replicas.
        ((2, 2), (0, 1, 2, 3), (2,), [((0, 1),), ((0, 1),), ((1, 2),), ((1, 2),)]),
        ((2, 2), (0, 2, 1, 3), (2,), [((0, 1),), ((1, 2),), ((0, 1),), ((1, 2),)]),
        # Scalars only have replicas.
        ((2,), (0, 1), (), [(), ()]),
    ],
)
def test_tiles_go_row_by_row_to_the_devices_that_the_order_names(dims, order, shape, boxes):
    sharding = Sharding(tuple(range(10, 10 + len(order))), Tiled(dims, order))
    assert shard_boxes(sharding, shape) == tuple(boxes)


@pytest.mark.parametrize(
    ("tiling", "devices", "shape"),
    [
        (Tiled((3,), (0, 1, 2)), 2, (6,)),  # more tiles than devices
        (Tiled((2,), (0,)), 2, (6,)),  # an order that is too short
        (Tiled((2,), (0, 0)), 2, (6,)),  # the same device twice
        (Tiled((2,), (0, 2)), 2, (6,)),  # a device that does not exist
        (Tiled((2,), (-1, 0)), 2, (6,)),
        (Tiled((2,), (0, 1)), 2, (6, 6)),  # fewer dimensions than the array has
        (Tiled((-1, -2), (0, 1)), 2, (6, 6)),
        (Tiled((0, 0), ()), 0, (6, 6)),
    ],
)
def test_a_tiling_that_does_not_fit_is_refused(tiling, devices, shape):
    with pytest.raises(StatusError) as caught:
        shard_boxes(Sharding(tuple(range(devices)), tiling), shape)
    assert caught.value.status.code == Code.INVALID_ARGUMENT


@pytest.mark.parametrize("tiling", [Even((2,)), Uneven(((1,), (3,))), Opaque()])
def test_where_shards_lie_is_unknown_for_shardings_that_do_not_say(tiling):
    with pytest.raises(StatusError, match="disassemble") as caught:
        shard_boxes(Sharding((0, 1), tiling), (4,))
    assert caught.value.status.code == Code.UNIMPLEMENTED


@pytest.mark.parametrize("tiling", [Even((4,)), Uneven(((4,),)), Replicated(), Tiled((1,), (0,))])
def test_the_only_shard_of_an_array_is_all_of_it(tiling):
    assert shard_boxes(Sharding((7,), tiling), (4,)) == (((0, 4),),)


def test_shard_shapes_of_shardings_that_list_them():
    assert shard_shape(Sharding((0, 1), Even((3, 2))), (6, 2), 1) == (3, 2)
    assert shard_shape(Sharding((0, 1), Uneven(((1,), (3,)))), (4,), 1) == (3,)
    with pytest.raises(StatusError, match="opaque"):
        shard_shape(Sharding((0,), Opaque()), (4,), 0)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (ArraySpec("float32", (4, 4), Sharding((0,))), 64),
        (ArraySpec("float32", (4, 4), Sharding((0, 1, 2))), 192),
        (ArraySpec("float32", (4, 4), Sharding((0, 1), Tiled((2, 1), (0, 1)))), 64),
        (ArraySpec("int4", (8,), Sharding((0,))), 4),
        (ArraySpec("bfloat16", (3,), Sharding((0,))), 6),
        (ArraySpec("float32", (), Sharding((0,))), 4),
        (ArraySpec("float32", (0, 5), Sharding((0,))), 0),
        (ArraySpec("int8", (6,), Sharding((0, 1), Uneven(((2,), (4,))))), 6),
        (ArraySpec("int8", (6,), Sharding((0, 1), Even((5,)))), 10),
        (ArraySpec("int8", (6,), Sharding((0, 1), Opaque())), 0),
        (ArraySpec("string", (6,), Sharding((0,))), 0),
        (None, 0),
    ],
)
def test_bytes_of_an_array_over_all_its_devices(spec, expected):
    assert nbytes(spec) == expected


@pytest.mark.parametrize(
    "sharding",
    [Sharding((0,)), Sharding((0, 1)), Sharding((0, 1), Even((3,))), Sharding((0, 1), Opaque())],
    ids=["one device", "replicated", "divided", "opaque"],
)
def test_the_contents_of_an_array_count_once(sharding: Sharding) -> None:
    assert contents_nbytes(ArraySpec("float32", (6,), sharding)) == 24


def test_dtype_names_are_numpys_or_ml_dtypes_own():
    import jax.numpy as jnp

    for name, bits in DTYPE_BITS.items():
        if bits and hasattr(jnp, name):
            dtype = np.dtype(getattr(jnp, name))
            assert dtype.name == name
            assert dtype.itemsize == max(1, bits // 8)
