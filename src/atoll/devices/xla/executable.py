"""An XLA executable, loaded on this host's part of its devices."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax._src.lib import xla_client as xc

from atoll.devices.xla.arrays import stacked_handler
from atoll.devices.xla.gate import Gates
from atoll.protocol.messages import FunctionInfo, OutputInfo
from atoll.transfers.dtypes import numpy_dtype


class Executable:
    """See `devices.device.LoadedFunction`. `devices` are the local ones, in the order of the function's assignment.

    `gates`: for a function that calls its client, where XLA would do so inside of the enqueuing call; `spans_hosts`: it
    has devices elsewhere, too. `held` is kept for as long as the executable is.
    """

    def __init__(
        self,
        loaded: Any,
        devices: tuple[Any, ...],
        ordinals: tuple[int, ...],
        gates: Gates | None = None,
        held: Any = None,
        spans_hosts: bool = False,
    ) -> None:
        self._held = held
        self._loaded = loaded
        self._gates = gates
        self.waits_inside = gates is not None and not spans_hosts  # else it starts in the island's order
        self._devices = devices
        module = loaded.hlo_modules()[0]
        program = xc.XlaComputation(module.as_serialized_hlo_module_proto()).program_shape()
        result = program.result_shape()
        outputs = list(result.tuple_shapes()) if result.is_tuple() else [result]
        self.ordinals = ordinals
        self.parameters = tuple(_dtype_and_shape(shape) for shape in program.parameter_shapes())
        self.outputs = tuple(_dtype_and_shape(shape) for shape in outputs)
        self.parameter_layouts = _unusual(loaded.get_parameter_layouts, self.parameters, devices[0])
        self.output_layouts = _unusual(loaded.get_output_layouts, self.outputs, devices[0])
        kinds = loaded.get_output_memory_kinds()
        default = devices[0].default_memory().kind
        self.output_memory_kinds = tuple(kinds[0]) if kinds else (default,) * len(self.outputs)
        self.scratch_bytes = int(loaded.get_compiled_memory_stats().temp_size_in_bytes)
        self.donated = _donated_inputs(module.to_string())
        self._handlers = [
            stacked_handler(dtype, shape, devices, "" if kind == default else kind)
            for (dtype, shape), kind in zip(self.outputs, self.output_memory_kinds, strict=True)
        ]

    def execute(self, arguments: list[Any], sequence: int, stream: int = 0) -> tuple[list[Any], Any]:
        """Enqueues one run; returns the outputs, not ready yet, and the run's completion token.

        The caller has checked count, dtypes, shapes and devices of the arguments, and that none is deleted.
        """
        if stream:
            with self._beside_others(stream):
                results = self._loaded.execute_sharded(arguments, with_tokens=True, launch_id=sequence & 0x7FFFFFFF)
        else:
            results = self._loaded.execute_sharded(arguments, with_tokens=True, launch_id=sequence & 0x7FFFFFFF)
        return results.consume_with_handlers(self._handlers), results.consume_token()

    def run(self, arguments: list[Any], stream: int) -> list[Any]:
        """XLA runs it in this thread where it has nothing to wait for."""
        for each in arguments:
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
        loaded = self._loaded
        stats = loaded.get_compiled_memory_stats()
        parameter_shardings = loaded.get_parameter_shardings()
        output_shardings = loaded.get_output_shardings()
        layouts = _layouts(loaded.get_output_layouts) or (b"",) * len(self.outputs)
        return FunctionInfo(
            name=loaded.hlo_modules()[0].name,
            fingerprint=loaded.fingerprint or b"",
            parameter_shardings=None
            if parameter_shardings is None
            else tuple(s.SerializeToString() for s in parameter_shardings),
            parameter_layouts=_layouts(loaded.get_parameter_layouts),
            outputs=tuple(
                OutputInfo(
                    dtype,
                    shape,
                    None if output_shardings is None else output_shardings[i].SerializeToString(),
                    self.output_memory_kinds[i],
                    layouts[i],
                )
                for i, (dtype, shape) in enumerate(self.outputs)
            ),
            donated=self.donated,
            memory_stats={name: int(getattr(stats, name)) for name in _MEMORY_STATS if hasattr(stats, name)},
            generated_code_bytes=int(loaded.size_of_generated_code_in_bytes()),
            parameters=self.parameters,
        )

    def cost_analysis(self) -> dict[str, float]:
        costs: dict[str, float] = self._loaded.cost_analysis()
        return costs

    def text(self) -> str:
        return "\n\n".join(module.to_string() for module in self._loaded.hlo_modules())


_MEMORY_STATS = (
    "generated_code_size_in_bytes",
    "argument_size_in_bytes",
    "output_size_in_bytes",
    "alias_size_in_bytes",
    "temp_size_in_bytes",
    "peak_memory_in_bytes",
    "host_generated_code_size_in_bytes",
    "host_argument_size_in_bytes",
    "host_output_size_in_bytes",
    "host_alias_size_in_bytes",
    "host_temp_size_in_bytes",
)


def _dtype_and_shape(shape: Any) -> tuple[str, tuple[int, ...]]:
    if shape.is_token():
        return "token", ()
    return np.dtype(shape.numpy_dtype()).name, tuple(shape.dimensions())


def _layouts(get: Any) -> tuple[bytes, ...]:
    try:
        return tuple(str(layout).encode() for layout in get())
    except jax.errors.JaxRuntimeError:  # XLA gives none where there are tokens among the arrays
        return ()


def _unusual(
    get: Any, types: tuple[tuple[str, tuple[int, ...]], ...], device: Any
) -> tuple[tuple[int, ...] | None, ...]:
    """The arrays' layouts, major to minor; None where it is the platform's default."""
    texts = _layouts(get)
    if len(texts) != len(types):
        return (None,) * len(types)
    unusual: list[tuple[int, ...] | None] = []
    for text, (dtype, shape) in zip(texts, types, strict=True):
        if len(shape) < 2:
            unusual.append(None)
            continue
        order = _major_to_minor(text.decode())
        default = _major_to_minor(str(device.client.get_default_layout(numpy_dtype(dtype), shape, device)))
        unusual.append(None if order == default else order)
    return tuple(unusual)


def _major_to_minor(text: str) -> tuple[int, ...]:
    """Of XLA's text of a layout, such as {1,0:T(8,128)}."""
    order = text.strip("{}").partition(":")[0]
    return tuple(int(part) for part in reversed(order.split(",")) if part)


def _donated_inputs(text: str) -> tuple[int, ...]:
    """Which parameters the module writes its outputs over; from the header of XLA's text.

    Parameters that a caller offers but that no output fits stay the caller's.
    """
    header = text[: text.find("\n")]
    start = header.find("input_output_alias=")
    if start < 0:
        return ()
    depth, position = 0, header.index("{", start)
    end = position
    while True:
        depth += (header[end] == "{") - (header[end] == "}")
        if depth == 0:
            break
        end += 1
    chunks = header[position + 1 : end].split("(")[1:]
    return tuple(sorted({int(chunk.split(",")[0]) for chunk in chunks}))
