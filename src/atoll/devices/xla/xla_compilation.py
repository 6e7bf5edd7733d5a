"""Reads a client's program and compiles it with XLA, in a worker or in a compiler process.

XLA, LLVM and MLIR end the process for many malformed programs and options. Therefore a cluster with tenants only uses
this module in compiler processes.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib import _jax, gpu_solver, lapack
from jax._src.lib import xla_client as xc
from jax._src.lib.mlir import ir

from atoll.cluster.processes.machine_memory import machine_memory
from atoll.devices.compilers.compiler_messages import RenamedTarget, Signature
from atoll.devices.compilers.compiler_process import no_memory_text
from atoll.devices.device import MayCrashError
from atoll.devices.xla import client_callbacks
from atoll.devices.xla.xla_compile_calls import AskedClient, CompileCalls
from atoll.errors import Code, Status, StatusError
from atoll.protocol.messages import HostChannels

# Parts of the names of custom calls that use LAPACK, on CPUs and on GPUs.
_LAPACK, _HYBRID = b"lapack_", b"hybrid_"
_lapack_begins = threading.Lock()
# For many operations on larger arrays, XLA's compiler for CPUs divides by zero, which also ends processes of stock JAX.
_MAX_ELEMENTS = 1 << 35
_CONSTANT = frozenset(("stablehlo.constant", "stablehlo.broadcast_in_dim", "func.return"))
# The total size of the programs that one MLIR context reads.
MAX_CONTEXT_BYTES = 1 << 20
_MAX_IDLE_CONTEXTS = 4


@dataclass(frozen=True)
class Source:
    """A client's program with XLA's serialized options, and the number of `callbacks` that it calls when it runs.

    `targets` are its custom calls of the client's libraries.
    """

    program: bytes
    options: bytes
    callbacks: int = 0
    channels: tuple[HostChannels, ...] = ()
    targets: tuple[RenamedTarget, ...] = ()


@dataclass(frozen=True)
class Prepared:
    """A module that was read and checked. Its MLIR context must be entered while it is used."""

    module: Any
    options: Any
    calls: CompileCalls
    signatures: list[Signature]

    def compile(self, client: Any, devices: Sequence[Any], host_callbacks: Sequence[Any] = ()) -> Any:
        """Compile and load the module on the client's `devices`, without a cache."""
        with self.calls.asking():
            return compiler.backend_compile_and_load(
                client, self.module, xc.DeviceList(tuple(devices)), self.options, list(host_callbacks)
            )


def prepare(source: Source, grid: Any, asked: AskedClient | None, refuse_peers: bool = False) -> Prepared:
    """Read a program for the devices `grid[replica][partition]`. Call this in an MLIR context of `context`.

    Raises StatusError if the program is not allowed here. Raises MLIR's error if MLIR cannot read it.
    """
    ids = np.array([[device.id for device in row] for row in grid], dtype=np.int32)
    options = xc.CompileOptions.ParseFromString(source.options)
    options.device_assignment = xc.DeviceAssignment.create(ids)
    options.compile_portable_executable = False
    _initialize_lapack(source.program)
    module = _jax.mlir.deserialize_portable_artifact(source.program, ir.Context.current)
    if grid.flat[0].platform == "cpu":
        check_sizes(module, grid.size)
    calls = CompileCalls(asked, grid.shape[1], source.targets)
    signatures = client_callbacks.find(
        source.program, module, source.callbacks, calls.replace, source.channels, refuse_peers, source.targets
    )
    calls.mark(module)
    if "sym_name" not in module.operation.attributes:  # JAX requires a name
        module.operation.attributes["sym_name"] = ir.StringAttr.get("program")
    return Prepared(module, options, calls, signatures)


def check_sizes(module: Any, devices: int) -> None:
    """Raise RESOURCE_EXHAUSTED if arrays of a program for CPUs are too large for XLA's compiler and this machine.

    Such an array cannot be allocated, but a compiler that divides by zero would end the process before that. Constants
    compile, and fail when they are allocated.
    """
    functions = [each for each in module.body.operations if each.operation.name == "func.func"]
    main = next((each for each in functions if each.attributes["sym_name"].value == "main"), None)
    for each in (*main.type.results, *main.type.inputs) if main is not None else ():  # XLA reports that it is missing
        nbytes = _bytes_if_too_large(each, devices)
        if nbytes and not _is_constant(main):
            raise StatusError(Code.RESOURCE_EXHAUSTED, no_memory_text(nbytes))


