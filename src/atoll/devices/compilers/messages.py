"""What describes a compiled program, wherever it was compiled."""

from __future__ import annotations

import msgspec

from atoll.ir.types import ShardType
from atoll.protocol.messages import FunctionInfo, HostChannels

# Dimensions from major to minor; None for the platform's default.
Layout = tuple[int, ...] | None


class Signature(msgspec.Struct, frozen=True, array_like=True):
    """What a callable has to return, or to write into the buffers that it takes.

    With `channels`, XLA has to be told what it takes, too: its `operands`.
    """

    results: tuple[ShardType, ...] = ()
    takes_buffers: bool = False
    operands: tuple[ShardType, ...] = ()
    channels: HostChannels | None = None


class Description(msgspec.Struct, frozen=True, array_like=True):
    """What a worker needs to know about an executable besides the executable itself."""

    info: FunctionInfo
    parameter_layouts: tuple[Layout, ...]
    output_layouts: tuple[Layout, ...]
    scratch_bytes: int  # on each device while it runs
