"""Callables of a client that a compiled function calls.

XLA makes the calls on its own threads, with views of device memory. Each thread waits without the GIL for the client's
answer. Answers are checked completely, because jaxlib copies as many bytes as the program's result has, regardless of
the size of the array that it gets.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import numpy as np

from atoll.errors import Status, invalid
from atoll.host_services.calls.call_messages import Array, packed, unpacked
from atoll.host_services.calls.client_calls import Calls, Reply
from atoll.ir.types import ShardType
from atoll.protocol.messages import HostChannels
from atoll.quantities import counted
from atoll.transfers.dtypes import dtype_name, numpy_dtype

# Of an answer to a question of a compilation.
MAX_ASKED_BYTES = 64 << 20


class Callbacks:
    """The callables of one function by position. The client keeps the callables for as long as this object exists.

    Args:
        calls: The host's calls.
        session: The session that compiled the function.
        numbers: The client's numbers for the callables.
        spans_devices: Whether the function runs on several devices. Then an error on one device would leave the others
            waiting in a collective forever, so errors of callables are kept until the run has ended.
        keys: Keys of the last callables, which are called while the function is compiled. `len()` does not count them.
        channels: The channels of each callable, if the function sends to its host and receives from it.
    """

    def __init__(
        self,
        calls: Calls,
        session: int,
        numbers: tuple[int, ...],
        spans_devices: bool = False,
        keys: tuple[bytes, ...] = (),
        channels: tuple[HostChannels, ...] = (),
    ) -> None:
        self.session = session
        self.spans_devices = spans_devices
        self.keys = keys
        self.channels = channels
        self._calls = calls
        self._numbers = numbers
        self._failure: Status | None = None
        calls.retain(session, numbers)
        weakref.finalize(self, calls.release, session, numbers).atexit = False

    def __len__(self) -> int:
        return len(self._numbers) - len(self.keys)

    def call(
        self, position: int, results: Sequence[ShardType], arguments: Sequence[Array | None]
    ) -> tuple[Array | None, ...]:
        """Call a callable and wait for its results, which have exactly the types `results`. A token is None.

        Raises ClientError with the client's traceback, or StatusError if there is no valid answer.
        """
        most = sum([numpy_dtype(dtype).itemsize * math.prod(shape) for dtype, shape in results if dtype != "token"])
        reply = self._calls.call(self.session, self._numbers[position], *packed(arguments), most)
        try:
            return _results(reply, results)
        except BaseException:
            reply.done()
            raise

    def ask(self, key: bytes, request: bytes) -> bytes:
        """Call the callable of a key with the bytes of a request, and return the answer's bytes. Raises like `call`."""
        number = self._numbers[len(self) + self.keys.index(key)]
        reply = self._calls.call(self.session, number, *packed([np.frombuffer(request, np.uint8)]), MAX_ASKED_BYTES)
        try:
            if len(reply.types) != 1:
                raise invalid(f"a callback of a compilation must return one array, got {len(reply.types)}")
            start = reply.offsets[0]
            return bytes(memoryview(reply.content)[start : start + reply.types[0].nbytes])
        finally:
            reply.done()

    def keep_failure(self, failure: Status) -> None:
        """Keep the error of a callable while the run continues. Only the first error is kept."""
        self._failure = self._failure or failure

    def take_failure(self) -> Status | None:
        """Return and clear the kept error. Call it after a run has ended, before the next one begins."""
        failure, self._failure = self._failure, None
        return failure


def _results(reply: Reply, wanted: Sequence[ShardType]) -> tuple[Array | None, ...]:
    """Return the arrays of a reply. The memory of the reply is released when the last array is deleted."""
    if len(reply.types) != len(wanted):
        raise invalid(f"a callback returned {counted(len(reply.types), 'result')}, expected {len(wanted)}")
    whole = np.frombuffer(reply.content, np.uint8)
    results: list[Array | None] = []
    for position, (given, offset, (dtype, shape)) in enumerate(zip(reply.types, reply.offsets, wanted, strict=True)):
        if dtype == "token":
            results.append(None)
            continue
        kind = numpy_dtype(dtype)
        nbytes = kind.itemsize * math.prod(shape)
        if (given.dtype, given.shape, given.nbytes) != (dtype_name(kind), shape, nbytes):
            raise invalid(
                f"result {position} of a callback must be {dtype}{list(shape)}, got {given.dtype}{list(given.shape)} "
                f"of {given.nbytes} bytes"
            )
        results.append(unpacked(whole, given, offset))
    weakref.finalize(whole, reply.done).atexit = False
    return tuple(results)
