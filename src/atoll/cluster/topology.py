"""What a cluster is meant to have."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from atoll.cluster.mesh import Shape, parse_mesh, text_of
from atoll.errors import SettingsError


@dataclass(frozen=True)
class Topology:
    """What a cluster is meant to have: ISLANDSxHOSTSxDEVICES, the same in each island."""

    islands: int
    hosts: int  # of each island
    devices: int  # of each host

    @classmethod
    def parse(cls, text: str) -> Topology:
        """Reads `2x1x4`: two islands of one host with four devices. Raises ValueError."""
        parts = text.lower().split("x")
        if len(parts) != 3 or not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
            raise ValueError(f"{text!r} is no topology: expected ISLANDSxHOSTSxDEVICES, such as 1x1x8 or 2x1x4")
        return cls(*map(int, parts))

    @property
    def host_count(self) -> int:
        return self.islands * self.hosts

    def island_of(self, host: int) -> int:
        return host // self.hosts

    def check_mesh(self, mesh: Shape) -> None:
        """Raises ValueError where the devices of an island cannot stand in such a mesh."""
        if mesh and math.prod(mesh) != self.hosts * self.devices:
            raise ValueError(
                f"an island of {self} has {self.hosts * self.devices} devices, which cannot stand in a mesh of "
                f"{text_of(mesh)}"
            )

    def __str__(self) -> str:
        return f"{self.islands}x{self.hosts}x{self.devices}"


class Seat(msgspec.Struct, frozen=True, array_like=True):
    """Where in a cluster a host wants to be. -1: anywhere.

    `rank` is within the island; without an `island` it counts through the whole cluster, as launchers do.
    """

    island: int = -1
    rank: int = -1

    def fits(self, island: int, rank: int, hosts: int) -> bool:
        """Whether it may be host `rank` of this island, which has so many."""
        if self.rank < 0:
            return self.island in (-1, island)
        wanted = (self.island, self.rank) if self.island >= 0 else divmod(self.rank, hosts)
        return wanted == (island, rank)

    def __str__(self) -> str:
        if self.rank < 0:
            return "any seat" if self.island < 0 else f"any rank of island {self.island}"
        return f"rank {self.rank}" + (f" of island {self.island}" if self.island >= 0 else " of the cluster")


def read_topology(text: str, mesh: str = "") -> Topology:
    """The topology of a cluster. Raises SettingsError for what is none, or is not of islands with that mesh."""
    try:
        topology = Topology.parse(text)
        topology.check_mesh(parse_mesh(mesh))
    except ValueError as error:
        raise SettingsError(str(error)) from None
    return topology
