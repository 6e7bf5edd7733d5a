"""The bytes in use on each device.

When a gang is about to start, its memory is reserved before a message is sent to any host: for results, for the scratch
memory of functions, and for values between the nodes of a program. Buffers that share memory share a `Block`: views of
other arrays, and outputs that are written to donated inputs. Devices of unknown size have no limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import groupby
from operator import attrgetter

import msgspec

from atoll.cluster.locations import HostDevice, MemoryRequirement
from atoll.state.grouped_counts import GroupedCounts
from atoll.state.usage import Account

# Requirements for which the groups of devices are remembered. Each program has a few.
_MAX_KNOWN = 4096
_CHARGED = attrgetter("requirement", "owner", "account")  # of a block


@dataclass(slots=True, eq=False)
class BlockGroup:
    """The parts of a divided block. They are mostly freed together."""

    requirement: MemoryRequirement  # of all of them
    count: int


class BlockSpan(msgspec.Struct, frozen=True, eq=False):
    """The islands on which a joint gang has memory."""

    hosts: tuple[int, ...]  # all hosts of the gang
    pieces: tuple[MemoryRequirement, ...]  # the memory on each of its islands

    @property
    def first_hosts(self) -> list[int]:
        """Return the first host of each piece."""
        return [piece[0][0][0] for piece in self.pieces]


class Block(msgspec.Struct, eq=False):
    """Memory on some devices of one island. It is free again after all of its users have released it.

    A joint gang takes one block for each value, which is on all of its islands, since most arrays stay together.
    `divide` replaces it by its parts before something happens to only some of them: before other buffers share it, and
    before a gang on only some of the islands uses it. A buffer then has the parts. The joint gang keeps the divided
    block, which stands for its parts (`undivided`). At most one buffer has a block that may be divided.
    """

    requirement: MemoryRequirement
    users: int = 1
    owner: MemoryLedger | None = None  # the ledger of the tenant, if memory is counted per tenant
    account: Account | None = None  # that the memory is charged to
    views: int = 0  # number of buffers that share the memory, less one; if it is not 0, workers write no outputs to it
    is_published: bool = False  # some of these buffers are published or lent, so they may outlive the others
    group: BlockGroup | None = None  # of the parts of a block
    span: BlockSpan | None = None  # of the block of a joint gang that may be divided, or was
    parts: tuple[Block, ...] = ()  # of a divided block

    @property
    def host(self) -> int:
        """Return the first of its hosts."""
        return self.requirement[0][0][0]

    @property
    def first_hosts(self) -> list[int]:
        """Return its first host on each of its islands."""
        return [self.host] if self.span is None else self.span.first_hosts


@dataclass(slots=True, eq=False)
class _Memory:
    """The memory of each device of a group, in bytes."""

    capacity: int | None = None  # None if unknown
    used: int = 0
    peak: int = 0


@dataclass(slots=True, frozen=True)
class _Part:
    """The memory that a requirement takes on each device of a group."""

    memory: _Memory
    nbytes: int
    device: HostDevice  # the first of the group
    devices: int  # number of devices


class MemoryLedger:
    """Bytes in use, by (host, ordinal).

    Hosts free memory later than it is released here. `is_tight` is set if reserved memory may not fit as long as hosts
    have not freed the memory that was released.
    """

    def __init__(self) -> None:
        self.capacity: dict[HostDevice, int] = {}  # of devices of known size
        self._groups: GroupedCounts[HostDevice, _Memory] = GroupedCounts(replace, astuple)
        # By the identity of the requirement, which must stay alive: hashing thousands of devices takes as long as
        # counting them.
        self._known: dict[int, tuple[MemoryRequirement, tuple[_Part, ...]]] = {}
        self._version = 0
        self.total = 0  # bytes in use on all devices
        self.is_tight = False
        self._unpublished_bytes = 0  # upper bound per device of the released bytes that hosts may not have freed

    # ---- devices

    def declare(self, device: HostDevice, capacity: int) -> None:
        """Add a device. A `capacity` of 0 means that it is unknown."""
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

    def used_on(self, device: HostDevice) -> int:
        memory = self._groups.get(device)
        return 0 if memory is None else memory.used

    def statistics(self, device: HostDevice) -> dict[str, int]:
        """Return the keys of JAX's `Device.memory_stats` that are known, in bytes."""
        memory = self._groups.get(device) or _Memory()
        known = {"bytes_in_use": memory.used, "peak_bytes_in_use": memory.peak}
        return known if memory.capacity is None else known | {"bytes_limit": memory.capacity}

    # ---- memory

    def lacking(self, *requirements: MemoryRequirement, limit: int | None = None) -> HostDevice | None:
        """Return a device that has not enough free memory for all of the requirements, or None.

        With a `limit`, return a device on which more than `limit` bytes would be in use.
        """
        if not self.capacity and limit is None:
            return None
        if len(requirements) == 1:  # nearly every gang
            for part in self._parts(requirements[0]):
                most = part.memory.capacity if limit is None else limit
                if most is not None and part.nbytes > most - part.memory.used:
                    return part.device
            return None
        wanted = [each for each in requirements if each]
        parts = [self._parts(each) for each in wanted]
        parts = [self._parts(each) for each in wanted]  # again, since later calls may have changed the groups
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
        """Reserve memory, also in the ledger of its `owner`. Charge it to the `account` until all users release it."""
        nbytes = self._count(requirement)
        if account is not None:
            account.hold(nbytes)
        if owner is not None:
            owner._count(requirement)
        return Block(requirement, users, owner, account)

    def take_all(
        self,
        requirements: Sequence[MemoryRequirement],
        owner: MemoryLedger | None = None,
        account: Account | None = None,
        users: int = 1,
    ) -> list[Block]:
        """Reserve memory as `take` does for each requirement, counting those that are alike at once."""
        for requirement, alike in groupby(requirements):
            times = len(list(alike))
            nbytes = self._count(requirement, times)
            if account is not None:
                account.hold_all(nbytes, times)
            if owner is not None:
                owner._count(requirement, times)
        return [Block(requirement, users, owner, account) for requirement in requirements]

    def take_joint(
        self,
        requirement: MemoryRequirement,
        span: BlockSpan,
        owner: MemoryLedger | None = None,
        account: Account | None = None,
        users: int = 1,
    ) -> Block:
        """Reserve memory of a joint gang as `take` does."""
        block = self.take(requirement, owner, account, users)
        block.span = span
        return block

    def _count(self, requirement: MemoryRequirement, times: int = 1) -> int:
        """Count the memory as used, so many times. Return its bytes on all devices together, for one time."""
        nbytes = 0
        for part in self._parts(requirement):
            memory = part.memory
            used = memory.used = memory.used + times * part.nbytes
            if used > memory.peak:
                memory.peak = used
            if memory.capacity is not None and used > memory.capacity - self._unpublished_bytes:
                self.is_tight = True
            nbytes += part.nbytes * part.devices
        self.total += times * nbytes
        return nbytes

    def _uncount(self, requirement: MemoryRequirement, times: int = 1) -> int:
        """Undo `_count`."""
        nbytes = 0
        for part in self._parts(requirement):
            part.memory.used -= times * part.nbytes
            self._unpublished_bytes += times * part.nbytes
            nbytes += part.nbytes * part.devices
        self.total -= times * nbytes
        return nbytes

    def release(self, blocks: Iterable[Block]) -> list[Block]:
        """Remove one user of each of the blocks. Return the blocks that have lost their last user.

        The parts of divided blocks have to be given in their place.
        """
        freed = _without_users(blocks)
        if not freed:
            return freed
        whole = whole_group(freed) if len(freed) > 1 else None
        for block in freed if whole is None else freed[:1]:
            requirement = block.requirement if whole is None else whole.requirement
            nbytes = self._uncount(requirement)
            if block.owner is not None:
                block.owner._uncount(requirement)
            if block.account is not None:
                block.account.hold(-nbytes)
        return freed

    def release_each(self, blocks: Iterable[Block]) -> None:
        """Remove one user of each of the blocks of different buffers, counting those that are alike at once."""
        for (requirement, owner, account), alike in groupby(_without_users(blocks), _CHARGED):
            times = len(list(alike))
            nbytes = self._uncount(requirement, times)
            if owner is not None:
                owner._uncount(requirement, times)
            if account is not None:
                account.hold_all(-nbytes, times)

    def hand_over(self, block: Block, owner: MemoryLedger | None) -> None:
        """Count a block in the ledger of another `owner`, since its former owner does not use it any more."""
        if block.owner is not None:
            block.owner._uncount(block.requirement)
        if owner is not None:
            owner._count(block.requirement)
        if block.account is not None:
            block.account.hold(-sum(nbytes for _, nbytes in block.requirement))
        block.owner, block.account = owner, None

    def frees_published(self) -> None:
        """Note that the messages which free the released memory precede all further messages to hosts."""
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
        if self._version != self._groups.version or len(self._known) >= _MAX_KNOWN:
            self._version = self._groups.version
            self._known.clear()
        self._known[id(requirement)] = requirement, parts
        return parts


