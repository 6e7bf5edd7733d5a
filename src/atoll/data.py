"""Input that is made on the hosts: batches go from a host's Python into its devices, never through the script::

    def pipeline(shard):  # runs on each host, which reads its own part
        source = grain.MapDataset.source(Corpus("/data/corpus")).seed(0).shuffle().repeat()
        return source[shard.index :: shard.count].map(tokenize).batch(32)

    batches = atoll.data.Batches(pipeline, NamedSharding(mesh, P("data")))
    iterator = iter(batches)
    for batch in iterator:  # global arrays of 32 * shard.count rows, with that sharding
        state, loss = step(state, batch)
    iterator.get_state()  # bytes; with them, another iterator goes on with exactly the next batch

A pipeline is a function that gives a dataset of grain or tf.data, a `grain.DataLoader`, or any iterable of batches; a
batch is a pytree of NumPy arrays whose first axes are its rows. Each host calls it in the session's Python process
there (`jax.experimental.colocated_python`), and reads ahead while the script computes. On stock JAX the same code runs
in the script's own process.

Invariants: batch n of every host is part of batch n of the script; at most `prefetch` batches that are read ahead are
in device memory; the state that the script sees is that of the batch that it took last, whatever was read ahead.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import colocated_python
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

__all__ = ["BatchIterator", "Batches", "Shard"]

_FORMAT = "atoll.data 1"
_REST_BYTES = 4096  # of a record, beside the state
_LOST = re.compile("ABORTED|DATA_LOSS|UNAVAILABLE|.*RuntimeError: the object was lost", re.DOTALL)
_PAUSES = (0.5, 1.0, 2.0, 4.0)  # seconds, while the processes of a host that failed come back
_LOST_NOTE = (
    "The batches that were read ahead are gone with it. `iterator.set_state(iterator.get_state())` makes the pipelines"
    " again, which go on with the batch that failed."
)


@dataclass(frozen=True, order=True)
class Shard:
    """Which part of the data a host reads. Hosts whose devices hold the same rows read the same part."""

    index: int
    count: int


Source = Callable[[Shard], Iterable[Any]] | Iterable[Any]


class Batches:
    """Batches of global arrays, from what each host reads of `source`. Each `iter` of it begins anew.

    Args:
      source: A function from a `Shard` to an iterable of this shard's batches. Or the iterable itself: what can be
        sliced, as a `grain.MapDataset` and a list can, is sharded by `source[shard.index :: shard.count]`; anything
        else only where one shard is all. It is pickled with cloudpickle: large data is opened in the function.
      sharding: That of each array, one for all or a pytree of them that is a prefix of the batch's. Rows may be sharded
        over hosts, and each host gives as many; all hosts give equally long batches. Other axes are whole on each host.
      prefetch: How many batches may be in device memory that the script has not taken yet; at least 1.
      state_bytes: Room for the state of one host's iterator, as JSON.
    """

    def __init__(self, source: Source, sharding: Any, *, prefetch: int = 2, state_bytes: int = 16384) -> None:
        if prefetch < 1:
            raise ValueError(f"prefetch={prefetch}: at least one batch is made before the script takes it")
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
    """One pass over `Batches`. For any thread; nothing is read before the first batch, or `start_prefetch`.

    An exception in the pipeline is raised by the `next` whose batch it is, with the traceback of the host. Where a host
    has no more batches the iterator ends, on all of them. Saved and restored by `grain.checkpoint.CheckpointSave` and
    `CheckpointRestore` as grain's own iterators are.
    """

    def __init__(self, batches: Batches) -> None:
        self._of = batches
        self._lock = threading.RLock()
        self._begin(None)

    def _begin(self, state: list[Any] | None, batches: int = 0) -> None:
        self._shards = state  # by shard, after the batch that was taken last; None at the beginning
        self._batches = batches
        self._hosts: Any = None
        self._pending: deque[tuple[jax.Array | Exception, Any]] = deque()  # records and batch of each call
        self._end: Exception | None = None  # what every `next` raises from now on
        self._thread = 0

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> Any:
        """The next batch. Raises what the pipeline raised; JaxRuntimeError where a host failed."""
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
        """Begins to read; for a script that has more to do before it takes the first batch."""
        with self._lock:
            if self._hosts is None and self._end is None:
                self._hosts, is_empty = self._open()
                if not is_empty:
                    self._read_ahead()

    def _open(self) -> tuple[_Hosts, bool]:
        """Makes the pipelines; once more where a process is lost meanwhile, since an island's end one after another."""
        for pause in (*_PAUSES, None):
            try:
                hosts = _Hosts(self._of, self._shards)
                return hosts, hosts.open()
            except jax.errors.JaxRuntimeError as error:
                if pause is None or not _is_loss(error):
                    raise
                time.sleep(pause)
        raise AssertionError

    def _read_ahead(self) -> None:
        if self._thread != threading.get_ident():
            # Calls of one thread are in order, on every host; those of two threads are not.
            for records, _ in self._pending:
                with contextlib.suppress(Exception):
                    jax.block_until_ready(records)
            self._thread = threading.get_ident()
        while len(self._pending) < self._of.prefetch:
            try:
                records, batch = self._hosts.next()
                records.copy_to_host_async()
            except Exception as error:  # where the pipeline runs in this process
                records, batch = error, None
            self._pending.append((records, batch))

    def get_state(self) -> bytes:
        """Where it is, as JSON: each host's own state after the batch that was taken last.

        An iterator of the pipeline that has `get_state` and `set_state`, as grain's have, says it itself. Any other is
        set by reading as many batches again. Valid for the same pipeline and the same number of shards.
        """
        with self._lock:
            for index, state in enumerate(self._shards or ()):
                if "too_large" in state:
                    raise ValueError(
                        f"the state of shard {index} takes {state['too_large']} bytes, and there is room for "
                        f"{self._of.state_bytes}: Batches(..., state_bytes=...) gives it more"
                    )
            return json.dumps({"format": _FORMAT, "batches": self._batches, "shards": self._shards}).encode()

    def set_state(self, state: bytes) -> None:
        """Goes on with the batch after those that had been taken when `get_state` gave this."""
        try:
            found = json.loads(state)
            if found["format"] != _FORMAT:
                raise ValueError(f"its format is {found['format']!r}")
            batches, shards = int(found["batches"]), found["shards"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"not the state of an iterator of atoll.data: {error}") from None
        with self._lock:
            self._begin(shards, batches)

    def close(self) -> None:
        """Lets go of the batches that were read ahead, and of the pipelines on the hosts."""
        with self._lock:
            self._hosts = None
            self._pending.clear()
            self._end = self._end or ValueError("this iterator has been closed; set_state opens it again")


