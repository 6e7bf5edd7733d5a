"""Reserve memory for nodes in commit order, and release it.

A node takes the memory of all its gangs at once, immediately before it is committed. A node that lacks memory waits,
and with it the rest of its session, but no other session: see `memory_waits`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby

import msgspec

from atoll.cluster.locations import HostDevice, MemoryRequirement, total
from atoll.cluster.resources import ResourceManager
from atoll.launch.memory_waits import MemoryWait, MemoryWaits
from atoll.launch.scheduler import Scheduler
from atoll.launch.shared_state import LaunchServices
from atoll.state.buffer_directory import Entry
from atoll.state.dispatch_units import parts_of
from atoll.state.gang_specs import GangSpec
from atoll.state.gang_states import Reason
from atoll.state.memory_ledger import Block, MemoryLedger, joint_requirement, undivided
from atoll.state.memory_quotas import QUOTAS, MemoryQuota
from atoll.state.queued_nodes import Dropped, Gang, QueuedNode
from atoll.state.session import GangRun, Inherited, Session
from atoll.state.tenants import Tenant


class _Need(msgspec.Struct, frozen=True):
    """The memory that a gang takes, or its part on one island.

    Attributes:
      spec: that of the gang, or of the part.
      fresh: values that get fresh memory, with their requirements.
      wanted: all fresh memory, including scratch.
      inherited: values that get the memory of donated inputs.
    """

    gang: Gang[GangRun]
    spec: GangSpec
    fresh: Sequence[tuple[int, MemoryRequirement]]
    wanted: Sequence[MemoryRequirement]
    inherited: Sequence[Inherited] = ()


class Reservations:
    """Takes memory from the ledger for gangs and entries, and returns it."""

    def __init__(
        self,
        sessions: Mapping[int, Session],
        scheduler: Scheduler[GangRun],
        resources: ResourceManager,
        services: LaunchServices,
    ) -> None:
        self.ledger = MemoryLedger()
        self.waits = MemoryWaits(self.ledger, sessions, scheduler, services, self._lack)
        self._sessions = sessions
        self._scheduler = scheduler
        self._resources = resources

    # ---- reserve

    def reserve(self, node: QueuedNode[GangRun]) -> Reason | None:
        """Take the memory of the node's gangs. Return None, or, if the node has to wait, the reason: memory or quota.

        A node that can never fit also waits, until `waits.hopeless` returns it.
        """
        needs = self._needs(node)
        lack = self._first_lack(node, needs)
        if lack is not None:
            self.waits.add(lack)
            return Reason.QUOTA if lack.quota else Reason.MEMORY
        if self.waits.waiting:
            self.waits.passed_by(node)
        for need in needs:
            self._take(need, node.tenant.memory)
        node.tenant.took_memory(len(node.gangs))
        return None

    def _lack(self, node: QueuedNode[GangRun]) -> MemoryWait | None:
        """Return what the node lacks now, as a new wait, or None."""
        return self._first_lack(node, self._needs(node))

    def _needs(self, node: QueuedNode[GangRun]) -> list[_Need]:
        needs = []
        for gang in node.gangs:
            spec = gang.run.spec
            need = self._joint_need(gang) if spec.islands else self._need(gang, spec)
            if need is not None:
                needs.append(need)
            else:
                needs += [self._need(gang, part) for part in parts_of(spec)]
        return needs

    def _joint_need(self, gang: Gang[GangRun]) -> _Need | None:
        """Return the memory that a joint gang takes on all of its islands, or None if it is found for each island.

        It can be found at once if each donated input, if any, was taken at once, and is used by an output or by none.
        """
        spec, entries = gang.run.spec, gang.run.launch.entries
        memory = spec.memory
        if memory.views:
            return None
        donors: dict[MemoryRequirement, list[tuple[Entry, list[Block]]]] = {}
        counts_copies = _counts_copies(gang)
        for entry in _donors(gang, spec):
            blocks = list(entry.blocks)
            whole = joint_requirement(blocks)
            if blocks and (whole is None or any([each.views for each in blocks])):
                if any([_is_reusable(each, counts_copies) for each in blocks]):
                    return None
            elif whole is not None:
                donors.setdefault(whole, []).append((entry, blocks))
        fresh: list[tuple[int, MemoryRequirement]] = []
        inherited: list[Inherited] = []
        for value, requirement in memory.fresh:
            found = donors.get(requirement) if donors else None
            if found:
                donor, blocks = found.pop()
                inherited += [(entries[value], donor, block) for block in blocks]
            else:
                fresh.append((value, requirement))
        if fresh and any(donors.values()):  # some may fit on some of the islands
            return None
        if not inherited:
            return _Need(gang, spec, memory.fresh, (memory.whole,) if memory.whole else ())
        scratch = (spec.scratch,) if spec.scratch else ()
        return _Need(gang, spec, fresh, (*scratch, *(requirement for _, requirement in fresh)), inherited)

    def _first_lack(self, node: QueuedNode[GangRun], needs: Sequence[_Need]) -> MemoryWait | None:
        if not self.ledger.capacity and node.tenant.memory is None:
            return None
        lack = next((lack for need in needs if (lack := self._lacking(node, need)) is not None), None)
        return lack if lack is not None or len(needs) < 2 else self._lack_of_all(node, needs)

    def _lack_of_all(self, node: QueuedNode[GangRun], needs: Sequence[_Need]) -> MemoryWait | None:
        """Return what the parts of a node on several islands lack together, of the tenant's quota for all devices."""
        memory, limit = node.tenant.memory, MemoryQuota.TOTAL.limit(node.tenant)
        if memory is None or not limit:
            return None
        own = next((need for need in needs if total(need.wanted)), None)
        lack = MemoryQuota.TOTAL.lacking(memory, [each for need in needs for each in need.wanted], limit)
        if own is None or lack is None:
            return None
        return MemoryWait(node, own.gang, total(own.wanted)[0][0], lack[1], MemoryQuota.TOTAL)

    def _need(self, gang: Gang[GangRun], spec: GangSpec) -> _Need:
        entries = gang.run.launch.entries
        memory = spec.memory
        reusable = self._consumed(gang, spec) if spec.consumes else None
        if not reusable:
            return _Need(gang, spec, memory.fresh, (memory.whole,) if memory.whole else ())
        fresh: list[tuple[int, MemoryRequirement]] = []
        inherited: list[Inherited] = []
        for value, requirement in memory.fresh:
            donors = reusable.get(requirement)
            if donors:
                inherited.append((entries[value], *donors.pop()))
            else:
                fresh.append((value, requirement))
        scratch = (spec.scratch,) if spec.scratch else ()
        return _Need(gang, spec, fresh, (*scratch, *(requirement for _, requirement in fresh)), inherited)

    def _lacking(self, node: QueuedNode[GangRun], need: _Need) -> MemoryWait | None:
        gang, wanted = need.gang, need.wanted
        device = self.ledger.lacking(*wanted)
        quota, nbytes = None, 0
        if device is None and self.waits.waiting and not all(map(self._scheduler.is_idle, need.spec.all_islands)):
            device = self.waits.claimed(node, wanted)
        if device is None and node.tenant.memory is not None:
            over = _over_quota(node.tenant, node.tenant.memory, wanted)
            if over is not None:
                quota, (device, nbytes) = over
        if device is None:
            return None
        return MemoryWait(node, gang, device, nbytes or dict(total(wanted))[device], quota)

    def _take(self, need: _Need, owner: MemoryLedger | None) -> None:
        run, spec = need.gang.run, need.spec
        account, entries = run.launch.program.account, run.launch.entries
        if spec.islands:
            self._take_joint(need, owner)
            return
        fresh, ledger = need.fresh, self.ledger
        if fresh:
            # The gang is a user until it has ended, even if the client releases the buffer before.
            if len(fresh) == 1:  # nearly every gang that has results
                value, requirement = fresh[0]
                block = ledger.take(requirement, owner, account, users=2)
                entries[value].blocks.add(block)
                run.blocks.append(block)
            else:
                blocks = ledger.take_all([requirement for _, requirement in fresh], owner, account, users=2)
                for (value, _), block in zip(fresh, blocks, strict=True):
                    own = entries[value].blocks
                    if own:
                        own.add(block)
                    else:  # nearly always
                        own[block] = None
                run.blocks += blocks
        if need.inherited:
            for entry, donor, block in need.inherited:
                donor.blocks.remove(block)
                entry.blocks.add(block)
            run.inherited = (*run.inherited, *need.inherited) if run.inherited else need.inherited
        for value, sources in spec.memory.views:
            for source in sources:
                _share(entries[source], entries[value], spec.hosts)
        if spec.scratch:
            run.blocks.append(ledger.take(spec.scratch, owner, account))

    def _take_joint(self, need: _Need, owner: MemoryLedger | None) -> None:
        """Take the memory of a joint gang on all of its islands at once."""
        run, spec = need.gang.run, need.spec
        entries = run.launch.entries
        for value, requirement in need.fresh:
            block = self._take_whole(need, requirement, owner, users=2)
            entries[value].blocks.add(block)
            run.blocks.append(block)
        for _, some in groupby(need.inherited, key=lambda each: id(each[0])):
            group = list(some)
            entry, donor, _ = group[0]
            donor.blocks.take()
            entry.blocks.add_all([block for _, _, block in group])
        run.inherited = need.inherited
        if spec.scratch:
            run.blocks.append(self._take_whole(need, spec.scratch, owner))

    def _take_whole(
        self, need: _Need, requirement: MemoryRequirement, owner: MemoryLedger | None, users: int = 1
    ) -> Block:
        """Take memory of a joint gang, on all of its islands."""
        account = need.gang.run.launch.program.account
        return self.ledger.take_joint(requirement, need.spec.span_of(requirement), owner, account, users)

    def _consumed(self, gang: Gang[GangRun], spec: GangSpec) -> dict[MemoryRequirement, list[tuple[Entry, Block]]]:
        """Return the blocks of donated inputs. An output of the same size is written to one of them.

        If other buffers share the memory of an input, workers copy the input and consume the copy. A quota of memory
        counts this copy, and so does the ledger if one of the buffers is published, or lent to a session that reads it.
        Otherwise it is not counted, since scripts that read an array and then donate it have such a buffer for a
        moment.
        """
        found: dict[MemoryRequirement, list[tuple[Entry, Block]]] = {}
        counts_copies = _counts_copies(gang)
        for entry in _donors(gang, spec):
            for block in entry.blocks.on(spec.hosts):
                if _is_reusable(block, counts_copies):
                    found.setdefault(block.requirement, []).append((entry, block))
        return found

    def publish(self, entry: Entry) -> None:
        """Note that the buffer is published: its memory outlives the buffers that share it."""
        entry.is_published = True
        for block in entry.blocks:
            block.is_published = True

    def lend(self, source: Entry, view: Entry) -> None:
        """Have a view in another session share all memory of its source, until the session has read it."""
        source.blocks.divide()
        for block in source.blocks:
            _share_block(block, view)
            block.is_published = True

    def hand_over(self, guests: Sequence[tuple[Entry, Tenant]], owner: Tenant) -> None:
        """Count memory that only other tenants use for them instead of the `owner`.

        Args:
          guests: buffers of other tenants, with their tenants. The first one with a block is charged for it.
          owner: the tenant that is charged for the blocks. It stays charged for those that its sessions' buffers use.
        """
        counts = Counter([block for entry, _ in guests for block in entry.blocks])
        used: set[Block] = set()
        if any(block.users > count for block, count in counts.items()):  # otherwise only the guests use them
            own = [session for session in self._sessions.values() if session.tenant is owner]
            used = {block for session in own for entry in session.directory.entries.values() for block in entry.blocks}
        for entry, tenant in guests:
            for block in entry.blocks:
                if block.owner is owner.memory and block not in used:
                    self.ledger.hand_over(block, tenant.memory)

    # ---- release

    def release(self, entry: Entry) -> None:
        """Release the memory of a buffer, which is not needed any more, or lost."""
        if entry.blocks:
            self._leave(entry.blocks.take())

    def release_all(self, entries: Iterable[Entry]) -> None:
        """Do the same for several buffers, with few calls per buffer."""
        if self.waits.waiting:
            for entry in entries:
                self.release(entry)
            return
        alone: list[Block] = []  # of buffers that have no other block
        for entry in entries:
            if entry.blocks:
                blocks = entry.blocks.take()
                if any([block.views for block in blocks]):
                    self._unshare(blocks)
                if len(blocks) == 1:
                    alone += blocks
                    continue
                self.ledger.release_each(alone)  # in the order of the buffers, since times are rounded
                alone = []
                self.ledger.release(blocks)
        self.ledger.release_each(alone)

    def release_on(self, hosts: Collection[int], entry: Entry) -> None:
        """Release the memory that a buffer has on lost hosts."""
        entry.blocks.divide(tuple(hosts))
        lost = [block for block in entry.blocks if block.host in hosts]
        for block in lost:
            entry.blocks.remove(block)
        if lost:
            self._leave(lost)

    def ended(self, gang: Gang[GangRun]) -> None:
        """Release the memory of a gang that has ended, and of values that no later gang needs."""
        gang.node.tenant.gave_back()
        gang.run.inherited = ()
        blocks, gang.run.blocks = gang.run.blocks, []
        for value in gang.run.spec.drops:
            entry = gang.run.launch.entries[value]
            dropped = entry.blocks.on(gang.run.spec.hosts)
            for block in dropped:
                entry.blocks.remove(block)
            self._unshare(dropped)
            self.ledger.release(dropped)
        self.ledger.release(undivided(blocks) if gang.islands else blocks)
        if self.waits.waiting:
            self.waits.retry(gang.all_islands)

    def run_through(self, gang: Gang[GangRun], specs: Sequence[GangSpec]) -> None:
        """Take and release memory as if these gangs of a delegated run had run one after another."""
        for spec in specs:
            each = Gang(0, gang.island, gang.node, GangRun(gang.run.launch, spec, set()))
            self._take(self._need(each, spec), gang.node.tenant.memory)
            gang.node.tenant.took_memory(1)
            self.ended(each)

    def hold_results(
        self, gang: Gang[GangRun], kept: Sequence[tuple[int, MemoryRequirement, int]], lost: Sequence[int]
    ) -> None:
        """Take the memory of the results of a delegated run on one island.

        Args:
          gang: the run's gang on the island.
          kept: results as (value, requirement, donor). The memory is that of argument `donor`, or fresh if it is -1.
          lost: arguments that lose their memory.
        """
        entries, (host,) = gang.run.launch.entries, gang.hosts
        given: dict[int, list[Block]] = {}
        for number in lost:
            given[number] = entries[number].blocks.on((host,))
            for each in given[number]:
                entries[number].blocks.remove(each)
        fresh = []
        for value, requirement, donor in kept:
            block = next((each for each in given.get(donor, ()) if each.requirement == requirement), None)
            if block is None:
                fresh.append((value, requirement))
            else:
                given[donor].remove(block)
                entries[value].blocks.add(block)
        for blocks in given.values():
            self._leave(blocks)
        for value, requirement in fresh:
            account = gang.run.launch.program.account
            entries[value].blocks.add(self.ledger.take(requirement, gang.node.tenant.memory, account))

    def grow(self, gang: Gang[GangRun]) -> None:
        """Release the memory that the gang holds while it runs, and take what its present `scratch` needs."""
        blocks, gang.run.blocks = undivided(gang.run.blocks), []
        self._release(blocks)
        if gang.run.spec.scratch:
            account = gang.run.launch.program.account
            gang.run.blocks.append(self.ledger.take(gang.run.spec.scratch, gang.node.tenant.memory, account))

    def has_memory_on(self, host: int, entry: Entry) -> bool:
        """Return whether the buffer has memory on the host."""
        return bool(entry.blocks.on((host,)))

    def dropped(self, nodes: Sequence[Dropped[GangRun]]) -> None:
        """Release the memory of gangs that were dropped, and end the waits of their nodes for memory."""
        waiting = self.waits.waiting
        for dropped in nodes:
            if dropped.node in waiting:
                self.waits.forget(dropped.node)
            if dropped.were_committed:
                self._uncommitted(dropped)

    def _uncommitted(self, dropped: Dropped[GangRun]) -> None:
        for gang in dropped.gangs:
            run = gang.run
            dropped.node.tenant.gave_back()
            for entry, donor, block in run.inherited:
                for each in undivided((block,)):
                    if each in entry.blocks:
                        entry.blocks.remove(each)
                        donor.blocks.add(each)
            blocks, run.blocks, run.inherited = undivided(run.blocks), [], ()
            self._release(blocks)

    def _leave(self, blocks: Sequence[Block]) -> None:
        """Release blocks that belonged to a buffer."""
        self._unshare(blocks)
        self._release(blocks)

    def _unshare(self, blocks: Iterable[Block]) -> None:
        """Note that a buffer does not share its blocks any more."""
        for block in blocks:
            if block.views:
                block.views -= 1
                if not block.views:  # one buffer is left
                    if self.waits.waiting:
                        self.waits.unshared(block)
                    block.is_published = False

    def _release(self, blocks: Iterable[Block]) -> None:
        freed = self.ledger.release(blocks)
        if freed and self.waits.waiting:
            island_of = self._resources.topology.island_of
            self.waits.retry({island_of(host) for block in freed for host in block.first_hosts})


