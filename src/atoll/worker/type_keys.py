"""Types as small numbers, so that one comparison of integers checks an argument of a launch."""

from __future__ import annotations

import threading
from typing import Any


class TypeKeys:
    """Numbers for (dtype, shard shapes, devices, layout). A layout is major-to-minor, or None for the default.

    Any thread may ask: the executor's does for arrays, and those that compile do for functions.
    """

    def __init__(self) -> None:
        self._keys: dict[Any, int] = {}
        self._types: list[Any] = []
        self._lock = threading.Lock()  # of those who add

    def of(
        self,
        dtype: str,
        shard_shapes: tuple[tuple[int, ...], ...],
        devices: tuple[int, ...],
        layout: tuple[int, ...] | None = None,
    ) -> int:
        description = (dtype, shard_shapes, devices, layout)
        key = self._keys.get(description)
        return self._add(description) if key is None else key

    def _add(self, description: Any) -> int:
        with self._lock:
            key: int | None = self._keys.get(description)
            if key is None:
                key = len(self._types)
                self._types.append(description)
                self._keys[description] = key  # last: other threads look here first, without the lock
            return key

    def layout(self, key: int) -> tuple[int, ...] | None:
        layout: tuple[int, ...] | None = self._types[key][3]
        return layout

    def shards(self, key: int) -> tuple[str, tuple[tuple[int, ...], ...]]:
        """The dtype, and the shape of each shard."""
        dtype, shapes, _, _ = self._types[key]
        return dtype, shapes

    def shard(self, key: int, number: int) -> tuple[str, tuple[int, ...], int]:
        """The dtype of a shard, its shape and its device."""
        dtype, shapes, devices, _ = self._types[key]
        return dtype, shapes[number], devices[number]

    def describe(self, key: int) -> str:
        dtype, shapes, devices, layout = self._types[key]
        shape = shapes[0] if len(set(shapes)) == 1 else shapes
        order = "" if layout is None else f" with dimensions in the order {list(layout)}"
        return f"{dtype}{list(shape)}{order} on local devices {list(devices)}"
