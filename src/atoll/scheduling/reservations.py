"""Memory for tickets, in commit order: which get it, which wait for it, and which fail since it is never free.

A ticket takes the memory of all its gangs at once, when it is to be committed. One that gets none waits, and with it
the rest of its session, but nobody else: others go on with what is free. So that what needs much is not passed for
ever, a waiting ticket that others have passed with `CLAIM_NS` of device time *claims* the device that it lacks: what is
freed there is kept for it, and those of its priority or a lower one who need memory there wait, too, for as long as
anything is in flight that may free some.

A wait ends as soon as there is memory. It ends with an error where it would not: where a gang needs more than there is;
and where nothing is in flight on the island nor in line there for others, and all sessions that hold memory of the
device have answered since, and so have sent what they had to release. A quota of memory is waited for in the same way,
and nobody counts but the tenant's own sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from atoll.cluster.locations import HostDevice, MemoryRequirement, total
from atoll.cluster.resources import ResourceManager
from atoll.errors import Status
from atoll.scheduling.buffer_directory import Entry
from atoll.scheduling.gangs import GangSpec
from atoll.scheduling.ledger import Block, Ledger
from atoll.scheduling.memory_errors import exhausted, holds
from atoll.scheduling.reasons import Reason
from atoll.scheduling.scheduler import Scheduler
from atoll.scheduling.session import GangRun, Inherited, Session
from atoll.scheduling.tenants import Tenant
from atoll.scheduling.tickets import Gang, Ticket

# Device time of others that may pass a ticket which waits for memory.
CLAIM_NS = 100_000_000
# For what runs to free memory by itself, until others are made to.
RELIEF_SECONDS = 0.1


class _Need(NamedTuple):
    """What a gang takes: fresh memory for values, and that of donated inputs for others; `wanted` is all that is fresh,
    its scratch included.
    """

    gang: Gang[GangRun]
    fresh: Sequence[tuple[int, MemoryRequirement]]
    wanted: Sequence[MemoryRequirement]
    inherited: Sequence[Inherited] = ()


@dataclass(slots=True, eq=False)
class _Waiting:
    """A ticket that waits for memory: the gang and the device that lack it, and how much the gang needs there.

    With a `quota`, what is lacking is its tenant's.
    """

    ticket: Ticket[GangRun]
    gang: Gang[GangRun]
    device: HostDevice
    nbytes: int
    quota: str = ""
    passed_ns: int = 0  # by others
    is_offered: bool = False  # it is ready again
    asked: dict[int, int] = field(default_factory=dict)  # by session: the ping that is to be answered

    @property
    def claims(self) -> bool:
        return not self.quota and self.passed_ns >= CLAIM_NS


class Reservations:
    """Takes memory from the ledger for gangs and entries, and gives it back."""

    def __init__(
        self, sessions: Mapping[int, Session], scheduler: Scheduler[GangRun], resources: ResourceManager
    ) -> None:
        self.ledger = Ledger()
        self._sessions = sessions
        self._scheduler = scheduler
        self._resources = resources
        self._waiting: dict[Ticket[GangRun], _Waiting] = {}  # in the order in which they began to
        # Whether a device is about to have so many bytes more for a ticket, which fails otherwise where that is asked
        # for the last time: see `migration.pressure`.
        self.relieve: Callable[[Ticket[GangRun], HostDevice, int, bool], bool] | None = None

    # ---- taking

    def reserve(self, ticket: Ticket[GangRun]) -> Reason | None:
        """Takes what the ticket's gangs need on their islands. Where it has to wait, what it lacks: memory, or quota.

        One that can never fit waits, too, until `hopeless` names it.
        """
        needs = [self._need(gang) for gang in ticket.gangs]
        if self.ledger.capacity or ticket.tenant.memory is not None:
            for need in needs:
                lacking = self._lacking(ticket, need)
                if lacking is not None:
                    before = self._waiting.get(ticket)
                    if before is not None:
                        lacking.passed_ns, lacking.asked = before.passed_ns, before.asked
                    self._waiting[ticket] = lacking
                    return Reason.QUOTA if lacking.quota else Reason.MEMORY
        if self._waiting:
            self._waiting.pop(ticket, None)
            self._passed(ticket)
        for need in needs:
            self._take(need, ticket.tenant.memory)
        ticket.tenant.took_memory(len(needs))
        return None

    def _need(self, gang: Gang[GangRun]) -> _Need:
        spec, entries = gang.run.spec, gang.run.launch.entries
        memory = spec.memory
        reusable = self._consumed(gang) if spec.consumes else None
        if not reusable:
            return _Need(gang, memory.fresh, (memory.whole,) if memory.whole else ())
        fresh: list[tuple[int, MemoryRequirement]] = []
        inherited: list[Inherited] = []
        for value, requirement in memory.fresh:
            donors = reusable.get(requirement)
            if donors:
                inherited.append((entries[value], *donors.pop()))
            else:
                fresh.append((value, requirement))
        scratch = (spec.scratch,) if spec.scratch else ()
        return _Need(gang, fresh, (*scratch, *(requirement for _, requirement in fresh)), inherited)

    def _lacking(self, ticket: Ticket[GangRun], need: _Need) -> _Waiting | None:
        gang, wanted = need.gang, need.wanted
        device = self.ledger.lacking(*wanted)
        quota = ""
        if device is None and self._waiting and not self._scheduler.is_idle(gang.island):
            device = self._claimed(ticket, wanted)
        if device is None and ticket.tenant.memory is not None:
            device, quota = self._over_quota(ticket.tenant, ticket.tenant.memory, wanted)
        return None if device is None else _Waiting(ticket, gang, device, dict(total(wanted))[device], quota)

    def _claimed(self, ticket: Ticket[GangRun], wanted: Sequence[MemoryRequirement]) -> HostDevice | None:
        """A device that the ticket needs and that is kept for another."""
        claims = {
            each.device
            for each in self._waiting.values()
            if each.claims
            and each.ticket.session != ticket.session
            and each.ticket.tenant.settings.priority >= ticket.tenant.settings.priority
            and not each.ticket.dropped
        }
        return next((device for device, _ in total(wanted) if device in claims), None) if claims else None

    def _over_quota(
        self, tenant: Tenant, memory: Ledger, wanted: Sequence[MemoryRequirement]
    ) -> tuple[HostDevice | None, str]:
        settings = tenant.settings
        if settings.memory:
            device = memory.lacking(*wanted, limit=settings.memory)
            if device is not None:
                return device, "memory"
        if settings.total_memory:
            sizes = total(wanted)
            if sizes and memory.total + sum(nbytes for _, nbytes in sizes) > settings.total_memory:
                return sizes[0][0], "total_memory"
        return None, ""

    def _passed(self, ticket: Ticket[GangRun]) -> None:
        """The ticket goes before those that wait."""
        for waiting in self._waiting.values():
            if waiting.ticket.session != ticket.session:
                island = waiting.gang.island
                waiting.passed_ns += sum(gang.estimate for gang in ticket.gangs if gang.island == island)

    def _take(self, need: _Need, owner: Ledger | None) -> None:
        run = need.gang.run
        account, entries = run.launch.program.account, run.launch.entries
        for value, requirement in need.fresh:
            # The gang is a user until it has ended, even if the client releases the buffer before.
            block = self.ledger.take(requirement, owner, account, users=2)
            entries[value].blocks += (block,)
            run.blocks.append(block)
        if need.inherited:
            for entry, donor, block in need.inherited:
                donor.blocks = tuple(other for other in donor.blocks if other is not block)
                entry.blocks += (block,)
            run.inherited = need.inherited
        for value, sources in run.spec.memory.views:
            for source in sources:
                _share(entries[source], entries[value], run.spec.hosts)
        if run.spec.scratch:
            run.blocks.append(self.ledger.take(run.spec.scratch, owner, account))

    def _consumed(self, gang: Gang[GangRun]) -> dict[MemoryRequirement, list[tuple[Entry, Block]]]:
        """The blocks of donated inputs: an output of the same size is written to one of them."""
        found: dict[MemoryRequirement, list[tuple[Entry, Block]]] = {}
        for value in gang.run.spec.consumes:
            entry = gang.run.launch.entries[value]
            for block in _on(gang.run.spec.hosts, entry):
                found.setdefault(block.requirement, []).append((entry, block))
        return found

    # ---- giving back

    def release(self, entry: Entry) -> None:
        """The buffer's memory is needed no more, or lost."""
        blocks, entry.blocks = entry.blocks, ()
        self._release(blocks)

    def ended(self, gang: Gang[GangRun]) -> None:
        """Its own memory goes, and what only it and those before it needed."""
        gang.ticket.tenant.gave_back()
        gang.run.inherited = ()
        blocks, gang.run.blocks = gang.run.blocks, []
        for value in gang.run.spec.drops:
            entry = gang.run.launch.entries[value]
            dropped = _on(gang.run.spec.hosts, entry)
            entry.blocks = tuple(block for block in entry.blocks if block not in dropped)
            blocks += dropped
        self._release(blocks)
        if self._waiting:
            self._retry(gang.island)

    def run_through(self, gang: Gang[GangRun], specs: Sequence[GangSpec]) -> None:
        """What the gang stands for has run, one after another: what that has left is taken."""
        for spec in specs:
            each = Gang(0, gang.island, gang.ticket, GangRun(gang.run.launch, spec, set()))
            self._take(self._need(each), gang.ticket.tenant.memory)
            gang.ticket.tenant.took_memory(1)
            self.ended(each)

    def keep(
        self, gang: Gang[GangRun], kept: Sequence[tuple[int, MemoryRequirement, int]], lost: Sequence[int]
    ) -> None:
        """The same, where it is known what is left: values, with their memory, and the arguments that this was of (-1:
        it is fresh). The `lost` arguments have none any more.
        """
        entries, (host,) = gang.run.launch.entries, gang.hosts
        given: dict[int, list[Block]] = {}
        for number in lost:
            blocks = given[number] = _on((host,), entries[number])
            entries[number].blocks = tuple(block for block in entries[number].blocks if block not in blocks)
        fresh = []
        for value, requirement, donor in kept:
            block = next((each for each in given.get(donor, ()) if each.requirement == requirement), None)
            if block is None:
                fresh.append((value, requirement))
            else:
                given[donor].remove(block)
                entries[value].blocks += (block,)
        for blocks in given.values():
            self._release(blocks)
        for value, requirement in fresh:
            account = gang.run.launch.program.account
            entries[value].blocks += (self.ledger.take(requirement, gang.ticket.tenant.memory, account),)

    def grow(self, gang: Gang[GangRun]) -> None:
        """The gang takes all that it needs while it runs, in place of what it has of that."""
        blocks, gang.run.blocks = gang.run.blocks, []
        self._release(blocks)
        if gang.run.spec.scratch:
            account = gang.run.launch.program.account
            gang.run.blocks.append(self.ledger.take(gang.run.spec.scratch, gang.ticket.tenant.memory, account))

    def lies_on(self, host: int, entry: Entry) -> bool:
        """Whether the buffer has memory there."""
        return bool(_on((host,), entry))

    def dropped(self, ticket: Ticket[GangRun]) -> None:
        """What the ticket had taken goes, as far as its gangs have not started; it waits no more."""
        self._waiting.pop(ticket, None)
        if not ticket.committed:
            return
        for gang in ticket.gangs:
            run = gang.run
            if run.started:
                continue
            ticket.tenant.gave_back()
            for entry, donor, block in run.inherited:
                if block in entry.blocks:
                    entry.blocks = tuple(other for other in entry.blocks if other is not block)
                    donor.blocks += (block,)
            blocks, run.blocks, run.inherited = run.blocks, [], ()
            self._release(blocks)

    def _release(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if self.ledger.release(block) and self._waiting:
                self._retry(self._resources.topology.island_of(block.requirement[0][0][0]))

    def _retry(self, island: int) -> None:
        """Memory may have become free there: those who wait are ready again, if it is enough for them."""
        for waiting in list(self._waiting.values()):
            if waiting.gang.island == island:
                self._offer(waiting)

    def _offer(self, waiting: _Waiting) -> None:
        if not waiting.is_offered and (waiting.quota or waiting.nbytes <= self.ledger.free(waiting.device)):
            waiting.is_offered = True
            self._scheduler.retry(waiting.ticket)

    # ---- waiting

    def lacking(self, ticket: Ticket[GangRun]) -> tuple[HostDevice, int, str] | None:
        """Where the ticket waits for memory: a device, the bytes that it needs there, and the quota that lacks them."""
        waiting = self._waiting.get(ticket)
        return None if waiting is None else (waiting.device, waiting.nbytes, waiting.quota)

    def is_wanted(self, tenant: Tenant) -> bool:
        """Whether something of a tenant with a higher priority waits for memory."""
        priority = tenant.settings.priority
        return any(each.tenant.settings.priority > priority and not each.dropped for each in self._waiting)

    def holders(self, device: HostDevice) -> list[str]:
        """The sessions that hold memory of the device, as anybody may read of them."""
        return [f"session {each.number}" for each in self._sessions.values() if holds(each, device)]

    def is_waiting(self, session: int) -> bool:
        """Whether something of the session waits for memory."""
        return any(ticket.session == session and not ticket.dropped for ticket in self._waiting)

    def hopeless(self) -> list[tuple[Gang[GangRun], Status]]:
        """Gangs that get no memory however long they wait, each with the error for it. To be asked now and then."""
        found = []
        for ticket, waiting in list(self._waiting.items()):
            if ticket.dropped:
                del self._waiting[ticket]
            elif self._is_hopeless(waiting):
                if self._may_be_relieved(waiting, is_last=True):
                    continue
                del self._waiting[ticket]
                lack = waiting.device, waiting.nbytes, waiting.quota
                found.append((waiting.gang, exhausted(self.ledger, self._sessions.values(), waiting.gang, *lack)))
            else:
                self._offer(waiting)  # a quota was raised, or a claim counts no more
        return found

    @property
    def now(self) -> float:
        """When the event happened that is handled."""
        return self._scheduler.now

    def seek_relief(self) -> None:
        """Who has waited for memory for a while, which what runs has not freed, may be helped."""
        for waiting in list(self._waiting.values()):
            if not waiting.ticket.dropped and self.now - waiting.ticket.since >= RELIEF_SECONDS:
                self._may_be_relieved(waiting, is_last=False)

    def _may_be_relieved(self, waiting: _Waiting, is_last: bool) -> bool:
        if (
            self.relieve is None
            or waiting.quota
            or waiting.nbytes > self.ledger.capacity.get(waiting.device, waiting.nbytes)
        ):
            return False
        return self.relieve(waiting.ticket, waiting.device, waiting.nbytes, is_last)

    def _is_hopeless(self, waiting: _Waiting) -> bool:
        if not waiting.quota and waiting.nbytes > self.ledger.capacity.get(waiting.device, waiting.nbytes):
            return True
        if not waiting.quota and waiting.nbytes <= self.ledger.free(waiting.device):
            return False  # it was freed just now, or is kept for another
        if self._may_be_helped(waiting):
            waiting.asked.clear()
            return False
        holders = [session for session in self._sessions.values() if self._may_release(session, waiting)]
        if any(session.number not in waiting.asked for session in holders):
            waiting.asked = {session.number: session.pings for session in holders}
            return False
        return all(session.pongs >= waiting.asked[session.number] for session in holders)

    def _may_be_helped(self, waiting: _Waiting) -> bool:
        """Whether something runs, or is about to, that may free memory."""
        tenant = waiting.ticket.tenant
        if waiting.quota:
            if tenant.running:
                return True
        # Who waits elsewhere may hold what is wanted here, and go on.
        elif not all(self._scheduler.is_idle(each.gang.island) for each in self._waiting.values()):
            return True
        stuck = {ticket.session for ticket in self._waiting}
        return any(
            ticket.session not in stuck and (not waiting.quota or ticket.tenant is tenant)
            for ticket in self._scheduler.tickets(waiting.gang.island)
        )

    def _may_release(self, session: Session, waiting: _Waiting) -> bool:
        if waiting.quota:
            return session.tenant is waiting.ticket.tenant
        return session.number == waiting.ticket.session or holds(session, waiting.device)


def _on(hosts: tuple[int, ...], entry: Entry) -> list[Block]:
    """The blocks of a buffer that lie on these hosts."""
    return [block for block in entry.blocks if block.requirement[0][0][0] in hosts]


def _share(source: Entry, view: Entry, hosts: tuple[int, ...]) -> None:
    """The view's memory on these hosts is that of its source."""
    for block in _on(hosts, source):
        if block not in view.blocks:
            block.users += 1
            view.blocks += (block,)
