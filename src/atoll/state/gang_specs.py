"""Specifications of gangs: what each gang of a program runs, what it needs, and how long it is expected to take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from atoll.cluster.locations import HostDevice, MemoryRequirement, total
from atoll.ir.program import STORAGE_STREAM
from atoll.state.host_window import NEW_NS
from atoll.state.memory_ledger import BlockSpan
from atoll.state.queued_nodes import UNKNOWN_NS, HostCallKind, OnIslands
from atoll.state.tallies import computes

# The first run often takes longer, so the sample of each of these runs replaces the estimate.
FIRST_RUNS = 2


class MadeValue(NamedTuple):
    """A value that a gang makes. A view takes no memory."""

    value: int
    requirement: MemoryRequirement  # on the gang's hosts
    views: frozenset[int]  # values whose memory it shares


class GangMemory(NamedTuple):
    """The memory that a gang needs if it writes no outputs to donated inputs."""

    fresh: tuple[tuple[int, MemoryRequirement], ...]  # values that need memory of their own
    whole: MemoryRequirement  # total of these values and of the scratch memory
    views: tuple[tuple[int, frozenset[int]], ...]  # values without memory of their own, and those that they view


class ClientFeed(NamedTuple):
    """Bytes that the client sends to a host, with their number among the program's feeds."""

    host: int
    feed: int


class HostFeeds(NamedTuple):
    """Data that other hosts may send to a host: ranges of the program's feeds between hosts, as (first, count)."""

    host: int
    feeds: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class DurationEstimate:
    """The expected duration of gangs that do the same: an exponential average over `runs` samples."""

    nanoseconds: int = UNKNOWN_NS
    runs: int = 0

    def observe(self, nanoseconds: int) -> None:
        """Add a sample, in nanoseconds."""
        self.runs += 1
        if self.runs <= FIRST_RUNS:
            self.nanoseconds = nanoseconds
            return
        # A single disturbed run should not count for much.
        self.nanoseconds += (nanoseconds - self.nanoseconds) // 4


