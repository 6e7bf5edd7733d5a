"""The physical side of the resource manager: which islands, hosts and devices there are, and in which state.

Which virtual device of a session sits on which physical one is in `controller.placement`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec

from atoll.cluster.locations import DeviceLocation
from atoll.cluster.mesh import Shape, mesh_of, point
from atoll.cluster.placement import IslandDevices
from atoll.cluster.topology import Topology
from atoll.errors import Status
from atoll.protocol.messages import DeviceInfo, VirtualDevice, WorkerReady


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
    max_in_flight: int


@dataclass
class Island:
    """Hosts that start, and fail, together."""

    number: int
    state: str = "starting"  # then "ready", "restarting", "lost" or "drained"
    draining: bool = False  # what is on it is being moved to others
    restarts: int = 0
    last_failure: Status | None = None

    @property
    def given_up(self) -> Status | None:
        """Why the island will not come back; None where it is there, or will be."""
        return self.last_failure if self.state in ("lost", "drained") else None


@dataclass
class ResourceManager:
    """Hosts as they join and leave. `mesh` is that of an island's devices where the platform tells none; (): a line."""

    topology: Topology
    mesh: Shape = ()
    hosts: dict[int, Host] = field(default_factory=dict)
    islands: dict[int, Island] = field(default_factory=dict)
    _was_complete: bool = False

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
            ready.max_in_flight,
        )
        self.hosts[ready.host] = host
        self._was_complete = self._was_complete or len(self.hosts) == self.topology.host_count
        members = self.hosts_of(ready.island)
        if len(members) == self.topology.hosts and all(self.hosts[each].state == "ready" for each in members):
            self.islands[ready.island].state = "ready"
        return host

    def hosts_of(self, island: int) -> list[int]:
        """The hosts of the island that have joined."""
        return sorted(host.number for host in self.hosts.values() if host.island == island)

    def max_in_flight(self, island: int) -> int:
        """How many runs may be in flight on each of the island's hosts: what the least of them can take."""
        return max(1, min(self.hosts[host].max_in_flight for host in self.hosts_of(island)))

    def addresses_of(self, island: int) -> tuple[tuple[int, str], ...]:
        """Where its hosts listen for data."""
        return tuple((host, self.hosts[host].data_address) for host in self.hosts_of(island))

    def lose(self, island: int, status: Status) -> None:
        """The island's workers are gone, all of them: without one the others cannot go on."""
        for host in self.hosts_of(island):
            self.hosts[host].state = "lost"
        self.islands[island].state = "restarting"
        self.islands[island].restarts += 1
        self.islands[island].last_failure = status

    @property
    def is_complete(self) -> bool:
        """True once every host has joined: from then on sessions may open, whatever islands come later."""
        return self._was_complete

    def add_island(self) -> int:
        """One more island, like the others, is about to start; its number."""
        island = self.topology.islands
        self.topology = replace(self.topology, islands=island + 1)
        self.islands[island] = Island(island)
        return island

    def retire(self, island: int, status: Status) -> None:
        """The island ends, by the will of an operator: nothing is there any more, nor will be."""
        record = self.islands[island]
        record.state, record.draining, record.last_failure = "drained", False, status

    def is_lost(self, host: int) -> bool:
        return self.hosts[host].state == "lost"

    def addresses(self) -> tuple[tuple[int, str], ...]:
        """Where the data ports of the hosts are that a new session may use."""
        away = [each.number for each in self.islands.values() if each.state in ("starting", "drained")]
        return tuple((h.number, h.data_address) for h in self.hosts.values() if h.island not in away)

    def number_of(self, location: DeviceLocation) -> int:
        """A physical device's number in the cluster, as operators see it."""
        return location.host * self.topology.devices + location.ordinal

    def devices(self, island: int) -> IslandDevices:
        """The island's devices at the points of its mesh."""
        members = [self.hosts[number] for number in self.hosts_of(island)]
        infos = [(host.number, info) for host in members for info in host.devices]
        mesh, order = mesh_of([(*info.coords, info.core_on_chip) for _, info in infos], self.mesh)
        record = self.islands[island]
        return IslandDevices(
            island,
            mesh,
            tuple(DeviceLocation(island, infos[i][0], infos[i][1].ordinal) for i in order),
            tuple(dict.fromkeys(kind for _, info in infos for kind in (info.platform, info.kind))),
            "it is being drained" if record.draining else "" if record.state == "ready" else f"it is {record.state}",
        )

    def virtual_devices(self) -> tuple[tuple[VirtualDevice, ...], dict[int, DeviceLocation]]:
        """What a session that opens now is given: a virtual device for each physical one, in its place."""
        virtual: list[VirtualDevice] = []
        locations: dict[int, DeviceLocation] = {}
        for island in self.islands:
            if self.islands[island].state in ("starting", "drained") or self.islands[island].draining:
                continue
            devices = self.devices(island)
            points = {location: i for i, location in enumerate(devices.locations)}
            for host in self.hosts_of(island):
                for info in self.hosts[host].devices:
                    location = DeviceLocation(island, host, info.ordinal)
                    if devices.mesh == self.mesh:
                        coords = (*point(points[location], devices.mesh), 0, 0, 0)[:3]
                        info = msgspec.structs.replace(info, coords=coords)
                    locations[len(virtual)] = location
                    virtual.append(VirtualDevice(len(virtual), island, host, info))
        return tuple(virtual), locations
