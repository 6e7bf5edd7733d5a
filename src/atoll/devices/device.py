"""The interface that a kind of devices implements for the worker.

A kind implements `DeviceBackend`, `DeviceArray`, `RunToken` and `LoadedFunction`. `devices.device_kinds` registers it
under its platform's name. The rest of the worker is common to all kinds and imports none of them.

The docstrings below use these names for threads:

- The *executor's thread* is the only one that makes, moves and consumes arrays and starts functions.
- *Readers* wait for a shard's contents (`numpy.asarray(shard)`).
- *Watchers* poll arrays and tokens, or wait for them.
- *Compilers* call `compile` and query functions.

The worker serializes deletion and donation with `DeviceArray.is_ready` (`worker.completions.DeletionGuard`), so an
array need not handle that race.

Errors: an operation raises at once if it is invalid (`StatusError`, or an exception whose text begins with the name of
a status code). `block_until_ready` raises errors that occur later, on the device. Some devices end the process on
invalid arguments, so `worker.step_runner` checks types, devices, deletion and sharing before each call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from atoll.devices.compilers.compiler_messages import CompiledProgram, CompileProgram, RenamedTarget
from atoll.errors import Status
from atoll.host_services.calls.function_callbacks import Callbacks
from atoll.host_services.python.rendezvous import KeyValues
from atoll.ir.plan import LocalArray
from atoll.ir.types import ShardType
from atoll.protocol.messages import DeviceInfo, FunctionInfo, LibraryTarget
from atoll.protocol.profiles import Recording


class MayCrashError(Exception):
    """A program whose compilation may end the process. `status` is the error of the program if it does."""

    def __init__(self, status: Status) -> None:
        super().__init__(status.message)
        self.status = status


# [replica][partition] of (host of the island, or rank in the world, and ordinal of the device)
Assignment = tuple[tuple[tuple[int, int], ...], ...]
# Dimensions from major to minor; None for the platform's default.
Layout = tuple[int, ...] | None


class DeviceArray(Protocol):
    """The local shards of a logical buffer, one per device on some devices of this host. Contents may come later."""

    @property
    def nbytes(self) -> int:
        """The size of all shards."""

    def is_ready(self) -> bool:
        """Return whether the computation of the contents has completed or failed.

        Any thread; must not block. Not called on a deleted array.
        """

    def block_until_ready(self) -> None:
        """Wait for the contents; raise the error if their computation failed. Watchers only."""

    def is_deleted(self) -> bool:
        """Return whether the array was deleted, or donated to a function or a move. Any thread; must not block."""

    def delete(self) -> None:
        """Free the memory after the work that was enqueued before. The executor's thread; must not block."""


class RunToken(Protocol):
    """The completion of one run of a function on all of this host's devices."""

    def block_until_ready(self) -> None:
        """Wait for the end of the run; raise the error if it failed. Watchers only."""


class LoadedFunction(Protocol):
    """A compiled function, loaded on those of its devices that belong to this host.

    `ordinals` are the ordinals of these devices on the host, in the order of the function's shards. `scratch_bytes` is
    the memory that a run needs on each device. The outputs overwrite the memory of the parameters at `donated`. With
    `waits_inside`, the worker calls `run` instead of `execute`: enqueueing would run the client's Python. `world` is
    the number of the world that it runs in, or 0. With `is_joint`, it computes together with other hosts, in
    collectives that do not tell one run from another.
    """

    ordinals: tuple[int, ...]
    parameters: tuple[ShardType, ...]
    parameter_layouts: tuple[Layout, ...]
    outputs: tuple[ShardType, ...]
    output_layouts: tuple[Layout, ...]
    donated: tuple[int, ...]
    scratch_bytes: int
    waits_inside: bool
    world: int
    is_joint: bool

    def execute(self, arguments: list[Any], sequence: int, stream: int = 0) -> tuple[Sequence[Any], RunToken]:
        """Enqueue one run; return its outputs, which are not ready yet, and its completion.

        The executor's thread; must not wait for data. `sequence` is the same on all hosts that take part in the run.
        Runs on a `stream` other than 0 may wait for a client, and must not block other runs. The caller has checked
        the arguments. The call deletes the arrays at `donated` positions.
        """

    def run(self, arguments: list[Any], stream: int) -> Sequence[Any]:
        """Run a function that `waits_inside` to its end; return its outputs.

        Any thread; blocks for as long as the client takes. No other run uses `stream`. The caller has checked the
        arguments, and prevents their deletion; none is donated. Raises the error if the run failed.
        """

    def info(self) -> FunctionInfo:
        """Return the properties that clients query. Compilers."""

    def cost_analysis(self) -> dict[str, float]:
        """Return estimates by name, such as "flops". Any thread; may be slow."""

    def text(self) -> str:
        """Return the compiled program in readable form. Any thread; may be slow."""