def divide(block: Block) -> tuple[Block, ...]:
    """Divide the block of a joint gang. Return its parts, which have its users in its place."""
    if not block.parts and block.span is not None:
        group = BlockGroup(block.requirement, len(block.span.pieces))
        users, owner, account, is_published = block.users, block.owner, block.account, block.is_published
        parts = [Block(each, users, owner, account, 0, is_published, group) for each in block.span.pieces]
        block.parts = tuple(parts)
    return block.parts


def undivided(blocks: Iterable[Block]) -> list[Block]:
    """Return the blocks, with the parts of those that were divided in their place."""
    return [each for block in blocks for each in (block.parts or (block,))]


def joint_requirement(blocks: Sequence[Block]) -> MemoryRequirement | None:
    """Return the memory of these blocks if a joint gang has taken them for one value, and otherwise None."""
    if len(blocks) == 1 and blocks[0].span is not None:
        return blocks[0].requirement
    group = whole_group(blocks) if blocks else None
    return None if group is None else group.requirement


def whole_group(blocks: Sequence[Block]) -> BlockGroup | None:
    """Return the group of which these are all blocks, charged to the same owner and account, or None."""
    first = blocks[0]
    group, owner, account = first.group, first.owner, first.account
    if group is None or len(blocks) != group.count:
        return None
    are_alike = [each.group is group and each.owner is owner and each.account is account for each in blocks]
    return group if all(are_alike) else None


def _without_users(blocks: Iterable[Block]) -> list[Block]:
    """Remove one user of each of the blocks. Return those that have lost their last user."""
    freed = []
    for block in blocks:
        users = block.users = block.users - 1
        if not users:
            freed.append(block)
    return freed
