"""The bytes in use on each device.

Memory is reserved when a gang is about to start, before a message goes to any host, from sizes that are known: results,
what its functions need while they run, and what only exists between the nodes of a program. Buffers that share memory
(the views that rearranging makes; an output that is written to a donated input) share a `Block`. A device whose size is
not known is counted and has no limit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.cluster.locations import HostDevice, MemoryRequirement


@dataclass(slots=True, eq=False)
class Block:
    """Memory on some devices of one island. It is free again when all its users have released it."""

    requirement: MemoryRequirement
    users: int = 1


@dataclass
class Ledger:
    """Bytes in use, by (host, ordinal)."""

    capacity: dict[HostDevice, int] = field(default_factory=dict)  # of the devices that have a known one
    used: dict[HostDevice, int] = field(default_factory=dict)
    peak: dict[HostDevice, int] = field(default_factory=dict)

    def declare(self, device: HostDevice, capacity: int) -> None:
        """The device exists; a `capacity` of 0 is not known."""
        self.used.setdefault(device, 0)
        self.peak.setdefault(device, 0)
        if capacity > 0:
            self.capacity[device] = capacity

    def lacking(self, requirement: MemoryRequirement) -> HostDevice | None:
        """A device on which there is not enough free memory now."""
        if self.capacity:
            for device, nbytes in requirement:
                if nbytes > self.free(device):
                    return device
        return None

    def free(self, device: HostDevice) -> int:
        capacity = self.capacity.get(device)
        return 1 << 62 if capacity is None else capacity - self.used[device]

    def statistics(self, device: HostDevice) -> dict[str, int]:
        """By jax's names for what `Device.memory_stats` gives, in bytes; no limit where the size is not known."""
        known = {"bytes_in_use": self.used.get(device, 0), "peak_bytes_in_use": self.peak.get(device, 0)}
        capacity = self.capacity.get(device)
        return known if capacity is None else known | {"bytes_limit": capacity}

    def take(self, requirement: MemoryRequirement) -> Block:
        used, peak = self.used, self.peak
        for device, nbytes in requirement:
            now = used[device] = used.get(device, 0) + nbytes
            if now > peak.get(device, 0):
                peak[device] = now
        return Block(requirement)

    def release(self, block: Block) -> bool:
        """One user of the block needs it no more; True where that was the last."""
        block.users -= 1
        if block.users:
            return False
        for device, nbytes in block.requirement:
            self.used[device] -= nbytes
        return True
