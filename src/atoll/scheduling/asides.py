"""Where a logical buffer is that was put aside: it has no memory of devices until it is brought back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from atoll.protocol import messages as m


@dataclass(frozen=True, slots=True)
class AsidePart:
    """What the shards at these positions hold, kept by one host: equal ones are kept once."""

    piece: m.AsidePiece
    host: int
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Aside:
    """All shards of a buffer: what is kept of it, or, where others have all of its memory, too, which shards of which
    other buffers they are, and the hosts in whose memory those are.
    """

    parts: tuple[AsidePart, ...]
    views: tuple[tuple[int, int], ...] = ()  # (handle, position) of others
    view_hosts: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """That are kept."""
        return sum(part.piece.nbytes for part in self.parts)

    @property
    def in_files(self) -> bool:
        return any(part.piece.path for part in self.parts)

    @property
    def memory_hosts(self) -> tuple[int, ...]:
        """The hosts whose loss is that of the buffer: files outlive them."""
        return self.view_hosts or tuple(sorted({part.host for part in self.parts if not part.piece.path}))

    def by_host(self) -> Iterator[tuple[int, tuple[m.AsidePiece, ...]]]:
        """What each host keeps."""
        for host in sorted({part.host for part in self.parts}):
            yield host, tuple(part.piece for part in self.parts if part.host == host)
