"""Small arrays whose contents this process passes to its proxy in shared memory.

The array is made by a run of an executable of the server, which takes the contents from the slot with the number of the
run. So the contents need no message, and the array no answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from atoll.client.jax_patches.numbered_runs import NumberedRuns, WrittenTypes
from atoll.ir.types import REPLICATED, Replicated, Tiled
from atoll.protocol.submission import PutArray, SmallWriting, encode
from atoll.transfers.shared_slots import SlotWriter

Array = np.ndarray[Any, Any] | np.generic


class SmallWriteTable:
    """The executables that make arrays of small contents, and the slots for the contents. Thread-safe.

    `submit(client, payload)` sends a plugin program to the client's proxy and returns the executable.
    """

    def __init__(self, submit: Callable[[Any, bytes], Any]) -> None:
        self._submit = submit
        self._runs = NumberedRuns()
        self._slots: SlotWriter | None = None
        self._written = WrittenTypes()

    @property
    def is_open(self) -> bool:
        """Whether there are slots."""
        return self._slots is not None

    def open(self, slots: SlotWriter) -> None:
        """Use these slots."""
        self._slots = slots

    def close(self) -> None:
        """Use no slots, because the connection to the proxy has ended."""
        self._slots = None

    def clear(self) -> None:
        """Forget everything, because the client was closed."""
        self._slots = None
        self._runs.forget_executables()
        self._written.clear()

    def start(self, array: Array, devices: Sequence[Any], tiling: Replicated | Tiled = REPLICATED) -> Any:
        """Return jaxlib's results of the run that makes a copy of `array` on `devices`, in tiles or replicated.

        Return None if JAX has to make the array. Raise JaxRuntimeError or ValueError if the server refuses.
        """
        slots, client = self._slots, devices[0].client
        if slots is None or not slots.has_space():
            return None
        key = client, tuple([device.id for device in devices]), array.dtype, array.shape, tiling
        if not self._runs.takes(key):  # types in turn would replace one another's executables, each for round trips
            return None
        if not self._written.is_frequent(key):
            return None

        def submit(number: int) -> Any:
            made = PutArray(array.dtype.name, array.shape)
            return self._submit(client, encode(SmallWriting(key[1], number, made, tiling))).execute_sharded

        _, results = self._runs.run(key, submit, [], slots, array.tobytes())
        return results
