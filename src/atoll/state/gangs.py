"""The specification of a program's gang: which hosts do what, what that needs, and how long it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from atoll.cluster.locations import MemoryRequirement, total
from atoll.state.in_flight import NEW_NS
from atoll.state.queued_nodes import UNKNOWN_NS, HostCallKind
from atoll.state.tallies import computes

FIRST_RUNS = 2


class MadeValue(NamedTuple):
    """A value that a gang makes: the memory that it takes on the gang's hosts, and the values whose memory it shares.

    A view has no memory of its own.
    """

    value: int
    requirement: MemoryRequirement
    views: frozenset[int]


class GangMemory(NamedTuple):
    """What a gang takes where it writes nothing to donated inputs: `fresh` memory for values; `whole` is that of all of
    them, and of its scratch. `views` are the values that have none of their own, and whose memory each of them shares.
    """

    fresh: tuple[tuple[int, MemoryRequirement], ...]
    whole: MemoryRequirement
    views: tuple[tuple[int, frozenset[int]], ...]


class ClientFeed(NamedTuple):
    """Bytes that the client sends to a host: the program's feed of this number."""

    host: int
    feed: int


class HostFeeds(NamedTuple):
    """What other hosts may send to this one: ranges of the program's feeds between hosts, as (first, count)."""

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
        if self.runs <= FIRST_RUNS:  # the first often takes longer
            self.nanoseconds = nanoseconds
            return
        # A single run that was disturbed should not count for much.
        self.nanoseconds += (nanoseconds - self.nanoseconds) // 4


@dataclass(slots=True)
class GangSpec:
    """What one gang of each launch of a program does: a node on one island, or several short ones as one dispatch unit.

    `duration_estimate` is of the time that this takes of the devices; gangs that do the same share it. A gang that
    waits for other hosts teaches nothing: how long it takes does not depend on itself.
    """

    island: int
    hosts: tuple[int, ...]
    kind: str  # of its last step, in one word: see `ir.plan.STEP_KINDS`
    functions: tuple[str, ...]  # that it runs
    awaited: tuple[ClientFeed, ...]
    incoming: tuple[HostFeeds, ...]
    handles: tuple[int, ...]  # that it needs or makes, by their positions in the launch
    makes: tuple[MadeValue, ...]
    consumes: tuple[int, ...]  # values whose memory it may write its outputs to
    drops: tuple[int, ...]  # values between nodes that no later gang needs on this island
    scratch: MemoryRequirement  # while it runs
    collective: bool  # its hosts compute together: on none of them it ends without the others
    devices: Mapping[int, tuple[int, ...]]  # by host, the ordinals of those that it keeps busy
    duration_estimate: DurationEstimate = field(default_factory=DurationEstimate)
    segments: int = 1  # of each of its hosts' plans
    host_call: HostCallKind | None = None
    moved: int = 0  # bytes that it writes in moving them
    title: str = ""  # of its functions: people know them so
    device_count: int = field(init=False)
    computes: bool = field(init=False)  # see `tallies.computes`; transfers go on beside that
    _memory: GangMemory | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.device_count = sum(map(len, self.devices.values()))
        self.computes = computes(self.kind, self.functions)

    @property
    def memory(self) -> GangMemory:
        """What it takes; worked out when the first such gang is to be committed."""
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
        """Return how much of its island's window the gang takes: nothing if its duration is unbounded."""
        return 0 if self.host_call else self.segments

    @property
    def spans_devices(self) -> bool:
        return self.device_count > 1

    @property
    def expected(self) -> int:
        """Return the expected duration of the next gang. It is long if none has run, so that few are started."""
        known = self.duration_estimate
        return known.nanoseconds if known.runs or self.incoming or self.host_call else max(known.nanoseconds, NEW_NS)

    def estimate_key(self, contents: Mapping[str, str], device: str) -> str:
        """Return the key of the gang's duration estimate: the contents of its functions, the kind of its devices, and
        their number per host. It is "" if the gang runs no function.
        """
        if not self.functions:
            return ""
        counts = [len(self.devices[host]) for host in self.hosts]
        shape = f"{len(counts)}x{counts[0]}" if len(set(counts)) == 1 else "+".join(map(str, counts))
        return " ".join([device, shape, *(contents.get(name, name) for name in self.functions)])

    def observe(self, nanoseconds: int) -> None:
        """Add the duration of a run, in nanoseconds, to the estimate."""
        if not (self.incoming or self.host_call):
            self.duration_estimate.observe(nanoseconds)


class RunGangs(NamedTuple):
    """Gangs that a delegated run has on an island: what each is, the bytes that it moves, its number among all of the
    program's, and that of the first gang of its node.
    """

    specs: tuple[GangSpec, ...]
    moved: tuple[int, ...]
    numbers: tuple[int, ...]
    nodes: tuple[int, ...]
