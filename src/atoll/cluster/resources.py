"""The physical islands, hosts and devices of a cluster.

`cluster.lifecycle` has the states of islands, `cluster.slice_placement` the physical devices of virtual devices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from atoll.cluster.lifecycle import HOST_TRANSITIONS, WORKING, HostState, Island, IslandState
from atoll.cluster.locations import DeviceLocation
from atoll.cluster.mesh import mesh_of, point
from atoll.cluster.sandbox.mechanisms import Mechanisms
from atoll.cluster.slice_placement import GPUS, IslandDevices
from atoll.cluster.state_machine import StateMachine
from atoll.cluster.topology import IslandShape, Topology
from atoll.cluster.virtual_devices import DeviceInfo, VirtualDevice
from atoll.errors import not_found

# Why no new slice can use an island, by its state.
_CLOSED = {IslandState.READY: "", IslandState.DRAINING: "it is being drained"}


@dataclass
class Host(StateMachine[HostState]):
    """A machine with its devices and one worker."""

    transitions = HOST_TRANSITIONS
    number: int
    island: int
    pid: int  # of its worker
    state: HostState
    devices: tuple[DeviceInfo, ...]
    data_address: str
    platform: str
    platform_version: str
    max_in_flight: int
    incarnation: int = 0
    machine: str = ""  # its name, for messages
    sandbox: Mechanisms | None = None  # for users' Python; None if its worker does not report it
    compiles_first: bool = False  # it finds out whether functions need a world: see `protocol.messages.Compile`

    def _described(self) -> str:
        return f"host {self.number}"

    @property
    def worker(self) -> str:
        """Return the name of its worker, for messages."""
        return f"worker {self.pid}" + (f" on {self.machine}" if self.machine else "")

    @property
    def has_cpu_devices(self) -> bool:
        """Return whether its devices are its CPUs, which also run its worker."""
        return bool(self.devices) and self.devices[0].platform == "cpu"


@dataclass
class ResourceManager:
    """The islands of a cluster, and the hosts that have joined."""

    topology: Topology
    hosts: dict[int, Host] = field(default_factory=dict)
    islands: dict[int, Island] = field(default_factory=dict)
    _was_complete: bool = False

    def __post_init__(self) -> None:
        self.islands = {number: Island(number) for number in range(self.topology.islands)}

    def join(self, host: Host) -> None:
        """Add a host whose worker has connected, for the first time or again."""
        self.hosts[host.number] = host
        self._was_complete = self._was_complete or len(self.hosts) == self.topology.host_count

    def has_all_hosts(self, island: int) -> bool:
        """Return whether every host of the island has a worker now."""
        members = self.hosts_of(island)
        return len(members) == self.topology.shapes[island].hosts and not any(self.has_failed(each) for each in members)

    def pending_reason(self, island: int) -> str:
        """Return which workers a starting island waits for, as text; "" if it does not wait."""
        record = self.islands[island]
        if record.works or record.is_over:
            return ""
        numbers = self.topology.hosts_of(island)
        missing = [each for each in numbers if each not in self.hosts or self.has_failed(each)]
        machines = dict(zip(numbers, record.machines, strict=False))
        names = [f"host {each}" + (f" on {machines[each]}" if each in machines else "") for each in missing]
        return f"waits for workers that are being started: {', '.join(names)}" if names else ""

    def hosts_of(self, island: int) -> list[int]:
        """Return the hosts of the island that have joined."""
        planned = self.topology.hosts_of(island) if island in self.islands else ()
        return [number for number in planned if number in self.hosts]

    def max_in_flight(self, island: int) -> int:
        """Return the number of runs that may be in flight on each host of the island, the minimum of their limits."""
        return max(1, min(self.hosts[host].max_in_flight for host in self.hosts_of(island)))

    def addresses_of(self, island: int) -> tuple[tuple[int, str], ...]:
        """Return the data addresses of the island's hosts."""
        return tuple((host, self.hosts[host].data_address) for host in self.hosts_of(island))

    def mark_hosts_failed(self, island: int) -> None:
        """Mark all hosts of the island as failed, since its workers cannot continue without one another."""
        for host in self.hosts_of(island):
            if not self.has_failed(host):
                self.hosts[host].enter(HostState.FAILED)

    def compile_first(self, islands: Iterable[int]) -> bool:
        """Return whether the hosts of these islands find out whether functions need a world: all that have joined."""
        hosts = [self.hosts[number] for island in islands for number in self.hosts_of(island)]
        return bool(hosts) and all([host.compiles_first for host in hosts])

    @property
    def is_complete(self) -> bool:
        """Return whether every host has joined at least once, so that sessions may open."""
        return self._was_complete

    def add_island(self, shape: IslandShape) -> int:
        """Add an island that is about to start, and return its number."""
        island = self.topology.islands
        self.topology = self.topology.with_island(shape)
        self.islands[island] = Island(island)
        return island

    @property
    def device_count(self) -> int:
        """Return the number of devices on islands that work now."""
        working = {number for number, island in self.islands.items() if island.state in WORKING}
        return sum([len(host.devices) for host in self.hosts.values() if host.island in working])

    def has_failed(self, host: int) -> bool:
        return self.hosts[host].state is HostState.FAILED

    def addresses(self) -> tuple[tuple[int, str], ...]:
        """Return the data addresses of the connected hosts that a session opened now would use."""
        return tuple(
            (host.number, host.data_address)
            for host in self.hosts.values()
            if self.islands[host.island].takes_sessions and host.state is HostState.READY
        )

    def away(self) -> dict[int, tuple[int, ...]]:
        """Return the hosts of the islands that a session opened now would use and that do not work now, by island."""
        return {
            each.number: tuple(self.hosts_of(each.number))
            for each in self.islands.values()
            if each.takes_sessions and not each.works
        }

    def states_text(self) -> str:
        """Return the states of all islands as text such as "island 0 is ready, island 1 is drained"."""
        return ", ".join(f"island {each.number} is {each.state}" for each in self.islands.values())

    def number_of(self, location: DeviceLocation) -> int:
        """Return a physical device's number in the cluster, as operators see it."""
        return self.topology.number_of(location.host, location.ordinal)

    def devices_for(self, island: int, platform: str) -> IslandDevices:
        """Return the island's devices for a session with devices of a platform; closed if they have another one."""
        devices, has = self.devices(island), self.topology.shapes[island].platform
        if has == platform:
            return devices
        reason = f"its devices are {has}, and this session has {platform} devices"
        return msgspec.structs.replace(devices, closed=reason)

    def devices(self, island: int) -> IslandDevices:
        """Return the island's devices at the points of its mesh."""
        members = [self.hosts[number] for number in self.hosts_of(island)]
        infos = [(host.number, info) for host in members for info in host.devices]
        shape, record = self.topology.shapes[island], self.islands[island]
        mesh, order = mesh_of([(*info.coords, info.core_on_chip) for _, info in infos], shape.mesh)
        kinds = [shape.kind, *(kind for _, info in infos for kind in (info.platform, info.kind))]
        return IslandDevices(
            island,
            mesh,
            tuple(DeviceLocation(island, infos[i][0], infos[i][1].ordinal) for i in order),
            tuple(dict.fromkeys(filter(None, kinds))),
            _CLOSED.get(record.state, f"it is {record.state}"),
        )

    def platform_for(self, wanted: str) -> str:
        """Return the platform for a session that asks for `wanted`; "" for that of the first island.

        Raise NOT_FOUND if no island has the platform.
        """
        platforms = self.topology.platforms
        for each in platforms:
            if not wanted or each == wanted or (wanted in GPUS and each in GPUS):
                return each
        raise not_found(f"this cluster has no {wanted} devices: its islands have {', '.join(platforms)} devices")

    def virtual_devices(self, platform: str) -> tuple[tuple[VirtualDevice, ...], dict[int, DeviceLocation]]:
        """Return the virtual devices of a session that opens now, one per physical device, and their locations."""
        virtual: list[VirtualDevice] = []
        locations: dict[int, DeviceLocation] = {}
        for island in self.islands:
            if not self.islands[island].takes_sessions or self.topology.shapes[island].platform != platform:
                continue
            devices = self.devices(island)
            points = {location: i for i, location in enumerate(devices.locations)}
            for host in self.hosts_of(island):
                for info in self.hosts[host].devices:
                    location = DeviceLocation(island, host, info.ordinal)
                    if devices.mesh == self.topology.shapes[island].mesh:
                        coords = (*point(points[location], devices.mesh), 0, 0, 0)[:3]
                        info = msgspec.structs.replace(info, coords=coords)
                    locations[len(virtual)] = location
                    virtual.append(VirtualDevice(len(virtual), island, host, info))
        return tuple(virtual), locations
