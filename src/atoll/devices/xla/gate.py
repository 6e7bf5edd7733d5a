"""Makes a program with callbacks run beside the thread that enqueues it, on XLA's CPU devices.

XLA runs such a program inside the call that enqueues it, unless it has something to wait for: a callback would then
stop everything else on this host. So a *gate* goes ahead of it on an execution stream of its own: a program that ends
when the lock is released which is held while both are enqueued. Programs over several devices wait for their launch
anyway.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax._src.lib import xla_client as xc
from jax.sharding import SingleDeviceSharding

from atoll.devices.xla import xla_custom_calls

_TARGET = "atoll_gate"
# So large a product is not "cheap": XLA runs cheap programs inside of the enqueuing call, too.
_SIZE = 16


_held = threading.Lock()


def _wait(_: xla_custom_calls.CallFrame) -> None:
    """Until the gate opens."""
    with _held:
        pass


class Gates:
    """One gate a device, compiled at its first use. For the executor's thread alone."""

    def __init__(self) -> None:
        self._gates: dict[Any, tuple[Any, Any]] = {}
        xla_custom_calls.register(_TARGET, _wait)

    @contextlib.contextmanager
    def closed(self, device: Any, stream: int) -> Iterator[None]:
        """What is enqueued on the device within, waits for the end of this context and of the stream's earlier work."""
        gate = self._gates.get(device)
        if gate is None:
            gate = self._gates[device] = _compile(device)
        executable, operand = gate
        with _held, xc.execution_stream_id(stream):
            executable.execute_sharded([operand])
            yield


def _compile(device: Any) -> tuple[Any, Any]:
    def gate(x: Any) -> Any:
        wait = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct((), np.float32), has_side_effect=True)
        return wait(x @ x)

    operand = jax.device_put(np.ones((_SIZE, _SIZE), np.float32), SingleDeviceSharding(device))
    return jax.jit(gate).lower(operand).compile().runtime_executable(), operand
