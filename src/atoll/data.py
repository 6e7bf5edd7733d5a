"""Input pipelines that run on the hosts: a batch moves from a host's Python to its devices without the script::

    def pipeline(shard):  # runs on each host and reads the host's part of the data
        source = grain.MapDataset.source(Corpus("/data/corpus")).seed(0).shuffle().repeat()
        return source[shard.index :: shard.count].map(tokenize).batch(32)

    batches = atoll.data.Batches(pipeline, NamedSharding(mesh, P("data")))
    iterator = iter(batches)
    for batch in iterator:  # global arrays of 32 * shard.count rows, with that sharding
        state, loss = step(state, batch)
    iterator.get_state()  # bytes; another iterator that is set to them continues with exactly the next batch

A pipeline is a function that returns a grain or tf.data dataset, a `grain.DataLoader`, or any iterable of batches. A
batch is a pytree of NumPy arrays whose first axis is the rows. Each host calls the function in the session's Python
process on that host (`jax.experimental.colocated_python`) and reads ahead while the script computes. With stock JAX the
same code runs in the script's process.

Invariants: batch n of the script consists of batch n of every host; at most `prefetch` batches that the script has not
taken are in device memory; the state that the script sees belongs to the batch that it took last.
"""

from __future__ import annotations

import base64
import contextlib
import json
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import astuple, dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import colocated_python
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from atoll.errors import Kind, details_of
from atoll.quantities import counted
from atoll.retries import Retry

__all__ = ["BatchIterator", "Batches", "Shard"]

_FORMAT = "atoll.data 1"
_RECORD_BYTES = 4096  # size of a record without the state
# Seconds between attempts while the processes of a failed host restart, and for all of them.
_FIRST_PAUSE, _MAX_PAUSE, _PATIENCE = 0.5, 4.0, 15.0
_LOST_NOTE = (
    "The batches that were read ahead are lost. Call `iterator.set_state(iterator.get_state())` to recreate the"
    " pipelines and continue with the batch that failed."
)


@dataclass(frozen=True, order=True)
class Shard:
    """The part of the data that a host reads. Hosts whose devices hold the same rows read the same part."""

    index: int
    count: int


Source = Callable[[Shard], Iterable[Any]] | Iterable[Any]


class Batches:
    """An iterable of batches of global arrays, which the hosts read from `source`. Each `iter` starts at the beginning.

    Args:
      source: A function from a `Shard` to an iterable of that shard's batches, or the iterable itself. An iterable that
        supports slicing, such as a `grain.MapDataset` or a list, is sharded by `source[shard.index :: shard.count]`;
        any other iterable must have a single shard. The source is pickled with cloudpickle, so open large data inside
        the function.
      sharding: The sharding of each array: one for all arrays, or a pytree that is a prefix of the batch's. Rows may be
        sharded over hosts; all hosts must return batches of equal length. Each host has all of the other axes.
      prefetch: Maximum number of batches in device memory that the script has not taken yet; at least 1.
      state_bytes: Maximum size of one host's iterator state, as JSON.
    """

    def __init__(self, source: Source, sharding: Any, *, prefetch: int = 2, state_bytes: int = 16384) -> None:
        if prefetch < 1:
            raise ValueError(f"prefetch={prefetch}: expected at least 1")
        if isinstance(source, Generator):
            raise TypeError(
                "a generator cannot be sent to the hosts: pass a function from an atoll.data.Shard to the iterable of"
                " this shard's batches"
            )
        for each in jax.tree.leaves(sharding) or [None]:
            if not isinstance(each, NamedSharding | SingleDeviceSharding):
                raise TypeError(f"batches need a NamedSharding or a SingleDeviceSharding, got {each!r}")
        self.source = source
        self.sharding = sharding
        self.prefetch = prefetch
        self.state_bytes = state_bytes

    def __iter__(self) -> BatchIterator:
        return BatchIterator(self)