def _over_quota(
    tenant: Tenant, memory: MemoryLedger, wanted: Sequence[MemoryRequirement]
) -> tuple[MemoryQuota, tuple[HostDevice, int]] | None:
    """Return the quota that is exceeded, with a device and the bytes that count against it, or None."""
    for quota in QUOTAS:
        limit = quota.limit(tenant)
        lack = quota.lacking(memory, wanted, limit) if limit else None
        if lack is not None:
            return quota, lack
    return None


def _donors(gang: Gang[GangRun], spec: GangSpec) -> Iterable[Entry]:
    """Return the donated inputs, each once. A client may donate an array at two positions, which workers refuse."""
    entries = gang.run.launch.entries
    return {id(entry): entry for entry in [entries[value] for value in spec.consumes]}.values()


def _counts_copies(gang: Gang[GangRun]) -> bool:
    settings = gang.node.tenant.settings
    return bool(settings.memory or settings.total_memory)


def _is_reusable(block: Block, counts_copies: bool) -> bool:
    """Return whether an output may be written to a block of a donated input: see `Reservations._consumed`."""
    return not (block.views and (counts_copies or block.is_published))


def _share(source: Entry, view: Entry, hosts: tuple[int, ...]) -> None:
    """Have the view share the memory of its source on these hosts."""
    source.blocks.divide()
    for block in source.blocks.on(hosts):
        _share_block(block, view, source.is_published)


def _share_block(block: Block, view: Entry, is_published: bool = False) -> None:
    if block not in view.blocks:
        block.users += 1
        block.views += 1
        block.is_published |= view.is_published or is_published
        view.blocks.add(block)