class _Hosts:
    """The script's side of the pipelines: an object of `_HostPipeline` on each host of the sharding's devices."""

    def __init__(self, batches: Batches, state: list[Any] | None) -> None:
        sharding = jax.tree.map(_beside_host, batches.sharding)
        first = jax.tree.leaves(sharding)[0]
        devices = first._device_assignment
        one_a_host = list({getattr(each, "host", each.process_index): each for each in devices[::-1]}.values())[::-1]
        records = NamedSharding(Mesh(np.array(one_a_host), ("host",)), PartitionSpec("host"))
        make: Any = colocated_python.colocated_python_class(_HostPipeline)
        room = batches.state_bytes + _REST_BYTES
        # The pipelines live as long as this does.
        self._pipeline = make(batches.source, sharding, records, room, state)
        weakref.finalize(self, self.__dict__.clear)  # at exit, too, while JAX still can
        spec = jax.ShapeDtypeStruct((len(one_a_host), room), np.uint8, sharding=records)
        calls = {"in_specs": ((), {}), "devices": devices}
        self._open = self._pipeline.open.specialize(out_specs_fn=lambda: spec, **calls)
        self.next = self._pipeline.next.specialize(**calls)

    def open(self) -> bool:
        """Whether a host has no batches at all. Raises ValueError where their first batches are not alike."""
        records = _unpack(self._open())
        if len({each["batch"] for each in records} - {None}) > 1:
            text = "; ".join(f"host {each['host']}: {each['batch']}" for each in records)
            raise ValueError(f"the hosts' first batches are not alike: {text}")
        return any(each["ended"] for each in records)


