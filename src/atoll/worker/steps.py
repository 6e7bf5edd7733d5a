"""What each step of a plan does on this host's devices. Nothing here waits for data but the threads that read it.

Every argument is checked here before XLA sees it, since XLA ends the process over a bad one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from atoll.errors import Code, Status, StatusError, invalid
from atoll.ir import plan as p
from atoll.protocol import messages as m
from atoll.transfers.data_port import DataPort
from atoll.worker import host_data
from atoll.worker.ends import ArrayEnd, Deletions, RunEnd, Wait
from atoll.worker.functions import Function, Functions
from atoll.worker.store import Buffer, TypeKeys
from atoll.worker.xla.arrays import numpy_dtype, shards_of
from atoll.worker.xla.backend import Backend

SMALL_BYTES = 16 * 1024


class Completion:
    """Stands for the end of a call or of a read; what a caller that asked for its status holds."""

    def is_deleted(self) -> bool:
        return False

    def delete(self) -> None:
        return None


@dataclass(slots=True)
class Read:
    """What a thread is to read and send off; `at_once()` tells whether that would wait for nobody."""

    read: Callable[[], None]
    at_once: Callable[[], bool]


@dataclass(slots=True)
class PlanRun:
    """One run of a plan. `segments` counts those whose turns have come."""

    run: m.Run
    plan: p.Plan
    segments: int = 0
    failure: Status | None = None
    values: dict[int, Buffer] | None = None  # from its first step on


@dataclass(slots=True, eq=False)
class DispatchUnit:
    """Legs of a walk that have one turn, from `segment` up to `stop`; and how far it has come.

    `waits` are the ends of what it has enqueued; `reads` what threads are yet to read for it.
    """

    walk: PlanRun
    segment: int
    stop: int
    sequence: int
    collective: bool
    position: int = 0  # among the leg's steps
    started: int = 0  # in nanoseconds
    waits: list[Wait] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)


class Steps:
    """Does steps, on the executor's thread."""

    def __init__(
        self,
        backend: Backend,
        functions: Functions,
        data_port: DataPort,
        keys: TypeKeys,
        host: int,
    ) -> None:
        self._backend = backend
        self._functions = functions
        self._data_port = data_port
        self._inbox = data_port.inbox
        self._keys = keys
        self.deletions = Deletions()
        self._host = host
        self._readers_lock = threading.Lock()

    def take(self, step: p.Step, unit: DispatchUnit) -> None:
        """Does one step: reads and writes the walk's values, and notes what the stretch's end depends on."""
        values, run = unit.walk.values, unit.walk.run
        assert values is not None
        if type(step) is p.Execute:
            self._execute(step, unit, values)
        elif type(step) is p.Put:
            values[step.output] = self._put(step, run)
            unit.waits.append(ArrayEnd(values[step.output].array, self.deletions))
        elif type(step) is p.Get:
            unit.reads.append(self._get(step, run, values))
        elif type(step) is p.Move:
            for source, target, array in zip(step.inputs, step.outputs, step.arrays, strict=True):
                values[target] = self._move(values[source], array, step.donate)
                unit.waits.append(ArrayEnd(values[target].array, self.deletions))
        elif type(step) is p.Select:
            values[step.output] = self._select(step, values)
        elif type(step) is p.Send:
            self._send(step, unit, values)
        elif type(step) is p.Receive:
            values[step.output] = self._receive(step, run)
            unit.waits.append(ArrayEnd(values[step.output].array, self.deletions))

    def device_of(self, segment: p.Segment) -> int:
        """A device that the leg's last step keeps busy: its end is awaited in that device's line."""
        step = segment.steps[-1]
        if type(step) is p.Execute:
            return self._functions.get(step.function).ordinals[0]
        if type(step) is p.Move:
            return step.arrays[0].devices[0]
        return step.array.devices[0] if isinstance(step, p.Put | p.Receive | p.Select) else 0

    # ---- compute

    def _execute(self, step: p.Execute, unit: DispatchUnit, values: dict[int, Buffer]) -> None:
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
        with self.deletions.lock if step.donated else nullcontext():
            outputs, token = function.executable.execute(arguments, unit.sequence)
        value = step.first_output
        for array, key in zip(outputs, function.output_keys, strict=True):
            values[value] = Buffer(array, key, _COMPUTED)
            value += 1
        if step.completion:
            values[value] = Buffer(Completion(), -1, None)
        waits = unit.waits
        if waits and type(waits[-1]) is RunEnd and waits[-1].is_within(arguments, function.ordinals):
            waits.pop()
        waits.append(RunEnd(token, outputs, self.deletions, function.ordinals))

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

    def _shards(self, step: p.Put, contents: dict[int, tuple[Any, Callable[[], None]]]) -> list[np.ndarray[Any, Any]]:
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
            shards = [host_data.copied(shard) for shard in shards]  # the segment is the sender's: take the bytes along
        return shards

    def _receive(self, step: p.Receive, run: m.Run) -> Buffer:
        array = step.array
        dtype = numpy_dtype(array.dtype)
        shards = [host_data.empty(shape, dtype) for shape in array.shard_shapes]
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

    def _move(self, buffer: Buffer, array: p.LocalArray, donate: bool) -> Buffer:
        donate = donate and not buffer.is_read
        with self.deletions.lock if donate else nullcontext():
            moved = self._backend.move(_alive(buffer), array, donate)
        return self._buffer(moved, array, self._keys.layout(buffer.key))

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

    def _get(self, step: p.Get, run: m.Run, values: dict[int, Buffer]) -> Read:
        buffer = values[step.input]
        shards = shards_of(_alive(buffer))
        self._hold(buffer)
        values[step.completion] = Buffer(Completion(), -1, None)
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

        def at_once() -> bool:
            return _is_small_and_ready(buffer) and self._data_port.takes_at_once(run.session, SMALL_BYTES)

        return Read(read, at_once)

    def _send(self, step: p.Send, unit: DispatchUnit, values: dict[int, Buffer]) -> None:
        run = unit.walk.run
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
                        self._send_to(piece.host, run.session, feed, content)
            finally:
                self._let_go(buffer)

        hosts = {piece.host for piece in step.pieces} - {self._host}

        def at_once() -> bool:
            return _is_small_and_ready(buffer) and all(
                self._data_port.host_takes_at_once(host, SMALL_BYTES) for host in hosts
            )

        unit.reads.append(Read(read, at_once))

    def _send_to(self, host: int, session: int, feed: int, content: Any) -> None:
        try:
            self._data_port.to_host(host).send(session, feed, [content])
        except OSError as error:  # as ConnectError is, too
            # By this code the controller knows to wait a while, for the name of what befell that host.
            raise StatusError(Code.UNAVAILABLE, f"host {host} cannot be reached: {error}") from error

    def _hold(self, buffer: Buffer) -> None:
        with self._readers_lock:
            buffer.readers.add(1)

    def _let_go(self, buffer: Buffer) -> None:
        with self._readers_lock:
            buffer.readers.add(-1)


def _is_small_and_ready(buffer: Buffer) -> bool:
    nbytes = getattr(buffer.array, "nbytes", None)  # a completion has none
    return nbytes is not None and nbytes <= SMALL_BYTES and buffer.array.is_ready()


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


def _as_bytes(array: np.ndarray[Any, Any]) -> Any:
    return array.reshape(-1).view(np.uint8).data if array.size else b""
