"""The Python of a client that a function calls while it runs.

XLA calls it on threads of its own, with views of the device's memory; each such thread waits here, without the
interpreter's lock, until the client has answered. What a client answers is believed in nothing: jaxlib copies as many
bytes as the program's result has, whatever array it is given.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import numpy as np

from atoll.errors import Status, invalid
from atoll.host_services.calls.call_arrays import Array, packed, unpacked
from atoll.host_services.calls.client_calls import Calls, Reply
from atoll.ir.types import ShardType
from atoll.protocol.messages import HostChannels
from atoll.transfers.dtypes import dtype_name, numpy_dtype


class Callbacks:
    """The callables of one function, by position; `numbers` are the client's numbers for them.

    The last of them, as many as there are `keys`, are called while the function is compiled; `len()` counts the others.
    Where a function `spans_devices`, a device that fails leaves others waiting in a collective, for good. So what its
    callables raise is kept until the run has ended. Where there are `channels`, the function sends to its host and
    receives from it: those of each callable.
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

    def __len__(self) -> int:
        return len(self._numbers) - len(self.keys)

    def call(
        self, position: int, results: Sequence[ShardType], arguments: Sequence[Array | None]
    ) -> tuple[Array | None, ...]:
        """Calls it with arrays, or None for a token, and returns what it returned, of exactly these types.

        Blocks. Raises ClientError with the client's traceback, and StatusError where there is no answer or a wrong one.
        """
        reply = self._calls.call(self.session, self._numbers[position], *packed(arguments))
        try:
            return _results(reply, results)
        except BaseException:
            reply.done()
            raise

    def ask(self, key: bytes, request: bytes) -> bytes:
        """Calls that of a key with some bytes, and returns the bytes that it answers. Blocks, and raises as `call`."""
        number = self._numbers[len(self) + self.keys.index(key)]
        reply = self._calls.call(self.session, number, *packed([np.frombuffer(request, np.uint8)]))
        try:
            if len(reply.types) != 1:
                raise invalid(f"a callback of a compilation has answered with {len(reply.types)} arrays, not one")
            start = reply.offsets[0]
            return bytes(memoryview(reply.content)[start : start + reply.types[0].nbytes])
        finally:
            reply.done()

    def keep_failure(self, failure: Status) -> None:
        """A callable has raised, and the run goes on."""
        self._failure = self._failure or failure

    def take_failure(self) -> Status | None:
        """What was kept. The run has ended, and no other has begun."""
        failure, self._failure = self._failure, None
        return failure

    def retain(self) -> None:
        """The function can be run on this host from now on."""
        self._calls.retain(self.session, self._numbers)

    def release(self) -> None:
        """The function exists no more on this host: the client may forget its callables."""
        self._calls.release(self.session, self._numbers)


def _results(reply: Reply, wanted: Sequence[ShardType]) -> tuple[Array | None, ...]:
    """The arrays of a reply, which keep its memory until the last of them is gone."""
    if len(reply.types) != len(wanted):
        raise invalid(f"a callback has answered with {len(reply.types)} results, not {len(wanted)}")
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
                f"a callback has answered with {given.dtype}{list(given.shape)} of {given.nbytes} bytes as result "
                f"{position}, which is {dtype}{list(shape)}"
            )
        results.append(unpacked(whole, given, offset))
    weakref.finalize(whole, reply.done).atexit = False
    return tuple(results)
