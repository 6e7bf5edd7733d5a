"""Tests of reads of many arrays: each element is read once, and the answer has the arrays in row-major order."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from atoll.errors import StatusError
from atoll.ifrt.requests.grouped_reads import HostRead, assemble, divide
from atoll.ir.types import REPLICATED, ArraySpec, Even, Opaque, Sharding, Tiled, shard_boxes
from atoll.protocol.questions import MAX_CONTENTS, MAX_SHARDS
from atoll.transfers.dtypes import numpy_dtype
from tests.ir.machine import cluster, shapes, slices, specs
from tests.work_counts import instructions_of

DTYPES = ("bool", "int8", "int4", "bfloat16", "float8_e4m3fn", "float32", "complex128")
PLACEMENT = cluster(1, 2, 3)


def host_of(device: int) -> int:
    return PLACEMENT[device].host


def sent(specs: tuple[ArraySpec, ...], read: HostRead, values: list[np.ndarray[Any, Any]]) -> bytes:
    """Return what a host sends for a read of arrays with these values."""
    content = b""
    for number, part in zip(read.arrays, read.parts, strict=True):
        box = shard_boxes(specs[number].sharding, specs[number].shape)[part.position]
        content += values[number][slices(box)].tobytes()
    return content


@st.composite
def arrays(draw: st.DrawFn) -> tuple[ArraySpec, ...]:
    found = []
    for _ in range(draw(st.integers(1, 4))):
        spec = draw(specs(PLACEMENT, draw(shapes)))
        found.append(ArraySpec(draw(st.sampled_from(DTYPES)), spec.shape, spec.sharding))
    return tuple(found)


@given(arrays())
def test_the_answer_has_all_elements_in_row_major_order(specs: tuple[ArraySpec, ...]) -> None:
    rng = np.random.default_rng(0)
    values = [rng.integers(0, 2, spec.shape).astype(numpy_dtype(spec.dtype)) for spec in specs]
    reads = divide(specs, host_of)
    assert len({host_of(device) for read in reads for device in read.devices}) == len(reads)
    for read in reads:
        owners = {
            specs[number].sharding.devices[part.position] for number, part in zip(read.arrays, read.parts, strict=True)
        }
        assert set(read.devices) == owners
    found = assemble(specs, reads, [sent(specs, read, values) for read in reads])
    assert found == b"".join([each.tobytes() for each in values])


def test_replicas_of_a_shard_are_read_once() -> None:
    spec = ArraySpec("int8", (4,), Sharding((4, 0, 5, 1), Tiled((2, 2), (0, 2, 1, 3))))
    near, far = sorted(divide((spec,), host_of), key=lambda read: read.devices)
    assert [part.position for part in (*near.parts, *far.parts)] == [1, 0]
    assert (near.devices, near.nbytes, far.devices, far.nbytes) == ((0,), 2, (4,), 2)


@pytest.mark.parametrize(
    ("specs", "text"),
    [
        ((ArraySpec("int8", (4,), Sharding((0, 1), Even((2,)))),), "UNIMPLEMENTED"),
        ((ArraySpec("int8", (4,), Sharding((0, 1), Opaque())),), "UNIMPLEMENTED"),
        ((ArraySpec("token", (), Sharding((0,), REPLICATED)),), "INVALID_ARGUMENT: .* hold no data"),
        ((ArraySpec("int8", (MAX_CONTENTS,), Sharding((0,))), ArraySpec("int8", (), Sharding((0,)))), "too many for"),
        (
            (ArraySpec("int8", (2,), Sharding((0, 1), Tiled((2,), (0, 1)))),) * (MAX_SHARDS // 2 + 1),
            "RESOURCE_EXHAUSTED: the arrays have too many shards",
        ),
    ],
)
def test_other_arrays_are_refused(specs: tuple[ArraySpec, ...], text: str) -> None:
    with pytest.raises(StatusError, match=text):
        divide(specs, host_of)


def test_a_host_that_sends_another_number_of_bytes_is_detected() -> None:
    specs = (ArraySpec("int8", (4,), Sharding((0, 1), Tiled((2,), (0, 1)))),)
    with pytest.raises(StatusError, match="INTERNAL: a host sent 3 bytes"):
        assemble(specs, divide(specs, host_of), [b"abc"])


def test_an_array_of_a_large_tree_costs_little() -> None:
    spec = ArraySpec("float32", (4, 2), Sharding((0,), REPLICATED))

    def work(count: int) -> int:
        return instructions_of(lambda: divide((spec,) * count, host_of))

    work(2)
    assert (work(110) - work(10)) / 100 <= 150, "instructions"
