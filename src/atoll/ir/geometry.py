"""Arrays on physical devices: the hosts, boxes and memory of an array's shards."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from atoll.cluster.locations import DeviceLocation, HostDevice, MemoryRequirement
from atoll.errors import unimplemented
from atoll.ir import row_exchange
from atoll.ir.exchange import Grid, Spread, spread
from atoll.ir.plan import LocalArray
from atoll.ir.types import DTYPE_BITS, ArraySpec, Box, Even, Opaque, Replicated, Shape, Tiled, nbytes, shard_boxes


@dataclass(frozen=True)
class Located:
    """An array whose shard i is at `locations[i]`. It caches what it computes, for all arrays of the same type."""

    spec: ArraySpec
    locations: tuple[DeviceLocation, ...]

    @cached_property
    def positions(self) -> dict[int, tuple[int, ...]]:
        """The positions of each host's shards in the device list."""
        found: dict[int, list[int]] = {}
        for position, location in enumerate(self.locations):
            found.setdefault(location.host, []).append(position)
        return {host: tuple(found[host]) for host in sorted(found)}

    @cached_property
    def hosts(self) -> tuple[int, ...]:
        return tuple(self.positions)

    @cached_property
    def shard_of(self) -> tuple[int, ...]:
        """The local number of each shard on its host."""
        counts: dict[int, int] = {}
        numbers = []
        for location in self.locations:
            number = counts.get(location.host, 0)
            counts[location.host] = number + 1
            numbers.append(number)
        return tuple(numbers)

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """The box of each shard. Raises UNIMPLEMENTED if the tiling does not determine it."""
        return shard_boxes(self.spec.sharding, self.spec.shape)

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The shape of each shard. Raises UNIMPLEMENTED if the tiling does not determine it."""
        tiling, count = self.spec.sharding.tiling, len(self.locations)
        match tiling:
            case Replicated():
                return (self.spec.shape,) * count
            case Tiled():
                return tuple(tuple(stop - start for start, stop in box) for box in self.boxes)
            case Even(shard_shape=each):
                return (each,) * count
            case Opaque():
                raise unimplemented("the shards of an opaque sharding have no known shape")
        return tiling.shard_shapes

    @cached_property
    def memory(self) -> MemoryRequirement:
        """The size of the array on each device."""
        if isinstance(self.spec.sharding.tiling, Opaque):
            return ()
        bits = DTYPE_BITS[self.spec.dtype]
        sums: dict[HostDevice, int] = {}
        for location, shape in zip(self.locations, self.shapes, strict=True):
            device = (location.host, location.ordinal)
            sums[device] = sums.get(device, 0) + math.prod(shape) * bits // 8
        return tuple(sums.items())

    @cached_property
    def nbytes(self) -> int:
        return nbytes(self.spec)

    @cached_property
    def _on(self) -> dict[int, LocalArray]:
        return {}

    def on(self, host: int) -> LocalArray:
        """Return the host's part."""
        part = self._on.get(host)
        if part is None:
            spec, here = self.spec, self.positions[host]
            part = self._on[host] = LocalArray(
                spec.dtype,
                spec.shape,
                tuple(self.shapes[i] for i in here),
                tuple(self.locations[i].ordinal for i in here),
                here,
                spec.sharding.memory_kind,
                spec.layout,
            )
        return part

    def in_order(self, order: Located | None) -> Located:
        """Return the array after sorting its rows into `order`, on the same devices."""
        return self if order is None else Located(row_exchange.in_order(self.spec, order.spec), self.locations)

    @cached_property
    def grid(self) -> Grid:
        return Grid(self.boxes)

    @cached_property
    def spread(self) -> Spread:
        """The distribution to hosts in the form of plans. Raises UNIMPLEMENTED if the shards have no known shape."""
        tiling = self.spec.sharding.tiling
        if isinstance(tiling, Opaque):
            raise unimplemented("the shards of an opaque sharding have no known shape")
        return spread(self.spec.shape, tiling, [location.host for location in self.locations])


def stays(source: Located, target: Located, reshard: bool) -> bool:
    """Return whether a transfer moves no part of the array between hosts, and shard i becomes shard i."""
    if len(source.locations) != len(target.locations):
        return False
    if any(a.host != b.host for a, b in zip(source.locations, target.locations, strict=True)):
        return False
    return not reshard or source.boxes == target.boxes
