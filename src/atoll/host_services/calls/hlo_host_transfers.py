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
from atoll.host_services.calls.call_arrays import Array
from atoll.host_services.calls.python_custom_calls import shard_type
from atoll.ir.types import ShardType
from atoll.protocol.advice import CALLBACK_ADVICE
from atoll.protocol.messages import HostChannels

SEND, RECEIVE = "stablehlo.send", "stablehlo.recv"
INFEED, OUTFEED = "stablehlo.infeed", "stablehlo.outfeed"
# Names of these operations in the portable form of a module, where a version number follows each.
NAMES = (b"send_v", b"recv_v", b"infeed_v", b"outfeed_v")

_NO_HOST = (
    "a program on a cluster has no infeed or outfeed, and would occupy its devices forever. Pass arrays as arguments "
    "and results, or use jax.pure_callback or jax.experimental.io_callback"
)
_NO_PEERS = (
    "programs on a cluster with tenants may not send between devices: a send without a matching receive occupies its "
    "device. Use a collective such as jax.lax.ppermute"
)


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
    """The types of what a module sends on its callables' channels, and receives.

    With `refuse_peers`, a module may not send from one device to another either: a program whose send has no matching
    receive occupies its device until the session ends.
    """

    def __init__(self, channels: Sequence[HostChannels], refuse_peers: bool = False) -> None:
        self._refuses_peers = refuse_peers
        self._sends = {channel for each in channels for channel in each.sends}
        self._receives = {channel for each in channels for channel in each.receives}
        self._types: dict[int, ShardType] = {}

    def add(self, operation: Any) -> None:
        """Add an infeed, outfeed, send or receive.

        Raises UNIMPLEMENTED for an infeed or outfeed, and for a transfer with the host on a channel that no callable
        has: the device would wait forever. Transfers between devices are for XLA, unless they are refused.
        """
        from jax._src.lib.mlir import ir
        from jax._src.lib.mlir.dialects import hlo

        if operation.name in (INFEED, OUTFEED):
            raise unimplemented(f"{operation.name}: {_NO_HOST}")
        attributes = operation.attributes
        if "is_host_transfer" not in attributes or not ir.BoolAttr(attributes["is_host_transfer"]).value:
            if self._refuses_peers:
                raise unimplemented(f"{operation.name}: {_NO_PEERS}")
            return
        channel = hlo.ChannelHandle(attributes["channel_handle"]).handle
        sends = operation.name == SEND
        if channel not in (self._sends if sends else self._receives):
            raise unimplemented(f"{operation.name}: {CALLBACK_ADVICE}")
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
