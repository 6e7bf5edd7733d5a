"""Runs the steps of plans on this host's devices. The thread that runs steps does not wait for data.

Other threads do: those that read data, that wait for joint runs or for arrays of another world, and that run functions
which call their client.

All arguments are checked before they are passed to XLA, which ends the process if an argument is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np

from atoll.cluster.processes.bugs import start_in
from atoll.devices.device import DeviceArray, DeviceBackend
from atoll.errors import StatusError, invalid
from atoll.host_services import host_data
from atoll.host_services.calls.function_callbacks import Callbacks
from atoll.host_services.python.python_sessions import Input
from atoll.ir import plan as p
from atoll.ir.program import STORAGE_STREAM
from atoll.peers.data_port import DataPort
from atoll.protocol import messages as m
from atoll.quantities import counted
from atoll.transfers.dtypes import numpy_dtype
from atoll.transfers.transfer_engine import nothing_to_release
from atoll.worker.client_reads import ClientReads
from atoll.worker.completions import ArrayCompletion, DeletionGuard, RunCompletion
from atoll.worker.dispatch_unit import DispatchUnit
from atoll.worker.function_records import Function
from atoll.worker.future_arrays import (
    ClientRunThreads,
    FutureArray,
    Outcome,
    live_array,
    raise_failure,
    runs_on_own_thread,
    stream_of,
)
from atoll.worker.host_functions import HostFunctions
from atoll.worker.host_network import HostNetwork, is_small_and_ready
from atoll.worker.joint_runs import JointRuns
from atoll.worker.store import COMPUTED, NO_ARRAY, Buffer, MemoryHolds, TypeKeys, share

# Sessions that wait at the same time for arrays that belong to another world, or for joint runs.
_WAITS = 8


class StepRunner:
    """Runs steps, on the executor's thread.

    `report` sends messages to the controller. `on_outcome` receives the ends of calls of Python and of runs that have
    threads. Both are called on any thread.
    """

    def __init__(
        self,
        backend: DeviceBackend,
        functions: HostFunctions,
        data_port: DataPort,
        network: HostNetwork,
        keys: TypeKeys,
        report: Callable[..., None],
        on_outcome: Callable[[Outcome], None],
    ) -> None:
        self._backend, self._functions = backend, functions
        self._records, self._followers, self._placer = functions.records, functions.followers, functions.placer
        self._network = network
        self._inbox = data_port.inbox
        self._keys = keys
        self._python = functions.python
        self._on_outcome = on_outcome
        self.deletions = DeletionGuard()
        self.release_memory = backend.release_memory
        self._waits = ThreadPoolExecutor(_WAITS, "atoll-wait-for-arrays")
        self.joint_runs = JointRuns(self._waits, backend.shards, self.deletions, functions.placer.closing_status)
        self.holds = MemoryHolds()
        self.client_reads = ClientReads(backend, data_port, self.holds, report)
        self._client_runs = ClientRunThreads()

    def run(self, step: p.Step, unit: DispatchUnit) -> None:
        """Run one step, which reads and writes the run's values, and adds to the unit's completions and reads."""
        values = unit.plan_run.values
        assert values is not None
        STEP_METHODS[type(step)](self, step, unit, values)

    @property
    def may_wait(self) -> bool:
        """Return whether steps may have to wait: whether this host has had functions in worlds, or joint ones."""
        return self._placer.may_wait

    def try_prepare(self, step: p.Step, unit: DispatchUnit, wake: Callable[[], None]) -> bool:
        """Bring the inputs of a call over to its world if they belong to another one.

        Return whether the step need not wait: for its function while that moves to another world, for a joint run, or
        for inputs that belong to another world, until they can be brought over. If it has to wait, call `wake` on any
        thread afterwards.
        """
        values = unit.plan_run.values
        assert values is not None
        if type(step) is p.Execute:
            return self._try_prepare_call(step, values, wake)
        if type(step) is p.Move or type(step) is p.Select:
            away = self._away(step.inputs, values, 0)
            return not away or self._are_ready(away, wake)
        return True

    def _try_prepare_call(self, step: p.Execute, values: dict[int, Buffer], wake: Callable[[], None]) -> bool:
        if self._placer.awaits(step.function, wake):
            return False
        function = self._records.get(step.function)
        if function.home is not None:
            function = self._followers.in_open_world(step.function)
        world, worlds = function.loaded.world, self._backend.worlds
        inputs = map(values.__getitem__, step.inputs)
        if function.loaded.is_joint and self.joint_runs.awaits(world, function.ordinals, inputs, wake):
            return False
        if worlds is None or not worlds.have_been_joined or not (away := self._away(step.inputs, values, world)):
            return True
        if not world and function.is_apart and self._followers.follow(step.function, worlds.world_of(away[0].array)):
            return self._try_prepare_call(step, values, wake)
        if not self._are_ready(away, wake):
            return False
        for each in away:
            each.array, each.world = worlds.bring(each.array, world), world
        return True

    def _away(self, inputs: Sequence[int], values: dict[int, Buffer], world: int) -> list[Buffer]:
        """Return the inputs that belong to another world. Other hosts have the inputs that this host lacks."""
        worlds = self._backend.worlds
        if worlds is None or not worlds.have_been_joined:
            return []
        away: dict[Buffer, None] = {}
        for value in inputs:
            each = values.get(value)
            if each is None or each.spec is None or each.world == world:  # nearly always, since calls repeat
                continue
            if not each.array.is_deleted() and not worlds.is_at_home(each.array, world):
                away[each] = None
        return list(away)

    def _are_ready(self, buffers: Sequence[Buffer], wake: Callable[[], None]) -> bool:
        """Return whether all of the arrays are ready. Otherwise, call `wake` on any thread when they are."""
        unready = [each.array for each in buffers if not each.array.is_ready()]
        if unready:
            start_in(self._waits, _wait_for, unready, wake)
        return not unready

    def drop_function(self, name: str) -> None:
        """Drop a function that no later run needs."""
        self._functions.drop(name)

    def session_of(self, function: str) -> int:
        return self._functions.session_of(function)

    def callbacks_of(self, segments: Sequence[p.Segment]) -> tuple[Callbacks, ...]:
        """Return the calls of the segments' functions into their client's process."""
        if not self._functions.calling_clients:
            return ()
        names = {step.function for segment in segments for step in segment.steps if type(step) is p.Execute}
        found = [self._functions.callbacks_of(name) for name in names]
        return tuple(callbacks for callbacks in found if callbacks is not None)

    def device_of(self, segment: p.Segment) -> int:
        """Return a device that the segment's last step keeps busy. Its watcher reports the segment's completion.

        The controller may have dropped the step's function after the step started, for example because another island
        of the function failed. Any watcher can report the completion then.
        """
        step = segment.steps[-1]
        if type(step) is not p.Execute:
            return p.device_of(step)
        function = self._records.loaded(step.function)
        return 0 if function is None else function.ordinals[0]

    def shards_of(self, array: DeviceArray) -> Sequence[DeviceArray]:
        """Return the shards of an array. Safe on any thread."""
        return self._backend.shards(array)

    def devices_of(self, unit: DispatchUnit) -> tuple[int, ...]:
        """Return the devices on which the unit's segment runs functions. Safe on any thread."""
        segments = unit.plan_run.plan.segments
        steps = segments[min(unit.segment, len(segments) - 1)].steps
        found: set[int] = set()
        for step in steps:
            if type(step) is p.Execute:
                with suppress(StatusError):  # the function may have been dropped meanwhile
                    found.update(self._records.get(step.function).ordinals)
        return tuple(found)

    # ---- compute

    def _execute(self, step: p.Execute, unit: DispatchUnit, values: dict[int, Buffer]) -> None:
        function = self._records.get(step.function)
        loaded = function.loaded
        buffers = [values[value] for value in step.inputs]
        arguments = self._arguments_of(step, function, buffers)
        stream = stream_of(unit, loaded)
        if runs_on_own_thread(step, unit, loaded):
            releases = [self.holds.hold(buffer, 1) for buffer in set(buffers)]
            self._client_runs.start(step, unit, values, function, arguments, stream, releases, self._on_outcome)
            return
        copied: list[Buffer] = []
        try:
            if step.donated:
                copied = self._copy_shared_memory(step.donated, buffers, arguments)
                with self.deletions.lock:
                    outputs, token = loaded.execute(arguments, unit.sequence, stream)
            else:
                outputs, token = loaded.execute(arguments, unit.sequence, stream)
        except Exception:
            if loaded.is_joint:  # it may have waited inside the call for hosts that left its world
                self.joint_runs.raise_cause(loaded.world, unit.sequence)
            raise
        for buffer in copied:
            buffer.leave_memory()
        value, world, may_fail_late = step.first_output, loaded.world, function.may_fail_late
        run = None
        if loaded.is_joint:
            run = self.joint_runs.start(world, unit.sequence, function.ordinals, token, outputs)
        for array, key in zip(outputs, function.output_keys, strict=True):
            values[value] = Buffer(array, key, COMPUTED, None, run, world, may_fail_late)
            value += 1
        if step.completion:
            values[value] = Buffer(NO_ARRAY, -1, None)
        completions = unit.completions
        if completions:
            last = completions[-1]
            if type(last) is RunCompletion and last.is_implied_by(arguments, function.ordinals):
                completions.pop()
        completions.append(RunCompletion(run or token, outputs, self.deletions, function.ordinals))

    def _arguments_of(self, step: p.Execute, function: Function, buffers: list[Buffer]) -> list[Any]:
        """Return the arrays to pass to a function, with copies of those to preserve. Raise an error if one is wrong."""
        if [buffer.key for buffer in buffers] != function.input_keys:
            self._check_arguments(function, buffers)
        arguments = [buffer.array for buffer in buffers]
        for array in arguments:
            if array.is_deleted():
                raise_failure(array)
                raise invalid("an argument has been deleted or donated")
        for position in step.preserved:
            arguments[position] = self._backend.copy(arguments[position])
        return arguments

    def _copy_shared_memory(
        self, donated: tuple[int, ...], buffers: list[Buffer], arguments: list[Any]
    ) -> list[Buffer]:
        """Copy donated arguments whose memory is being read or shared with other buffers, and return their buffers.

        Raise INVALID_ARGUMENT if a donated argument is passed a second time.
        """
        copied = []
        for position in donated:
            buffer = buffers[position]
            if sum(other is buffer for other in buffers) > 1:
                raise invalid(f"argument {position} is donated and also passed a second time to the same call")
            if not buffer.is_exclusive:
                arguments[position] = self._backend.copy(arguments[position])
                copied.append(buffer)
        return copied

    def _check_arguments(self, function: Function, buffers: list[Buffer]) -> None:
        """Raise INVALID_ARGUMENT that names the first wrong argument. Tokens may have any type."""
        wanted = function.input_keys
        if len(wanted) != len(buffers):
            raise invalid(f"expected {counted(len(wanted), 'argument')}, got {len(buffers)}")
        for position, (key, buffer) in enumerate(zip(wanted, buffers, strict=True)):
            if position in function.token_positions and buffer.key >= 0:
                continue  # JAX passes an empty array for a token
            if key != buffer.key:
                got = "no array" if buffer.key < 0 else self._keys.describe(buffer.key)
                raise invalid(f"argument {position}: expected {self._keys.describe(key)}, got {got}")

    # ---- Python

    def _call_python(self, step: p.Python, unit: DispatchUnit, values: dict[int, Buffer]) -> None:
        futures: list[tuple[Buffer, FutureArray, p.LocalArray]] = []
        results = [(position, array) for position, _, array in step.results]
        inputs: list[Input] = []
        try:
            for position, value in step.arguments:
                inputs.append(self._python_input(position, values[value]))
            for _, value, array in step.results:
                future = FutureArray()
                values[value] = self._buffer_with_layout(future, array, None)
                futures.append((values[value], future, array))
            self._python.call(
                step.function,
                step.stream,
                inputs,
                results,
                lambda contents: self._on_outcome(Outcome(unit, futures, contents)),
                unit.sequence,
            )
        except BaseException:
            for each in inputs:
                each.release()
            raise
        unit.futures += 1
        if step.completion >= 0:
            values[step.completion] = Buffer(NO_ARRAY, -1, None)

    def leave_out_calls(self, unit: DispatchUnit) -> bool:
        """Hold back the calls of Python behind those that a failed unit does not make. Return whether it has some.

        Other hosts may wait in these calls for this host.
        """
        left_out = False
        first = unit.position
        for segment in unit.plan_run.plan.segments[unit.segment : unit.stop]:
            for step in segment.steps[first:]:
                if type(step) is p.Python and step.stream != STORAGE_STREAM:
                    self._python.leave_out(step.function, step.stream, unit.sequence)
                    left_out = True
            first = 0
        return left_out

    def call_ended(self, sequence: int) -> None:
        """Start the calls of Python that wait behind one of this unit, which has failed here and ended on all hosts."""
        self._python.resume(sequence)

    def _python_input(self, position: int, buffer: Buffer) -> Input:
        """Return an input whose memory is protected until another thread has read it."""
        array = live_array(buffer)
        dtype, shapes = self._keys.shards(buffer.key)
        releases = [self.holds.hold(buffer, len(shapes))]

        def release() -> None:
            with suppress(IndexError):  # already released
                releases.pop()()

        is_future = isinstance(array, FutureArray)

        def read() -> list[np.ndarray[Any, Any]]:
            return [np.asarray(shard) for shard in self._backend.shards(array.wait() if is_future else array)]

        return Input(position, dtype, shapes, not is_future and is_small_and_ready(array), read, release)

    def resolve_future(
        self, buffer: Buffer, future: FutureArray, array: p.LocalArray | None, contents: Any
    ) -> DeviceArray:
        """Resolve the future with its array, and put the array into the buffer, unless the buffer was released."""
        made: DeviceArray = contents if array is None else self._backend.put(array, contents)
        future.set_result(made)
        if buffer.array is future:
            buffer.array = made
            if future.is_deleted():
                buffer.delete()
        return made

    # ---- data in

    def _put(self, step: p.Put, unit: DispatchUnit, values: dict[int, Buffer]) -> None:
        array = self._array_of_contents(step, unit.plan_run.run)
        values[step.output] = self._new_buffer(array, step.array)
        unit.completions.append(ArrayCompletion(array, self.deletions))

    def _array_of_contents(self, step: p.Put, run: m.Run) -> Any:
        """Put the contents that the run carries, or that have arrived as its feeds, on the devices."""
        if run.contents is not None:
            contents = [memoryview(run.contents)] * len(step.pieces)
            return self._backend.put(step.array, self._host_shards(step, contents))
        taken = self._inbox.take_all(run.session, [run.feeds[piece.feed] for piece in step.pieces])
        try:
            contents = [taken[run.feeds[piece.feed]][0] for piece in step.pieces]
            return self._backend.put(step.array, self._host_shards(step, contents))
        finally:
            for _, done in taken.values():
                done()

    def _put_all(self, step: p.PutAll, unit: DispatchUnit, values: dict[int, Buffer]) -> None:
        for output, buffer in zip(step.outputs, self._buffers_of_contents(step, unit.plan_run.run), strict=True):
            values[output] = buffer
            unit.completions.append(ArrayCompletion(buffer.array, self.deletions))

    def _buffers_of_contents(self, step: p.PutAll, run: m.Run) -> list[Buffer]:
        """Put arrays whose contents follow each other in one host buffer on the devices."""
        content, done = run.contents, nothing_to_release
        if content is None:
            content, done = self._inbox.take(run.session, run.feeds[step.feed])
        try:
            whole = np.frombuffer(content, np.uint8) if memoryview(content).nbytes else np.empty(0, np.uint8)
            made, start = [], 0
            for array in step.arrays:
                stop = start + math.prod(array.shape) * numpy_dtype(array.dtype).itemsize
                if stop > whole.nbytes:
                    raise invalid(f"arrays need more than the {whole.nbytes} bytes of their host buffer")
                shard = host_data.view(whole[start:stop], array.dtype, array.shape, None)
                # It is lent, because the sender may reuse its memory.
                made.append(self._new_buffer(self._backend.put(array, [shard], are_lent=True), array))
                start = stop
        finally:
            done()
        return made

    def _host_shards(self, step: p.Put, contents: list[Any]) -> list[np.ndarray[Any, Any]]:
        """Cut the contents of the pieces into local shards. Raise INVALID_ARGUMENT if they do not fit."""
        shards = []
        for piece, content in zip(step.pieces, contents, strict=True):
            whole = host_data.view(content, step.array.dtype, piece.shape, piece.strides)
            shards.append(host_data.cut(whole, piece.box))
        for shard, shape in zip(shards, step.array.shard_shapes, strict=True):
            if shard.shape != shape:
                raise invalid(f"a shard of shape {list(shape)} was given contents of shape {list(shard.shape)}")
        if any(isinstance(content, memoryview) for content in contents):
            shards = [host_data.copied(shard) for shard in shards]  # the sender will reuse its memory
        return shards

    # ---- from device to device

    def _move(self, step: p.Move, unit: DispatchUnit, values: dict[int, Buffer]) -> None:
        for source, target, array in zip(step.inputs, step.outputs, step.arrays, strict=True):
            values[target] = self._move_buffer(values[source], array, step.donate)
            unit.completions.append(ArrayCompletion(values[target].array, self.deletions))

    def _move_buffer(self, buffer: Buffer, array: p.LocalArray, donate: bool) -> Buffer:
        """Return a buffer on other devices, in the layout of the moved one. With `donate`, delete the moved one."""
        source = live_array(buffer)
        if self._keys.shards(buffer.key) != (array.dtype, array.shard_shapes):
            raise invalid(f"{self._keys.describe(buffer.key)} cannot be moved to {array.dtype}{list(array.shape)}")
        consume = donate and buffer.is_exclusive
        with self.deletions.lock if consume else nullcontext():
            moved = self._backend.move(source, array, consume)
        if donate and not consume:
            buffer.leave_memory()
        return self._buffer_with_layout(moved, array, self._keys.layout(buffer.key))

    def _select(self, step: p.Select, unit: DispatchUnit, values: dict[int, Buffer]) -> None:
        values[step.output] = self._select_shards(step, values)

    def _select_shards(self, step: p.Select, values: dict[int, Buffer]) -> Buffer:
        """Return an array of shards of other arrays, whose memory it shares. A bitcast copies them."""
        shards, sources = [], []
        for i, take in enumerate(step.takes):
            source = values[step.inputs[take.input]]
            available = self._backend.shards(live_array(source))
            shard = available[take.shard]
            sources.append((source, take.shard, len(available)))
            dtype, shape, device = self._keys.shard(source.key, take.shard)
            wanted = step.array.dtype, step.array.shard_shapes[i], step.array.devices[i]
            # JAX declares the tokens of several devices, each of shape [], as the shards of an array of shape [0].
            is_token = dtype == "token" and wanted[:2] == ("token", (0,))
            if device != wanted[2] or not (step.bitcast or is_token or (dtype, shape) == wanted[:2]):
                raise invalid(f"{_shard(dtype, shape, device)} cannot be {_shard(*wanted)}")
            shards.append(self._backend.bitcast(shard, *wanted[:2]) if step.bitcast else shard)
        array = self._backend.stack(step.array, shards)
        if step.bitcast:  # a copy, in the default layout
            return self._buffer_with_layout(array, step.array, None)
        layouts = {self._keys.layout(source.key) for source, _, _ in sources}
        if len(layouts) > 1:
            raise invalid("shards of different layouts cannot be one array")
        buffer = self._buffer_with_layout(array, step.array, layouts.pop())
        share(buffer, sources)
        joint_runs = {source.run for source, _, _ in sources}
        if len(joint_runs) == 1:
            buffer.run = joint_runs.pop()
        return buffer

    def view(self, buffer: Buffer) -> Buffer:
        """Return another buffer with the same memory. Raise an error if the buffer has failed or was deleted."""
        array = live_array(buffer)
        count = len(self._keys.shards(buffer.key)[1])
        made = Buffer(array, buffer.key, buffer.spec)
        share(made, [(buffer, i, count) for i in range(count)])
        return made

    def _new_buffer(self, array: Any, spec: p.LocalArray) -> Buffer:
        """Return the buffer of an array that the devices have made for this type, in its layout."""
        return self._buffer_with_layout(array, spec, _unusual_layout(spec))

    def _buffer_with_layout(self, array: Any, spec: p.LocalArray, layout: tuple[int, ...] | None) -> Buffer:
        """Return the buffer of an array of this type in a layout, which is None for the default one."""
        return Buffer(array, self._keys.of(spec.dtype, spec.shard_shapes, spec.devices, layout), spec)

    # ---- data out

    def _get(self, step: p.Get, unit: DispatchUnit, values: dict[int, Buffer]) -> None:
        unit.reads.append(self.client_reads.read(step, unit.plan_run.run, values))

    def _get_all(self, step: p.GetAll, unit: DispatchUnit, values: dict[int, Buffer]) -> None:
        unit.reads.append(self.client_reads.read_all(step, unit.plan_run.run, values))

    def _report_value(self, step: p.Report, unit: DispatchUnit, values: dict[int, Buffer]) -> None:
        unit.reads.append(self.client_reads.report(step, unit, values))

    def _send(self, step: p.Send, unit: DispatchUnit, values: dict[int, Buffer]) -> None:
        buffer = values[step.input]
        array = live_array(buffer)
        release = self.holds.hold(buffer, len(self._backend.shards(array)))
        try:
            self._network.send(step, unit, array, release)
        except Exception:
            release()
            raise

    def _send_rows(self, step: p.SendRows, unit: DispatchUnit, values: dict[int, Buffer]) -> None:
        buffers = [values[value] for value in step.inputs]
        arrays = [live_array(buffer) for buffer in buffers]
        release = self.holds.hold_all([(each, len(self._backend.shards(each.array))) for each in buffers])
        try:
            self._network.send_rows(step, unit, arrays, release)
        except Exception:
            release()
            raise

    def _receive(self, step: p.Receive, unit: DispatchUnit, values: dict[int, Buffer]) -> None:
        received = self._network.receive(step, unit.plan_run.run)
        values[step.output] = self._new_buffer(received, step.array)
        unit.completions.append(ArrayCompletion(received, self.deletions))

    def _receive_rows(self, step: p.ReceiveRows, unit: DispatchUnit, values: dict[int, Buffer]) -> None:
        array, spans = self._network.receive_rows(step, unit)
        values[step.output] = self._new_buffer(array, step.array)
        unit.completions.append(ArrayCompletion(array, self.deletions))
        if spans is not None:
            assert step.spans_array is not None
            values[step.spans] = self._new_buffer(spans, step.spans_array)
            unit.completions.append(ArrayCompletion(spans, self.deletions))


