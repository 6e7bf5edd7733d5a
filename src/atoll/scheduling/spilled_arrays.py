"""Describe where the contents of a spilled array are: it has no device memory until it is restored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from atoll.protocol import messages as m


@dataclass(frozen=True, slots=True)
class SpilledPart:
    """The contents of the shards at these positions, on one host: equal shards are stored once."""

    piece: m.SpilledPiece
    host: int
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SpilledArray:
    """All shards of a spilled array: its parts, or, if other arrays share all of its memory, the shards of these that
    it consists of, and the hosts in whose memory those are.
    """

    parts: tuple[SpilledPart, ...]
    views: tuple[tuple[int, int], ...] = ()  # (handle, position) of others
    view_hosts: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """The size of all parts."""
        return sum(part.piece.nbytes for part in self.parts)

    @property
    def in_files(self) -> bool:
        return any(part.piece.path for part in self.parts)

    @property
    def memory_hosts(self) -> tuple[int, ...]:
        """The hosts whose loss is that of the buffer: files outlive them."""
        return self.view_hosts or tuple(sorted({part.host for part in self.parts if not part.piece.path}))

    def by_host(self) -> Iterator[tuple[int, tuple[m.SpilledPiece, ...]]]:
        """Yield each host with its pieces."""
        for host in sorted({part.host for part in self.parts}):
            yield host, tuple(part.piece for part in self.parts if part.host == host)
