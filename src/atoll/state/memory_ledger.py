"""The bytes in use on each device.

Memory is reserved when a gang is about to start, before a message goes to any host, from sizes that are known: results,
what its functions need while they run, and what only exists between the nodes of a program. Buffers that share memory
(the views that rearranging makes; an output that is written to a donated input) share a `Block`. A device whose size is
not known is counted and has no limit.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

from atoll.cluster.locations import HostDevice, MemoryRequirement
from atoll.state.grouped_counts import GroupedCounts
from atoll.state.usage import Account

# Requirements whose devices are remembered: each program has a few.
_MOST_KNOWN = 4096


@dataclass(slots=True, eq=False)
class Block:
    """Memory on some devices of one island. It is free again when all its users have released it.

    `views` counts the buffers that have it, but one. While there are such views, workers write no outputs to it.
    """

    requirement: MemoryRequirement
    users: int = 1
    owner: MemoryLedger | None = None  # that of the tenant who has it, where those are counted
    account: Account | None = None  # of who had it made
    views: int = 0


@dataclass(slots=True, eq=False)
class _Memory:
    """That of each device of a group."""

    capacity: int | None = None  # where it is known
    used: int = 0
    peak: int = 0


@dataclass(slots=True, frozen=True)
class _Part:
    """What a requirement takes on each device of a group; `device` is the first of them."""

    memory: _Memory
    nbytes: int
    device: HostDevice
    devices: int


class MemoryLedger:
    """Bytes in use, by (host, ordinal).

    Hosts learn later what was released here. Until then they have it, too: memory `is_tight` where what was taken may
    not fit beside that.
    """

    def __init__(self) -> None:
        self.capacity: dict[HostDevice, int] = {}  # of the devices that have a known one
        self._groups: GroupedCounts[HostDevice, _Memory] = GroupedCounts(replace, astuple)
        # By identity: to hash thousands of devices takes as long as to count them. The requirement keeps its identity.
        self._known: dict[int, tuple[MemoryRequirement, tuple[_Part, ...]]] = {}
        self._version = 0
        self.total = 0  # bytes in use on all devices
        self.is_tight = False
        self._unpublished_bytes = 0  # on a device, at most: bytes that were released, and that hosts may still have

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():  # not its dictionary: see `journal.snapshots`
            setattr(self, name, value)
        # What was restored has another identity.
        self._known = {id(requirement): (requirement, parts) for requirement, parts in self._known.values()}

    # ---- devices

    def declare(self, device: HostDevice, capacity: int) -> None:
        """The device exists; a `capacity` of 0 is not known."""
        known = capacity if capacity > 0 else None
        for group in self._groups.of((device,), partial(_Memory, known)):
            if known is not None:
                group.count.capacity = known
        if known is not None:
            self.capacity[device] = known

    @property
    def used(self) -> dict[HostDevice, int]:
        return {device: memory.used for device, memory in self._groups.items()}

    @property
    def peak(self) -> dict[HostDevice, int]:
        return {device: memory.peak for device, memory in self._groups.items()}

    def free(self, device: HostDevice) -> int:
        memory = self._groups.get(device)
        return 1 << 62 if memory is None or memory.capacity is None else memory.capacity - memory.used

    def statistics(self, device: HostDevice) -> dict[str, int]:
        """By jax's names for what `Device.memory_stats` gives, in bytes; no limit where the size is not known."""
        memory = self._groups.get(device) or _Memory()
        known = {"bytes_in_use": memory.used, "peak_bytes_in_use": memory.peak}
        return known if memory.capacity is None else known | {"bytes_limit": memory.capacity}

    # ---- memory

    def lacking(self, *requirements: MemoryRequirement, limit: int | None = None) -> HostDevice | None:
        """A device on which there is not enough free memory now for all of these; with `limit`, on which more than that
        would be in use.
        """
        if not self.capacity and limit is None:
            return None
        if len(requirements) == 1:  # as of nearly every gang
            for part in self._parts(requirements[0]):
                most = part.memory.capacity if limit is None else limit
                if most is not None and part.nbytes > most - part.memory.used:
                    return part.device
            return None
        wanted = [each for each in requirements if each]
        parts = [self._parts(each) for each in wanted]
        parts = [self._parts(each) for each in wanted]  # the later ones may have changed groups of the others
        sums: dict[_Memory, int] = {}
        for each in parts:
            for part in each:
                memory = part.memory
                nbytes = sums[memory] = sums.get(memory, 0) + part.nbytes
                most = memory.capacity if limit is None else limit
                if most is not None and nbytes > most - memory.used:
                    return part.device
        return None

    def take(
        self,
        requirement: MemoryRequirement,
        owner: MemoryLedger | None = None,
        account: Account | None = None,
        users: int = 1,
    ) -> Block:
        """Memory; it is counted as the `owner`'s, too, and the `account` has it until its `users` have released it."""
        nbytes = self._count(requirement)
        if account is not None:
            account.hold(nbytes)
        if owner is not None:
            owner._count(requirement)
        return Block(requirement, users, owner, account)

    def _count(self, requirement: MemoryRequirement) -> int:
        """The bytes that it takes on all devices together."""
        nbytes = 0
        for part in self._parts(requirement):
            memory = part.memory
            used = memory.used = memory.used + part.nbytes
            if used > memory.peak:
                memory.peak = used
            if memory.capacity is not None and used > memory.capacity - self._unpublished_bytes:
                self.is_tight = True
            nbytes += part.nbytes * part.devices
        self.total += nbytes
        return nbytes

    def _uncount(self, requirement: MemoryRequirement) -> int:
        nbytes = 0
        for part in self._parts(requirement):
            part.memory.used -= part.nbytes
            self._unpublished_bytes += part.nbytes
            nbytes += part.nbytes * part.devices
        self.total -= nbytes
        return nbytes

    def release(self, block: Block) -> bool:
        """One user of the block needs it no more; True where that was the last."""
        block.users -= 1
        if block.users:
            return False
        nbytes = self._uncount(block.requirement)
        if block.owner is not None:
            block.owner._uncount(block.requirement)
        if block.account is not None:
            block.account.hold(-nbytes)
        return True

    def frees_published(self) -> None:
        """Hosts will know of all that was released before anything else is sent to them."""
        self.is_tight, self._unpublished_bytes = False, 0

    def _parts(self, requirement: MemoryRequirement) -> tuple[_Part, ...]:
        if self._version == self._groups.version:
            known = self._known.get(id(requirement))
            if known is not None:
                return known[1]
        wanted: dict[HostDevice, int] = {}
        for device, nbytes in requirement:
            wanted[device] = wanted.get(device, 0) + nbytes
        by_size: dict[int, list[HostDevice]] = {}
        for device, nbytes in wanted.items():
            by_size.setdefault(nbytes, []).append(device)
        sizes = {nbytes: self._groups.of(devices, _Memory) for nbytes, devices in by_size.items()}
        parts = tuple(
            _Part(
                group.count, nbytes, next(device for device in by_size[nbytes] if device in group.keys), len(group.keys)
            )
            for nbytes, groups in sizes.items()
            for group in groups
        )
        if self._version != self._groups.version or len(self._known) >= _MOST_KNOWN:
            self._version = self._groups.version
            self._known.clear()
        self._known[id(requirement)] = requirement, parts
        return parts
