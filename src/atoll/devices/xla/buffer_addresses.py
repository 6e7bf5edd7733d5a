"""Find the address of an array in a CPU device's memory, for a script that asks
(`client/jax_patches/buffer_pointers.py`).

A program with the array as its parameter asks, by a custom call. So it takes its place in the order like any other, and
needs no message of its own.
"""

from __future__ import annotations

import ctypes

from atoll.devices.xla import xla_custom_calls
from atoll.protocol.questions import ADDRESS_CALL


def _write_address(frame: xla_custom_calls.CallFrame) -> None:
    """The first argument's, as the first result: two uint32."""
    address = frame.arguments.buffers[0].contents.data or 0
    ctypes.c_uint64.from_address(frame.results.buffers[0].contents.data).value = address


def register() -> None:
    xla_custom_calls.register(ADDRESS_CALL, _write_address)