class ProgramLoader(Protocol):
    """The part of a backend for programs that compiler processes have compiled (`devices.compilers`).

    `compiler` names a factory of `devices.compilers.compiler_process.Compiler` as "module:callable". The process gets
    `compiler_devices` devices. With `loads_apart`, it can load the programs of functions on several islands before it
    is known whether these communicate.
    """

    compiler: str
    compiler_devices: int
    loads_apart: bool

    def find(self, request: CompileProgram, tenant: str) -> CompiledProgram | None:
        """Return the program if it is stored for this tenant, without parsing it. Compilers."""

    def keep(self, request: CompileProgram, tenant: str, program: CompiledProgram) -> None:
        """Store a program that a compiler process has compiled for this tenant. Compilers."""

    def compile_over_islands(
        self, request: CompileProgram, callbacks: Callbacks | None, tenant: str
    ) -> tuple[CompiledProgram, bool, float]:
        """Compile a program for devices of several islands in this process, to `load` it. Only with `loads_apart`.

        Returns and raises the same as `DeviceBackend.compile`. Compilers, several at a time.
        """

    def load(
        self,
        program: CompiledProgram,
        assignment: Assignment,
        callbacks: Callbacks | None = None,
        world: int = 0,
        ranks: tuple[int, int] = (0, 0),
    ) -> LoadedFunction:
        """Load a program on this host's devices. Compilers, several at a time.

        If the assignment contains devices of other islands, `ranks` are the first host of this island in it and the
        number of its hosts. Without a world, the islands then run the program without communicating.

        Raises StatusError if the program does not match the request.
        """


class WorldMaker(Protocol):
    """The part of a backend for *worlds*: functions that run on hosts of several islands (`devices.xla.xla_world`).

    Each world has a number, and its hosts have ranks. Only the executor's thread may call `bring`.
    """

    def serve(self, world: int, address: str, ranks: int) -> None:
        """Start the world's coordination service on the host of rank 0, for this number of hosts."""

    def join(self, world: int, address: str, rank: int, ranks: int, hostname: str) -> None:
        """Join the world whose service is at `address`. Blocks until all hosts have joined.

        Collectives receive messages at `hostname`.
        """

    def close(self, world: int) -> None:
        """Leave the world. Its runs in flight fail, and so does every later use of its functions."""

    def key_values(self, world: int) -> KeyValues:
        """Return the store that the world's hosts share. Raise FAILED_PRECONDITION if the world was closed."""

    @property
    def have_been_joined(self) -> bool:
        """Whether this host has joined a world. If not, all arrays are at home."""

    def is_at_home(self, array: Any, world: int) -> bool:
        """Return whether functions of the world can use the array without `bring`."""

    def world_of(self, array: Any) -> int:
        """Return the open world whose functions can use the array without `bring`, or 0."""

    def bring(self, array: Any, world: int) -> Any:
        """Return an array for functions of the world, which shares its memory with the given array. That one is ready.

        With world 0, return an array for functions that run in no world, and for the other methods.
        """


class LibraryLoader(Protocol):
    """The part of a backend for shared libraries of clients. Compilers, several at a time.

    A library stays in the process, because XLA keeps the addresses of its handlers. Each tenant has its own copy.
    """

    def load(self, content: bytes, tenant: str) -> None:
        """Load a library unless it is loaded. Raise StatusError if it cannot be loaded, or if there are too many."""

    def register(self, targets: Sequence[LibraryTarget], tenant: str) -> tuple[RenamedTarget, ...]:
        """Register targets of loaded libraries with the platform. Raise INVALID_ARGUMENT for places that do not exist.

        Return the names under which they are registered.
        """


