"""A host's null devices: a `devices.device.DeviceBackend` with simulated time. Its arrays contain zeros."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from atoll.devices.compilers.compiler_messages import RenamedTarget
from atoll.devices.device import Assignment, Layout, LibraryLoader, ProgramLoader, WorldMaker
from atoll.devices.null.model import NullModel
from atoll.devices.null.null_program import NullProgram, read_program
from atoll.devices.null.sim_events import EventClock, SimEvent, SimTask, all_of
from atoll.errors import unimplemented
from atoll.host_services.calls.function_callbacks import Callbacks
from atoll.host_services.python.rendezvous import KeyValues
from atoll.ir.plan import LocalArray
from atoll.ir.types import DTYPE_BITS
from atoll.protocol.messages import DeviceInfo, FunctionInfo, OutputInfo
from atoll.protocol.profiles import Recording
from atoll.transfers.dtypes import numpy_dtype

_POLL_SECONDS = 2e-4


def bytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    return (math.prod(shape) * DTYPE_BITS[dtype] + 7) // 8


def wait_for(moment: SimEvent) -> None:
    """Block until the event is over. For watchers and readers."""
    while not moment.is_over:
        time.sleep(_POLL_SECONDS)


class NullShard:
    """A part of a null array on one device."""

    __slots__ = ("dtype_name", "moment", "shape")

    def __init__(self, dtype_name: str, shape: tuple[int, ...], moment: SimEvent) -> None:
        self.dtype_name = dtype_name
        self.shape = shape
        self.moment = moment

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        self.block_until_ready()
        return np.zeros(self.shape, numpy_dtype(self.dtype_name))

    def is_ready(self) -> bool:
        return self.moment.is_over

    def block_until_ready(self) -> None:
        wait_for(self.moment)


class NullArray:
    """A `devices.device.DeviceArray`, without contents."""

    __slots__ = ("_is_deleted", "dtype_name", "moment", "shapes")

    def __init__(self, dtype_name: str, shapes: tuple[tuple[int, ...], ...], moment: SimEvent) -> None:
        self.dtype_name = dtype_name
        self.shapes = shapes
        self.moment = moment
        self._is_deleted = False

    @property
    def shards(self) -> list[NullShard]:
        return [NullShard(self.dtype_name, shape, self.moment) for shape in self.shapes]

    @property
    def nbytes(self) -> int:
        return sum(bytes_of(self.dtype_name, shape) for shape in self.shapes)

    def is_deleted(self) -> bool:
        return self._is_deleted

    def is_ready(self) -> bool:
        return self.moment.is_over

    def block_until_ready(self) -> None:
        wait_for(self.moment)

    def delete(self) -> None:
        self._is_deleted = True


class Collectives:
    """The tasks on several hosts of this process that some of these hosts have not reached yet."""

    def __init__(self) -> None:
        self._open: dict[tuple[Any, ...], tuple[SimTask, int]] = {}

    def join(self, key: tuple[Any, ...], clock: EventClock, seconds: float, parts: int) -> SimTask:
        """Return the task of that key. Each of its `parts` hosts calls this once."""
        work, left = self._open.get(key) or (SimTask(clock, seconds, parts), parts)
        if left > 1:
            self._open[key] = work, left - 1
        else:
            self._open.pop(key, None)
        return work


class NullToken:
    """The completion of a run."""

    __slots__ = ("moment",)

    def __init__(self, moment: SimEvent) -> None:
        self.moment = moment

    def block_until_ready(self) -> None:
        wait_for(self.moment)


class NullBackend:
    """The null devices of a host, each with the end of its last task."""

    platform = "null"
    platform_version = "null devices"
    key_values: KeyValues | None = None
    loader: ProgramLoader | None = None  # msgspec reads its programs safely
    worlds: WorldMaker | None = None
    libraries: LibraryLoader | None = None
    max_in_flight = 24  # as for XLA's devices

    def __init__(self, host: int, devices: int, model: NullModel, clock: EventClock, collectives: Collectives) -> None:
        self.host = host  # rank within its island
        self.clock = clock
        self.collectives = collectives
        self.model = model
        self.lines: list[SimEvent] = [SimEvent(clock, 0.0)] * devices
        # The last task, and its devices. `lines` includes it when a task on other devices begins.
        self._latest = self.lines[0]
        self._latest_on: tuple[int, ...] = ()
        self._last_run = (-1, 0)  # its dispatch unit, and its position in the unit

    def describe(self) -> tuple[DeviceInfo, ...]:
        return tuple(
            DeviceInfo(
                ordinal,
                "null",
                "null",
                ("device",),
                "device",
                (ordinal, 0, 0),
                0,
                ordinal,
                self.model.memory_bytes,
            )
            for ordinal in range(len(self.lines))
        )

    def compile(
        self,
        program: bytes,
        options: bytes,
        assignment: Assignment,
        callbacks: Callbacks | None = None,
        tenant: str = "",
        world: int = 0,
        targets: tuple[RenamedTarget, ...] = (),
    ) -> tuple[NullFunction, bool, float]:
        devices = [device for row in assignment for device in row]
        ordinals = tuple(ordinal for host, ordinal in devices if host == self.host)
        return NullFunction(self, read_program(program), ordinals, len({host for host, _ in devices})), False, 0.0

    def stop(self, sequence: int, text: str, devices: int = 0) -> None:
        """Null devices cannot be stopped."""

    def begin(self, ordinals: tuple[int, ...], work: SimTask, after: Sequence[SimEvent]) -> None:
        """Begin a task on these devices, after their current tasks and the events of `after`."""
        if ordinals == self._latest_on:  # the common case
            before, self._latest = self._latest, work
            work.join((before, *after))
            return
        for ordinal in self._latest_on:
            self.lines[ordinal] = self._latest
        self._latest, self._latest_on = work, ordinals
        work.join((*[self.lines[ordinal] for ordinal in ordinals], *after))

    def run_key(self, sequence: int) -> tuple[int, int]:
        """Return a key for the next run of a dispatch unit, which each host of the run computes alike."""
        last, count = self._last_run
        self._last_run = (sequence, count + 1 if last == sequence else 0)
        return self._last_run

    # ---- arrays

    def put(self, array: LocalArray, contents: Sequence[np.ndarray[Any, Any]], are_lent: bool = False) -> NullArray:
        return NullArray(array.dtype, array.shard_shapes, SimEvent(self.clock, self.clock.now()))

    def shards(self, array: NullArray) -> list[NullShard]:
        return array.shards

    def stack(self, array: LocalArray, shards: Sequence[NullShard]) -> NullArray:
        return NullArray(array.dtype, array.shard_shapes, all_of(self.clock, [shard.moment for shard in shards]))

    def move(self, array: NullArray, target: LocalArray, donate: bool) -> NullArray:
        """Copy all shards at the same time over the island's interconnect."""
        largest = max((bytes_of(array.dtype_name, shape) for shape in array.shapes), default=0)
        work = SimTask(self.clock, self.model.ici_latency + largest / self.model.ici_bandwidth)
        work.join((array.moment,))
        if donate:
            array.delete()
        return NullArray(array.dtype_name, array.shapes, work)

    def copy(self, array: NullArray) -> NullArray:
        return NullArray(array.dtype_name, array.shapes, array.moment)

    def bitcast(self, shard: NullShard, dtype: str, shape: tuple[int, ...]) -> NullShard:
        return NullShard(dtype, shape, shard.moment)

    def release_memory(self) -> None:
        """Null arrays have no memory."""

    def memory_stats(self, ordinal: int) -> dict[str, int]:
        return {}

    def begin_profile(self, recording: Recording) -> Callable[[], bytes]:
        raise unimplemented("null devices compute nothing, so they have no profile")

    def default_layout(self, dtype: str, shape: tuple[int, ...], ordinal: int) -> str:
        return "{" + ",".join(str(i) for i in reversed(range(len(shape)))) + "}"


