"""Tests that copies of large arrays need little additional memory."""

from __future__ import annotations

import itertools
import mmap
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.host_services import host_data
from atoll.host_services import slabs as module
from atoll.host_services.slabs import SLAB_BYTES, ArrayContents, ArrayPart, assemble, row_major_parts, slabs

SHAPES = [(), (0, 3), (1,), (7,), (4, 6), (3, 1, 5), (2, 3, 4, 5), (40, 1), (1, 40)]


def parts(shape: tuple[int, ...], dtype: str = "int32") -> list[np.ndarray]:
    """Return arrays of a shape: a contiguous one, and others that are parts of larger arrays."""
    whole = np.arange(np.prod([size + 2 for size in shape], dtype=int)).astype(dtype)
    whole = whole.reshape([size + 2 for size in shape])
    inside = whole[(*(slice(1, -1) for _ in shape), ...)]
    ends = whole[(*(slice(0, size) for size in shape[:-1]), *[slice(2, None)][: len(shape)], ...)]
    return [np.ascontiguousarray(inside).reshape(shape), inside, ends]


@pytest.mark.parametrize("cuts", [(1, 1), (2, 1), (1, 3), (2, 3)])
@pytest.mark.parametrize("shape", [(4, 6), (4, 6, 2), (4, 3_000_000)])
def test_row_major_parts_of_shards_are_the_whole_array(shape: tuple[int, ...], cuts: tuple[int, int]) -> None:
    array = np.arange(np.prod(shape)).astype(np.int16).reshape(shape)
    steps = shape[0] // cuts[0], shape[1] // cuts[1]
    boxes = tuple(
        ((i * steps[0], (i + 1) * steps[0]), (j * steps[1], (j + 1) * steps[1]), *((0, size) for size in shape[2:]))
        for i in range(cuts[0])
        for j in range(cuts[1])
    )
    found = list(row_major_parts(shape, boxes, [np.ascontiguousarray(host_data.cut(array, box)) for box in boxes]))
    assert b"".join(bytes(each.views()[0]) for each in found) == array.tobytes()
    assert all(each.nbytes <= SLAB_BYTES for each in found)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("nbytes", [1, 4, 12, 50, 10_000])
def test_slabs_are_the_array_in_order_and_no_larger_than_asked(shape: tuple[int, ...], nbytes: int) -> None:
    array, *_ = parts(shape)
    found = [host_data.cut(array, slab) for slab in slabs(shape, array.itemsize, nbytes)]
    assert b"".join(each.tobytes() for each in found) == array.tobytes()
    assert all(each.nbytes <= max(nbytes, array.itemsize) for each in found)
    assert all(each.flags.c_contiguous for each in found)


@given(data=st.data())
def test_parts_make_up_the_array_whatever_the_tiling(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 7), max_size=3)))
    cuts = [sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=3))}) for size in shape]
    boxes = list(itertools.product(*[list(itertools.pairwise(each)) for each in cuts]))
    array, *_ = parts(shape, data.draw(st.sampled_from(["int32", "bool", "complex64"])))
    given = [ArrayPart(box, host_data.cut(array, box).copy(), data.draw(st.booleans())) for box in boxes]
    target = np.zeros_like(array)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.slabs, "__defaults__", (data.draw(st.integers(1, 300)),))
        assemble(target, data.draw(st.permutations(given)))
    assert np.array_equal(target, array)


@pytest.mark.parametrize("shape", SHAPES)
@given(data=st.data())
def test_any_bytes_of_an_array_can_be_had(shape: tuple[int, ...], data: st.DataObject) -> None:
    for array in parts(shape):
        contents = ArrayContents(array)
        start = data.draw(st.integers(0, array.nbytes))
        stop = data.draw(st.integers(start, array.nbytes))
        assert b"".join(contents.slice(start, stop)) == array.tobytes()[start:stop]


@pytest.mark.parametrize("shape", SHAPES)
def test_contents_are_written_into_what_they_travel_in(shape: tuple[int, ...]) -> None:
    for array in parts(shape, "uint16"):
        target = bytearray(array.nbytes)
        ArrayContents(array.view(ml_dtypes.bfloat16)).write_into(memoryview(target))
        assert bytes(target) == array.tobytes() == b"".join(ArrayContents(array).views())


def test_a_part_is_copied_a_slab_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []

    def contiguous(array: np.ndarray) -> np.ndarray:
        copied.append(array.nbytes)
        return array.copy()

    monkeypatch.setattr(module.np, "ascontiguousarray", contiguous)
    whole = np.zeros((4, 300, 5000), np.uint8)
    contents = ArrayContents(whole[:, 100:200, :2500])
    for start in range(0, contents.nbytes, 10_000):
        contents.slice(start, min(start + 10_000, contents.nbytes))
    assert max(copied) <= 10_000
    assert sum(copied) <= contents.nbytes


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


class Peak:
    """Measures this process's peak memory from now on."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")

    def stop(self) -> int:
        lines = dict(each.split(":", 1) for each in Path("/proc/self/status").read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("count", [4, 64])
def test_what_is_assembled_takes_no_more_memory_than_its_parts_did(axis: int, count: int) -> None:
    """This holds for memory of a mapping and of the allocator, and for any places of the parts in the array."""
    size = 4096
    shape = (size // count, size) if axis == 0 else (size, size // count)
    boxes = [[(0, size), (0, size)] for _ in range(count)]
    for number, box in enumerate(boxes):
        box[axis] = (number * size // count, (number + 1) * size // count)
    given = [ArrayPart((box[0], box[1]), np.full(shape, number, np.uint32), True) for number, box in enumerate(boxes)]
    target = np.empty((size, size), np.uint32)
    before = resident()
    peak = Peak()
    assemble(target, given)
    assert peak.stop() - before < SLAB_BYTES + (4 << 20)
    for number, (part, box) in enumerate(zip(given, boxes, strict=True)):
        assert (host_data.cut(target, (box[0], box[1])) == number).all()
        assert part.contents.shape == shape  # the parts still exist
