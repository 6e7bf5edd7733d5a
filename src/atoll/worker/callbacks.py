"""The Python of a client that a function calls while it runs.

XLA calls it on threads of its own, with views of the device's memory; each such thread waits here, without the
interpreter's lock, until the client has answered. What a client answers is believed in nothing: jaxlib copies as many
bytes as the program's result has, whatever array it is given.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from atoll.errors import invalid
from atoll.transfers.call_messages import ArrayType
from atoll.transfers.calls import Answer, Calls
from atoll.transfers.dtypes import numpy_dtype

# dtype and shape
ResultType = tuple[str, tuple[int, ...]]

_TOKEN = ArrayType("", (), 0)


class Callbacks:
    """The callables of one function, by position; `numbers` are the client's numbers for them."""

    def __init__(self, calls: Calls, session: int, numbers: tuple[int, ...]) -> None:
        self._calls = calls
        self._session = session
        self._numbers = numbers
        calls.retain(session, numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def call(
        self, position: int, results: Sequence[ResultType], arguments: Sequence[np.ndarray[Any, Any] | None]
    ) -> tuple[np.ndarray[Any, Any] | None, ...]:
        """Calls it with arrays, or None for a token, and returns what it returned, of exactly these types.

        Blocks. Raises ClientError with the client's traceback, and StatusError where there is no answer or a wrong one.
        """
        types = tuple(_TOKEN if each is None else _type_of(each) for each in arguments)
        contents = [_bytes_of(each) for each in arguments if each is not None]
        answer = self._calls.call(self._session, self._numbers[position], types, contents)
        try:
            return _results(answer, results)
        except BaseException:
            answer.done()
            raise

    def released(self) -> None:
        """The function exists no more on this host: the client may forget its callables."""
        self._calls.release(self._session, self._numbers)


def _type_of(array: np.ndarray[Any, Any]) -> ArrayType:
    return ArrayType(array.dtype.name, array.shape, array.nbytes)


def _bytes_of(array: np.ndarray[Any, Any]) -> Any:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.size else b""


def _results(answer: Answer, wanted: Sequence[ResultType]) -> tuple[np.ndarray[Any, Any] | None, ...]:
    """The arrays of an answer, which keep its memory until the last of them is gone."""
    if len(answer.types) != len(wanted):
        raise invalid(f"a callback has answered with {len(answer.types)} results, not {len(wanted)}")
    results: list[np.ndarray[Any, Any] | None] = []
    whole = np.frombuffer(answer.content, np.uint8)
    start = whole.ctypes.data
    for position, (given, view, (dtype, shape)) in enumerate(zip(answer.types, answer.views, wanted, strict=True)):
        if dtype == "token":
            results.append(None)
            continue
        kind = numpy_dtype(dtype)
        nbytes = kind.itemsize * int(np.prod(shape, dtype=np.int64))
        if (given.dtype, given.shape, view.nbytes) != (kind.name, shape, nbytes):
            raise invalid(
                f"a callback has answered with {given.dtype}{list(given.shape)} of {view.nbytes} bytes as result "
                f"{position}, which is {dtype}{list(shape)}"
            )
        if not nbytes:
            results.append(np.empty(shape, kind))
            continue
        offset = np.frombuffer(view, np.uint8).ctypes.data - start
        results.append(whole[offset : offset + nbytes].view(kind).reshape(shape))
    weakref.finalize(whole, answer.done).atexit = False
    return tuple(results)
