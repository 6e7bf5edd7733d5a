"""Tests of the shards of a local array."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from atoll.devices.xla.xla_arrays import shards_of

_BRIEFLY = 0.2


class ListedAtFirstUse:
    """Array that lists its shards at the first use, as in jaxlib 0.10.

    The first listing pauses halfway for another thread.
    """

    def __init__(self) -> None:
        self.begun, self.other_has_them = threading.Event(), threading.Event()
        self._listed: list[int] = []

    @property
    def _arrays(self) -> list[int]:
        if not self._listed:
            self._listed.append(0)
            self.begun.set()
            self.other_has_them.wait(_BRIEFLY)
            self._listed.append(1)
        return list(self._listed)


def test_threads_that_ask_for_the_shards_at_the_same_time_get_all_of_them() -> None:
    array = ListedAtFirstUse()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(shards_of, array)
        assert array.begun.wait(30)
        second = shards_of(array)
        array.other_has_them.set()
        assert second == [0, 1]
        assert first.result() == [0, 1]
