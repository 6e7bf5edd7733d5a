"""Nodes that wait for memory.

A node that lacks memory waits, and with it the rest of its session. Other sessions continue with the free memory. To
prevent starvation, a waiting node that others have passed with `CLAIM_NS` of device time *claims* the device that it
lacks: memory that is freed there is kept for it. Nodes of the same or a lower priority that need memory there then also
wait, as long as gangs are in flight that may free some.

A wait ends as soon as there is enough memory. It ends with an error if it would last forever:

- The gang needs more memory than the device has.
- Nothing is in flight that may free memory, and no node of a session without such waits is in line on the island. The
  session and all holders of the device's memory have answered a ping since, so they have sent their releases. Sessions
  with very many arrays count as holders.

Waits for a quota of memory follow the same rules, for the tenant's own sessions only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter

import msgspec

from atoll.cluster.locations import HostDevice, MemoryRequirement, total
from atoll.errors import Code, Details, Kind, Status
from atoll.launch.memory_holders import holders_of, holds, share_of
from atoll.launch.scheduler import Scheduler
from atoll.launch.shared_state import LaunchServices
from atoll.protocol import messages as m
from atoll.quantities import human_bytes, parse_bytes
from atoll.state.memory_ledger import Block, MemoryLedger
from atoll.state.memory_quotas import MemoryQuota
from atoll.state.queued_nodes import Gang, QueuedNode
from atoll.state.session import GangRun, Session
from atoll.state.tenants import Tenant

# Device time of other sessions that may pass a node which waits for memory.
CLAIM_NS = 100_000_000
# In the details and the count of an error: the memory of a device, where no quota was reached.
DEVICE_MEMORY = "device memory"
# Time for running gangs to free memory, before memory is reclaimed from sessions.
RELIEF_SECONDS = 0.1
# Time for memory that is released in steps to be free. Sessions may always have some such memory.
RELEASED_SECONDS = 30.0


class MemoryWait(msgspec.Struct, eq=False):
    """The wait of a node for memory.

    Attributes:
      gang: the gang of the node that lacks memory.
      nbytes: the bytes that the gang needs on `device`, or on all devices if these count against the quota.
      quota: the quota of its tenant that is exceeded; None if the device lacks memory.
      passed_ns: device time of other sessions' nodes that got memory during the wait.
      is_offered: whether the node is ready again.
      asked: the ping that each session has to answer, by session.
      sought: time of the last search for memory of sessions.
      last_since: time of the first search without which the gang fails, or -1.
    """

    node: QueuedNode[GangRun]
    gang: Gang[GangRun]
    device: HostDevice
    nbytes: int
    quota: MemoryQuota | None = None
    passed_ns: int = 0
    is_offered: bool = False
    asked: dict[int, int] = msgspec.field(default_factory=dict)
    sought: float = 0.0
    last_since: float = -1.0

    def seeks(self, now: float, is_last: bool) -> None:
        """Note that a search for memory of sessions begins. With `is_last`, the gang fails without it."""
        self.sought = now
        if is_last and self.last_since < 0:
            self.last_since = now

    @property
    def island(self) -> int:
        """The island of the device."""
        return self.gang.run.spec.island_of(self.device[0])

    @property
    def claims(self) -> bool:
        return self.quota is None and self.passed_ns >= CLAIM_NS


# Computes again what a node lacks. Returns None if it lacks nothing.
Lack = Callable[[QueuedNode[GangRun]], MemoryWait | None]


class MemoryWaits:
    """The nodes that wait for memory of the `ledger`, or for a quota of memory."""

    def __init__(
        self,
        ledger: MemoryLedger,
        sessions: Mapping[int, Session],
        scheduler: Scheduler[GangRun],
        services: LaunchServices,
        lack: Lack,
    ) -> None:
        self.waiting: dict[QueuedNode[GangRun], MemoryWait] = {}  # in the order in which the waits began
        self._services = services
        self._lack = lack
        self._ledger = ledger
        self._sessions = sessions
        self._scheduler = scheduler

    # ---- events

    def add(self, wait: MemoryWait) -> None:
        """Add the wait of a node, in place of an earlier one for other memory."""
        before = self.waiting.get(wait.node)
        if before is not None:
            wait.passed_ns, wait.asked = before.passed_ns, before.asked
            wait.sought, wait.last_since = before.sought, before.last_since
        self.waiting[wait.node] = wait

    def forget(self, node: QueuedNode[GangRun]) -> None:
        """End the wait of a node, if it waits."""
        self.waiting.pop(node, None)

    def passed_by(self, node: QueuedNode[GangRun]) -> None:
        """Note that a node got its memory before the nodes that wait."""
        self.forget(node)
        for waiting in self.waiting.values():
            if waiting.node.session != node.session:
                island = waiting.island
                waiting.passed_ns += sum(gang.estimate for gang in node.gangs if gang.is_on(island))

    def retry(self, islands: Collection[int]) -> None:
        """Offer the nodes that wait on these islands, if enough memory is free for them."""
        for waiting in list(self.waiting.values()):
            if waiting.island in islands:
                self._offer(waiting)

    def unshared(self, block: Block) -> None:
        """Offer the nodes that donate a block with one buffer left: they may need no memory for a copy of it now.

        Call this before `block.is_published` becomes false.
        """
        for waiting in list(self.waiting.values()):
            counted_copy = block.is_published or waiting.node.tenant.memory is not None
            if counted_copy and not waiting.is_offered and _donates(waiting.gang, block):
                self._offer_now(waiting)

    def _offer(self, waiting: MemoryWait) -> None:
        if not waiting.is_offered and self._missing(waiting) <= 0:
            self._offer_now(waiting)

    def _offer_now(self, waiting: MemoryWait) -> None:
        waiting.is_offered = True
        self._scheduler.retry(waiting.node)

    # ---- queries

    @property
    def now(self) -> float:
        """The time of the event that is being handled."""
        return self._scheduler.now

    def claimed(self, node: QueuedNode[GangRun], wanted: Sequence[MemoryRequirement]) -> HostDevice | None:
        """Return a device whose memory the node needs and which is claimed by another session's node, or None."""
        claims = {
            each.device
            for each in self.waiting.values()
            if each.claims
            and each.node.session != node.session
            and each.node.tenant.settings.priority >= node.tenant.settings.priority
            and each.node.is_pending
        }
        return next((device for device, _ in total(wanted) if device in claims), None) if claims else None

    def lacking(self, node: QueuedNode[GangRun]) -> tuple[HostDevice, int, MemoryQuota | None] | None:
        """Return what the node waits for: a device, the bytes that it needs, and the quota or None."""
        waiting = self.waiting.get(node)
        return None if waiting is None else (waiting.device, waiting.nbytes, waiting.quota)

    def is_wanted(self, tenant: Tenant) -> bool:
        """Return whether a node of a higher priority than the tenant's waits for memory."""
        priority = tenant.settings.priority
        return any(each.tenant.settings.priority > priority and each.is_pending for each in self.waiting)

    def holders(self, device: HostDevice) -> list[str]:
        """Return the sessions that hold memory of the device, as text that all tenants may read."""
        share = share_of(self._sessions)
        holders = [each for each in self._sessions.values() if holds(each, device, share)]
        return ["published arrays" if each.is_vault else f"session {each.number}" for each in holders]

    def is_waiting(self, session: int) -> bool:
        """Return whether a node of the session waits for memory."""
        return any(node.session == session and node.is_pending for node in self.waiting)

    # ---- ticks

    def hopeless(self, releasing: bool = False) -> list[tuple[Gang[GangRun], Status]]:
        """End the waits that would last forever. Return their gangs with the errors. Call this once in a while.

        If some memory is still being released in steps (`releasing`), only waits of more than `RELEASED_SECONDS` end.
        """
        found = []
        for node, waiting in list(self.waiting.items()):
            if not node.is_pending:
                del self.waiting[node]
            elif releasing and self.now - node.since < RELEASED_SECONDS:
                continue
            elif self._is_hopeless(waiting):
                if self._renewed(waiting) or self._may_be_relieved(waiting, is_last=True):
                    continue
                del self.waiting[node]
                lack = waiting.device, waiting.nbytes, waiting.quota
                node.tenant.count_refusal(waiting.quota or DEVICE_MEMORY)
                found.append((waiting.gang, exhausted(self._ledger, self._sessions.values(), waiting.gang, *lack)))
            else:
                self._offer(waiting)  # a quota may have been raised, or a claim may have ended
        return found

    def seek_relief(self) -> None:
        """Reclaim memory for nodes that have waited for `RELIEF_SECONDS`, beginning with the oldest search."""
        for waiting in sorted(self.waiting.values(), key=attrgetter("sought")):
            if waiting.node.is_pending and self.now - waiting.node.since >= RELIEF_SECONDS:
                self._may_be_relieved(waiting, is_last=False)

    def _renewed(self, waiting: MemoryWait) -> bool:
        """Offer the node if it lacks nothing now, or replace its wait if it lacks something else.

        Return whether one of them was the case.
        """
        lack = self._lack(waiting.node)
        if lack is None:
            if not waiting.is_offered:
                self._offer_now(waiting)
            return True
        if (lack.device, lack.nbytes, lack.quota) == (waiting.device, waiting.nbytes, waiting.quota):
            return False
        self.add(lack)
        return True

    def _may_be_relieved(self, waiting: MemoryWait, is_last: bool) -> bool:
        most = self._limit(waiting)
        if most is not None and waiting.nbytes > most:
            return False
        missing = self._missing(waiting)
        is_relieved = self._services.reclaim(waiting, missing, is_last)
        if missing > 0:
            self._offer(waiting)
        return is_relieved

    def _limit(self, waiting: MemoryWait) -> int | None:
        """Return the size of the memory that the node waits for, or None if it is unlimited."""
        if waiting.quota is not None:
            return waiting.quota.limit(waiting.node.tenant) or None
        return self._ledger.capacity.get(waiting.device)

    def _missing(self, waiting: MemoryWait) -> int:
        """Return how many bytes must become free for the node. They are free if this is not positive."""
        if waiting.quota is None:
            return waiting.nbytes - self._ledger.free(waiting.device)
        memory, most = waiting.node.tenant.memory, self._limit(waiting)
        if memory is None or most is None:
            return 0
        return waiting.quota.used(memory, waiting.device) + waiting.nbytes - most

    def _is_hopeless(self, waiting: MemoryWait) -> bool:
        if not waiting.quota and waiting.nbytes > self._ledger.capacity.get(waiting.device, waiting.nbytes):
            return True
        if self._missing(waiting) <= 0:
            return False  # it was freed just now, or is claimed by another node
        if self._may_be_helped(waiting):
            waiting.asked.clear()
            return False
        holders = [session for session in self._sessions.values() if self._may_release(session, waiting)]
        if any(session.number not in waiting.asked for session in holders):
            waiting.asked = {session.number: session.pings for session in holders}
            return False
        return all(session.pongs >= waiting.asked[session.number] for session in holders)

    def _may_be_helped(self, waiting: MemoryWait) -> bool:
        """Return whether gangs run, or will run, that may free memory."""
        tenant = waiting.node.tenant
        if waiting.quota:
            if tenant.running:
                return True
        # A session that waits on another island may hold memory of this one, and continue.
        elif not all(self._scheduler.is_idle(each.island) for each in self.waiting.values()):
            return True
        stuck = {node.session for node in self.waiting}
        return any(
            session not in stuck and (not waiting.quota or node.tenant is tenant)
            for session, node in self._scheduler.first_nodes(waiting.island)
        )

    def _may_release(self, session: Session, waiting: MemoryWait) -> bool:
        if waiting.quota:
            return session.tenant is waiting.node.tenant
        return session.number == waiting.node.session or holds(session, waiting.device, share_of(self._sessions))


