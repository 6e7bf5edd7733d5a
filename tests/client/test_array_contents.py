"""Tests of large arrays' contents: when an array was published before, and which arrays subscribers read again."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from atoll.client import array_contents
from atoll.client.array_contents import MAX_READS, MIN_BYTES, content_of, reads

LARGE = MIN_BYTES // 4


def array(size: int) -> Any:
    return np.zeros(size, np.float32)  # supports weak references, like an array of JAX


def test_an_array_keeps_its_number_while_it_exists() -> None:
    first, second = array(LARGE), array(LARGE)
    content = content_of(first, None)
    assert (content.number > 0, content.is_known) == (True, False)
    assert content_of(first, None) == (content.number, True)
    assert content_of(second, None).number not in (0, content.number)


def test_each_dtype_in_which_an_array_is_published_has_a_number() -> None:
    values = array(LARGE)
    half = content_of(values, np.dtype(np.float16))
    assert content_of(values, None).number != half.number
    assert content_of(values, np.dtype(np.float16)) == (half.number, True)


def test_small_arrays_have_no_number() -> None:
    assert content_of(array(LARGE - 1), None) == (0, False)


def test_nothing_is_kept_of_arrays_that_exist_no_more() -> None:
    before = len(array_contents._known)
    values = [array(LARGE) for _ in range(3)]
    numbers = {content_of(each, None).number for each in values}
    assert len(array_contents._known) == before + 3
    del values
    gc.collect()
    assert len(array_contents._known) == before
    later = [array(LARGE) for _ in range(3)]  # perhaps at the same addresses
    assert numbers.isdisjoint(content_of(each, None).number for each in later)


@pytest.mark.parametrize(
    ("sizes", "have", "expected"),
    [
        ([1, 2, 3], {}, [range(3)]),
        ([1, 2, 3], {0: 0}, [range(1, 3)]),
        ([1, 2, 3], {1: 0}, [range(1), range(2, 3)]),
        ([1, 2, 3], {2: 0}, [range(2)]),
        ([1, 2, 3], {0: 0, 1: 0, 2: 0}, []),
        ([], {}, []),
    ],
)
def test_the_arrays_between_those_that_a_subscriber_has_are_read(
    sizes: list[int], have: Mapping[int, int], expected: list[range]
) -> None:
    assert reads(sizes, have) == expected


def test_the_smallest_arrays_are_read_again_if_there_would_be_too_many_reads() -> None:
    count = 2 * MAX_READS + 5
    sizes = [1000 + each for each in range(count)]
    have = {each: 0 for each in range(1, count, 2)}
    found = reads(sizes, have)
    assert len(found) == MAX_READS
    needed = {each for each in range(count) if each not in have}
    read = [each for some in found for each in some]
    assert needed <= set(read)
    assert sorted(read) == read
    assert set(read) - needed == {1, 3, 5}