# The method that runs a step, by its type.
STEP_METHODS: dict[type[p.Step], Callable[[StepRunner, Any, DispatchUnit, dict[int, Buffer]], None]] = {
    p.Execute: StepRunner._execute,
    p.Python: StepRunner._call_python,
    p.Put: StepRunner._put,
    p.PutAll: StepRunner._put_all,
    p.Get: StepRunner._get,
    p.GetAll: StepRunner._get_all,
    p.Report: StepRunner._report_value,
    p.Move: StepRunner._move,
    p.Select: StepRunner._select,
    p.Send: StepRunner._send,
    p.Receive: StepRunner._receive,
    p.SendRows: StepRunner._send_rows,
    p.ReceiveRows: StepRunner._receive_rows,
}


def _shard(dtype: str, shape: tuple[int, ...], device: int) -> str:
    return f"a shard of {dtype}{list(shape)} on local device {device}"


def _unusual_layout(array: p.LocalArray) -> tuple[int, ...] | None:
    """Return the layout of the array that `DeviceBackend.put` makes, or None for the default."""
    layout = array.layout
    return None if layout is None or layout == tuple(range(len(layout))) else layout


def _wait_for(arrays: Sequence[DeviceArray], wake: Callable[[], None]) -> None:
    for each in arrays:
        with suppress(Exception):  # whoever uses the array raises the error of its computation
            each.block_until_ready()
    wake()
