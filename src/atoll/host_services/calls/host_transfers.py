"""Sends of a program to its host, and receives from it: the way in which programs on TPUs call Python.

JAX lowers a callback there to one send for each argument and one receive for each result, each on a channel of its own
(`_emit_tpu_python_callback` in jax/_src/callback.py). Only who made the callback knows which channels belong together.
Written by JAX's sources, and untested on a TPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from atoll.errors import invalid, unimplemented
from atoll.host_services.calls.arrays import Array
from atoll.host_services.calls.custom_calls import shard_type
from atoll.ir.types import ShardType
from atoll.protocol.advice import CALLBACK_ADVICE
from atoll.protocol.messages import HostChannels

SEND, RECEIVE = "stablehlo.send", "stablehlo.recv"
# Of the two in the portable form of a module, where their versions follow.
NAMES = (b"send_v", b"recv_v")


@dataclass(frozen=True)
class SendAndReceive:
    """A callable with its channels: what JAX keeps of a callback until the program is compiled.

    A callable without results returns a Python number, as a sign that it has ended: so results get their `dtypes` here.
    """

    callback: Callable[..., Any]
    channels: HostChannels
    dtypes: tuple[Any, ...]

    def __call__(self, *arguments: Any) -> tuple[Array, ...]:
        return tuple(map(np.asarray, self.callback(*arguments), self.dtypes))


class HostTransfers:
    """The types of what a module sends on its callables' channels, and receives."""

    def __init__(self, channels: Sequence[HostChannels]) -> None:
        self._sends = {channel for each in channels for channel in each.sends}
        self._receives = {channel for each in channels for channel in each.receives}
        self._types: dict[int, ShardType] = {}

    def add(self, operation: Any) -> None:
        """Adds a send or receive; those between devices are XLA's alone.

        Raises UNIMPLEMENTED for the host's where no callable has its channel: its device would wait for ever.
        """
        from jax._src.lib.mlir import ir
        from jax._src.lib.mlir.dialects import hlo

        attributes = operation.attributes
        if "is_host_transfer" not in attributes or not ir.BoolAttr(attributes["is_host_transfer"]).value:
            return
        channel = hlo.ChannelHandle(attributes["channel_handle"]).handle
        sends = operation.name == SEND
        if channel not in (self._sends if sends else self._receives):
            raise unimplemented(CALLBACK_ADVICE)
        arrays = list(operation.operands if sends else operation.results)[:-1]  # the last is a token
        if len(arrays) != 1:
            raise invalid(f"the program has {len(arrays)} arrays on channel {channel} to its host, not one")
        kind = shard_type(arrays[0].type)
        if self._types.setdefault(channel, kind) != kind:
            raise invalid(f"the program has arrays of different types on channel {channel} to its host")

    def types(self, channels: Sequence[int]) -> tuple[ShardType, ...]:
        """Raises INVALID_ARGUMENT for a channel that the module does not use."""
        if unused := [channel for channel in channels if channel not in self._types]:
            raise invalid(f"the program has nothing on the channels {unused[:10]} of a callback")
        return tuple(self._types[channel] for channel in channels)