class BatchIterator(Iterator[Any]):
    """One pass over `Batches`. Thread-safe. Reading starts with the first `next` or with `start_prefetch`.

    If the pipeline raises an exception for a batch, the `next` for that batch raises it, with the host's traceback.
    When one host has no more batches, the iterator ends for all hosts. `grain.checkpoint.CheckpointSave` and
    `CheckpointRestore` accept this iterator like grain's own.
    """

    def __init__(self, batches: Batches) -> None:
        self._of = batches
        self._lock = threading.RLock()
        self._begin(None)

    def _begin(self, state: list[Any] | None, batches: int = 0) -> None:
        self._shards = state  # the state per shard after the batch that was taken last; None at the beginning
        self._batches = batches
        self._hosts: Any = None
        self._pending: deque[tuple[jax.Array | Exception, Any]] = deque()  # records and batch of each call
        self._end: Exception | None = None  # raised by every later `next`
        self._thread = 0  # the thread that issued the last calls to the hosts

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> Any:
        """Return the next batch. Raise the pipeline's exception, or JaxRuntimeError if a host failed."""
        with self._lock:
            if self._end is None:
                try:
                    return self._next()
                except Exception as error:
                    self._end = error
                    self.close()
                    if _is_loss(error):
                        error.add_note(_LOST_NOTE)
            raise self._end

    def _next(self) -> Any:
        self.start_prefetch()
        records = _unpack(self._pending[0][0]) if self._pending else []
        if not records or any(each["ended"] for each in records):
            raise StopIteration
        _, batch = self._pending.popleft()
        self._read_ahead()
        states = {each["shard"][0]: each["state"] for each in records}
        self._shards = [states[index] for index in sorted(states)]
        self._batches += 1
        return jax.tree.map(jax.device_put, batch, jax.tree.broadcast(self._of.sharding, batch))

    def start_prefetch(self) -> None:
        """Start to read, if the script has other work to do before it takes the first batch."""
        with self._lock:
            if self._hosts is None and self._end is None:
                self._hosts, is_empty = self._open()
                if not is_empty:
                    self._read_ahead()

    def _open(self) -> tuple[_Hosts, bool]:
        """Create the pipelines; return them and whether a host has no batches.

        Try again if a process is lost meanwhile: the processes of a failed island end one after another.
        """
        retry = Retry(_FIRST_PAUSE, _MAX_PAUSE, patience=_PATIENCE)
        while True:
            try:
                hosts = _Hosts(self._of, self._shards)
                return hosts, hosts.open()
            except jax.errors.JaxRuntimeError as error:
                if retry.is_over or not _is_loss(error):
                    raise
            time.sleep(retry.next_pause())

    def _read_ahead(self) -> None:
        if self._thread != threading.get_ident():
            # Every host receives the calls of one thread in order, but not the calls of two threads.
            for records, _ in self._pending:
                with contextlib.suppress(Exception):
                    jax.block_until_ready(records)
            self._thread = threading.get_ident()
        while len(self._pending) < self._of.prefetch:
            try:
                records, batch = self._hosts.next()
                records.copy_to_host_async()
            except Exception as error:  # raised here if the pipeline runs in this process
                records, batch = error, None
            self._pending.append((records, batch))

    def get_state(self) -> bytes:
        """Return the position as JSON: the state of each shard after the batch that was taken last.

        If the pipeline's iterator has `get_state` and `set_state`, as grain's iterators have, the state is its own.
        Otherwise it is the number of batches, and `set_state` reads that many batches again. A state is valid for the
        same pipeline and the same number of shards.
        """
        with self._lock:
            for index, state in enumerate(self._shards or ()):
                if "too_large" in state:
                    raise ValueError(
                        f"the state of shard {index} takes {state['too_large']} bytes, but the limit is "
                        f"{self._of.state_bytes}: pass a larger limit as Batches(..., state_bytes=...)"
                    )
            return json.dumps({"format": _FORMAT, "batches": self._batches, "shards": self._shards}).encode()

    def set_state(self, state: Any) -> None:
        """Continue with the batch that follows the position at which `get_state` returned `state`.

        `state` may also be an array of these bytes, as `atoll.subscribe` returns it.
        """
        try:
            found = json.loads(state if isinstance(state, bytes) else np.asarray(state, np.uint8).tobytes())
            if found["format"] != _FORMAT:
                raise ValueError(f"the format is {found['format']!r}, expected {_FORMAT!r}")
            batches, shards = int(found["batches"]), found["shards"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"not the state of an iterator of atoll.data: {error}") from None
        with self._lock:
            self._begin(shards, batches)

    def close(self) -> None:
        """Release the batches that were read ahead and the pipelines on the hosts."""
        with self._lock:
            self._hosts = None
            self._pending.clear()
            self._end = self._end or ValueError("this iterator has been closed; call set_state to open it again")


