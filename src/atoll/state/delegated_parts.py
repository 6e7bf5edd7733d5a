"""Programs whose runs may be delegated, with the data that is known before any run.

On each island these are the gangs in order, the most memory that they need, and the memory that is in use at the end.
`launch.delegated_programs` computes them, and `launch.delegated_runs` delegates the runs.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import msgspec

from atoll.cluster.locations import HostDevice, MemoryRequirement
from atoll.state.gang_specs import GangSpec, RunGangs

_SHORT_NS = 1_000_000


class NotDelegated(enum.Enum):
    """Why there is no `DelegatedProgram` for a program."""

    UNKNOWN = "unknown"  # no launch of it could have been delegated yet
    IMPOSSIBLE = "impossible"  # its launches cannot be delegated


class PartResult(NamedTuple):
    """A result of a run's part on an island. Its memory is that of argument `donor`, or new memory if `donor` is -1."""

    value: int
    requirement: MemoryRequirement
    donor: int


class PartMemory(msgspec.Struct, frozen=True):
    """The memory that a part needs on devices in addition to its arguments, in bytes.

    Attributes:
      peak: at most.
      head: at most, while its first calls run.
      tail: when its last gangs have started.
      left: at its end.
    """

    peak: dict[HostDevice, int]
    head: dict[HostDevice, int]
    tail: dict[HostDevice, int]
    left: dict[HostDevice, int]

    def behind(self, before: PartMemory) -> MemoryRequirement:
        """Return the memory that a run needs in addition to that of the run `before` it, which is about to end."""
        found = {}
        for device in sorted({*self.peak, *before.tail}):
            has = before.peak.get(device, 0)
            together = before.tail.get(device, 0) + self.head.get(device, 0)
            after = before.left.get(device, 0) + self.peak.get(device, 0)
            if max(together, after) > has:
                found[device] = max(together, after) - has
        return tuple(found.items())


class Transfers(NamedTuple):
    """The transfers of one kind in a part, as sums over the gangs before each place, and over all gangs at the end.

    Attributes:
      counts: the number of transfers.
      nbytes: the bytes that they move.
    """

    kind: str
    counts: tuple[int, ...]
    nbytes: tuple[int, ...]


class IslandPart(msgspec.Struct, frozen=True):
    """A program's part on one island.

    Attributes:
      each: its gangs, in order.
      whole: one gang for all of them. Its scratch memory is the most that they need in addition to arguments.
      successor: `whole`, with only the memory that it needs in addition to that of an equal run before it.
      lost: arguments that have lost their memory to other values at the end.
      devices: the host's devices, if all gangs have the same; otherwise None.
      written: bytes to charge, summed over the gangs before each place, and over all gangs at the end.
      samples: places whose durations are observed, and the number of gangs that do the same as each.
    """

    each: RunGangs
    whole: GangSpec
    successor: GangSpec
    memory: PartMemory
    results: tuple[PartResult, ...]
    lost: tuple[int, ...]
    devices: tuple[int, ...] | None
    transfers: tuple[Transfers, ...]
    written: tuple[int, ...]
    samples: dict[int, int]
    sample_places: tuple[int, ...]

    @property
    def gangs(self) -> tuple[GangSpec, ...]:
        return self.each.specs


class DelegatedProgram(msgspec.Struct, frozen=True):
    """A program whose runs may be delegated.

    Attributes:
      parts: its part on each island.
      nodes: the nodes with gangs on several islands, each as (island, place in the island's part) of its gangs.
      gangs: the number of its gangs.
      ahead: the limit for calls on a host from the first gang that has not ended to the newest.
      weight: the part of an island's window that a run takes, in gangs.
    """

    parts: dict[int, IslandPart]
    nodes: tuple[tuple[tuple[int, int], ...], ...]
    gangs: int
    ahead: int
    weight: int

    @property
    def is_short(self) -> bool:
        """Return whether the durations of its functions are known, and less than 1 ms on average."""
        known = [
            (part.gangs[place].duration_estimate, count)
            for part in self.parts.values()
            for place, count in part.samples.items()
        ]
        took = sum(each.nanoseconds * count for each, count in known)
        return all(each.runs for each, _ in known) and took < _SHORT_NS * sum(count for _, count in known)

    def close(self, limits: dict[int, int]) -> None:
        """Raise the number of segments that each island runs, so that no gang waits for one that is not run.

        Either all gangs of a node are run or none, and on each island all gangs before one that is run.
        """
        for node in reversed(self.nodes):
            if any(limits[island] > place for island, place in node):
                for island, place in node:
                    limits[island] = max(limits[island], place + 1)