class _HostPipeline:
    """A host's side: reads the pipeline, and puts each batch on this host's devices with what follows it.

    A *record* is a row of bytes, JSON of one length: whether the pipeline has ended, and its state after the batch.
    """

    def __init__(self, source: Source, sharding: Any, records: Any, room: int, state: list[Any] | None) -> None:
        self._source, self._start = source, state
        self._sharding = sharding
        self._records = records
        self._room = room

    def open(self) -> jax.Array:
        """Makes the pipeline and reads its first batch; the record says what that is like."""
        shards = {_own_shard(each) for each in jax.tree.leaves(self._sharding)}
        if len(shards) > 1:
            raise ValueError(f"the arrays of a batch have their rows on this host in different ways: {sorted(shards)}")
        (self._shard,) = shards
        self._pipeline = _Pipeline(_part_of(self._source, self._shard))
        if self._start is not None:
            if len(self._start) != self._shard.count:
                raise ValueError(f"a state of {len(self._start)} shards, where the sharding makes {self._shard.count}")
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
                f"this batch is {_described(specs)}, and the first was {_described(self._specs)}: all are to be alike."
                " A last one that is short is left out by .batch(..., drop_remainder=True) of grain and tf.data"
            )
        return self._record(""), self._global(batch)

    def _record(self, batch: str | None) -> jax.Array:
        row = {"host": jax.process_index(), "shard": astuple(self._shard), "ended": batch is None, "batch": batch}
        state = self._pipeline.get_state()
        size = len(json.dumps(state, default=_plain))
        if size > self._room - _REST_BYTES:
            state = {"too_large": size}
        text = json.dumps(row | {"state": state}, default=_plain).encode().ljust(self._room)
        return jax.make_array_from_process_local_data(self._records, np.frombuffer(text, np.uint8)[None])

    def _global(self, batch: Any) -> Any:
        def put(leaf: Any, sharding: Any) -> jax.Array:
            shape = (len(leaf) * self._shard.count, *np.shape(leaf)[1:])
            return jax.make_array_from_process_local_data(sharding, np.asarray(leaf), shape)

        return jax.tree.map(put, batch, jax.tree.broadcast(self._sharding, batch))


class _Pipeline(Iterator[Any]):
    """The iterator of a pipeline, and its state as JSON: its own, or how many batches it has read."""

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
                raise ValueError(f"the state is after {state['read']} batches, and the pipeline has {self._read}")


_END = object()


def _part_of(source: Source, shard: Shard) -> Iterable[Any]:
    if callable(source):
        return source(shard)
    if shard.count == 1:
        return source
    if hasattr(source, "__getitem__"):
        return source[shard.index :: shard.count]  # type: ignore[no-any-return]
    raise TypeError(
        f"{type(source).__name__} cannot be sliced, so each of {shard.count} hosts would read all of it: give a"
        " function from an atoll.data.Shard to the iterable of this shard's batches"
    )


def _own_shard(sharding: Sharding) -> Shard:
    """Which rows this process has, among the sets of rows that processes have."""
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
        raise ValueError(f"{name} is a scalar: the first axis of each array of a batch is its rows")
    if array.dtype.kind in "OSTUMm":
        raise TypeError(f"{name} is of dtype {array.dtype}, which devices do not hold")
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _described(specs: Any) -> str:
    leaves = jax.tree.leaves_with_path(specs)
    text = ", ".join(f"batch{jax.tree_util.keystr(path)} {spec.dtype}{list(spec.shape)}" for path, spec in leaves)
    return text if len(text) < 1000 else f"{text[:1000]}... ({zlib.crc32(text.encode()):x})"


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"the state of the pipeline's iterator has a {type(value).__name__}, which JSON does not hold")


def _beside_host(sharding: Any) -> Any:
    """The same sharding over the CPU devices beside its devices, where the hosts make arrays."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(colocated_python.colocated_cpu_devices(sharding.mesh), sharding.spec)
    return SingleDeviceSharding(*colocated_python.colocated_cpu_devices(tuple(sharding.device_set)))


def _unpack(records: Any) -> list[dict[str, Any]]:
    if isinstance(records, Exception):
        raise records
    return [json.loads(row.tobytes()) for row in np.asarray(records)]


def _is_loss(error: Exception) -> bool:
    return isinstance(error, jax.errors.JaxRuntimeError) and _LOST.match(str(error)) is not None
