"""The planned islands of a cluster, which may differ in hosts, devices, platform and mesh."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby

import msgspec

from atoll.cluster.mesh import Shape, text_of
from atoll.errors import SettingsError
from atoll.quantities import counted

MAX_PER_LEVEL = 1 << 16  # islands of a cluster, hosts of an island, and devices of a host
MAX_HOSTS = 1 << 16  # of a cluster
MAX_DEVICES = 1 << 20  # of a cluster
_MAX_DIGITS = 12  # of a number that is read; longer ones are too large in any case


class IslandShape(msgspec.Struct, frozen=True):
    """The planned hosts and devices of an island."""

    hosts: int  # number of hosts
    devices: int  # number of devices per host
    platform: str = ""  # platform, as JAX names it
    mesh: Shape = ()  # mesh of its devices if the platform has no coordinates; empty for a line
    kind: str = ""  # additional name of its devices, for `add_slice(kind=)` and `tpu_devices=`

    def check(self) -> None:
        """Raise ValueError for an invalid shape, such as a mesh for another number of devices."""
        if not (1 <= self.hosts <= MAX_PER_LEVEL and 1 <= self.devices <= MAX_PER_LEVEL):
            raise ValueError(
                f"an island has one to {MAX_PER_LEVEL} hosts with one to {MAX_PER_LEVEL} devices each, not {self}"
            )
        if self.mesh and math.prod(self.mesh) != self.hosts * self.devices:
            devices = counted(self.hosts * self.devices, "device")
            raise ValueError(
                f"an island of {self.hosts}x{self.devices} (hosts x devices) has {devices}, which "
                f"cannot form a mesh of {text_of(self.mesh)}"
            )

    def __str__(self) -> str:
        """Return text such as "2 hosts with 4 cuda devices each"."""
        devices = counted(self.devices, f"{self.platform} device".strip())
        return f"{counted(self.hosts, 'host')} with {devices}{' each' * (self.hosts > 1)}"


@dataclass(frozen=True)
class Topology:
    """The islands of a cluster, by number. Hosts and devices are numbered through the whole cluster."""

    shapes: tuple[IslandShape, ...]

    @classmethod
    def parse(cls, text: str, platform: str = "", mesh: Shape = ()) -> Topology:
        """Parse "2x1x4" (two islands of one host with four devices) or several joined by +, such as "1x2x4+1x1x8".

        Raise ValueError with the expected form for other text.
        """
        shapes: list[IslandShape] = []
        for part in text.lower().split("+"):
            numbers = part.strip().split("x")
            if len(numbers) != 3 or not all(each.isascii() and each.isdigit() and each.strip("0") for each in numbers):
                raise ValueError(
                    "expected ISLANDSxHOSTSxDEVICES, such as 1x1x8 or 2x1x4; or several of these if islands differ, "
                    "such as 1x2x4+1x1x8"
                )
            islands, hosts, devices = (int(each.lstrip("0")[:_MAX_DIGITS]) for each in numbers)
            _check_islands(len(shapes) + islands)
            shapes += [IslandShape(hosts, devices, platform, mesh)] * islands
        return cls(tuple(shapes))

    def check(self) -> None:
        """Raise ValueError for an invalid shape, or too many islands, hosts or devices."""
        _check_islands(self.islands)
        for shape in self.shapes:
            shape.check()
        if self.host_count > MAX_HOSTS:
            raise ValueError(f"a cluster has one to {MAX_HOSTS} hosts, not {self.host_count}")
        if self.device_count > MAX_DEVICES:
            raise ValueError(f"a cluster has one to {MAX_DEVICES} devices, not {self.device_count}")

    @property
    def islands(self) -> int:
        return len(self.shapes)

    @cached_property
    def _first_hosts(self) -> list[int]:
        """Return the first host of each island, and the number of hosts."""
        return list(accumulate((each.hosts for each in self.shapes), initial=0))

    @cached_property
    def _first_devices(self) -> list[int]:
        return list(accumulate((each.hosts * each.devices for each in self.shapes), initial=0))

    @property
    def host_count(self) -> int:
        return self._first_hosts[-1]

    @property
    def device_count(self) -> int:
        return self._first_devices[-1]

    def first_host(self, island: int) -> int:
        return self._first_hosts[island]

    def hosts_of(self, island: int) -> range:
        """Return the numbers of the island's hosts, by rank."""
        return range(self._first_hosts[island], self._first_hosts[island + 1])

    def island_of(self, host: int) -> int:
        """Return the island of a host. For a host outside the cluster, return a number that no island has."""
        return bisect_right(self._first_hosts, host) - 1

    def number_of(self, host: int, ordinal: int) -> int:
        """Return a device's number in the cluster."""
        island = self.island_of(host)
        rank = host - self._first_hosts[island]
        return self._first_devices[island] + rank * self.shapes[island].devices + ordinal

    def island_of_device(self, number: int) -> int:
        """Return the island of a device with this number in the cluster."""
        return bisect_right(self._first_devices, number) - 1

    def with_island(self, shape: IslandShape) -> Topology:
        """Return this topology with an additional island."""
        return Topology((*self.shapes, shape))

    @property
    def platforms(self) -> tuple[str, ...]:
        """Return the distinct platforms of the islands."""
        return tuple(dict.fromkeys(each.platform for each in self.shapes))

    def __str__(self) -> str:
        """Return the text that `parse` reads, without platforms and meshes."""
        alike = groupby(self.shapes, key=lambda each: (each.hosts, each.devices))
        return "+".join(f"{len(list(group))}x{hosts}x{devices}" for (hosts, devices), group in alike)


class RankSlot(msgspec.Struct, frozen=True, array_like=True):
    """The place in a cluster that a host asks for. -1 stands for any.

    `rank` counts within the island. Without an `island` it counts through the whole cluster, as with launchers.
    """

    island: int = -1
    rank: int = -1

    def fits(self, island: int, host: int, first: int) -> bool:
        """Return whether host number `host` of the island, whose first host is `first`, is such a place."""
        if self.rank < 0:
            return self.island in (-1, island)
        wanted = (self.island, first + self.rank) if self.island >= 0 else (island, self.rank)
        return wanted == (island, host)

    def __str__(self) -> str:
        if self.rank < 0:
            return "any rank slot" if self.island < 0 else f"any rank of island {self.island}"
        return f"rank {self.rank}" + (f" of island {self.island}" if self.island >= 0 else " of the cluster")


def _check_islands(count: int) -> None:
    if count > MAX_PER_LEVEL:
        raise ValueError(f"a cluster has one to {MAX_PER_LEVEL} islands, not {count}")


def make_topology(shapes: Iterable[IslandShape]) -> Topology:
    """Return the topology. Raise SettingsError if it is invalid; see `Topology.check`."""
    topology = Topology(tuple(shapes))
    try:
        topology.check()
    except ValueError as error:
        raise SettingsError(str(error)) from None
    return topology
