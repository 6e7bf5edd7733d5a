"""How a host agent is started."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field, replace

from atoll.cluster.sandbox.isolation import mechanisms_here
from atoll.cluster.sandbox.mechanisms import Mechanisms
from atoll.cluster.topology import RankSlot
from atoll.devices.accelerators import Devices, devices, parts
from atoll.wire.address import Address


@dataclass(frozen=True)
class AgentOptions:
    """How a host agent is started.

    `advertise` is the host name or address under which the other machines of the cluster reach this one, "" for the
    address from which it reaches the controller; `listen` the one at which its worker listens, "" for the same, or for
    all of the machine's where another is advertised. `coordinator_address` is the address of this machine on the
    network that the hosts of an island compute over, "" for the advertised one. `grace_seconds` is how long it may go
    on after SIGTERM. With `stays` it waits for the next cluster where one has ended. It does not outlive the process
    `parent`, if any.

    Where a machine has several workers, each has an agent, with a name of its own as `machine` and a part of the
    `devices`.
    """

    controller: Address
    rank_slot: RankSlot
    advertise: str = ""
    listen: str = ""
    coordinator_address: str = ""
    group: str = ""
    grace_seconds: float = 25.0
    stays: bool = False
    parent: int = 0
    machine: str = field(default_factory=platform.node)
    devices: Devices = field(default_factory=devices)
    sandbox: Mechanisms = field(default_factory=mechanisms_here)  # for users' Python


def options_of_workers(options: AgentOptions, workers: int) -> list[AgentOptions]:
    """Those of the agents of a machine with so many workers. Each rank that a launcher gives is then as many hosts.

    They are of one group, so that an island takes them together. Raises SettingsError where the machine's devices
    cannot be divided.
    """
    if workers == 1:
        return [options]
    rank_slot = options.rank_slot
    return [
        replace(
            options,
            machine=f"{options.machine}/{number}",
            group=options.group or options.machine,
            rank_slot=RankSlot(rank_slot.island, rank_slot.rank * workers + number)
            if rank_slot.rank >= 0
            else rank_slot,
            devices=part,
        )
        for number, part in enumerate(parts(options.devices, workers))
    ]