class _Hosts:
    """The script's handle on the pipelines: one `_HostPipeline` on each host of the sharding's devices."""

    def __init__(self, batches: Batches, state: list[Any] | None) -> None:
        sharding = jax.tree.map(_on_host_cpus, batches.sharding)
        first = jax.tree.leaves(sharding)[0]
        devices = first._device_assignment
        one_per_host = list({getattr(each, "host", each.process_index): each for each in devices[::-1]}.values())[::-1]
        records = NamedSharding(Mesh(np.array(one_per_host), ("host",)), PartitionSpec("host"))
        make: Any = colocated_python.colocated_python_class(_HostPipeline)
        room = batches.state_bytes + _RECORD_BYTES
        # The pipelines live as long as this object.
        self._pipeline = make(batches.source, sharding, records, room, state)
        weakref.finalize(self, self.__dict__.clear)  # also at exit, while JAX still works
        spec = jax.ShapeDtypeStruct((len(one_per_host), room), np.uint8, sharding=records)
        calls = {"in_specs": ((), {}), "devices": devices}
        self._open = self._pipeline.open.specialize(out_specs_fn=lambda: spec, **calls)
        self.next = self._pipeline.next.specialize(**calls)

    def open(self) -> bool:
        """Open the pipelines; return whether a host has no batches. Raise ValueError if the first batches differ."""
        records = _unpack(self._open())
        if len({each["batch"] for each in records} - {None}) > 1:
            text = "; ".join(f"host {each['host']}: {each['batch']}" for each in records)
            raise ValueError(f"the hosts' first batches differ in structure, dtypes or shapes: {text}")
        return any(each["ended"] for each in records)


class _HostPipeline:
    """The pipeline of one host: reads batches and puts each on this host's devices, together with a record.

    A *record* is a row of bytes of fixed length, as JSON: whether the pipeline has ended, and its state after a batch.
    """

    def __init__(self, source: Source, sharding: Any, records: Any, room: int, state: list[Any] | None) -> None:
        self._source, self._start = source, state
        self._sharding = sharding
        self._records = records
        self._room = room

    def open(self) -> jax.Array:
        """Create the pipeline and read its first batch; return a record with the batch's dtypes and shapes."""
        shards = {_own_shard(each) for each in jax.tree.leaves(self._sharding)}
        if len(shards) > 1:
            raise ValueError(f"the arrays of a batch have different rows on this host: {sorted(shards)}")
        (self._shard,) = shards
        self._pipeline = _Pipeline(_part_of(self._source, self._shard))
        if self._start is not None:
            if len(self._start) != self._shard.count:
                raise ValueError(
                    f"a state of {counted(len(self._start), 'shard')}, but the sharding has {self._shard.count}"
                )
            self._pipeline.set_state(self._start[self._shard.index])
        self._first: Any = next(self._pipeline, _END)
        if self._first is _END:
            return self._record(None)
        self._specs: Any = jax.tree.map_with_path(_spec, self._first)
        if not jax.tree.leaves(self._specs):
            raise ValueError(f"a batch without arrays: {self._first!r}")
        return self._record(_described(self._specs))

    def next(self) -> tuple[jax.Array, Any]:
        first, self._first = self._first, _END
        batch = next(self._pipeline, _END) if first is _END else first
        if batch is _END:
            nothing = jax.tree.map(lambda spec: np.zeros(spec.shape, spec.dtype), self._specs)
            return self._record(None), self._global(nothing)
        specs = jax.tree.map_with_path(_spec, batch)
        if specs != self._specs:
            raise ValueError(
                f"this batch is {_described(specs)}, and the first was {_described(self._specs)}: all batches must be"
                " alike. To drop a short last batch, use .batch(..., drop_remainder=True) of grain or tf.data"
            )
        return self._record(""), self._global(batch)

    def _record(self, batch: str | None) -> jax.Array:
        row = {"host": jax.process_index(), "shard": astuple(self._shard), "ended": batch is None, "batch": batch}
        state = self._pipeline.get_state()
        size = len(json.dumps(state, default=_plain))
        if size > self._room - _RECORD_BYTES:
            state = {"too_large": size}
        text = json.dumps(row | {"state": state}, default=_plain).encode().ljust(self._room)
        return jax.make_array_from_process_local_data(self._records, np.frombuffer(text, np.uint8)[None])

    def _global(self, batch: Any) -> Any:
        def put(leaf: Any, sharding: Any) -> jax.Array:
            shape = (len(leaf) * self._shard.count, *np.shape(leaf)[1:])
            return jax.make_array_from_process_local_data(sharding, np.asarray(leaf), shape)

        return jax.tree.map(put, batch, jax.tree.broadcast(self._sharding, batch))


