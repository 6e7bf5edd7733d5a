"""Define arrays that a session's Python process, or its client, is still computing.

A future takes the place of such an array in its buffer. Threads may wait for it. The controller dispatches launches
that need the array on a device only when it is available (`dependencies.dependency_tracker`). Only the executor's
thread resolves futures.
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


class FutureArray:
    """Takes the place of a `DeviceArray` that is not available yet."""

    nbytes = 0

    def __init__(self) -> None:
        self._done = threading.Event()
        self._array: Any = None
        self.failure: Status | None = None
        self._is_deleted = False

    def set_result(self, array: Any) -> None:
        self._array = array
        self._done.set()

    def fail(self, status: Status) -> None:
        self.failure = status
        self._done.set()

    def wait(self) -> Any:
        """Wait for the array and return it. Raises the failure if it was not computed."""
        self._done.wait()
        raise_failure(self)
        if self._array is None:
            raise invalid("the array has been deleted or donated")
        return self._array

    def is_ready(self) -> bool:
        return False

    def is_deleted(self) -> bool:
        return self._is_deleted or self.failure is not None

    def delete(self) -> None:
        """Mark the array; it is deleted as soon as it is available."""
        self._is_deleted = True

    def block_until_ready(self) -> None:
        self.wait()


def raise_failure(array: Any) -> None:
    """Raise the failure if `array` is a future that failed."""
    if isinstance(array, FutureArray) and array.failure is not None:
        raise StatusError(Code(array.failure.code), array.failure.message, array.failure.payloads)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a unit's futures: the contents of the local shards of each, or the failure.

    If a future has no `LocalArray`, its contents are the array itself.
    """

    unit: DispatchUnit
    futures: Sequence[tuple[Buffer, FutureArray, LocalArray | None]]
    contents: Sequence[Sequence[np.ndarray[Any, Any]] | Any] | Status
