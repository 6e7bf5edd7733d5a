"""The arrays of a program that is being traced: their types, and where they lie."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from atoll.client import jax_internals as internals
from atoll.errors import ProgramError
from atoll.ir.types import DTYPE_BITS, ArraySpec, Replicated, Sharding, Tiled, Tiling

Place = Any  # a jax.sharding.Sharding, or a function that gives one when XLA has chosen it


@dataclass(eq=False)
class Value:
    """An array. Those of the `host` (NumPy arrays, Python's numbers) have no place until something uses them.

    Several values may be one array under different views of it; they share `root`, which stands in the program.
    """

    aval: Any
    committed: bool
    line: str  # of the user's, that made it
    place: Place = None
    of: Value | None = None
    host: bool = False
    constant: Any = None  # what it holds, where that is known already
    shared: bool = False  # a constant of the program's own, which no launch may consume
    donated: str = ""  # the line that gave it away
    put: bool = False  # a copy that the function has in hand, from a device_put
    copies: dict[Sharding, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.aval = internals.plain(self.aval)

    @property
    def root(self) -> Value:
        return self if self.of is None else self.of.root

    @property
    def placed(self) -> bool:
        return self.root.place is not None

    @property
    def sharding(self) -> Any:
        """Where it lies; waits for XLA where XLA chooses."""
        root = self.root
        if callable(root.place):
            root.place = root.place()
        return root.place

    @property
    def spec(self) -> ArraySpec:
        return array_spec(self.aval, self.sharding)

    def lies_on(self, sharding: Any) -> bool:
        """Whether its shards are those of `sharding` already."""
        return array_spec(self.aval, sharding).sharding == self.spec.sharding

    def seen(self) -> Value:
        """The same array under a view of its own: giving that away does not give this away."""
        return Value(self.aval, True, self.line, of=self)

    def given_away(self) -> str:
        """The line that donated it, or ""."""
        return self.donated or self.root.donated


def kept(value: Any, line: str) -> Value:
    """A value for something that the function has not been given as an argument."""
    if isinstance(value, np.ndarray):
        value = value.copy()  # as it is now, whatever the function does to it later
    array = hasattr(value, "sharding")
    return Value(
        internals.abstractify(value),
        internals.is_committed(value) if array else False,
        line,
        place=value.sharding if array else None,
        host=not array,
        constant=value,
        shared=not array,
    )


@lru_cache(maxsize=16384)
def array_spec(aval: Any, sharding: Any) -> ArraySpec:
    """The array's type in a program. Raises ProgramError for one that programs do not know."""
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
