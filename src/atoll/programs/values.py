"""The arrays of a program that is being traced: their types and shardings."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from atoll.client import jax_internals as internals
from atoll.errors import ProgramError
from atoll.ir.types import DTYPE_BITS, ArraySpec, Replicated, Sharding, Tiled, Tiling

ShardingLike = Any  # a jax.sharding.Sharding, or a function that donates one when XLA has chosen it


@dataclass(eq=False)
class Value:
    """An array. Those of the `host` (NumPy arrays, Python's numbers) have no sharding until something uses them.

    Several values may be views of one array; they share `root`, which is the value in the program.
    """

    aval: Any
    committed: bool
    line: str  # the user's line that made it
    sharding_like: ShardingLike = None
    view_of: Value | None = None
    host: bool = False
    constant: Any = None  # its contents, where they are known already
    shared: bool = False  # a constant of the program's own, which no launch may consume
    donated: str = ""  # the line that donated it
    put: bool = False  # a copy that a device_put of the function has made
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
        """Its sharding; waits for XLA where XLA chooses it."""
        root = self.root
        if callable(root.sharding_like):
            root.sharding_like = root.sharding_like()
        return root.sharding_like

    @property
    def spec(self) -> ArraySpec:
        return array_spec(self.aval, self.sharding)

    def is_sharded_as(self, sharding: Any) -> bool:
        """Whether its shards are on the devices of `sharding` already, in the same order."""
        return array_spec(self.aval, sharding).sharding == self.spec.sharding

    def view(self) -> Value:
        """A view of the array: donating the view does not donate this value."""
        return Value(self.aval, True, self.line, view_of=self)

    def stand_in(self, *, shared: bool = True) -> Value:
        """What stands for the array in a part of a control flow node. Nothing there may consume it if it is
        shared.
        """
        sharding = self.root.sharding_like
        return Value(self.aval, self.committed, self.line, sharding, host=sharding is None, shared=shared)

    def donated_at(self) -> str:
        """The line that donated it, or ""."""
        return self.donated or self.root.donated


def constant_value(value: Any, line: str) -> Value:
    """A value for something that is no argument of the function."""
    if isinstance(value, np.ndarray):
        value = value.copy()  # the function may change it later
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


@lru_cache(maxsize=16384)
def array_spec(aval: Any, sharding: Any) -> ArraySpec:
    """The array's type in a program. Raises ProgramError for a type that programs do not have."""
    aval, sharding = internals.physical(aval, sharding)
    dtype = aval.dtype.name
    if dtype not in DTYPE_BITS:
        raise ProgramError(f"a program has no arrays of {dtype}")
    devices = internals.devices_of(sharding)
    if devices is None:
        raise ProgramError(f"{sharding} names no devices, and a program must know them")
    try:
        tiling = _tiling(sharding, aval.ndim, len(devices))
    except NotImplementedError as error:
        raise ProgramError(f"{error}; give the array a NamedSharding first (jax.device_put)") from None
    kind = sharding.memory_kind or ""
    return ArraySpec(dtype, tuple(aval.shape), Sharding(tuple(device.id for device in devices), tiling, kind))


def _tiling(sharding: Any, rank: int, devices: int) -> Tiling:
    tiles = internals.tiles(sharding, rank) if devices > 1 else None
    if tiles is None or math.prod(tiles[0][:rank]) == 1:
        return Replicated()
    return Tiled(*tiles)
