"""The executor: walks plans in the order in which the controller sent them.

One thread enqueues; nothing in it waits for data. Small programs may run inside the call that enqueues them, and
may wait there for a peer: that is why this thread reads no messages. A second thread learns from XLA when runs
have ended, and a pool of threads reads results for clients and other hosts.

Every argument is checked here before XLA sees it, since XLA ends the process over a bad one.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np

from atoll.errors import Code, Status, invalid, status_of
from atoll.ir import plan as p
from atoll.transport import messages as m
from atoll.worker import host_data
from atoll.worker.data_port import DataPort
from atoll.worker.ends import ArrayEnd, Deletions, Ends, RunEnd
from atoll.worker.functions import Function, Functions
from atoll.worker.store import Buffer, Store, TypeKeys
from atoll.worker.xla import Backend, numpy_dtype, shards_of

_log = logging.getLogger(__name__)

# Each may wait for a client that does not read; there are enough for the others.
READ_THREADS = 64


class _Completion:
    """Stands for the end of a call or of a read; what a caller that asked for its status holds."""

    def is_deleted(self) -> bool:
        return False

    def delete(self) -> None:
        return None


class Executor:
    """Owns the stores. `submit` takes messages from the control thread; `report` sends back what came of them."""

    def __init__(
        self,
        backend: Backend,
        functions: Functions,
        data_port: DataPort,
        keys: TypeKeys,
        report: Callable[..., None],
        host: int,
    ) -> None:
        self._backend = backend
        self._functions = functions
        self._data_port = data_port
        self._inbox = data_port.inbox
        self._keys = keys
        self._report = report
        self._host = host
        self._stores: dict[int, Store] = {}
        self._plans: dict[int, p.Plan] = {}
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ends = Ends(report)
        self._deletions = Deletions()
        self._readers = ThreadPoolExecutor(READ_THREADS, "atoll-read")
        self._readers_lock = threading.Lock()
        threading.Thread(target=self._work, name="atoll-executor", daemon=True).start()

    def submit(self, message: Any) -> None:
        """Takes one of Run, Free, KeepPlan, DropPlan, OpenStore, CloseStore; they are done in order."""
        self._queue.put(message)

    # ---- the executor's thread

    def _work(self) -> None:
        while True:
            message = self._queue.get()
            try:
                if type(message) is m.Run:
                    self._run(message)
                elif type(message) is m.Free:
                    self._free(message)
                elif type(message) is m.KeepPlan:
                    self._plans[message.plan] = message.body
                elif type(message) is m.DropPlan:
                    self._plans.pop(message.plan, None)
                elif type(message) is m.OpenStore:
                    self._stores.setdefault(message.session, Store())
                elif type(message) is m.CloseStore:
                    self._stores.pop(message.session, None)
            except Exception:
                _log.exception("the executor failed at %s", type(message).__name__)
            del message  # or the last run's arguments live until the next message

    def _free(self, message: m.Free) -> None:
        store = self._stores.get(message.session)
        if store is not None:
            for handle in message.handles:
                store.free(handle, message.delete)

    def _run(self, run: m.Run) -> None:
        started = time.monotonic_ns()
        store = self._stores.get(run.session)
        plan = self._plans.get(run.plan)
        if store is None:  # its session has ended
            self._report(m.Done(((run.sequence, started, started),)))
            return
        if plan is None:
            self._report(m.Failed(run.sequence, Status(Code.INTERNAL, f"plan {run.plan} is not on this host")))
            return
        waits: list[Any] = []
        reads: list[Callable[[], None]] = []
        try:
            handles = dict(zip(plan.arguments, run.arguments, strict=True))
            values: dict[int, Buffer] = {value: store.get(handle) for value, handle in handles.items()}
            for step in plan.steps:
                self._step(step, run, values, waits, reads)
            for value, handle in zip(plan.results, run.results, strict=True):
                store.set(handle, values[value])
        except Exception as error:
            status = _named(status_of(error), plan.name)
            for handle in run.results:
                store.set(handle, status)
            self._report(m.Failed(run.sequence, status))
            return
        if not reads:
            self._ends.expect(self._device_of(plan), run.sequence, started, waits)
        elif self._reads_at_once(plan, run, values):
            self._read(run, reads)  # a hand-over to another thread would take longer
        else:
            self._readers.submit(self._read, run, reads)

    def _step(
        self,
        step: p.Step,
        run: m.Run,
        values: dict[int, Buffer],
        waits: list[Any],
        reads: list[Callable[[], None]],
    ) -> None:
        if type(step) is p.Execute:
            self._execute(step, run, values, waits)
        elif type(step) is p.Put:
            values[step.output] = self._put(step, run)
            waits.append(ArrayEnd(values[step.output].array, self._deletions))
        elif type(step) is p.Get:
            reads.append(self._get(step, run, values))
        elif type(step) is p.Move:
            for source, target, array in zip(step.inputs, step.outputs, step.arrays, strict=True):
                buffer = values[source]
                donate = step.donate and not buffer.is_read
                with self._deletions.lock if donate else nullcontext():
                    moved = self._backend.move(_alive(buffer), array, donate)
                values[target] = self._buffer(moved, array, self._keys.layout(buffer.key))
                waits.append(ArrayEnd(moved, self._deletions))
        elif type(step) is p.Select:
            values[step.output] = self._select(step, values)
        elif type(step) is p.Send:
            reads.append(self._send(step, run, values))
        elif type(step) is p.Receive:
            values[step.output] = self._receive(step, run)
            waits.append(ArrayEnd(values[step.output].array, self._deletions))

    def _reads_at_once(self, plan: p.Plan, run: m.Run, values: dict[int, Buffer]) -> bool:
        """Whether reading would wait neither for the device nor for the client."""
        return (
            type(plan.steps[-1]) is p.Get
            and all(_is_small_and_ready(values[value]) for value in plan.arguments)
            and self._data_port.takes_at_once(run.session, _SMALL_BYTES)
        )

    def _device_of(self, plan: p.Plan) -> int:
        """A device that the plan's last step keeps busy: its runs' ends are awaited in that device's line."""
        step = plan.steps[-1]
        if type(step) is p.Execute:
            return self._functions.get(step.function).ordinals[0]
        if type(step) is p.Move:
            return step.arrays[0].devices[0]
        return step.array.devices[0] if isinstance(step, p.Put | p.Receive | p.Select) else 0

    # ---- compute

    def _execute(self, step: p.Execute, run: m.Run, values: dict[int, Buffer], waits: list[Any]) -> None:
        function = self._functions.get(step.function)
        buffers = [values[value] for value in step.inputs]
        if [buffer.key for buffer in buffers] != function.input_keys:
            self._check_arguments(function, buffers)
        arguments = [buffer.array for buffer in buffers]
        for array in arguments:
            if array.is_deleted():
                raise invalid("an argument has been deleted or donated")
        for position in step.preserved:
            arguments[position] = self._backend.copy(arguments[position])
        for position in step.donated:
            if buffers[position].is_read:
                arguments[position] = self._backend.copy(arguments[position])
        if len(step.donated) > 0:
            _check_donation(step.donated, buffers)
        with self._deletions.lock if step.donated else nullcontext():
            outputs, token = function.executable.execute(arguments, run.sequence)
        value = step.first_output
        for array, key in zip(outputs, function.output_keys, strict=True):
            values[value] = Buffer(array, key, _COMPUTED)
            value += 1
        if step.completion:
            values[value] = Buffer(_Completion(), -1, None)
        waits.append(RunEnd(token, outputs, self._deletions))

    def _check_arguments(self, function: Function, buffers: list[Buffer]) -> None:
        """Raises INVALID_ARGUMENT that says which argument is wrong, unless all differ in tokens alone."""
        wanted = function.input_keys
        if len(wanted) != len(buffers):
            raise invalid(f"expected {len(wanted)} arguments, got {len(buffers)}")
        for position, (key, buffer) in enumerate(zip(wanted, buffers, strict=True)):
            if position in function.token_positions and buffer.key >= 0:
                continue  # JAX stands an empty array in for a token
            if key != buffer.key:
                got = "no array" if buffer.key < 0 else self._keys.describe(buffer.key)
                raise invalid(f"argument {position}: expected {self._keys.describe(key)}, got {got}")

    # ---- data in

    def _put(self, step: p.Put, run: m.Run) -> Buffer:
        contents: dict[int, tuple[Any, Callable[[], None]]] = {}
        try:
            for piece in step.pieces:
                if piece.feed not in contents:
                    contents[piece.feed] = self._inbox.take(run.session, run.feeds[piece.feed])
            array = self._backend.put(step.array, self._shards(step, contents))
        finally:
            for _, done in contents.values():
                done()
        return self._buffer(array, step.array, _unusual_layout(step.array))

    def _shards(
        self, step: p.Put, contents: dict[int, tuple[Any, Callable[[], None]]]
    ) -> list[np.ndarray[Any, Any]]:
        """What each local shard is to hold. Raises INVALID_ARGUMENT where the bytes do not fit."""
        shards = []
        for piece in step.pieces:
            content, _ = contents[piece.feed]
            whole = host_data.view(content, step.array.dtype, piece.shape, piece.strides)
            shards.append(host_data.cut(whole, piece.box))
        for shard, shape in zip(shards, step.array.shard_shapes, strict=True):
            if shard.shape != shape:
                raise invalid(f"a shard of shape {list(shape)} was given contents of shape {list(shard.shape)}")
        if any(isinstance(content, memoryview) for content, _ in contents.values()):
            shards = [np.array(shard) for shard in shards]  # the segment is the sender's: take the bytes along
        return shards

    def _receive(self, step: p.Receive, run: m.Run) -> Buffer:
        array = step.array
        dtype = numpy_dtype(array.dtype)
        shards = [np.empty(shape, dtype) for shape in array.shard_shapes]
        for piece in step.pieces:
            content, done = self._inbox.take(run.session, run.feeds[piece.feed])
            shape = tuple(stop - start for start, stop in piece.box)
            try:
                shards[piece.shard][tuple(slice(a, b) for a, b in piece.box)] = host_data.view(
                    content, array.dtype, shape, None
                )
            finally:
                done()
        return self._buffer(self._backend.put(array, shards), array, _unusual_layout(array))

    def _select(self, step: p.Select, values: dict[int, Buffer]) -> Buffer:
        shards = []
        sources = [values[step.inputs[take.input]] for take in step.takes]
        for i, (take, source) in enumerate(zip(step.takes, sources, strict=True)):
            shard = shards_of(_alive(source))[take.shard]
            if step.bitcast:
                shard = self._backend.bitcast(shard, step.array.dtype, step.array.shard_shapes[i])
            elif shard.shape != step.array.shard_shapes[i]:
                raise invalid(f"a shard of shape {list(shard.shape)} cannot be one of {step.array.shard_shapes[i]}")
            shards.append(shard)
        array = self._backend.stack(step.array, shards)
        if step.bitcast:  # a copy, in the default layout
            return self._buffer(array, step.array)
        layouts = {self._keys.layout(source.key) for source in sources}
        if len(layouts) > 1:
            raise invalid("shards of different layouts cannot be one array")
        buffer = self._buffer(array, step.array, layouts.pop())
        for source in sources:
            buffer.readers.join(source.readers)
        return buffer

    def _buffer(self, array: Any, spec: p.LocalArray, layout: tuple[int, ...] | None = None) -> Buffer:
        return Buffer(array, self._keys.of(spec.dtype, spec.shard_shapes, spec.devices, layout), spec)

    # ---- data out

    def _get(self, step: p.Get, run: m.Run, values: dict[int, Buffer]) -> Callable[[], None]:
        buffer = values[step.input]
        shards = shards_of(_alive(buffer))
        self._hold(buffer)
        values[step.completion] = Buffer(_Completion(), -1, None)
        feed = run.feeds[step.feed]

        def read() -> None:
            try:
                channel = self._data_port.to_proxy(run.session)
                arrays = [np.asarray(shards[i]) for i in step.shards]
                dtype = arrays[0].dtype
                if dtype.kind == "T":
                    channel.send(run.session, feed, [host_data.encode_strings(arrays[0])])
                    return
                whole = tuple((0, size) for size in step.shape)
                if step.strides is None and step.boxes == (whole,) and arrays[0].flags.c_contiguous:
                    channel.send_in_parts(run.session, feed, _as_bytes(arrays[0]))
                    return
                size, _ = host_data.region_bytes(dtype.itemsize, step.shape, step.strides)
                channel.send_filled(
                    run.session,
                    feed,
                    size,
                    lambda target: host_data.fill(target, dtype, step.shape, step.strides, step.boxes, arrays),
                )
            finally:
                self._let_go(buffer)

        return read

    def _send(self, step: p.Send, run: m.Run, values: dict[int, Buffer]) -> Callable[[], None]:
        buffer = values[step.input]
        shards = shards_of(_alive(buffer))
        self._hold(buffer)

        def read() -> None:
            try:
                for piece in step.pieces:
                    part = np.ascontiguousarray(host_data.cut(np.asarray(shards[piece.shard]), piece.box))
                    feed = run.feeds[piece.feed]
                    content = host_data.encode_strings(part) if part.dtype.kind == "T" else _as_bytes(part)
                    if piece.host == self._host:
                        self._inbox.put(run.session, feed, np.array(np.frombuffer(content, np.uint8)))
                    else:
                        self._data_port.to_host(piece.host).send(run.session, feed, [content])
            finally:
                self._let_go(buffer)

        return read

    def _hold(self, buffer: Buffer) -> None:
        with self._readers_lock:
            buffer.readers.add(1)

    def _let_go(self, buffer: Buffer) -> None:
        with self._readers_lock:
            buffer.readers.add(-1)

    def _read(self, run: m.Run, reads: list[Callable[[], None]]) -> None:
        failure: Status | None = None
        started = time.monotonic_ns()
        for read in reads:
            try:
                read()
            except Exception as error:
                failure = failure or status_of(error)
        if failure is not None:
            self._report(m.Failed(run.sequence, failure))
        else:
            self._report(m.Done(((run.sequence, started, time.monotonic_ns()),)))


