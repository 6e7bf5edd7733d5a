"""Reads a client's program and compiles it with XLA, in a worker or in a compiler process.

The program, its options and the module that results come from a client. XLA, LLVM and MLIR end the process for many
malformed ones, so a cluster with tenants calls this module in compiler processes only.
"""

from __future__ import annotations

import contextlib
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

from atoll.devices.compilers.compiler_messages import Signature
from atoll.devices.xla import client_callbacks
from atoll.devices.xla.xla_compile_calls import AskedClient, CompileCalls
from atoll.protocol.messages import HostChannels

# Parts of the names of custom calls that use LAPACK, on CPUs and on GPUs, in programs lowered elsewhere.
_LAPACK, _HYBRID = b"lapack_", b"hybrid_"
_lapack_begins = threading.Lock()
# Of programs that one MLIR context reads.
MOST_CONTEXT_BYTES = 1 << 20
_MOST_IDLE_CONTEXTS = 4


@dataclass(frozen=True)
class Source:
    """A client's program and XLA's serialized options, with how many `callbacks` it calls while it runs."""

    program: bytes
    options: bytes
    callbacks: int = 0
    channels: tuple[HostChannels, ...] = ()


@dataclass(frozen=True)
class Prepared:
    """A module that was read and checked, ready for XLA. Its MLIR context must be entered while it is used."""

    module: Any
    options: Any
    calls: CompileCalls
    signatures: list[Signature]

    def compile(self, client: Any, devices: Sequence[Any], host_callbacks: Sequence[Any] = ()) -> Any:
        """Compile and load the module on the client's `devices`, without any cache."""
        with self.calls.asking():
            return compiler.backend_compile_and_load(
                client, self.module, xc.DeviceList(tuple(devices)), self.options, list(host_callbacks)
            )


def prepare(source: Source, grid: Any, asked: AskedClient | None, refuse_peers: bool = False) -> Prepared:
    """Read a program for the devices `grid[replica][partition]`. Call this in an MLIR context of `context`.

    Raises StatusError for a program that may not run here, and what MLIR raises for a program that it cannot read.
    """
    ids = np.array([[device.id for device in row] for row in grid], dtype=np.int32)
    options = xc.CompileOptions.ParseFromString(source.options)
    options.device_assignment = xc.DeviceAssignment.create(ids)
    options.compile_portable_executable = False
    _initialize_lapack(source.program)
    module = _jax.mlir.deserialize_portable_artifact(source.program, ir.Context.current)
    calls = CompileCalls(asked, grid.shape[1])
    signatures = client_callbacks.find(
        source.program, module, source.callbacks, calls.replace, source.channels, refuse_peers
    )
    calls.mark(module)
    if "sym_name" not in module.operation.attributes:  # JAX asks for it
        module.operation.attributes["sym_name"] = ir.StringAttr.get("program")
    return Prepared(module, options, calls, signatures)


class Contexts:
    """MLIR contexts that were used before. For any thread.

    It takes 4 ms of CPU time to create and destroy a context of JAX. A small program takes 25 ms to compile. A context
    keeps the types and constants of all programs that it has read, so a bound of bytes ends its use.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[tuple[Any, int]] = []  # with how many bytes of programs each has read

    @contextlib.contextmanager
    def use(self, program_bytes: int) -> Iterator[None]:
        """Enter a context that nobody else uses meanwhile, for a program of this size. After an error it is dropped."""
        with self._lock:
            entered, read = self._idle.pop() if self._idle else (None, 0)
        if entered is None:
            entered = mlir.make_ir_context()
        with entered:
            yield
        read += program_bytes
        with self._lock:
            if read <= MOST_CONTEXT_BYTES and len(self._idle) < _MOST_IDLE_CONTEXTS:
                self._idle.append((entered, read))


context = Contexts().use


def _initialize_lapack(program: bytes) -> None:
    """Take LAPACK from SciPy if the program calls it: JAX does so where it lowers, and calls without it crash."""
    with _lapack_begins:
        if _LAPACK in program:
            lapack._lapack.initialize()
        if _HYBRID in program:
            gpu_solver.initialize_hybrid_kernels()


def load_executable(client: Any, serialized: bytes, grid: Any, host_callbacks: Sequence[Any] = ()) -> Any:
    """Load what `serialize` of an executable has returned on the client's devices `grid[replica][partition]`.

    Nothing of the options with which it was compiled is read.
    """
    options = xc.CompileOptions()
    options.num_replicas, options.num_partitions = grid.shape
    options.device_assignment = xc.DeviceAssignment.create(
        np.array([[device.id for device in row] for row in grid], dtype=np.int32)
    )
    options.executable_build_options.debug_options.xla_dump_to = ""  # or XLA reads where to in the executable
    _initialize_lapack(serialized)
    devices = xc.DeviceList(tuple(grid.flatten()))
    if host_callbacks:
        return client.deserialize_executable(serialized, devices, options, host_callbacks=list(host_callbacks))
    return client.deserialize_executable(serialized, devices, options)
