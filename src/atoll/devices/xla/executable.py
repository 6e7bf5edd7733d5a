"""An XLA executable, loaded on this host's part of its devices."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from jax._src.lib import xla_client as xc

from atoll.devices.compilers.compiler_messages import Description
from atoll.devices.xla.gate import Gates
from atoll.devices.xla.stops import launch_id
from atoll.devices.xla.xla_arrays import stacked_handler
from atoll.protocol.messages import FunctionInfo


class Executable:
    """See `devices.device.LoadedFunction`. `description` describes the executable `loaded`. `devices` are the local
    ones, in the order of the function's assignment.

    `gates`: for a function that calls its client, where XLA would do so inside of the enqueuing call; `spans_hosts`: it
    has devices elsewhere, too. `held` is kept for as long as the executable is.
    """

    def __init__(
        self,
        loaded: Any,
        description: Description,
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
        """Enqueues one run; returns the outputs, not ready yet, and the run's completion token.

        The caller has checked count, dtypes, shapes and devices of the arguments, and that none is deleted.
        """
        if stream:
            with self._beside_others(stream):
                results = self._loaded.execute_sharded(arguments, with_tokens=True, launch_id=launch_id(sequence))
        else:
            results = self._loaded.execute_sharded(arguments, with_tokens=True, launch_id=launch_id(sequence))
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
        return self.description.info

    def cost_analysis(self) -> dict[str, float]:
        costs: dict[str, float] = self._loaded.cost_analysis()
        return costs

    def text(self) -> str:
        return "\n\n".join(module.to_string() for module in self._loaded.hlo_modules())