def _donates(gang: Gang[GangRun], block: Block) -> bool:
    entries = gang.run.launch.entries
    return any(block in entries[value].blocks for value in gang.run.spec.consumes)


_FREE = "Delete arrays that you do not need, donate arguments of computations (`donate_argnums`)"
_SPREAD = "The device is too small for this even without other arrays: shard the arrays over more devices"


def exhausted(
    ledger: MemoryLedger,
    sessions: Collection[Session],
    gang: Gang[GangRun],
    device: HostDevice,
    nbytes: int,
    quota: MemoryQuota | None,
) -> Status:
    """Return the error for a gang that cannot get `nbytes` of the device, or of its tenant's quota."""
    text = f"out of memory on device {device[1]} of host {device[0]}: {gang.run.launch.program.name} needs "
    tenant = gang.node.tenant
    if quota is not None and tenant.memory is not None:
        where = " of each device" if quota is MemoryQuota.PER_DEVICE else ""
        needs, has, most = _amounts(nbytes, quota.used(tenant.memory, device), quota.limit(tenant))
        text += f"{needs}, and tenant {tenant.name} has {has} of its quota `{quota}`, {most}{where}"
        sessions, of_rest = [each for each in sessions if each.tenant is tenant], "; held there by "
        advice = f"{_FREE}, or ask an operator for a larger quota (`atoll tenants set {tenant.name}`)"
    else:
        needs, free, capacity = _amounts(nbytes, max(0, ledger.free(device)), ledger.capacity[device], adds_up=False)
        text += f"{needs}, and {free} of {capacity} are free"
        of_rest = "; the rest is held by "
        advice = _SPREAD if nbytes > ledger.capacity[device] else f"{_FREE}, or use more or other devices"
    holders, largest = holders_of(sessions, gang.node, device)
    if largest:
        text += of_rest + ", ".join(largest)
    text += f". {advice}"
    report = m.MemoryReport(f"device {device[1]} of host {device[0]}", tuple(holders))
    status = Status(Code.RESOURCE_EXHAUSTED, text, {m.MEMORY_REPORT: msgspec.msgpack.encode(report)})
    return status.with_details(Details(Kind.LIMIT, hosts=(device[0],), limit=quota or DEVICE_MEMORY, retriable=True))


def _amounts(needs: int, other: int, limit: int, adds_up: bool = True) -> tuple[str, str, str]:
    """Return the amounts as text: rounded, or in bytes if the rounded amounts would seem to fit.

    With `adds_up`, `needs` and `other` are more than `limit` together; otherwise `needs` is more than `other`.
    """
    texts = tuple(map(human_bytes, (needs, other, limit)))
    rounded = [parse_bytes(each) for each in texts]
    is_clear = rounded[0] + rounded[1] > rounded[2] if adds_up else rounded[0] > rounded[1]
    one, two, three = texts if is_clear else tuple(f"{each} B" for each in (needs, other, limit))
    return one, two, three
