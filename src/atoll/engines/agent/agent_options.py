"""Options of host agents, and the rank slots that launchers assign to them."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from atoll.cluster.environment_variables import (
    COMPLETION_INDEX,
    ISLAND,
    JOB_INDEX,
    MPI_RANK,
    PMIX_RANK,
    RANK,
    SLURM_RANK,
)
from atoll.cluster.sandbox.isolation import mechanisms_here
from atoll.cluster.sandbox.mechanisms import Mechanisms
from atoll.cluster.setting_forms import Setting
from atoll.cluster.topology import RankSlot
from atoll.devices.accelerators import Devices, devices, parts
from atoll.wire.address import Address

_AWAY_SECONDS = 600.0


@dataclass(frozen=True)
class AgentOptions:
    """Options of a host agent.

    If a machine has several workers, it runs one agent per worker. Each agent has its own name `machine` and a part of
    the `devices`.

    Attributes:
        advertise: Host name or address at which the other machines of the cluster reach this one. By default, the
            address from which it reaches the controller.
        listen: Address at which the worker listens. By default the advertised one, or all addresses if `advertise`
            is given.
        coordinator_address: Address of this machine on the network that an island's hosts use for collectives. By
            default the advertised one.
        grace_seconds: Time to leave after SIGTERM.
        stays: Whether the agent waits for the next cluster when one has ended.
        parent: Process that the agent must not outlive; 0 for none.
        away_seconds: Time without a message of its cluster after which an agent that has joined ends, unless it
            `stays`. It is at least the grace of the cluster.
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
    away_seconds: float = _AWAY_SECONDS
    machine: str = field(default_factory=platform.node)
    devices: Devices = field(default_factory=devices)
    sandbox: Mechanisms = field(default_factory=mechanisms_here)  # for users' Python


def options_of_workers(options: AgentOptions, workers: int) -> list[AgentOptions]:
    """Return the options of one agent per worker of a machine. A rank of the launcher then stands for `workers` hosts.

    The agents form one group, so an island takes them together. Raise SettingsError if the devices of the machine
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


# Per launcher, the variable with the index of a job (the number of an island, if any) and the variable with the rank.
# The first launcher with a rank counts. Kubernetes sets JOB_COMPLETION_INDEX in the pods of an indexed Job. The index
# of a Job within its JobSet is a label of the pod, which the manifest passes as JOB_INDEX.
_LAUNCHERS: tuple[tuple[Setting[int] | None, Setting[int]], ...] = (
    (ISLAND, RANK),
    (JOB_INDEX, COMPLETION_INDEX),
    (None, MPI_RANK),
    (None, PMIX_RANK),
    (None, SLURM_RANK),
)


def rank_slot_of(environment: Mapping[str, str], island: int | None = None, rank: int | None = None) -> RankSlot:
    """Return the rank slot that flags ask for, or else the launcher's variables, or else any.

    A rank without an island counts through all hosts of the cluster. Raise SettingsError if a variable is no number.
    """
    if island is not None or rank is not None:
        return RankSlot(_or_any(island), _or_any(rank))
    for of_island, of_rank in _LAUNCHERS:
        if of_rank.text(environment) or (of_island is ISLAND and ISLAND.text(environment)):
            island_number = of_island.get(environment) if of_island is not None else None
            return RankSlot(_or_any(island_number), _or_any(of_rank.get(environment)))
    return RankSlot()


def _or_any(number: int | None) -> int:
    return -1 if number is None else number
