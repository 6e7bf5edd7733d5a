"""Writes and reads a host's shards of stored arrays, in the format of Orbax.

Each array is a zarr array whose chunks are the written shards, so hosts never write to the same chunk. Any other
sharding can read it, on any number of hosts.
"""

from __future__ import annotations

import math
import os
import time
import urllib.parse
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from atoll.cluster.sandbox.grants import USER_VIEW, Sandbox
from atoll.errors import Code, StatusError, shortened
from atoll.ir.types import Box, Shape, shard_boxes
from atoll.protocol.messages import python_messages as m
from atoll.transfers.dtypes import numpy_dtype

# Maximum and minimum of the window, the bytes of shards that are requested but not written. A window larger than needed
# to keep all CPUs busy would use fresh memory for each shard, which is slow.
WINDOW_BYTES = 256 << 20
_MIN_WINDOW = 64 << 20
# The same values as in Orbax.
_COMPRESSOR = {"id": "zstd", "level": 1}
_FILES_AT_ONCE = 128


class Asking(Protocol):
    """The arguments of a call, whose shards are requested one by one."""

    def ask(self, argument: m.Argument, shard: int) -> None:
        """Request a shard, at most once."""

    def take(self, argument: m.Argument, shard: int) -> np.ndarray[Any, Any]:
        """Wait for a requested shard. Raise StatusError if it is unavailable."""


def writing(
    source: m.WriteArrays, devices: Sequence[int], sandbox: Sandbox = USER_VIEW
) -> Callable[[m.Call, Asking], list[list[Any]]]:
    """Return a function that writes the shards of a call's arguments on `devices`, the devices of this host.

    It writes each shard as soon as it arrives, and holds at most WINDOW_BYTES, or one shard. Raises StatusError.
    """
    _check_granted(source.arrays, sandbox, True)
    tensorstore, context = _tensorstore()
    here = [_written(array, number, frozenset(devices)) for number, array in enumerate(source.arrays)]

    def run(call: m.Call, arguments: Asking) -> list[list[Any]]:
        waits = _Waits(source.timeout_seconds)
        # Open all arrays concurrently. The dtype of a stored array is the argument's.
        stores = {
            argument.position: tensorstore.open(
                _new(source.arrays[argument.position], argument.dtype), open=True, create=True, context=context
            )
            for argument in call.arguments
            if here[argument.position]
        }
        to_ask = deque((argument, *each) for argument in call.arguments for each in here[argument.position])
        asked: deque[tuple[m.Argument, int, Box]] = deque()
        writes: deque[tuple[m.Argument, Any]] = deque()
        held = 0
        while to_ask or asked or writes:
            while to_ask and (not held or held + _nbytes(to_ask[0][0]) <= _window(to_ask[0][0])):
                asked.append(to_ask.popleft())
                arguments.ask(*asked[-1][:2])
                held += _nbytes(asked[-1][0])
            if asked:
                argument, shard, box = asked.popleft()
                array = source.arrays[argument.position]
                store = waits.result(stores[argument.position], "write", array)[_slices(box)]
                contents = arguments.take(argument, shard)
                writes.append((argument, store.write(contents, can_reference_source_data_indefinitely=True)))
                del contents
            else:
                argument, write = writes.popleft()
                waits.result(write, "write", source.arrays[argument.position])
                held -= _nbytes(argument)
        return []

    return run


def _nbytes(argument: m.Argument) -> int:
    """Return the bytes of each shard of an argument."""
    return numpy_dtype(argument.dtype).itemsize * math.prod(argument.shape)


def _window(argument: m.Argument) -> int:
    return min(WINDOW_BYTES, max(_MIN_WINDOW, ((os.cpu_count() or 1) + 2) * _nbytes(argument)))


def reading(
    source: m.ReadArrays, devices: Sequence[int], sandbox: Sandbox = USER_VIEW
) -> Callable[[m.Call, object], list[list[Any]]]:
    """Return a function that reads the shards of each array on `devices`. Raises StatusError."""
    _check_granted(source.arrays, sandbox, False)
    tensorstore, context = _tensorstore()
    here = [_held(array, frozenset(devices)) for array in source.arrays]

    def run(call: m.Call, arguments: object) -> list[list[Any]]:
        waits = _Waits(source.timeout_seconds)
        arrays = [source.arrays[position] for position in call.results]
        openings = [
            tensorstore.open(_spec(array) | {"fill_missing_data_reads": False}, open=True, context=context)
            for array in arrays
        ]
        reads: list[dict[Box, Any]] = []
        for array, position, opening in zip(arrays, call.results, openings, strict=True):
            store = waits.result(opening, "read", array)
            if store.shape != array.shape:
                raise StatusError(
                    Code.INVALID_ARGUMENT,
                    f"{_where(array)} has the shape {list(store.shape)}, but the request is for {list(array.shape)}",
                )
            if store.dtype.name != array.dtype:
                store = tensorstore.cast(store, array.dtype)
            reads.append({box: store[_slices(box)].read() for box in dict.fromkeys(here[position])})
        results = []
        for array, position, boxes in zip(arrays, call.results, reads, strict=True):
            shards = {box: waits.result(read, "read", array) for box, read in boxes.items()}
            results.append([shards[box] for box in here[position]])
        return results

    return run