_SMALL_BYTES = 16 * 1024


def _is_small_and_ready(buffer: Buffer) -> bool:
    nbytes = getattr(buffer.array, "nbytes", None)  # a completion has none
    return nbytes is not None and nbytes <= _SMALL_BYTES and buffer.array.is_ready()


# What a computed buffer is made of is known to its function, not kept with each buffer.
_COMPUTED = p.LocalArray("", (), (), (), ())


def _unusual_layout(array: p.LocalArray) -> tuple[int, ...] | None:
    """The layout that `Backend.put` makes the array with; None for the default."""
    layout = array.layout
    return None if layout is None or layout == tuple(range(len(layout))) else layout


def _alive(buffer: Buffer) -> Any:
    if buffer.spec is None:
        raise invalid("a call's completion is no array")
    if buffer.array.is_deleted():
        raise invalid("the array has been deleted or donated")
    return buffer.array


def _check_donation(donated: tuple[int, ...], buffers: list[Buffer]) -> None:
    for position in donated:
        if sum(other.array is buffers[position].array for other in buffers) > 1:
            raise invalid(f"argument {position} is donated and also passed a second time to the same call")


def _named(status: Status, program: str) -> Status:
    if not program or program in status.message:
        return status
    return Status(status.code or int(Code.INTERNAL), f"{status.message} (in {program})", status.payloads)


def _as_bytes(array: np.ndarray[Any, Any]) -> Any:
    return array.reshape(-1).view(np.uint8).data if array.size else b""

