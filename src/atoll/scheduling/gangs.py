"""What a program's gangs are made by: which hosts do what, what that needs, and how long it takes."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.cluster.locations import MemoryRequirement
from atoll.scheduling.scheduler import UNKNOWN_NS


@dataclass(slots=True)
class GangSpec:
    """What a launch of the program does as one gang: a node, or several short ones in one turn, on one island.

    `estimate` is the time that this takes, as learnt from its runs. A gang that waits for other hosts teaches nothing:
    how long it takes is not its own doing.
    """

    island: int
    hosts: tuple[int, ...]
    work: str  # what it does, in one word
    functions: tuple[str, ...]  # that it runs
    awaited: tuple[tuple[int, int], ...]  # the client's feeds that it takes: (host, feed)
    incoming: tuple[tuple[int, tuple[int, ...]], ...]  # those of other hosts
    handles: tuple[int, ...]  # of the launch, that it needs or makes; by their place
    # What it makes here: (value, its bytes, the values whose memory it shares instead).
    makes: tuple[tuple[int, MemoryRequirement, frozenset[int]], ...]
    consumes: tuple[int, ...]  # values in whose place it may write
    drops: tuple[int, ...]  # values between nodes that nothing after it needs on this island
    scratch: MemoryRequirement  # while it runs
    collective: bool  # its hosts compute something together: on none of them it ends without the others
    estimate: int = UNKNOWN_NS
    segments: int = 1  # of each of its hosts' plans
    runs: int = 0  # that it has learnt from

    def learn(self, nanoseconds: int) -> None:
        if self.incoming:
            return
        self.runs += 1
        # Slow to forget: the first run often takes longer, and one that was disturbed should not count for much.
        self.estimate += (nanoseconds - self.estimate) // 4
