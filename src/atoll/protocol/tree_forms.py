"""The form of a published tree, which its publisher sends to its subscribers. The controller does not read it.

Small arrays of the same shape are published as a few larger arrays, *packs*. A pack has one dimension. Each of its
parts has the shards of its arrays at one place of the publisher's mesh, one after another. So devices pack arrays
without communication: each concatenates its own shards.
"""

from __future__ import annotations

import itertools
import math
from typing import Annotated

import msgspec

MAX_PACKED = 512  # arrays per pack

_Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Axis = Annotated[int, msgspec.Meta(ge=0, lt=64)]


class Pack(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The content of a pack: arrays of one shape.

    Attributes:
      paths: of the arrays in the tree.
      count: number of arrays in the pack. Further arrays than those with paths are padding.
      shape: of each array.
      cuts: over how many axes of the mesh each dimension of the arrays is cut.
      mesh: sizes of the publisher's mesh.
      axes: numbers of the axes of the mesh over which the pack is cut, from major to minor.
    """

    paths: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=MAX_PACKED)]
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_PACKED)]
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=64)]
    cuts: Annotated[tuple[_Axis, ...], msgspec.Meta(max_length=64)]
    mesh: Annotated[tuple[Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)], ...], msgspec.Meta(max_length=64)]
    axes: Annotated[tuple[_Axis, ...], msgspec.Meta(max_length=64)]

    @property
    def parts(self) -> tuple[int, ...]:
        """Return the number of parts along each axis."""
        return tuple(self.mesh[axis] for axis in self.axes)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Return the shape of the shards of the arrays."""
        parts = iter(self.parts)
        return tuple(
            size // math.prod(itertools.islice(parts, cuts)) for size, cuts in zip(self.shape, self.cuts, strict=True)
        )

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise ValueError if an array of this shape cannot be the pack."""
        if any(axis >= len(self.mesh) for axis in self.axes) or len(set(self.axes)) != len(self.axes):
            raise ValueError("a pack has axes that its mesh does not have")
        if len(self.paths) > self.count:
            raise ValueError(f"a pack of {self.count} arrays has {len(self.paths)} paths")
        if len(self.cuts) != len(self.shape) or sum(self.cuts) != len(self.axes):
            raise ValueError("the arrays of a pack are not cut over its axes")
        size = math.prod(self.parts) * math.prod(self.shard_shape)
        if size != math.prod(self.shape):
            raise ValueError(f"arrays of shape {self.shape} cannot be cut evenly")
        if shape != (self.count * size,):
            raise ValueError(f"a pack of {self.count * size} elements has the shape {shape}")


class TreeForm(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The form of a published tree. Leaves are numbered in the order of the arrays, and of the contents of packs.

    Attributes:
      tree: the encoded tree with the numbers of leaves, or an encoded None if subscribers need the argument `like`.
      packs: descriptions of the arrays that are packs, by their number.
      checksums: for each of the last arrays of the version, the numbers of the arrays whose checksums it contains. No
        leaf is in these last arrays.
      contents: for each of the other arrays, a number that only arrays with the same content have, or 0. Empty if all
        are 0.
    """

    tree: msgspec.Raw
    packs: dict[int, Pack]
    checksums: tuple[tuple[_Size, ...], ...] = ()
    contents: tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)], ...] = ()