class _Pipeline(Iterator[Any]):
    """The iterator of a pipeline, with its state as JSON: the iterator's own, or the number of batches read."""

    def __init__(self, batches: Any) -> None:
        if hasattr(batches, "as_numpy_iterator"):  # tf.data
            batches = batches.as_numpy_iterator()
        self._iterator: Any = iter(batches)
        self._has_state = hasattr(self._iterator, "get_state") and hasattr(self._iterator, "set_state")
        self._read = 0

    def __next__(self) -> Any:
        batch = next(self._iterator)
        self._read += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        if not self._has_state:
            return {"read": self._read}
        state = self._iterator.get_state()
        return {"bytes": base64.b64encode(state).decode()} if isinstance(state, bytes) else {"json": state}

    def set_state(self, state: dict[str, Any]) -> None:
        if self._has_state == ("read" in state):
            raise ValueError(f"the state is of another kind of iterator than the pipeline's {type(self._iterator)}")
        if self._has_state:
            self._iterator.set_state(base64.b64decode(state["bytes"]) if "bytes" in state else state["json"])
            return
        for _ in range(state["read"]):
            if next(self, _END) is _END:
                raise ValueError(f"the state is after {state['read']} batches, but the pipeline has only {self._read}")


_END = object()


def _part_of(source: Source, shard: Shard) -> Iterable[Any]:
    if callable(source):
        return source(shard)
    if shard.count == 1:
        return source
    if hasattr(source, "__getitem__"):
        return source[shard.index :: shard.count]  # type: ignore[no-any-return]
    raise TypeError(
        f"{type(source).__name__} cannot be sliced, so each of {shard.count} hosts would read all of it: pass a"
        " function from an atoll.data.Shard to the iterable of this shard's batches"
    )


def _own_shard(sharding: Sharding) -> Shard:
    """Return the index of this process's set of rows among the distinct sets of all processes."""
    pieces = len(sharding.device_set)
    rank = max(1, len(getattr(sharding, "spec", ())))
    rows: dict[int, set[tuple[int, int, int]]] = {}
    for device, index in sharding.devices_indices_map((pieces,) * rank).items():
        rows.setdefault(device.process_index, set()).add(index[0].indices(pieces))
    distinct = sorted({tuple(sorted(each)) for each in rows.values()})
    if sum(map(len, distinct)) != len(set().union(*rows.values())):
        raise ValueError(f"hosts share some of their rows, but not all, under {sharding}")
    return Shard(distinct.index(tuple(sorted(rows[jax.process_index()]))), len(distinct))


def _spec(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
    array = np.asarray(leaf)
    name = f"batch{jax.tree_util.keystr(path)}"
    if not array.ndim:
        raise ValueError(f"{name} is a scalar: the first axis of each array of a batch must be its rows")
    if array.dtype.kind in "OSTUMm":
        raise TypeError(f"{name} is of dtype {array.dtype}, which devices do not support")
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _described(specs: Any) -> str:
    leaves = jax.tree.leaves_with_path(specs)
    text = ", ".join(f"batch{jax.tree_util.keystr(path)} {spec.dtype}{list(spec.shape)}" for path, spec in leaves)
    return text if len(text) < 1000 else f"{text[:1000]}... ({zlib.crc32(text.encode()):x})"


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"the state of the pipeline's iterator has a {type(value).__name__}, which JSON cannot represent")


def _on_host_cpus(sharding: Any) -> Any:
    """Return `sharding` over the CPU devices that are on the hosts of its devices, where hosts create arrays."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(colocated_python.colocated_cpu_devices(sharding.mesh), sharding.spec)
    return SingleDeviceSharding(*colocated_python.colocated_cpu_devices(tuple(sharding.device_set)))


def _unpack(records: Any) -> list[dict[str, Any]]:
    if isinstance(records, Exception):
        raise records
    return [json.loads(row.tobytes()) for row in np.asarray(records)]


def _is_loss(error: Exception) -> bool:
    details = details_of(error)
    return isinstance(error, jax.errors.JaxRuntimeError) and (details.is_loss or details.kind is Kind.PYTHON)