@dataclass(slots=True)
class GangSpec(OnIslands):
    """The specification of one gang of a program: a node on one island, or several short nodes as one dispatch unit.

    `duration_estimate` estimates the device time; gangs that do the same share it. Gangs that wait for other hosts add
    no samples, since their duration depends on these.
    """

    island: int
    hosts: tuple[int, ...]
    kind: str  # of its last step, in one word: see `ir.plan.STEP_KINDS`
    functions: tuple[str, ...]
    awaited: tuple[ClientFeed, ...]
    incoming: tuple[HostFeeds, ...]
    handles: tuple[int, ...]  # that it needs or makes, as positions in the launch
    makes: tuple[MadeValue, ...]
    consumes: tuple[int, ...]  # values whose memory it may write its outputs to
    drops: tuple[int, ...]  # values between nodes that no later gang needs on this island
    scratch: MemoryRequirement  # while it runs
    collective: bool  # its hosts compute together, so it ends on none of them before the others
    devices: Mapping[int, tuple[int, ...]]  # by host, the ordinals of the devices that it keeps busy
    duration_estimate: DurationEstimate = field(default_factory=DurationEstimate)
    segments: int = 1  # of the plan of each host
    host_call: HostCallKind | None = None
    moved: int = 0  # bytes that its transfers write
    title: str = ""  # names of its functions for display
    is_apart: bool = False  # hosts of different islands do not compute together
    stream: int | None = None  # of a call of colocated Python: see `ir.program.Call`
    # Of a joint gang: its islands, and the hosts on each of them. See `state.joint_gangs`.
    islands: tuple[int, ...] = ()
    places: tuple[tuple[int, ...], ...] = ()
    parts: tuple[GangSpec, ...] = ()  # of a joint gang: the gangs on its islands, unless it has several nodes
    nodes: tuple[GangSpec, ...] = ()  # of a joint gang that is a dispatch unit: the joint gangs of its nodes
    device_count: int = field(init=False)
    computes: bool = field(init=False)  # see `tallies.computes`; transfers run beside gangs that compute
    _memory: GangMemory | None = field(default=None, init=False)
    _island_of: dict[int, int] = field(default_factory=dict, init=False)
    _spans: dict[int, BlockSpan] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.device_count = sum(map(len, self.devices.values()))
        self.computes = computes(self.kind, self.functions)

    @property
    def memory(self) -> GangMemory:
        """Return the memory that the gang needs. It is computed when the first such gang is about to be committed."""
        if self._memory is None:
            fresh = tuple(
                [(each.value, each.requirement) for each in self.makes if each.requirement and not each.views]
            )
            parts = [requirement for _, requirement in fresh] + [self.scratch] * bool(self.scratch)
            views = tuple([(each.value, each.views) for each in self.makes if each.views])
            self._memory = GangMemory(fresh, parts[0] if len(parts) == 1 else total(parts), views)
        return self._memory

    @property
    def weight(self) -> int:
        """Return how much of its island's window the gang takes: 0 if its duration is unbounded."""
        return 0 if self.host_call else self.segments

    @property
    def runs_together(self) -> bool:
        """Whether it calls Python in processes that are one JAX program on several hosts."""
        return self.stream is not None and self.stream != STORAGE_STREAM

    @property
    def spans_devices(self) -> bool:
        return self.device_count > 1

    @property
    def expected(self) -> int:
        """Return the expected duration of the next gang. It is long if no gang has run, so that few are started."""
        known = self.duration_estimate
        return known.nanoseconds if known.runs or self.incoming or self.host_call else max(known.nanoseconds, NEW_NS)

    def span_of(self, requirement: MemoryRequirement) -> BlockSpan:
        """Return where a joint gang has memory.

        Args:
          requirement: memory of the gang. The result is remembered by its identity, so it must stay alive.
        """
        found = self._spans.get(id(requirement))
        if found is None:
            by_island: dict[int, list[tuple[HostDevice, int]]] = {}
            for each in requirement:
                by_island.setdefault(self.island_of(each[0][0]), []).append(each)
            found = self._spans[id(requirement)] = BlockSpan(self.hosts, tuple(map(tuple, by_island.values())))
        return found

    def islands_of(self, hosts: Iterable[int]) -> list[int]:
        """Return the islands of some of the gang's hosts, in ascending order."""
        return sorted({self.island_of(host) for host in hosts})

    def island_of(self, host: int) -> int:
        """Return the island of one of the gang's hosts."""
        if not self.islands:
            return self.island
        if not self._island_of:
            self._island_of = {each: island for island, hosts in self.by_island for each in hosts}
        return self._island_of[host]

    def estimate_key(self, contents: Mapping[str, str], device: str) -> str:
        """Return the key of the gang's duration estimate, or "" if the gang runs no function.

        The key consists of the kind of the devices, their number per host, and the contents of the functions.
        """
        if not self.functions:
            return ""
        counts = [len(self.devices[host]) for host in self.hosts]
        shape = f"{len(counts)}x{counts[0]}" if len(set(counts)) == 1 else "+".join(map(str, counts))
        return " ".join([device, shape, *(contents.get(name, name) for name in self.functions)])

    def observe(self, nanoseconds: int) -> None:
        """Add the duration of a run, in nanoseconds, to the estimate, unless it depends on others."""
        if not (self.incoming or self.host_call):
            self.duration_estimate.observe(nanoseconds)


class RunGangs(NamedTuple):
    """The gangs that a delegated run has on an island. Each field has one item per gang."""

    specs: tuple[GangSpec, ...]
    moved: tuple[int, ...]  # bytes
    numbers: tuple[int, ...]  # position among all gangs of the program
    nodes: tuple[int, ...]  # position of the first gang of the same node
