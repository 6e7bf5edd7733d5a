"""The seam below a worker: what a kind of devices has to offer.

A kind implements `DeviceBackend`, and with it `DeviceArray`, `RunToken` and `LoadedFunction`; `devices.device_kinds`
registers it under its platform's name. Everything above this seam (plans, stores, order, completions, the data plane)
is common to all kinds and imports none of them. XLA's devices are `devices.xla`; `devices.null` has devices that only
take time.

Threads: *the executor's thread* makes, moves and consumes arrays and starts functions, and is the only one that does.
*Readers* are threads that wait for a shard's contents (`numpy.asarray(shard)`). *Watchers* ask arrays and tokens
whether they are ready. *Compilers* call `compile` and ask functions about themselves. The worker serializes deletion
and donation with `DeviceArray.is_ready` (`worker.completions.DeletionGuard`), so an array need not tolerate that race
itself.

Errors: an operation raises what is wrong with it at once (`StatusError`, or an exception whose text begins with the
name of a status code). What goes wrong later, on the device, is raised by `block_until_ready`. A bad argument must
never reach a device that would end the process over it: `worker.step_runner` has checked types, devices, deletion and
sharing before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from atoll.devices.compilers.compiler_messages import CompiledProgram, CompileProgram
from atoll.host_services.calls.function_callbacks import Callbacks
from atoll.host_services.python.rendezvous import KeyValues
from atoll.ir.plan import LocalArray
from atoll.ir.types import ShardType
from atoll.protocol.messages import DeviceInfo, FunctionInfo
from atoll.protocol.profiles import Recording

# [replica][partition] of (host of the island, ordinal of the device)
Assignment = tuple[tuple[tuple[int, int], ...], ...]
# Dimensions from major to minor; None for the platform's default.
Layout = tuple[int, ...] | None


class DeviceArray(Protocol):
    """The local shards of a logical buffer, one for each of some devices of this host. The contents may come later."""

    @property
    def nbytes(self) -> int:
        """The bytes of all shards."""

    def is_ready(self) -> bool:
        """Whether the contents are there, or have failed. Any thread; must not block. Not asked of a deleted array."""

    def block_until_ready(self) -> None:
        """Waits for the contents; raises what went wrong in making them. Watchers only."""

    def is_deleted(self) -> bool:
        """Whether it was deleted, or donated to a function or a move. Any thread; must not block."""

    def delete(self) -> None:
        """Frees the memory. The executor's thread; must not block: work that was enqueued before may still use it."""


class RunToken(Protocol):
    """The completion of one run of a function on all of this host's devices."""

    def block_until_ready(self) -> None:
        """Waits for the end of the run; raises what went wrong in it. Watchers only."""


class LoadedFunction(Protocol):
    """A compiled function, loaded on this host's part of its devices.

    `ordinals` are these devices among the host's, in the order in which it takes and gives shards. `scratch_bytes` is
    what it needs on each device while it runs. `donated` are the parameters whose memory it writes its outputs over.
    `waits_inside`: its client's Python would run inside of the call that enqueues it, unless that is by `execute`.
    """

    ordinals: tuple[int, ...]
    parameters: tuple[ShardType, ...]
    parameter_layouts: tuple[Layout, ...]
    outputs: tuple[ShardType, ...]
    output_layouts: tuple[Layout, ...]
    donated: tuple[int, ...]
    scratch_bytes: int
    waits_inside: bool

    def execute(self, arguments: list[Any], sequence: int, stream: int = 0) -> tuple[Sequence[Any], RunToken]:
        """Enqueues one run; returns its outputs, which are not ready yet, and its completion.

        The executor's thread, which this holds up: it must not wait for data. `sequence` is the same on all hosts that
        run it together. Runs of a `stream` other than 0 may wait for a client, and must hold up no others. The caller
        has checked the arguments. Arrays at `donated` positions are deleted by this.
        """

    def run(self, arguments: list[Any], stream: int) -> Sequence[Any]:
        """Runs what `waits_inside` to its end; returns its outputs. Any thread, for as long as the client likes.

        `stream` is like that of `execute`, and this run's alone. The caller has checked the arguments, and keeps them
        from being deleted. None is donated. Raises what went wrong.
        """

    def info(self) -> FunctionInfo:
        """What clients ask about it. Compilers."""

    def cost_analysis(self) -> dict[str, float]:
        """Estimates by name, such as "flops". Any thread, may take a while."""

    def text(self) -> str:
        """The compiled program, to be read by people. Any thread, may take a while."""


