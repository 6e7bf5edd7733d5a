"""Arrays that are still being made by something that may take long: a session's Python process, or its client.

A promise stands in a buffer for the array that it will get. Threads may wait for it. What needs the array on a device
comes when it is there: the controller sees to that (`promises.promises`). Only the executor's thread keeps or breaks
promises.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.errors import Code, Status, StatusError, invalid
from atoll.ir.plan import LocalArray
from atoll.worker.store import Buffer

if TYPE_CHECKING:
    from atoll.worker.dispatch_unit import DispatchUnit


class PromisedArray:
    """In the place of a `DeviceArray` that comes later."""

    nbytes = 0

    def __init__(self) -> None:
        self._kept = threading.Event()
        self._array: Any = None
        self.failure: Status | None = None
        self._is_deleted = False

    def keep(self, array: Any) -> None:
        self._array = array
        self._kept.set()

    def fail(self, status: Status) -> None:
        self.failure = status
        self._kept.set()

    def wait(self) -> Any:
        """The array; for threads that may wait. Raises why there is none."""
        self._kept.wait()
        raise_failure(self)
        if self._array is None:
            raise invalid("the array has been deleted or donated")
        return self._array

    def is_ready(self) -> bool:
        return False

    def is_deleted(self) -> bool:
        return self._is_deleted or self.failure is not None

    def delete(self) -> None:
        """The array will be deleted as soon as it is there."""
        self._is_deleted = True

    def block_until_ready(self) -> None:
        self.wait()


def raise_failure(array: Any) -> None:
    """Raises why an array that was promised will never be; nothing for any other array."""
    if isinstance(array, PromisedArray) and array.failure is not None:
        raise StatusError(Code(array.failure.code), array.failure.message, array.failure.payloads)


@dataclass(frozen=True)
class Outcome:
    """What came of a unit's promises: the contents of each one's local shards, or why there are none.

    Where a promise has no `LocalArray`, its contents are the array itself.
    """

    unit: DispatchUnit
    promised: Sequence[tuple[Buffer, PromisedArray, LocalArray | None]]
    contents: Sequence[Sequence[np.ndarray[Any, Any]] | Any] | Status
