"""What lies on each device, in bytes, and who is waiting for room.

Memory is reserved when a gang's turn has come, before any host hears of it, from sizes that are known: results, what
its functions need while they run, and what only exists between the nodes of a program. Buffers that share memory (the
views that rearranging makes; an output in the place of a donated input) share a `Block`. A device whose size nobody
knows is counted and has no limit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from atoll.cluster.locations import HostDevice, MemoryRequirement


@dataclass(slots=True, eq=False)
class Block:
    """Memory on some devices of one island. It is free again when all its users have let go."""

    needs: MemoryRequirement
    users: int = 1


@dataclass
class Ledger:
    """Bytes in use, by (host, ordinal)."""

    capacity: dict[HostDevice, int] = field(default_factory=dict)  # of the devices that have a known one
    used: dict[HostDevice, int] = field(default_factory=dict)
    peak: dict[HostDevice, int] = field(default_factory=dict)

    def declare(self, place: HostDevice, capacity: int) -> None:
        """The device is there; a `capacity` of 0 is not known."""
        self.used.setdefault(place, 0)
        self.peak.setdefault(place, 0)
        if capacity > 0:
            self.capacity[place] = capacity

    def lacking(self, needs: MemoryRequirement) -> HostDevice | None:
        """A device on which there is no room for that now."""
        if self.capacity:
            for place, nbytes in needs:
                if nbytes > self.free(place):
                    return place
        return None

    def free(self, place: HostDevice) -> int:
        capacity = self.capacity.get(place)
        return 1 << 62 if capacity is None else capacity - self.used[place]

    def take(self, needs: MemoryRequirement) -> Block:
        used, peak = self.used, self.peak
        for place, nbytes in needs:
            now = used[place] = used.get(place, 0) + nbytes
            if now > peak.get(place, 0):
                peak[place] = now
        return Block(needs)

    def let_go(self, block: Block) -> bool:
        """One user of the block needs it no more; True where that was the last."""
        block.users -= 1
        if block.users:
            return False
        for place, nbytes in block.needs:
            self.used[place] -= nbytes
        return True


def total(many: Iterable[MemoryRequirement]) -> MemoryRequirement:
    """What all of these need together."""
    sums: dict[HostDevice, int] = {}
    for needs in many:
        for place, nbytes in needs:
            sums[place] = sums.get(place, 0) + nbytes
    return tuple(sums.items())