def check_values(module: Any, devices: int) -> None:
    """Raise MayCrashError if a value within a program for CPUs is too large for XLA's compiler: see `too_large`."""
    nbytes = too_large(module, devices)
    if nbytes:
        raise MayCrashError(Status(Code.RESOURCE_EXHAUSTED, no_memory_text(nbytes)))


def too_large(module: Any, devices: int) -> int:
    """Return the bytes of a program's largest value if XLA's compiler and this machine cannot hold it, and otherwise 0.

    XLA usually compiles a program with such a value without allocating memory for it. Only some operations end the
    process with SIGFPE.
    """
    types: set[Any] = set()

    def note(operation: Any) -> Any:
        types.update(result.type for result in operation.results)
        return ir.WalkResult.ADVANCE

    module.operation.walk(note)
    return max((_bytes_if_too_large(each, devices) for each in types), default=0)


def _bytes_if_too_large(value: Any, devices: int) -> int:
    """Return the bytes of a value per device, or 0 if XLA's compiler takes it or this machine has as much memory."""
    if not isinstance(value, ir.RankedTensorType) or not value.has_static_shape:
        return 0
    elements: int = math.prod(value.shape) // devices
    if elements <= _MAX_ELEMENTS or elements <= machine_memory():
        return 0
    return elements * max(1, _bits(value.element_type) // 8)


def _is_constant(main: Any) -> bool:
    return all(each.operation.name in _CONSTANT for each in main.regions[0].blocks[0].operations)


def _bits(element: Any) -> int:
    if isinstance(element, ir.ComplexType):
        return 2 * _bits(element.element_type)
    return int(getattr(element, "width", 8))


class Contexts:
    """A pool of MLIR contexts. For any thread.

    It takes 4 ms of CPU time to create and destroy one of JAX's contexts; a small program compiles in 25 ms. A context
    keeps the types and constants of all programs that it has read, so it is dropped after `MAX_CONTEXT_BYTES`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[tuple[Any, int]] = []  # with the size of the programs that each has read

    @contextlib.contextmanager
    def use(self, program_bytes: int) -> Iterator[None]:
        """Enter a context for a program of this size, for exclusive use. It is dropped after an error."""
        with self._lock:
            entered, read = self._idle.pop() if self._idle else (None, 0)
        if entered is None:
            entered = mlir.make_ir_context()
        with entered:
            yield
        read += program_bytes
        with self._lock:
            if read <= MAX_CONTEXT_BYTES and len(self._idle) < _MAX_IDLE_CONTEXTS:
                self._idle.append((entered, read))


context = Contexts().use


def _initialize_lapack(program: bytes) -> None:
    """Load LAPACK from SciPy if the program calls it: JAX only loads it where it lowers, and calls crash without it."""
    with _lapack_begins:
        if _LAPACK in program:
            lapack._lapack.initialize()
        if _HYBRID in program:
            gpu_solver.initialize_hybrid_kernels()


def load_executable(client: Any, serialized: bytes, grid: Any, host_callbacks: Sequence[Any] = ()) -> Any:
    """Load the result of an executable's `serialize` on the client's devices `grid[replica][partition]`.

    The options with which it was compiled are not used.
    """
    options = xc.CompileOptions()
    options.num_replicas, options.num_partitions = grid.shape
    options.device_assignment = xc.DeviceAssignment.create(
        np.array([[device.id for device in row] for row in grid], dtype=np.int32)
    )
    options.executable_build_options.debug_options.xla_dump_to = ""  # overrides the option in the executable
    _initialize_lapack(serialized)
    devices = xc.DeviceList(tuple(grid.flatten()))
    if host_callbacks:
        return client.deserialize_executable(serialized, devices, options, host_callbacks=list(host_callbacks))
    return client.deserialize_executable(serialized, devices, options)
