"""Arrays whose contents this process sends to their hosts itself, on channels that bypass the proxy.

The array is made by a run of an executable of the server. The proxy then asks for the contents, because it knows the
array's host and the order of the uploads, which decides which one a full host receives first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np

from atoll.client.jax_patches.numbered_runs import NumberedRuns, WrittenTypes
from atoll.errors import AtollError, StatusError
from atoll.host_services.calls.call_messages import Landed, Wanted, encode, first_call
from atoll.ir.types import REPLICATED, Replicated, Tiled
from atoll.protocol.submission import PutArray, Writing
from atoll.protocol.submission import encode as encode_submission
from atoll.transfers.channel import DataChannel
from atoll.transfers.piece_contents import BufferContents

Array = np.ndarray[Any, Any]


class WriteTable:
    """The contents that hosts of this process's arrays have not received, by the number of the write. Thread-safe.

    `submit(client, payload)` sends a plugin program to the client's proxy and returns the executable. `run(call)` calls
    a function on another thread, which it may wait for.
    """

    def __init__(self, submit: Callable[[Any, bytes], Any], run: Callable[[Callable[[], None]], None]) -> None:
        self._submit = submit
        self._run = run
        self._runs = NumberedRuns()
        self._written = WrittenTypes()
        self._contents: dict[int, Array] = {}

    def __len__(self) -> int:
        """Return the number of writes whose contents are kept."""
        return len(self._contents)

    def start(self, array: Array, devices: Sequence[Any], tiling: Replicated | Tiled = REPLICATED) -> Any:
        """Return jaxlib's results of the run that makes a copy of `array` on `devices`, in tiles or replicated.

        The array is contiguous. Raise JaxRuntimeError or ValueError if the server refuses.
        """
        client, numbers = devices[0].client, tuple([device.id for device in devices])
        made = PutArray(array.dtype.name, array.shape)

        def submit(number: int) -> Any:
            return self._submit(client, encode_submission(Writing(numbers, number, made, tiling))).execute_sharded

        key = _key(devices, made, tiling)
        _, results = self._runs.run(key, submit, [], self._contents, array.view(np.ndarray))
        return results

    def is_frequent(self, array: Array, devices: Sequence[Any], tiling: Replicated | Tiled) -> bool:
        """Count an array, and return whether arrays of its type are written often."""
        key = _key(devices, PutArray(array.dtype.name, array.shape), tiling)
        return self._runs.takes(key) and self._written.is_frequent(key)

    # ---- from the proxy

    def send(self, wanted: Wanted, direct: DataChannel | None, proxy: DataChannel) -> None:
        """Start to send contents to the host on its `direct` channel, or else to the proxy.

        If this process does not have them, send no bytes, with which the launch fails.
        """
        array = self._contents.get(wanted.write)
        if array is None:  # after `start` was interrupted, or the client was closed
            self._run(partial(self._send_to_proxy, wanted.write, memoryview(b""), proxy))
            return
        view = memoryview(array.reshape(-1).view(np.uint8))
        to_proxy = partial(self._run, partial(self._send_to_proxy, wanted.write, view, proxy))

        def on_end(error: BaseException | None) -> None:
            if error is None or isinstance(error, StatusError):  # the host has everything, or knows why it has not
                _notify(proxy, wanted.write)
            else:
                to_proxy()

        if direct is None:
            to_proxy()
            return
        try:
            direct.start_in_chunks(0, wanted.feed, BufferContents((view,), wanted.feed), on_end)
        except (AtollError, OSError, RuntimeError):  # RuntimeError: in an exit handler, no thread can be started
            to_proxy()

    def _send_to_proxy(self, write: int, view: memoryview, proxy: DataChannel) -> None:
        try:
            proxy.send_in_parts(0, write, view)
        except (AtollError, OSError, RuntimeError):  # RuntimeError: an exit handler can start no writing thread
            proxy.shut_down()  # which ends the session, because hosts await the contents

    def written(self, write: int) -> None:
        """Forget contents that are not needed any more."""
        self._contents.pop(write, None)

    def clear(self) -> None:
        """Forget everything, because the client was closed."""
        self._runs.forget_executables()
        self._written.clear()
        self._contents.clear()


def _key(devices: Sequence[Any], array: PutArray, tiling: Replicated | Tiled) -> Hashable:
    return devices[0].client, tuple([device.id for device in devices]), array, tiling


def _notify(proxy: DataChannel, write: int) -> None:
    try:
        proxy.send(0, first_call(0), encode(Landed(write)))
    except (AtollError, OSError):
        proxy.shut_down()
