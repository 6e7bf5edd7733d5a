"""Copies of much memory on several threads, and their errors."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.transfers.host_memory import copy, copy_all


class Numbers:
    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.nbytes = array.nbytes

    def copy_to(self, place: np.ndarray) -> None:
        place[...] = self.array


@pytest.mark.parametrize("nbytes", [0, 1, 1 << 10, 3 << 20])
def test_bytes_are_copied(nbytes: int) -> None:
    source, target = np.arange(nbytes, dtype=np.uint8), np.zeros(nbytes + 2, np.uint8)
    copy(memoryview(source), memoryview(target)[1:-1])
    np.testing.assert_array_equal(target[1:-1], source)
    assert not target[0]
    assert not target[-1]


@pytest.mark.parametrize(("count", "size"), [(0, 0), (1, 1 << 20), (3, 10), (2, 1 << 20), (40, 1 << 16)])
def test_each_is_copied_once_to_its_own_place(count: int, size: int) -> None:
    sources = [np.full(size, number, np.float32) for number in range(count)]
    whole = np.full((count, size), -1, np.float32)
    copy_all(list(zip(map(Numbers, sources), whole, strict=True)))
    np.testing.assert_array_equal(whole, np.array(sources).reshape(whole.shape))


def test_what_does_not_fit_is_an_error_whoever_copies_it() -> None:
    right = (Numbers(np.ones(1 << 20, np.uint8)), np.zeros(1 << 20, np.uint8))
    wrong = (Numbers(np.ones(3 << 20, np.uint8)), np.zeros(5, np.uint8))
    for copies in ([wrong, right], [right, right, wrong]):
        with pytest.raises(ValueError, match="broadcast"):
            copy_all(copies)
