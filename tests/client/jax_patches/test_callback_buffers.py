"""Tests of the replacements of XLA's buffers: all of their interfaces read and write the same memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from atoll.client.jax_patches.callback_buffers import Buffer, on_arrays


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


def test_a_buffer_is_the_memory_of_its_array() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    buffer = Buffer(array)
    assert (buffer.shape, buffer.ndim, buffer.dtype, buffer.writeable) == ((2, 3), 2, np.dtype(np.int16), True)
    np.asarray(buffer)[0] = 7
    assert array[0].tolist() == [7, 7, 7]
    assert np.asarray(buffer, np.float32).dtype == np.float32
    assert np.from_dlpack(buffer).tolist() == array.tolist()


def test_an_argument_is_not_written_to_and_goes_to_those_who_know_no_such_thing_as_a_copy() -> None:
    buffer = Buffer(read_only(np.arange(3)))
    assert not buffer.writeable
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(buffer)[0] = 7
    assert buffer.__dlpack__(stream=None) is not None
    assert np.from_dlpack(buffer).tolist() == [0, 1, 2]


def test_results_begin_as_zeros_or_as_the_argument_whose_memory_they_share() -> None:
    def callback(_: Any, x: Buffer, first: Buffer, second: Buffer) -> None:
        assert not x.writeable
        np.asarray(second)[0] += 5

    given = read_only(np.array([1, 2], np.float32))
    results = on_arrays(callback, (("int32", (3,)), ("float32", (2,))), {1: 0})(given)
    assert [each.tolist() for each in results] == [[0, 0, 0], [6, 2]]
    assert given.tolist() == [1, 2], "what came stays as it was"
