"""The arrays of a program during tracing: their types and shardings."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from atoll.client import jax_internals as internals
from atoll.client.client_caches import client_cache
from atoll.errors import ProgramError
from atoll.ir.types import DTYPE_BITS, ArraySpec, Replicated, Sharding, Tiled, Tiling

ShardingLike = Any  # a jax.sharding.Sharding, or a function that waits until XLA has chosen one and returns it


@dataclass(eq=False)
class Value:
    """An array. A `host` value (a NumPy array or a Python number) has no sharding until something uses it.

    Several values may be views of one array. They share `root`, which is the value in the program.
    """

    aval: Any
    committed: bool
    line: str  # the user's line that created it
    sharding_like: ShardingLike = None
    view_of: Value | None = None
    host: bool = False
    constant: Any = None  # the contents, if they are known during tracing
    shared: bool = False  # whether other uses or launches need the array, so that no node may consume it
    donated: str = ""  # the line that donated it
    put: bool = False  # whether a device_put of the function has created it
    copies: dict[Sharding, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.aval = internals.plain(self.aval)

    @property
    def root(self) -> Value:
        return self if self.view_of is None else self.view_of.root

    @property
    def has_sharding(self) -> bool:
        return self.root.sharding_like is not None

    @property
    def sharding(self) -> Any:
        """The sharding. Waits for XLA if XLA chooses it."""
        root = self.root
        if callable(root.sharding_like):
            root.sharding_like = root.sharding_like()
        return root.sharding_like

    @property
    def spec(self) -> ArraySpec:
        return array_spec(self.aval, self.sharding)

    def is_sharded_as(self, sharding: Any) -> bool:
        """Return whether the shards are already those of `sharding`, on the same devices in the same order."""
        return array_spec(self.aval, sharding).sharding == self.spec.sharding

    def view(self) -> Value:
        """Return a view of the array. Donating the view does not donate this value."""
        return Value(self.aval, True, self.line, view_of=self)

    def stand_in(self, *, shared: bool = True) -> Value:
        """Return a placeholder for the array in a part of a control flow node, which may not consume it if `shared`."""
        sharding = self.root.sharding_like
        return Value(self.aval, self.committed, self.line, sharding, host=sharding is None, shared=shared)

    def donated_at(self) -> str:
        """Return the line that donated the array, or ""."""
        return self.donated or self.root.donated


def constant_value(value: Any, line: str) -> Value:
    """Return the value of a constant, which is not an argument of the function."""
    if isinstance(value, np.ndarray):
        value = value.copy()  # the function may change the array later
    array = hasattr(value, "sharding")
    return Value(
        internals.abstractify(value),
        internals.is_committed(value) if array else False,
        line,
        sharding_like=value.sharding if array else None,
        host=not array,
        constant=value,
        shared=not array,
    )


@client_cache(16384)
def array_spec(aval: Any, sharding: Any) -> ArraySpec:
    """Return the array's type in a program. Raise ProgramError if programs do not support the type."""
    aval, sharding = internals.physical(aval, sharding)
    dtype = aval.dtype.name
    if dtype not in DTYPE_BITS:
        raise ProgramError(f"programs do not support arrays of dtype {dtype}")
    devices = internals.devices_of(sharding)
    if devices is None:
        raise ProgramError(f"programs need a sharding with devices, got {sharding}")
    try:
        tiling = _tiling(sharding, aval.ndim, len(devices))
    except NotImplementedError as error:
        raise ProgramError(f"{error}; put the array onto a NamedSharding first (jax.device_put)") from None
    kind = sharding.memory_kind or ""
    return ArraySpec(dtype, tuple(aval.shape), Sharding(tuple(device.id for device in devices), tiling, kind))


def _tiling(sharding: Any, rank: int, devices: int) -> Tiling:
    tiles = internals.tiles(sharding, rank) if devices > 1 else None
    if tiles is None or math.prod(tiles[0][:rank]) == 1:
        return Replicated()
    return Tiled(*tiles)
