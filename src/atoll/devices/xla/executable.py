"""XLA executables on this host's devices, and the gates that let those with callbacks run asynchronously."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax._src import compiler
from jax._src.lib import xla_client as xc
from jax._src.lib.mlir import ir
from jax.sharding import SingleDeviceSharding

from atoll.devices.compilers.compiler_messages import Description
from atoll.devices.xla import xla_custom_calls
from atoll.devices.xla.stops import launch_id
from atoll.devices.xla.xla_arrays import stacked_handler
from atoll.devices.xla.xla_compilation import context
from atoll.protocol.messages import FunctionInfo


class XlaExecutable:
    """An executable on this host's devices: a `devices.device.LoadedFunction`.

    `devices` are the local ones, in the order of the function's assignment. If XLA would run the function's callbacks
    inside the call that enqueues it, `gates` is set. If its devices communicate with those of other hosts, `is_joint`
    is set. `world` is the number of the world that it runs in, or 0.
    """

    def __init__(
        self,
        loaded: Any,
        description: Description,
        devices: tuple[Any, ...],
        ordinals: tuple[int, ...],
        gates: Gates | None = None,
        is_joint: bool = False,
        world: int = 0,
    ) -> None:
        self.world = world
        self.is_joint = is_joint
        self._loaded = loaded
        self._gates = gates
        self.waits_inside = gates is not None and not is_joint  # a run on several hosts keeps the island's order
        self._devices = devices
        self.ordinals = ordinals
        self.description = description
        self.parameters = description.info.parameters
        self.outputs = tuple((each.dtype, each.shape) for each in description.info.outputs)
        self.parameter_layouts = description.parameter_layouts
        self.output_layouts = description.output_layouts
        self.scratch_bytes = description.scratch_bytes
        self.donated = description.info.donated
        default = devices[0].default_memory().kind
        self._handlers = [
            stacked_handler(each.dtype, each.shape, devices, "" if each.memory_kind == default else each.memory_kind)
            for each in description.info.outputs
        ]

    def execute(self, arguments: list[Any], sequence: int, stream: int = 0) -> tuple[list[Any], Any]:
        if stream:
            with self._beside_others(stream):
                results = self._loaded.execute_sharded(arguments, with_tokens=True, launch_id=launch_id(sequence))
        else:
            results = self._loaded.execute_sharded(arguments, with_tokens=True, launch_id=launch_id(sequence))
        return results.consume_with_handlers(self._handlers), results.consume_token()

    def run(self, arguments: list[Any], stream: int) -> list[Any]:
        for each in arguments:  # XLA runs the function in this thread if it has nothing to wait for
            each.block_until_ready()
        with xc.execution_stream_id(stream):
            results = self._loaded.execute_sharded(arguments, with_tokens=True)
        outputs: list[Any] = results.consume_with_handlers(self._handlers)
        results.consume_token().block_until_ready()
        return outputs

    def _beside_others(self, stream: int) -> AbstractContextManager[None]:
        if self._gates is not None:
            return self._gates.closed(self._devices[0], stream)
        context: AbstractContextManager[None] = xc.execution_stream_id(stream)
        return context

    def info(self) -> FunctionInfo:
        return self.description.info

    def cost_analysis(self) -> dict[str, float]:
        costs: dict[str, float] = self._loaded.cost_analysis()
        return costs

    def text(self) -> str:
        return "\n\n".join(module.to_string() for module in self._loaded.hlo_modules())


_TARGET = "atoll_gate"
# XLA runs programs that it estimates as cheap inside the enqueuing call. A matrix product of this size is not cheap.
_SIZE = 16
_GATE = f"""
module @gate {{
  func.func public @main(%x: tensor<{_SIZE}x{_SIZE}xf32>) -> tensor<f32> {{
    %product = stablehlo.dot_general %x, %x, contracting_dims = [1] x [0]
      : (tensor<{_SIZE}x{_SIZE}xf32>, tensor<{_SIZE}x{_SIZE}xf32>) -> tensor<{_SIZE}x{_SIZE}xf32>
    %waited = stablehlo.custom_call @{_TARGET}(%product) {{api_version = 4 : i32, has_side_effect = true}}
      : (tensor<{_SIZE}x{_SIZE}xf32>) -> tensor<f32>
    return %waited : tensor<f32>
  }}
}}
"""

_held = threading.Lock()


def _wait(_: xla_custom_calls.CallFrame) -> None:
    """Wait until the gate opens."""
    with _held:
        pass


class Gates:
    """One gate per device, compiled at its first use. Only for the executor's thread.

    XLA's CPU client runs a program inside the call that enqueues it, unless the program has something to wait for. A
    callback would then block everything else on this host. Therefore a gate is enqueued before such a program, on the
    same execution stream: a program that ends when a lock is released, which is held while both are enqueued. Programs
    on several devices wait for their launch in any case.
    """

    def __init__(self) -> None:
        self._gates: dict[Any, tuple[Any, Any]] = {}
        xla_custom_calls.register(_TARGET, _wait)

    @contextlib.contextmanager
    def closed(self, device: Any, stream: int) -> Iterator[None]:
        """Make work that is enqueued on the device in this context wait for the context's end.

        It also waits for earlier work of the stream.
        """
        gate = self._gates.get(device)
        if gate is None:
            gate = self._gates[device] = _compile(device)
        executable, operand = gate
        with _held, xc.execution_stream_id(stream):
            executable.execute_sharded([operand])
            yield


def _compile(device: Any) -> tuple[Any, Any]:
    """Return a gate for the device, and its argument."""
    devices = xc.DeviceList((device,))
    options = compiler.get_compile_options(num_replicas=1, num_partitions=1, device_assignment=np.array([[device.id]]))
    with context(len(_GATE)):
        module = ir.Module.parse(_GATE)
        executable = compiler.backend_compile_and_load(device.client, module, devices, options, [])
    operand = jax.device_put(np.ones((_SIZE, _SIZE), np.float32), SingleDeviceSharding(device))
    return executable, operand
