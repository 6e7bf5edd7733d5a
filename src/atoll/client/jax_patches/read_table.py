"""Reads of arrays whose contents hosts send to this process, on its channels.

jaxlib's client receives contents in messages of gRPC, and copies them several times. A host and this process share
memory, or a connection on which bytes need no further copy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from atoll.client.jax_patches.numbered_runs import NumberedRuns
from atoll.client.latch import Latch
from atoll.errors import OK, Status
from atoll.protocol.submission import Reading, encode
from atoll.transfers.transfer_engine import nothing_to_release

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class ArrivingContents:
    """The contents of one array while they arrive. Thread-safe."""

    __slots__ = ("_buffer", "_ended", "_filled", "_process", "error", "is_complete")

    def __init__(self, nbytes: int) -> None:
        self.is_complete = False
        self.error = OK  # why the contents do not arrive, if another way of reading would fail as well
        self._buffer: Bytes = np.empty(nbytes, np.uint8)
        self._filled = 0
        self._process = os.getpid()
        self._ended = Latch()

    def take(self, content: Any, more: bool, is_own: bool = False) -> bool:
        """Add a part. Return whether it was the last one. `is_own`: no one else uses the memory of `content`."""
        part = np.frombuffer(content, np.uint8)
        if is_own and not more and not self._filled and part.nbytes == self._buffer.nbytes:
            self._buffer = part
            self.is_complete = True
            self.end()
            return True
        stop = self._filled + part.nbytes
        if stop > self._buffer.nbytes or (not more and stop != self._buffer.nbytes):
            self.end()
            return True
        self._buffer[self._filled : stop] = part  # NumPy lets other threads run meanwhile
        self._filled = stop
        if not more:
            self.is_complete = True
            self.end()
        return not more

    def end(self, error: Status = OK) -> None:
        """Wake the threads that wait. If the contents are not complete, the rest does not arrive."""
        if not self._ended.is_set():
            self.error = error
        self._ended.set()

    @property
    def has_failed(self) -> bool:
        """Whether the contents do not arrive. False while they may still arrive."""
        return self._ended.is_set() and not self.is_complete

    def wait(self) -> Bytes | None:
        """Return the contents once all have arrived, or None if they do not arrive, for example in a forked child.

        There is no deadline, because a computation may take any time. `ReadTable.fail` ends the wait if the proxy sends
        `Unread`, or if a channel is lost.
        """
        if not self.is_complete and self._process == os.getpid():
            self._ended.wait()
        return self._buffer if self.is_complete else None


class ReadTable:
    """The reads of this process that have not ended, by feed. Thread-safe.

    `submit(client, payload)` sends a plugin program to the client's proxy and returns the executable.
    """

    def __init__(self, submit: Callable[[Any, bytes], Any]) -> None:
        self._submit = submit
        self._runs = NumberedRuns()
        self._arriving: dict[int, ArrivingContents] = {}
        self.losses = 0  # how often all reads have ended

    def __len__(self) -> int:
        """Return the number of reads that have not ended."""
        return len(self._arriving)

    def start(self, array: Any, devices: Sequence[Any], nbytes: int, losses: int) -> ArrivingContents:
        """Request the contents of an array on these devices. Raise JaxRuntimeError or ValueError if JAX refuses it.

        `losses` is the table's count before the caller saw that contents can arrive. If all reads have ended since
        then, this one ends as well, because its contents may have been lost before the table had it.
        """
        contents = ArrivingContents(nbytes)
        client, ids = devices[0].client, tuple(device.id for device in devices)

        def submit(number: int) -> Any:
            return self._submit(client, encode(Reading(ids, number))).execute_sharded

        feed, _ = self._runs.run((client, ids), submit, [array], self._arriving, contents)
        if self.losses != losses:
            self.fail((feed,))
        return contents

    def take(self, feed: int, content: Any, more: bool, done: Callable[[], None]) -> None:
        """Take a part of the contents that hosts have sent. Call `done` once it has been read.

        If nothing has to be released, the memory of contents that arrive at once becomes the array's.
        """
        try:
            contents = self._arriving.get(feed)
            if contents is not None and contents.take(content, more, done is nothing_to_release):
                self._arriving.pop(feed, None)
        finally:
            done()

    def fail(self, feeds: Iterable[int], error: Status = OK) -> None:
        """End the reads of these feeds, whose contents do not arrive, with `error`. Without any, end all reads."""
        chosen = tuple(feeds)
        if not chosen:
            self.losses += 1  # before the reads end: see `start`
        for feed in chosen or tuple(self._arriving):
            contents = self._arriving.pop(feed, None)
            if contents is not None:
                contents.end(error)

    def clear(self) -> None:
        """End all reads, and forget the executables, because the client was closed."""
        self._runs.forget_executables()
        self.fail(())
