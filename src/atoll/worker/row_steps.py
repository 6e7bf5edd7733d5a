"""What the steps of a sparse exchange do on this host: see `ir.row_exchange`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atoll.ir import plan as p
from atoll.worker.completions import ArrayCompletion, DeletionGuard
from atoll.worker.dispatch_unit import DispatchUnit
from atoll.worker.host_network import HostNetwork
from atoll.worker.store import Buffer


class RowSteps:
    """For the executor's thread. `alive(buffer)` is its array, and raises where there is none any more; `hold(buffer)`
    keeps its memory as it is until the result is called; `made(array, spec)` is a buffer for a new one.
    """

    def __init__(
        self,
        network: HostNetwork,
        deletions: DeletionGuard,
        alive: Callable[[Buffer], Any],
        hold: Callable[[Buffer], Callable[[], None]],
        made: Callable[[Any, p.LocalArray], Buffer],
    ) -> None:
        self._network = network
        self._deletions = deletions
        self._alive = alive
        self._hold = hold
        self._made = made

    def run(self, step: p.SendRows | p.ReceiveRows, unit: DispatchUnit, values: dict[int, Buffer]) -> None:
        if isinstance(step, p.SendRows):
            self._send(step, unit, values)
        else:
            self._receive(step, unit, values)

    def _send(self, step: p.SendRows, unit: DispatchUnit, values: dict[int, Buffer]) -> None:
        buffers = [values[value] for value in step.inputs]
        arrays = [self._alive(buffer) for buffer in buffers]
        releases = [self._hold(buffer) for buffer in buffers]

        def release() -> None:
            for each in releases:
                each()

        try:
            self._network.send_rows(step, unit, arrays, release)
        except Exception:
            release()
            raise

    def _receive(self, step: p.ReceiveRows, unit: DispatchUnit, values: dict[int, Buffer]) -> None:
        array, spans = self._network.receive_rows(step, unit)
        values[step.output] = self._made(array, step.array)
        unit.completions.append(ArrayCompletion(array, self._deletions))
        if spans is not None:
            assert step.spans_array is not None
            values[step.spans] = self._made(spans, step.spans_array)
            unit.completions.append(ArrayCompletion(spans, self._deletions))