class DeviceBackend(Protocol):
    """One host's devices. The worker creates one backend before it reports that it is ready.

    `max_in_flight` is how many runs may be enqueued on this host and not completed. The controller uses the minimum
    over an island's hosts as the island's window. `platform` is the platform that JAX shows. `key_values` is a store
    that the hosts of an island share. With a `loader`, tenants' programs are compiled in compiler processes; it is None
    if reading a program cannot end this process. With `worlds`, its hosts can join worlds; without, the parts of a
    function on different islands run independently. With `libraries`, programs may call handlers in shared libraries.
    """

    platform: str
    platform_version: str
    max_in_flight: int
    key_values: KeyValues | None
    loader: ProgramLoader | None
    worlds: WorldMaker | None
    libraries: LibraryLoader | None

    def describe(self) -> tuple[DeviceInfo, ...]:
        """Return the devices, by ordinal."""

    def compile(
        self,
        program: bytes,
        options: bytes,
        assignment: Assignment,
        callbacks: Callbacks | None = None,
        tenant: str = "",
        world: int = 0,
        targets: tuple[RenamedTarget, ...] = (),
    ) -> tuple[LoadedFunction, bool, float]:
        """Compile and load a client's program, which may call these `callbacks`, and `targets` of its libraries.

        In a `world`, the hosts in the assignment are ranks of the world.
        Returns the function, whether it came from a cache, and the duration in seconds. Cache entries of `tenant` are
        not used for other tenants. Compilers, several at a time. Raises UNIMPLEMENTED if these devices cannot run the
        program, and MayCrashError if only a compiler process may compile it.
        """

    def stop(self, sequence: int, text: str, devices: int = 0) -> None:
        """End the run of this sequence number with CANCELLED and this text, if the devices support that.

        `devices` is the number of this host's devices on which it has not ended, or 0 if that is unknown.
        Any thread; must not block. The run may not have started, or may have ended.
        """

    # The executor's thread calls the methods below, unless they say otherwise. They are asynchronous (the contents of
    # a result may come later) and must not wait for data.

    def put(self, array: LocalArray, contents: Sequence[np.ndarray[Any, Any]], are_lent: bool = False) -> Any:
        """Return an array made of one host array per shard. The result owns the host arrays; nothing modifies them.

        If they `are_lent`, they may change after the call, which copies them. They share no memory.
        """

    def shards(self, array: Any) -> Sequence[Any]:
        """Return the array's shards, in order; they share its memory.

        Readers wait for a shard with `numpy.asarray` or its `block_until_ready`.
        """

    def stack(self, array: LocalArray, shards: Sequence[Any]) -> Any:
        """Return an array made of shards that are on its devices already. It shares their memory."""

    def move(self, array: Any, target: LocalArray, donate: bool) -> Any:
        """Copy each shard to the target's device and memory.

        With `donate`, the call deletes the array, and the result may reuse its memory. Otherwise they share no memory.
        """

    def copy(self, array: Any) -> Any:
        """Return a copy on the same devices that shares no memory with the array."""

    def bitcast(self, shard: Any, dtype: str, shape: tuple[int, ...]) -> Any:
        """Return a copy of the shard's bytes as another dtype and shape, on the same device."""

    def release_memory(self) -> None:
        """Free host memory that the platform still holds for deleted arrays. Called when a session has ended."""

    def memory_stats(self, ordinal: int) -> dict[str, int]:
        """Return the device's memory statistics by JAX's names, in bytes; {} if unknown. Any thread."""

    def begin_profile(self, recording: Recording) -> Callable[[], bytes]:
        """Start to record this process. The returned function stops that, and returns a serialized XSpace.

        One recording at a time. Both calls may block their thread. Raises UNIMPLEMENTED if there is no profiler.
        """

    def default_layout(self, dtype: str, shape: tuple[int, ...], ordinal: int) -> str:
        """Return the default layout of an array in XLA's notation, such as {1,0}. Any thread."""
