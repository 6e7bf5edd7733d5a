"""Arrays whose contents this process sends to their hosts itself, through shared memory.

The array is made by a run of an executable of the server. The proxy then asks for the contents, because it knows the
array's host and the order of the uploads, which decides which one a full host receives first.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from atoll.errors import AtollError, StatusError
from atoll.host_services.calls.call_messages import Landed, Wanted, encode, first_call
from atoll.protocol.submission import MOST_READINGS, RUNS_OF_A_READING, PutArray, Writing, first_feed
from atoll.protocol.submission import encode as encode_submission
from atoll.transfers.channel import DataChannel
from atoll.transfers.piece_contents import BufferContents

_MOST_WRITERS = 256

Array = np.ndarray[Any, Any]


class _Writer:
    """An executable of the server that makes an array. Used under the lock of the table."""

    def __init__(self, run: Callable[[list[Any]], Any], number: int) -> None:
        self.run = run
        first = first_feed(number)
        self.writes = iter(range(first, first + RUNS_OF_A_READING))


class WriteTable:
    """The contents that hosts of this process's arrays have not received, by the number of the write. Thread-safe.

    `submit(client, payload)` sends a plugin program to the client's proxy and returns the executable. `run(call)` calls
    a function on another thread.
    """

    def __init__(self, submit: Callable[[Any, bytes], Any], run: Callable[[Callable[[], None]], None]) -> None:
        self._submit = submit
        self._run = run
        self._numbers = itertools.count()
        self._writers: dict[tuple[Any, int, str, tuple[int, ...]], _Writer] = {}
        self._contents: dict[int, Array] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of writes whose contents are kept."""
        return len(self._contents)

    def start(self, array: Array, device: Any) -> Any:
        """Return jaxlib's results of the run that makes a copy of `array`, which is contiguous, on `device`.

        Raise JaxRuntimeError or ValueError if the server refuses.
        """
        key = device.client, device.id, array.dtype.name, array.shape
        write: int | None = None
        with self._lock:  # the server counts the runs of a writer in the order in which they are sent
            try:
                writer = self._writers.get(key)
                if writer is None:
                    writer = self._add(device, array)
                write = next(writer.writes, None)
                if write is None:
                    writer = self._add(device, array)
                    write = next(writer.writes)
                self._contents[write] = array.view(np.ndarray)
                return writer.run([])
            except BaseException:  # the server may have received the run or not: its count may differ from now on
                self._writers.pop(key, None)
                if write is not None:
                    self._contents.pop(write, None)
                raise

    def _add(self, device: Any, array: Array) -> _Writer:
        number = next(self._numbers)
        if number >= MOST_READINGS:
            raise ValueError(f"this process has used all {MOST_READINGS} numbers of writers")
        writing = Writing(device.id, number, PutArray(array.dtype.name, array.shape))
        run = self._submit(device.client, encode_submission(writing)).execute_sharded
        writer = self._writers[device.client, device.id, array.dtype.name, array.shape] = _Writer(run, number)
        if len(self._writers) > _MOST_WRITERS:
            del self._writers[next(iter(self._writers))]
        return writer

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
        except (AtollError, OSError):
            to_proxy()

    def _send_to_proxy(self, write: int, view: memoryview, proxy: DataChannel) -> None:
        try:
            proxy.send_in_parts(0, write, view)
        except (AtollError, OSError, ValueError):  # ValueError: the channel's memory is being closed
            proxy.shut_down()  # which ends the session, because hosts await the contents

    def written(self, write: int) -> None:
        """Forget contents that are not needed any more."""
        self._contents.pop(write, None)

    def clear(self) -> None:
        """Forget everything, because the client was closed."""
        with self._lock:
            self._writers.clear()
            self._contents.clear()


def _notify(proxy: DataChannel, write: int) -> None:
    try:
        proxy.send(0, first_call(0), encode(Landed(write)))
    except (AtollError, OSError, ValueError):
        proxy.shut_down()
