"""The resource manager: which islands, hosts and devices there are, and which virtual device sits on which.

Virtual devices map one to one onto the physical ones, island by island, host by host.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.errors import Status
from atoll.ir.lowering import Seat
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
    loss: Status | None = None  # of a lost one: what befell it


@dataclass
class ResourceManager:
    """Hosts as they join and leave, and the mapping of virtual devices."""

    topology: Topology
    hosts: dict[int, Host] = field(default_factory=dict)
    seats: dict[int, Seat] = field(default_factory=dict)
    virtual: tuple[VirtualDevice, ...] = ()

    def join(self, ready: WorkerReady, pid: int) -> Host:
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
        if self.is_complete:
            self._number_devices()
        return host

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

    def island_state(self, island: int) -> str:
        hosts = [h for h in self.hosts.values() if h.island == island]
        if len(hosts) < self.topology.hosts:
            return "starting"
        return "lost" if any(h.state == "lost" for h in hosts) else "ready"