class NullFunction:
    """A null program on this host's part of its devices: a `devices.device.LoadedFunction`."""

    def __init__(self, backend: NullBackend, program: NullProgram, ordinals: tuple[int, ...], hosts: int) -> None:
        self._backend = backend
        self._program = program
        self._hosts = hosts
        self.ordinals = ordinals
        self.parameters = program.parameters
        self.outputs = program.outputs
        self.parameter_layouts: tuple[Layout, ...] = (None,) * len(program.parameters)
        self.output_layouts: tuple[Layout, ...] = (None,) * len(program.outputs)
        self.donated = program.donated
        self.scratch_bytes = program.scratch_bytes
        self.waits_inside = False
        self.world = 0
        self.is_joint = False  # its hosts meet by the run's sequence number
        self._shapes = [(dtype, (shape,) * len(ordinals)) for dtype, shape in program.outputs]

    def execute(self, arguments: list[NullArray], sequence: int, stream: int = 0) -> tuple[list[NullArray], NullToken]:
        backend, program = self._backend, self._program
        if self._hosts == 1:
            work = SimTask(backend.clock, program.seconds)
        else:
            key = backend.run_key(sequence)
            work = backend.collectives.join(key, backend.clock, program.seconds, self._hosts)
        backend.begin(self.ordinals, work, [array.moment for array in arguments])
        for position in program.donated:
            arguments[position].delete()
        return [NullArray(dtype, shapes, work) for dtype, shapes in self._shapes], NullToken(work)

    def run(self, arguments: list[NullArray], stream: int) -> list[NullArray]:
        raise unimplemented("null programs do not call their client")

    def info(self) -> FunctionInfo:
        program = self._program
        return FunctionInfo(
            name=program.name,
            fingerprint=b"",
            parameter_shardings=None,
            parameter_layouts=(),
            outputs=tuple(OutputInfo(dtype, shape, None, "device", b"") for dtype, shape in program.outputs),
            donated=program.donated,
            memory_stats={},
            generated_code_bytes=0,
            parameters=program.parameters,
        )

    def cost_analysis(self) -> dict[str, float]:
        return {"optimal_seconds": self._program.seconds}

    def text(self) -> str:
        return str(self._program)