def _check_granted(arrays: Sequence[m.StoredArray], sandbox: Sandbox, is_write: bool) -> None:
    """Raise PERMISSION_DENIED, with the setting that grants access, if an array is outside the granted directories."""
    for array in arrays:
        path = array.location.removeprefix("file://")
        reason = sandbox.refusal(os.path.normpath(path), is_write) if path.startswith("/") else ""
        if reason:
            what = "write" if is_write else "read"
            raise StatusError(Code.PERMISSION_DENIED, f"cannot {what} {_where(array)}: {reason}")


class _Waits:
    """Waits for storage until the timeout of a request. Raises StatusError."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    def result(self, future: Any, what: str, array: m.StoredArray) -> Any:
        try:
            return future.result(timeout=max(0.0, self._deadline - time.monotonic()))
        except TimeoutError:
            code, why = Code.DEADLINE_EXCEEDED, f"not within the request's timeout of {self._seconds:g} s"
        except Exception as error:  # TensorStore's errors begin with a status name and end with the whole spec
            name, _, text = str(error).partition(": ")
            code = Code.__members__.get(name, Code.INTERNAL)
            why = (text if name in Code.__members__ else str(error)).partition(" [tensorstore_spec=")[0]
        raise StatusError(code, shortened(f"cannot {what} {_where(array)}: {why}"))


@lru_cache(1)
def _tensorstore() -> tuple[Any, Any]:
    """Return the TensorStore module and the context of this process. Raise FAILED_PRECONDITION if it is missing."""
    try:
        import tensorstore
    except ImportError as error:
        raise StatusError(
            Code.FAILED_PRECONDITION,
            f"storing arrays requires TensorStore, which host {os.uname().nodename} lacks ({error}): "
            "pip install 'atoll[checkpoints]' there",
        ) from None
    return tensorstore, tensorstore.Context({"file_io_concurrency": {"limit": _FILES_AT_ONCE}})


def _held(array: m.StoredArray, here: frozenset[int]) -> list[Box]:
    """Return the box of each local shard, in the order of the sharding's devices."""
    boxes = shard_boxes(array.sharding, array.shape)
    return [box for device, box in zip(array.sharding.devices, boxes, strict=True) if device in here]


def _written(array: m.StoredArray, number: int, here: frozenset[int]) -> list[tuple[int, Box]]:
    """Return the local shards that this host writes, with their boxes.

    One of the devices that hold a box writes it. The choice rotates over arrays and boxes to balance the writes.
    """
    holders: dict[Box, list[int]] = {}
    for device, box in zip(array.sharding.devices, shard_boxes(array.sharding, array.shape), strict=True):
        holders.setdefault(box, []).append(device)
    local = [device for device in array.sharding.devices if device in here]
    chosen = [(each[(number + i) % len(each)], box) for i, (box, each) in enumerate(holders.items())]
    return [(local.index(device), box) for device, box in chosen if device in here]


def _chunk(array: m.StoredArray) -> Shape:
    """Return the shape of the first shard, which is the largest, because only the last ones may be smaller."""
    return tuple(max(1, stop - start) for start, stop in shard_boxes(array.sharding, array.shape)[0])


def _new(array: m.StoredArray, dtype: str) -> dict[str, Any]:
    metadata = {"shape": array.shape, "chunks": _chunk(array), "compressor": _COMPRESSOR}
    return _spec(array) | {"dtype": dtype, "metadata": metadata, "store_data_equal_to_fill_value": True}


def _spec(array: m.StoredArray) -> dict[str, Any]:
    location = array.location.rstrip("/")
    if "://" in location:
        kvstore: Any = f"{location}/{urllib.parse.quote(array.name)}/"
    else:
        kvstore = {"driver": "file", "path": f"{location}/{array.name}/"}
    return {"driver": "zarr", "kvstore": kvstore}


def _where(array: m.StoredArray) -> str:
    return f"{array.name!r} at {array.location}"


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)
