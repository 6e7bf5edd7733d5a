"""Tests that gathering, cutting and copying the rows of a message gives the results of NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from atoll.host_services.row_messages import RowMessage, Rows

INDEX = np.array([3, 0, 0, 4])


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int8, np.bool_, np.complex128])
@pytest.mark.parametrize("index", [None, INDEX], ids=["all", "some"])
@pytest.mark.parametrize("columns", [slice(None), slice(1, 3)], ids=["whole", "cut"])
def test_rows_are_written_as_they_are_taken(dtype: type, index: np.ndarray | None, columns: slice) -> None:
    array = (np.arange(5 * 4 * 2).reshape(5, 4, 2) % 7).astype(dtype)[:, columns]
    wanted = array if index is None else array[index]
    rows = Rows(array, index)
    assert (rows.shape, rows.nbytes) == (wanted.shape, wanted.nbytes)
    for place in (np.zeros_like(wanted, order="C"), np.zeros((*wanted.shape, 2), dtype)[..., 0]):
        rows.copy_to(place)
        np.testing.assert_array_equal(place, wanted)
    target = bytearray(wanted.nbytes)
    rows.write_into(memoryview(target))
    assert bytes(target) == wanted.tobytes()


@pytest.mark.parametrize("shape", [(5,), (5, 3)])
def test_a_message_is_its_numbers_and_its_rows_however_it_is_cut(shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape), dtype=np.int16).reshape(shape)
    numbers = np.array([[7, 8, 9]], "<i4")
    message = RowMessage(numbers, [Rows(array), Rows(array, INDEX)])
    whole = numbers.tobytes() + array.tobytes() + array[INDEX].tobytes()
    assert message.nbytes == len(whole)
    assert b"".join(message.views()) == whole
    for start in range(message.nbytes):
        for stop in range(start, message.nbytes + 1):
            assert b"".join(message.slice(start, stop)) == whole[start:stop]
    target = bytearray(message.nbytes)
    message.write_into(memoryview(target))
    assert bytes(target) == whole
