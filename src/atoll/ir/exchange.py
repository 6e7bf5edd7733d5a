"""Transfers between hosts by a rule: each host works out for itself which parts it sends and which it receives.

An `Exchange` says how an array lies before and after, and numbers what passes between two shards by their positions. So
neither lowering nor a plan grows with the number of pairs of shards; a host's work grows with its own.

Each element of each target shard is received once. Replicas on the target's own host are preferred; else replicas share
the load.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import msgspec

from atoll.ir.grid import Grid
from atoll.ir.ranges import Range, expand, runs
from atoll.ir.types import Box, Even, Replicated, Shape, Sharding, Tiled, Tiling, Uneven, shard_boxes


class SendPiece(NamedTuple):
    """`box` (in the shard's own coordinates) of local shard `shard` goes to `host` as `feed`."""

    shard: int
    box: Box
    host: int
    feed: int


class ReceivePiece(NamedTuple):
    """`feed` holds `box` (in the shard's own coordinates) of local shard `shard`."""

    shard: int
    box: Box
    feed: int


class Tiles(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    """`Tiled`, with the order of tiles as ranges."""

    dims: Shape
    order: tuple[Range, ...]


class Spread(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """How an array lies on hosts: the shards at its first positions are on the first hosts, as many on each as
    `hosts` says: (hosts that follow one another, shards on each).
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
        """What each shard holds. Raises UNIMPLEMENTED where the tiling does not say."""
        return shard_boxes(Sharding(tuple(range(len(self.host_of))), self._tiling), self.shape)

    @cached_property
    def _tiling(self) -> Tiling:
        tiling = self.tiling
        return Tiled(tiling.dims, expand(tiling.order)) if isinstance(tiling, Tiles) else tiling

    def shape_at(self, position: int) -> Shape:
        """Of one shard."""
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
    """`hosts[i]` has the shard at position i."""
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
    """Shard i of `source` becomes shard i of `target`, or, with `reshard`, the parts that make it up go there.

    What passes between hosts are feeds of the program, numbered from `first` on.
    """

    source: Spread
    target: Spread
    reshard: bool
    first: int

    @property
    def feeds(self) -> int:
        """How many numbers are taken: where shards have nothing in common, theirs is not used."""
        return len(self.target.host_of) * self._feeds_a_shard

    @property
    def _feeds_a_shard(self) -> int:
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
            elif all(start < stop for start, stop in box):  # the target has all of the array
                found |= holders
        return tuple(sorted(found))

    def _among(self, hosts: set[int], box: Box, origins: list[int]) -> set[int]:
        """Those of the hosts that send something of the box, which others hold, too."""
        found: set[int] = set()
        for _, positions in self.target.grid.overlapping(box) if hosts else ():
            for position in positions:
                found.add(self.source.host_of[self._origin(box, origins, position)])
                if found >= hosts:
                    return found
        return found

    def sent(self, positions: Sequence[int]) -> tuple[SendPiece, ...]:
        """What goes out from a host that has the source's shards at these positions."""
        targets, pieces = self.target.host_of, []
        if not self.reshard:
            for shard, position in enumerate(positions):
                pieces.append(SendPiece(shard, self._whole(position), targets[position], self.first + position))
            return tuple(pieces)
        here: dict[Box, dict[int, int]] = {}  # by box: its shards on this host, by their positions
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
        """What a host gets that is to have the target's shards at these positions."""
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
        """The numbers of what the target's shards at these positions may get: (first, count)."""
        each, found = self._feeds_a_shard, []
        for first, count, step in runs(positions):
            if step == 1:
                found.append((self.first + first * each, count * each))
            else:
                found += [(self.first + number * each, each) for number in expand([(first, count, step)])]
        return tuple(found)

    def _feed(self, origin: int, position: int) -> int:
        return self.first + position * self._feeds_a_shard + origin

    def _whole(self, position: int) -> Box:
        return tuple([(0, size) for size in self.source.shape_at(position)])

    def _origin(self, box: Box, origins: list[int], position: int) -> int:
        """Which of the positions that hold a box gives it to the target's shard at `position`."""
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
    """What two boxes share."""
    return tuple([(max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True)])


def relative(box: Box, origin: Box) -> Box:
    """The box in coordinates that begin where `origin` does."""
    return tuple([(start - first, stop - first) for (start, stop), (first, _) in zip(box, origin, strict=True)])
