"""Transfers of arrays between hosts, in a compact form from which each host computes what it sends and receives.

An `Exchange` describes how the array is distributed before and after. It numbers the messages between two shards by
their positions. Therefore the sizes of lowered programs and plans do not depend on the number of pairs of shards, and a
host's work depends only on its own shards.

Each element of a target shard is received once. A replica on the target's host sends it if there is one; otherwise, the
replicas share the load.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import groupby, product
from typing import NamedTuple

import msgspec

from atoll.ir.types import Box, Even, Replicated, Shape, Sharding, Tiled, Tiling, Uneven, shard_boxes


class SendPiece(NamedTuple):
    """`box` of local shard `shard`, in the shard's coordinates, which is sent to `host` as `feed`."""

    shard: int
    box: Box
    host: int
    feed: int


class ReceivePiece(NamedTuple):
    """`box` of local shard `shard`, in the shard's coordinates, which arrives as `feed`."""

    shard: int
    box: Box
    feed: int


class Tiles(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    """A `Tiled` with the order of tiles as ranges."""

    dims: Shape
    order: tuple[Range, ...]


class Spread(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """The distribution of an array to hosts.

    `hosts` contains the hosts in the order of the shards: (range of hosts, number of consecutive shards on each).
    """

    shape: Shape
    tiling: Replicated | Tiles | Even | Uneven
    hosts: tuple[tuple[Range, int], ...]

    @cached_property
    def host_of(self) -> tuple[int, ...]:
        """The host of each position."""
        return tuple([host for some, each in self.hosts for host in expand([some]) for _ in range(each)])

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """The box of each shard. Raises UNIMPLEMENTED if the tiling does not determine it."""
        return shard_boxes(Sharding(tuple(range(len(self.host_of))), self._tiling), self.shape)

    @cached_property
    def _tiling(self) -> Tiling:
        tiling = self.tiling
        return Tiled(tiling.dims, expand(tiling.order)) if isinstance(tiling, Tiles) else tiling

    def shape_at(self, position: int) -> Shape:
        """Return the shape of the shard at `position`."""
        match self.tiling:
            case Even(shard_shape=shape):
                return shape
            case Uneven(shard_shapes=shapes):
                return shapes[position]
        return tuple([stop - start for start, stop in self.boxes[position]])

    @cached_property
    def grid(self) -> Grid:
        return Grid(self.boxes)


def spread(shape: Shape, tiling: Replicated | Tiled | Even | Uneven, hosts: Sequence[int]) -> Spread:
    """Return the distribution of an array whose shard i is on `hosts[i]`."""
    counted = [(host, len([*some])) for host, some in groupby(hosts)]
    compact = tuple(
        (some, each)
        for each, group in groupby(counted, key=lambda one: one[1])
        for some in runs([host for host, _ in group])
    )
    return Spread(
        shape, Tiles(tiling.dims, tuple(runs(tiling.order))) if isinstance(tiling, Tiled) else tiling, compact
    )


class Exchange(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """A transfer from the distribution `source` to `target`.

    Shard i becomes shard i. With `reshard`, each target shard gets its parts from the source shards that contain them.
    Messages between hosts are feeds of the program, numbered from `first`.
    """

    source: Spread
    target: Spread
    reshard: bool
    first: int

    @property
    def feeds(self) -> int:
        """How many numbers are reserved. Pairs of shards without common elements do not use theirs."""
        return len(self.target.host_of) * self._feeds_per_shard

    @property
    def _feeds_per_shard(self) -> int:
        return len(self.source.host_of) if self.reshard else 1

    @cached_property
    def senders(self) -> tuple[int, ...]:
        """The hosts that send something, in order."""
        hosts = self.source.host_of
        if not self.reshard:
            return tuple(sorted(set(hosts)))
        found: set[int] = set()
        for box, origins in self.source.grid.origins.items():
            holders = {hosts[origin] for origin in origins}
            if len(holders) > 1:
                found |= self._among(holders - found, box, origins)
            elif all(start < stop for start, stop in box):  # the target contains the whole array
                found |= holders
        return tuple(sorted(found))

    def _among(self, hosts: set[int], box: Box, origins: list[int]) -> set[int]:
        """Return those of `hosts` that send part of the box, of which other hosts have replicas."""
        found: set[int] = set()
        for _, positions in self.target.grid.overlapping(box) if hosts else ():
            for position in positions:
                found.add(self.source.host_of[self._origin(box, origins, position)])
                if found >= hosts:
                    return found
        return found

    def sent(self, positions: Sequence[int]) -> tuple[SendPiece, ...]:
        """Return what a host sends that has the source shards at these positions."""
        targets, pieces = self.target.host_of, []
        if not self.reshard:
            for shard, position in enumerate(positions):
                pieces.append(SendPiece(shard, self._whole(position), targets[position], self.first + position))
            return tuple(pieces)
        here: dict[Box, dict[int, int]] = {}  # by box and position: the shard on this host
        for shard, origin in enumerate(positions):
            here.setdefault(self.source.boxes[origin], {})[origin] = shard
        for box, shards in here.items():
            origins = self.source.grid.origins[box]
            for wanted, takers in self.target.grid.overlapping(box):
                part = relative(common(box, wanted), box)
                for position in takers:
                    origin = self._origin(box, origins, position)
                    if origin in shards:
                        pieces.append(SendPiece(shards[origin], part, targets[position], self._feed(origin, position)))
        return tuple(sorted(pieces, key=lambda piece: piece.feed))

    def received(self, positions: Sequence[int]) -> tuple[ReceivePiece, ...]:
        """Return what a host receives that gets the target shards at these positions."""
        pieces = []
        for shard, position in enumerate(positions):
            if not self.reshard:
                pieces.append(ReceivePiece(shard, self._whole(position), self.first + position))
                continue
            wanted = self.target.boxes[position]
            for box, origins in self.source.grid.overlapping(wanted):
                feed = self._feed(self._origin(box, origins, position), position)
                pieces.append(ReceivePiece(shard, relative(common(box, wanted), wanted), feed))
        return tuple(pieces)

    def feeds_to(self, positions: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Return the feeds that the target shards at these positions may receive, as ranges (first, count)."""
        each, found = self._feeds_per_shard, []
        for first, count, step in runs(positions):
            if step == 1:
                found.append((self.first + first * each, count * each))
            else:
                found += [(self.first + number * each, each) for number in expand([(first, count, step)])]
        return tuple(found)

    def _feed(self, origin: int, position: int) -> int:
        return self.first + position * self._feeds_per_shard + origin

    def _whole(self, position: int) -> Box:
        return tuple([(0, size) for size in self.source.shape_at(position)])

    def _origin(self, box: Box, origins: list[int], position: int) -> int:
        """Return which of the source positions with this box sends it to the target shard at `position`."""
        if len(origins) == 1:
            return origins[0]
        near = self._origins_by_host(box, origins).get(self.target.host_of[position])
        choices = near or origins
        return choices[position % len(choices)]

    def _origins_by_host(self, box: Box, origins: list[int]) -> dict[int, list[int]]:
        found = self._near.get(box)
        if found is None:
            found = self._near[box] = {}
            for origin in origins:
                found.setdefault(self.source.host_of[origin], []).append(origin)
        return found

    @cached_property
    def _near(self) -> dict[Box, dict[int, list[int]]]:
        return {}


def common(a: Box, b: Box) -> Box:
    """Return the intersection of two boxes."""
    return tuple([(max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True)])


def relative(box: Box, origin: Box) -> Box:
    """Return `box` in coordinates relative to the start of `origin`."""
    return tuple([(start - first, stop - first) for (start, stop), (first, _) in zip(box, origin, strict=True)])


class Grid:
    """The distinct boxes of a tiling, with the positions of each. A tiling cuts each dimension independently."""

    def __init__(self, boxes: tuple[Box, ...]) -> None:
        self.origins: dict[Box, list[int]] = {}  # positions, by box
        for position, box in enumerate(boxes):
            self.origins.setdefault(box, []).append(position)
        rank = len(boxes[0]) if boxes else 0
        cuts = [sorted({box[d] for box in self.origins if box[d][0] < box[d][1]}) for d in range(rank)]
        self._intervals = [(cut, [start for start, _ in cut], [stop for _, stop in cut]) for cut in cuts]

    def overlapping(self, wanted: Box) -> list[tuple[Box, list[int]]]:
        """Return the boxes that overlap with `wanted`, with their positions."""
        choices = []
        for (start, stop), (cut, starts, stops) in zip(wanted, self._intervals, strict=True):
            if start >= stop:
                return []
            choices.append(cut[bisect_right(stops, start) : bisect_left(starts, stop)])
        return [(box, self.origins[box]) for box in product(*choices)]


# (first, count, step)
Range = tuple[int, int, int]


def runs(numbers: Sequence[int]) -> Iterator[Range]:
    """Split numbers into ranges. Steps other than 1 are only used for 3 or more numbers."""
    at = 0
    while at < len(numbers):
        step = numbers[at + 1] - numbers[at] if at + 1 < len(numbers) else 1
        end = at + 1
        while end < len(numbers) and numbers[end] - numbers[end - 1] == step:
            end += 1
        if step == 0 or (step != 1 and end - at < 3):
            step, end = 1, at + 1
        yield numbers[at], end - at, step
        at = end


def expand(ranges: Iterable[Range]) -> tuple[int, ...]:
    """Return the numbers of the ranges: the inverse of `runs`."""
    return tuple([number for first, count, step in ranges for number in range(first, first + count * step, step)])
