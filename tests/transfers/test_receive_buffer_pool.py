"""Memory that large pieces land in: used again, never while it is read, and zeros where it is to be."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.transfers import receive_buffer_pool
from atoll.transfers.receive_buffer_pool import MIN_BLOCK_BYTES, MIN_ZEROS_BYTES, Range, ReceiveBufferPool


@pytest.fixture
def memory() -> Iterator[ReceiveBufferPool]:
    memory = ReceiveBufferPool()
    memory.open()
    yield memory
    memory.close()


def test_memory_that_is_used_no_more_is_used_again_and_never_while_it_is_read() -> None:
    memory = ReceiveBufferPool()
    memory.open()
    first = memory.take(8 << 20)
    address = first.ctypes.data
    assert address % 64 == 0
    part = first[10:20].view(np.uint8)[1:]
    del first
    second = memory.take(8 << 20)
    assert second.ctypes.data != address  # a view of a view still reads it
    del part
    third = memory.take(8 << 20)
    assert third.ctypes.data == address
    del second, third
    assert memory.statistics().free_bytes == 16 << 20
    memory.close()
    assert memory.statistics().free_bytes == 0


def test_free_memory_is_kept_within_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive_buffer_pool, "KEPT_BYTES", 20 << 20)
    memory = ReceiveBufferPool()
    memory.open()
    taken = [memory.take(8 << 20) for _ in range(4)]
    taken.clear()
    assert memory.statistics().free_bytes == 16 << 20
    memory.close()


def test_what_comes_back_while_nobody_takes_any_is_bounded(monkeypatch):
    monkeypatch.setattr(receive_buffer_pool, "KEPT_BYTES", 4 * MIN_BLOCK_BYTES)
    memory = ReceiveBufferPool()
    memory.open()
    taken = [memory.take(MIN_BLOCK_BYTES) for _ in range(12)]
    taken.clear()
    assert sum(len(block) for _, block in memory._returned) == 4 * MIN_BLOCK_BYTES
    memory.close()


def written(memory: ReceiveBufferPool, nbytes: int, ranges: list[Range]) -> np.ndarray:
    """Bytes that are not zeros in these ranges."""
    content = memory.take_zeros(nbytes, ranges)
    for start, stop in ranges:
        content[start:stop] = 7
    return content


@st.composite
def uses(draw: st.DrawFn) -> tuple[int, list[Range]]:
    """Bytes of one or two sizes that blocks have, and what is written of them."""
    nbytes = draw(st.sampled_from([MIN_ZEROS_BYTES, MIN_ZEROS_BYTES + 4099, 5 * MIN_ZEROS_BYTES]))
    place = st.integers(0, nbytes)
    return nbytes, draw(st.lists(st.tuples(place, place).map(lambda ends: (min(ends), max(ends))), max_size=4))


@settings(max_examples=50)
@given(st.lists(st.tuples(uses(), st.booleans()), min_size=2, max_size=8))
def test_memory_that_is_used_again_is_zeros_outside_of_what_is_written(steps: list) -> None:
    memory = ReceiveBufferPool()
    memory.open()
    kept = []
    for (nbytes, ranges), is_resolved in steps:
        content = written(memory, nbytes, ranges)
        expected = np.zeros(nbytes, np.uint8)
        for start, stop in ranges:
            expected[start:stop] = 7
        np.testing.assert_array_equal(content, expected)
        if is_resolved:
            kept.append((content, expected))
        del content
    for content, expected in kept:
        np.testing.assert_array_equal(content, expected)
    memory.close()


def test_what_any_piece_has_landed_in_is_cleared_for_zeros(memory: ReceiveBufferPool) -> None:
    piece = memory.take(8 << 20)
    piece[:] = 7
    address = piece.ctypes.data
    del piece
    content = memory.take_zeros(8 << 20, [(5, 10)])
    assert content.ctypes.data == address
    assert not content[:5].any()
    assert not content[10:].any()


def test_memory_of_which_nothing_need_be_zeros_is_not_cleared(memory: ReceiveBufferPool) -> None:
    piece = memory.take(10 << 20)
    piece[:] = 7
    del piece
    smaller = memory.take(8 << 20)
    assert (smaller == 7).all()
    del smaller
    assert not memory.take_zeros(10 << 20, []).any()


def test_of_free_memory_that_is_taken_which_costs_least_to_clear(memory: ReceiveBufferPool) -> None:
    little, much = written(memory, 8 << 20, [(0, 100)]), written(memory, 8 << 20, [(0, 4 << 20)])
    addresses = little.ctypes.data, much.ctypes.data
    del little, much
    assert memory.take_zeros(8 << 20, [(0, 50)]).ctypes.data == addresses[0]
    assert memory.take_zeros(8 << 20, [(0, 8 << 20)]).ctypes.data == addresses[1]  # zeros stay for others


def test_many_ranges_are_cleared_as_one(memory: ReceiveBufferPool) -> None:
    many = [(start, start + 10) for start in range(0, 2000, 20)]
    for ranges in (many, [(3, 8)], many):
        content = written(memory, 8 << 20, ranges)
        assert np.count_nonzero(content) == sum(stop - start for start, stop in ranges)
        del content
    assert memory.statistics().reused == 2
