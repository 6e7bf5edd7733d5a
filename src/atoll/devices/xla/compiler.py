"""Compiles programs for CPU devices in a compiler process. For other devices, it only checks them.

The process has as many devices as the worker's island. XLA's code for CPUs refers to no device or process, so the
worker can load it on any devices.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src.interpreters import mlir
from jax._src.lib import _jax
from jax._src.lib import xla_client as xc
from jax._src.lib.mlir import ir
from jaxlib.mlir.dialects import stablehlo
from msgspec.structs import replace

from atoll.devices.compilers.compiler_messages import (
    Begun,
    CompiledProgram,
    CompileProgram,
    Description,
    OutlinedProgram,
)
from atoll.devices.compilers.compiler_process import Asking
from atoll.devices.xla.description import describe
from atoll.devices.xla.ifrt_ir import read_fragment, read_outline
from atoll.devices.xla.loop_checks import insert_checks
from atoll.devices.xla.xla_backend import XlaBackend
from atoll.devices.xla.xla_compilation import Source, context, load_executable, prepare, too_large
from atoll.devices.xla.xla_libraries import StandIns

# Compiled before the first program of a tenant, because MLIR's dialects and LLVM are slow to initialize.
_FIRST = """
module @first {
  func.func public @main(%x: tensor<f32>) -> tensor<f32> {
    %y = stablehlo.add %x, %x : tensor<f32>
    return %y : tensor<f32>
  }
}
"""
# Worker threads that load programs have a stack of at least 2 MiB. A smaller one makes programs that need more fail
# here.
_LOADING_STACK = 1 << 20
_MAX_TEXT = 300
# Bounds of the search for a line of the user's code.
_MAX_OPERATIONS, _MAX_DEPTH = 100, 20


class XlaCompiler:
    """A `devices.compilers.compiler_process.Compiler` for XLA's devices."""

    def __init__(self, devices: int) -> None:
        jax.config.update("jax_num_cpu_devices", devices)
        self._backend = XlaBackend()
        self._stand_ins = StandIns()
        threading.stack_size(_LOADING_STACK)  # for the threads that this module starts
        with context(len(_FIRST)):
            version = stablehlo.get_minimum_version()
            first = _jax.mlir.serialize_portable_artifact(mlir.module_to_bytecode(ir.Module.parse(_FIRST)), version)
        request = CompileProgram(first, xc.CompileOptions().SerializeAsString(), 1, 1, "cpu")
        self.compile(request, None, lambda begun: None)

    def compile(
        self, request: CompileProgram, asking: Asking | None, begun: Callable[[Begun], None]
    ) -> CompiledProgram | OutlinedProgram:
        if request.fragment is None:
            return self._compile(request, asking, begun)
        name, mesh = request.fragment
        with context(len(request.program)):
            if not name:
                return OutlinedProgram(read_outline(request.program))
            module = read_fragment(request.program, name, mesh)
        compiled = self._compile(replace(request, program=module, fragment=None), asking, begun)
        return replace(compiled, program=module) if compiled.description is None else compiled

    def _compile(
        self, request: CompileProgram, asking: Asking | None, begun: Callable[[Begun], None]
    ) -> CompiledProgram:
        grid = self._grid(request)
        source = Source(request.program, request.options, request.callbacks, request.channels, request.targets)
        self._stand_ins.register(request.targets)
        with context(len(request.program)):
            prepared = prepare(source, grid, asking, refuse_peers=True)
            huge = too_large(prepared.module, grid.size) if request.platform == "cpu" else 0
            begun(Begun(*_name_and_line(prepared.module), huge))
            signatures = tuple(prepared.signatures)
            if request.platform != "cpu":
                _verify(prepared.module)
                return CompiledProgram(b"", None, signatures)
            _disable_dumps(prepared.options)
            insert_checks(prepared.module, request.replicas * request.partitions)
            executable = prepared.compile(self._backend.client, grid.flatten(), _stand_ins(request.callbacks))
            serialized = executable.serialize()
            del executable
        return CompiledProgram(serialized, self._rehearse(serialized, grid, request.callbacks), signatures)

    def _grid(self, request: CompileProgram) -> Any:
        count = request.replicas * request.partitions
        own = self._backend.devices
        devices = [own[i % len(own)] for i in range(count)]
        return np.array(devices, dtype=object).reshape(request.replicas, request.partitions)

    def _rehearse(self, serialized: bytes, grid: Any, callbacks: int) -> Description:
        """Repeat everything that the worker does with the executable, so that a crash ends this process."""
        outcome: list[Description | Exception] = []

        def load() -> None:
            try:
                loaded = load_executable(self._backend.client, serialized, grid, _stand_ins(callbacks))
                description = describe(loaded, grid.flat[0], grid.shape)
                loaded.cost_analysis()
                for module in loaded.hlo_modules():
                    module.to_string()
                outcome.append(description)
            except Exception as error:
                outcome.append(error)

        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]


def _stand_ins(count: int) -> list[Any]:
    """Return placeholders for a client's callables, which only the worker calls."""

    def stand_in(*_: Any) -> Any:
        raise NotImplementedError

    return [stand_in] * count


def _verify(module: Any) -> None:
    """Convert the module to HLO, which is the first step of its compilation."""
    _jax.mlir.mlir_module_to_xla_computation(mlir.module_to_bytecode(module), False, False)


def _disable_dumps(options: Any) -> None:
    """Prevent XLA from writing files to a directory that the client has chosen."""
    options.executable_build_options.debug_options.xla_dump_to = ""
    options.env_option_overrides = [each for each in options.env_option_overrides if "dump" not in each[0]]


def _name_and_line(module: Any) -> tuple[str, str]:
    """Return the module's name, and the first known line of the user's code ("" if unknown)."""
    name = ir.StringAttr(module.operation.attributes["sym_name"]).value
    lines = (
        line
        for function in module.body.operations
        for region in function.regions  # a Shardy mesh has no region
        for block in region.blocks
        for operation in itertools.islice(block.operations, _MAX_OPERATIONS)
        if (line := _line(operation.location))
    )
    return name[:_MAX_TEXT], next(lines, "")[:_MAX_TEXT]


def _line(location: Any) -> str:
    """Return, for example, "train.py:12"; "" if the location has no file, or if this JAX does not expose it."""
    for _ in range(_MAX_DEPTH):
        if (file := getattr(location, "filename", None)) is not None:
            return f"{file}:{location.start_line}"
        within = [getattr(location, name, None) for name in ("callee", "child_loc")]
        location = next((each for each in (*within, *getattr(location, "locations", ())[:1]) if each is not None), None)
    return ""
