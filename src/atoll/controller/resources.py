"""The resource manager: which islands, hosts and devices there are, and which virtual device sits on which.

Virtual devices map one to one onto the physical ones, island by island, host by host.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.errors import Status
from atoll.ir.lowered import Seat
from atoll.transport.messages import DeviceInfo, VirtualDevice, WorkerReady


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
            raise ValueError(
                f"{text!r} is no topology: expected ISLANDSxHOSTSxDEVICES, such as 1x1x8 or 2x1x4"
            )
        return cls(*map(int, parts))

    @property
    def host_count(self) -> int:
        return self.islands * self.hosts

    def island_of(self, host: int) -> int:
        return host // self.hosts

    def __str__(self) -> str:
        return f"{self.islands}x{self.hosts}x{self.devices}"


@dataclass
class Host:
    """A machine with its devices and one worker. `pid` is the worker's."""

    number: int
    island: int
    pid: int
    state: str  # "ready" or "lost"
    devices: tuple[DeviceInfo, ...]
    data_address: str
    platform: str
    platform_version: str


@dataclass
class Island:
    """Hosts that start, and fail, together."""

    number: int
    state: str = "starting"  # then "ready", "restarting" or "lost"
    restarts: int = 0
    last_failure: Status | None = None

    @property
    def given_up(self) -> Status | None:
        """Why the island will not come back; None where it is there, or will be."""
        return self.last_failure if self.state == "lost" else None


@dataclass
class ResourceManager:
    """Hosts as they join and leave, and the mapping of virtual devices."""

    topology: Topology
    hosts: dict[int, Host] = field(default_factory=dict)
    islands: dict[int, Island] = field(default_factory=dict)
    seats: dict[int, Seat] = field(default_factory=dict)
    virtual: tuple[VirtualDevice, ...] = ()

    def __post_init__(self) -> None:
        self.islands = {number: Island(number) for number in range(self.topology.islands)}

    def join(self, ready: WorkerReady, pid: int) -> Host:
        """A host's worker is up, for the first time or again. The island is ready with the last of its hosts."""
        host = Host(
            ready.host,
            ready.island,
            pid,
            "ready",
            ready.devices,
            ready.data_address,
            ready.platform,
            ready.platform_version,
        )
        self.hosts[ready.host] = host
        members = self.hosts_of(ready.island)
        if len(members) == self.topology.hosts and all(self.hosts[each].state == "ready" for each in members):
            self.islands[ready.island].state = "ready"
        if self.is_complete and not self.virtual:
            self._number_devices()
        return host

    def hosts_of(self, island: int) -> list[int]:
        """The hosts of the island that have joined."""
        return sorted(host.number for host in self.hosts.values() if host.island == island)

    def lose(self, island: int, status: Status) -> None:
        """The island's workers are gone, all of them: without one the others cannot go on."""
        for host in self.hosts_of(island):
            self.hosts[host].state = "lost"
        self.islands[island].state = "restarting"
        self.islands[island].restarts += 1
        self.islands[island].last_failure = status

    @property
    def is_complete(self) -> bool:
        """True once every host has joined: from then on sessions may open."""
        return len(self.hosts) == self.topology.host_count

    def is_lost(self, host: int) -> bool:
        return self.hosts[host].state == "lost"

    def _number_devices(self) -> None:
        virtual: list[VirtualDevice] = []
        for number in sorted(self.hosts):
            host = self.hosts[number]
            for info in host.devices:
                device = len(virtual)
                virtual.append(VirtualDevice(device, host.island, number, info))
                self.seats[device] = Seat(host.island, number, info.ordinal)
        self.virtual = tuple(virtual)