class ProgramLoader(Protocol):
    """The part of a backend for programs that compiler processes have compiled (`devices.compilers`).

    `compiler` names what compiles in such a process, as "module:callable" for a
    `devices.compilers.compiler_process.Compiler`, and `compiler_devices` is how many devices it gets.
    """

    compiler: str
    compiler_devices: int

    def find(self, request: CompileProgram, tenant: str) -> CompiledProgram | None:
        """Return the program if it was kept for this tenant, without reading it. Compilers."""

    def keep(self, request: CompileProgram, tenant: str, program: CompiledProgram) -> None:
        """Keep a program that a compiler process has compiled for this tenant. Compilers."""

    def load(
        self, program: CompiledProgram, assignment: Assignment, callbacks: Callbacks | None = None
    ) -> LoadedFunction:
        """Load a program on this host's devices. Compilers, several at a time.

        Raises StatusError for a program that does not fit.
        """


class DeviceBackend(Protocol):
    """One host's devices. Made once, in the worker's process, before the worker says that it is ready.

    `max_in_flight` is how many runs may be enqueued on this host and not completed: the controller keeps the least of
    an island's hosts as the island's window. `platform` is what JAX shows as the devices' platform. `key_values` are
    what the hosts of an island of several tell one another. Programs of tenants are compiled apart if there is a
    `loader`; it is None if reading a program cannot end this process.
    """

    platform: str
    platform_version: str
    max_in_flight: int
    key_values: KeyValues | None
    loader: ProgramLoader | None

    def describe(self) -> tuple[DeviceInfo, ...]:
        """The devices, by ordinal."""

    def compile(
        self,
        program: bytes,
        options: bytes,
        assignment: Assignment,
        callbacks: Callbacks | None = None,
        tenant: str = "",
    ) -> tuple[LoadedFunction, bool, float]:
        """Compiles and loads a client's program, which may call these `callbacks`. Returns the function, whether
        a cache had it, and the seconds that it took. No other tenant's compilation uses what is cached for `tenant`.

        Compilers, several at a time. Raises UNIMPLEMENTED for what these devices cannot run.
        """

    def stop(self, sequence: int, text: str) -> None:
        """End the run of this sequence number with CANCELLED and this text, if the devices can do that. Any thread.

        Does not block. The run may be in line, or have ended.
        """

    # All that follows: the executor's thread; asynchronous (the result's contents may come later); must not wait for
    # data.

    def put(self, array: LocalArray, contents: Sequence[np.ndarray[Any, Any]]) -> Any:
        """One array out of one host array a shard. The host arrays belong to the result and do not change any more."""

    def shards(self, array: Any) -> Sequence[Any]:
        """The array's shards, in order; they share its memory. Readers wait for one by `numpy.asarray`, or by its
        `block_until_ready`.
        """

    def stack(self, array: LocalArray, shards: Sequence[Any]) -> Any:
        """One array out of shards that are on its devices already; nothing is copied, the memory is shared."""

    def move(self, array: Any, target: LocalArray, donate: bool) -> Any:
        """Copies shard by shard to the target's devices and memory. With `donate` the array is deleted, and the result
        may have its memory; otherwise the two share none."""

    def copy(self, array: Any) -> Any:
        """A copy on the same devices, which shares no memory."""

    def bitcast(self, shard: Any, dtype: str, shape: tuple[int, ...]) -> Any:
        """A copy of the shard's bytes as another dtype and shape, on its own device."""

    def release_memory(self) -> None:
        """Frees the host memory of arrays that exist no more, where the platform has kept it. Called once a session has
        ended, since no other call may come for long."""

    def memory_stats(self, ordinal: int) -> dict[str, int]:
        """What the platform knows of the device's memory, by jax's names, in bytes; {} where nothing. Any thread."""

    def begin_profile(self, recording: Recording) -> Callable[[], bytes]:
        """Begins to record what this process does. What it returns ends that, and gives a serialized XSpace.

        One at a time. A thread of its own, which both may block. Raises UNIMPLEMENTED where there is no profiler.
        """

    def default_layout(self, dtype: str, shape: tuple[int, ...], ordinal: int) -> str:
        """The layout that an array gets by default, in XLA's notation, such as {1,0}. Any thread."""
