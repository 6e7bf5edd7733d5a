"""Define the controller's record of a delegated run, and the interface that `delegated_runs` needs of the launcher."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from atoll.dependencies.delegated_programs import DelegatedProgram
from atoll.dependencies.large_plans import LargePlans
from atoll.errors import Status
from atoll.scheduling.buffer_directory import Entry
from atoll.scheduling.dispatch_units import Unit
from atoll.scheduling.gang_states import GangState
from atoll.scheduling.programs import RegisteredProgram
from atoll.scheduling.queued_nodes import Gang, QueuedNode
from atoll.scheduling.reservations import Reservations
from atoll.scheduling.scheduler import Scheduler
from atoll.scheduling.session import GangRun, Launch, Session


@dataclass(slots=True, eq=False)
class DelegatedRun:
    """A launch that is, or may become, a delegated run. `first` is the sequence number of the program's first gang."""

    launch: Launch
    program: DelegatedProgram
    first: int
    gangs: dict[int, Gang[GangRun]]  # by island
    ending: int  # those of them that have not ended
    limits: dict[int, int] | None = None  # by island: the segments that run, once it was revoked
    exclusive_ns: dict[int, int] = field(default_factory=dict)  # by island: of devices, before it was revoked there

    def has_ended(self, island: int) -> bool:
        return not self.gangs[island].run.hosts_left

    def gangs_in(self, state: GangState) -> list[Gang[GangRun]]:
        """Return the gangs in this state, in the order of their islands."""
        return [gang for _, gang in sorted(self.gangs.items()) if gang.state is state]

    def share(self, islands: Iterable[int]) -> None:
        """Others want what it has: what it takes of devices from now on is charged to its session."""
        self.exclusive_ns |= {island: self.gangs[island].run.device_ns for island in islands}

    def shared_ns(self, gang: Gang[GangRun]) -> int:
        """What is charged for a gang that has ended: nothing where there was nobody to share with."""
        taken = gang.run.device_ns
        return taken - self.exclusive_ns.get(gang.island, taken)

    def make_entries(self) -> None:
        """Of the values between nodes: the launch becomes one like others."""
        program, entries = self.launch.program, self.launch.entries
        for number, made in enumerate(program.values, start=program.arguments):
            if made.result < 0:
                entries[number] = Entry(made.hosts, made.nbytes, producer=program.name)

    def rest(self, limits: dict[int, int]) -> list[tuple[int, Unit]]:
        """The nodes beyond so many segments of each island, with their first sequence numbers."""
        places = dict.fromkeys(limits, 0)
        found, number = [], self.first
        for node in self.launch.program.nodes:
            if places[node[0].island] >= limits[node[0].island]:
                found.append((number, node))
            for spec in node:
                places[spec.island] += 1
            number += len(node)
        return found


@dataclass(slots=True, eq=False)
class Revocation:
    """The revocation of a session's runs, whose hosts were asked how many segments of each they have started.

    `started` holds the answers, by sequence number of the gang. `lost` are runs that one island has lost before it had
    started them, by number, with the reason.
    """

    runs: list[DelegatedRun]
    asked: set[int]
    started: dict[int, int] = field(default_factory=dict)
    lost: dict[int, Status] = field(default_factory=dict)


class Launching(Protocol):
    """What launches and ends gangs: the controller."""

    scheduler: Scheduler[GangRun]
    memory: Reservations
    in_flight: dict[int, Gang[GangRun]]  # by sequence
    large_plans: LargePlans

    def enqueue(self, node: QueuedNode[GangRun]) -> None: ...

    def gang_left(self, gang: Gang[GangRun]) -> None:
        """Note that a gang has started, or was dropped."""

    def fail(self, launch: Launch, status: Status) -> None:
        """Fail a launch: drop its gangs that have not started."""

    def gang_ended(self, launch: Launch) -> None:
        """Count a gang of the launch that has ended, or that was dropped."""


class Builder(Protocol):
    """What makes the records of launches."""

    def reserve_numbers(self, count: int = 1) -> int:
        """Reserve sequence numbers for gangs. Return the first."""

    def reserve_feeds(self, program: RegisteredProgram) -> int:
        """Reserve numbers for the program's feeds between hosts. Return the first."""

    def make_node(self, session: Session, launch: Launch, unit: Unit, age: int, first: int) -> None:
        """Make the node of a dispatch unit. Its gangs have the numbers from `first` on."""


class Buffers(Protocol):
    """What frees the buffers of sessions."""

    def drop_uses(self, session: Session, gang: Gang[GangRun]) -> None:
        """Note that a gang keeps none of its buffers from being freed any more."""
