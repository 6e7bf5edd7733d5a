"""The commit order of gangs: one line an island, none of which contradicts another.

Each node of a launch is a ticket, with one gang on each of the node's islands. A session's tickets wait in lines, one
an island; one that is at the head of all of its lines, and lacks nothing, is *ready*. When an island has room, its
policy (`scheduling.policy`) picks a ready ticket, and that is *committed*, if there is memory for it: at this moment
its gangs get their positions in the order of all of its islands, whether these have room now or later. So all islands
start their gangs in one total order, that of commitment, and what a gang awaits from another island stands earlier in
it: no two gangs can wait for each other.

Bounded, host by host: an island starts gangs while those in flight on each of their hosts keep it busy for less than
`BUSY_NS`, at most `window` of them; one whose hosts have no room blocks what comes after it.
Tickets are committed as late as that allows, so that a newcomer gets in within milliseconds, also between the nodes of
a long program.

Pure: `enqueue`, `arrived`, `finished`, `drop`, `pause` and their like are the events; `next` hands out the gangs to
start, in order, and `touched` names the islands that may have some.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic

from atoll.scheduling.cells import Cell
from atoll.scheduling.island_lines import HostLoad, IslandLines
from atoll.scheduling.policies.fair import FairShares
from atoll.scheduling.policy import Policy
from atoll.scheduling.reasons import Reason
from atoll.scheduling.tickets import Gang, Payload, Ticket
from atoll.scheduling.waits import Hindrances, Wait, waits_of

# Work in flight on a host, by what its gangs took before.
BUSY_NS = 8_000_000
# Sets of hosts whose loads are remembered.
_MOST_KNOWN = 1024


@dataclass(frozen=True)
class SchedulerStatistics:
    """An island's gangs: that wait, are in flight (and the time that these are expected to take), and were started."""

    waiting: int
    in_flight: int
    busy_ns: int
    started: int
    window: int


class Scheduler(Generic[Payload]):
    """Decides what each island runs next; `hosts` are how many each of them has, one if not given.

    Once the window of a host is full, it is filled again only when it is half empty: gangs then leave in batches,
    one message for many, and the host still has half a window of work.
    """

    def __init__(
        self,
        islands: int,
        window: int,
        policy: Callable[[], Policy] = FairShares,
        busy_ns: int = BUSY_NS,
        hosts: Sequence[int] = (),
    ) -> None:
        self.window = window
        self._reserve: Callable[[Ticket[Payload]], Reason | None] = _enough
        self._busy_ns = busy_ns
        self._policy = policy
        self._islands: list[IslandLines[Payload]] = [
            IslandLines(policy(), window, count) for count in hosts or [1] * islands
        ]
        self._aside: dict[int, Ticket[Payload]] = {}  # in no line yet, by number
        # Ready, by the paused island that they need; in the order in which they were held.
        self._held: dict[int, dict[Ticket[Payload], None]] = {}
        self.now = 0.0  # when the event happened that is handled, by the controller's clock
        self.touched: set[int] = set()  # islands that may have something to start now

    # ---- events

    def use_policy(self, policy: Callable[[], Policy]) -> None:
        """Has each island choose by a policy of its own from now on. To be called before tickets are enqueued."""
        self._policy = policy
        for island in self._islands:
            island.policy = policy()

    def use_memory(self, reserve: Callable[[Ticket[Payload]], Reason | None]) -> None:
        """Asks for memory before it commits a ticket. One that lacks some is not committed until `retry`."""
        self._reserve = reserve

    def add_island(self, hosts: int = 1) -> None:
        """There is one more, with the next number."""
        self._islands.append(IslandLines(self._policy(), self.window, hosts))

    def set_window(self, island: int, window: int) -> None:
        """From now on at most so many gangs are in flight on each host of the island: what its devices can take."""
        self._islands[island].window = window

    def enqueue(self, ticket: Ticket[Payload]) -> None:
        """The ticket joins its session's lines, which are ordered by age."""
        if ticket.is_aside:
            ticket.is_aside = False
            del self._aside[ticket.number]
        for gang in ticket.gangs:
            line = self._islands[gang.island].lines.setdefault(ticket.session, deque())
            place = len(line)
            while place and line[place - 1].age > ticket.age:
                place -= 1
            if place:
                ticket.behind += 1
            elif line:
                line[0].behind += 1
            line.insert(place, ticket)
        self._offer(ticket)

    def stand_aside(self, ticket: Ticket[Payload]) -> None:
        """The ticket waits in no line, and holds up nothing of its session, until it is enqueued."""
        ticket.is_aside, ticket.reason = True, Reason.PYTHON
        self._aside[ticket.number] = ticket

    def arrived(self, ticket: Ticket[Payload]) -> None:
        """One of the things that the ticket waited for has arrived."""
        ticket.missing -= 1
        self._offer(ticket)

    def lacks(self, ticket: Ticket[Payload], what: Reason) -> None:
        """The ticket waits for one thing more than it did, unless its gangs have their places in the order."""
        ticket.missing += 1
        ticket.lacks = what

    def next(self, island: int) -> Gang[Payload] | None:
        """The next gang to start there, or None while the island is full or paused, or no ticket is ready."""
        state = self._islands[island]
        while not state.draining and not state.paused:
            if not state.committed:
                if state.full_hosts == state.hosts:
                    return None
                ticket = state.policy.take()
                if ticket is None:
                    return None
                self._commit(ticket)
                continue
            gang = state.committed[0]
            if gang.ticket.dropped:
                state.committed.popleft()
                state.policy.charge(gang, 0)
                continue
            cells = self._loads(state, gang)
            for cell in cells:
                load = cell.count
                if not load.full and load.in_flight and load.in_flight + gang.weight > state.window:
                    load.full = True  # for this gang: one that is larger than the window runs when nothing else does
                    state.full_hosts += len(cell.keys)
            if any(cell.count.full for cell in cells):
                return None
            if gang.exclusive and state.in_flight:
                state.draining = True
                return None
            state.committed.popleft()
            state.in_flight += gang.weight
            state.busy_ns += gang.estimate
            state.started += 1
            state.draining = gang.exclusive
            for cell in cells:
                load = cell.count
                load.in_flight += gang.weight
                load.busy_ns += gang.estimate
                load.full = self._is_full(state, load)
                state.full_hosts += len(cell.keys) * load.full
            if not gang.weight:
                self._count_late(state, 1)
            return gang
        return None

    def _is_full(self, state: IslandLines[Payload], load: HostLoad) -> bool:
        if load.in_flight >= state.window:
            return True
        # While something late runs, what is in flight may wait for it, and it for what is in line.
        return not state.late and load.busy_ns >= self._busy_ns and load.in_flight >= load.least

    def _count_late(self, state: IslandLines[Payload], change: int) -> None:
        state.late += change
        state.full_hosts = 0
        for cell in state.loads:
            cell.count.full = self._is_full(state, cell.count)
            state.full_hosts += len(cell.keys) * cell.count.full

    def _loads(self, state: IslandLines[Payload], gang: Gang[Payload]) -> list[Cell[int, HostLoad]]:
        """Of the gang's hosts."""
        if state.loads_version != state.loads.version or len(state.known_loads) > _MOST_KNOWN:
            state.loads_version = state.loads.version
            state.known_loads.clear()
        cells = state.known_loads.get(gang.hosts)
        if cells is None:
            cells = state.known_loads[gang.hosts] = state.loads.of(gang.hosts, HostLoad)
        return cells

    def finished(self, gang: Gang[Payload], nanoseconds: int = 0) -> None:
        """A gang that `next` gave has left its island. Its session is charged the time that it took of the devices,
        summed over these.
        """
        state = self._islands[gang.island]
        state.policy.charge(gang, nanoseconds)
        state.in_flight -= gang.weight
        state.busy_ns -= gang.estimate
        for cell in self._loads(state, gang):
            load = cell.count
            load.in_flight -= gang.weight
            load.busy_ns -= gang.estimate
            has_room = load.in_flight < load.least or (
                load.in_flight <= state.window // 2 and load.busy_ns <= self._busy_ns // 2
            )
            if load.full and has_room:
                load.full = False
                state.full_hosts -= len(cell.keys)
                self.touched.add(gang.island)
        if not gang.weight:
            self._count_late(state, -1)
        if state.draining and state.in_flight == 0:
            state.draining = False
            self.touched.add(gang.island)

    def retry(self, ticket: Ticket[Payload]) -> None:
        """What the ticket lacked when it was to be committed may be there now."""
        self._offer(ticket)

    def is_idle(self, island: int) -> bool:
        """Whether nothing is in flight there."""
        return not self._islands[island].in_flight

    def drop(self, ticket: Ticket[Payload]) -> None:
        """The ticket's gangs will not run, where they have not started yet."""
        if ticket.dropped:
            return
        in_line = not (ticket.is_aside or ticket.committed)
        self._mark_dropped(ticket)
        if in_line:
            self._leave_lines(ticket)

    def drop_session(self, session: int) -> list[Ticket[Payload]]:
        """The session has ended; returns its tickets of which something has not started."""
        waiting = {
            ticket.number: ticket
            for island in range(len(self._islands))
            for ticket in self.tickets(island)
            if ticket.session == session
        }
        for ticket in waiting.values():
            self._mark_dropped(ticket)
        for state in self._islands:
            state.lines.pop(session, None)
            state.excluded.discard(session)
            state.policy.forget(session)
        return list(waiting.values())

    def _mark_dropped(self, ticket: Ticket[Payload]) -> None:
        ticket.dropped = True
        if ticket.is_aside:
            del self._aside[ticket.number]
            ticket.is_aside = False
        for gang in ticket.gangs:
            self._held.get(gang.island, {}).pop(ticket, None)

    def pause(self, island: int) -> None:
        """The island starts nothing until `resume`; nor does any ticket that needs it."""
        self._islands[island].paused = True

    def resume(self, island: int) -> None:
        self._islands[island].paused = False
        self._offer_held(island)

    def give_up(self, island: int) -> None:
        """The paused island will not be resumed. All tickets that need it were dropped: it keeps none of them."""
        state = self._islands[island]
        state.committed.clear()
        state.policy = self._policy()
        self._held.pop(island, None)

    def exclude(self, island: int, session: int) -> None:
        """The session starts nothing on the island until `admit`: something that it needs there is missing."""
        self._islands[island].excluded.add(session)

    def admit(self, island: int, session: int) -> None:
        self._islands[island].excluded.discard(session)
        self._offer_held(island)

    def _offer_held(self, island: int) -> None:
        self.touched.add(island)
        for ticket in self._held.pop(island, ()):
            self._offer(ticket)

    # ---- lines

    def _offer(self, ticket: Ticket[Payload]) -> None:
        """Has it compete where nothing of its own stands in its way."""
        if ticket.committed or ticket.dropped:
            return
        reason = self._hindrance(ticket)
        if reason is not ticket.reason:
            ticket.wait_for(reason, self.now)
        if reason is not Reason.ORDER:
            return
        for gang in ticket.gangs:
            self._islands[gang.island].policy.add(ticket)
            self.touched.add(gang.island)

    def _hindrance(self, ticket: Ticket[Payload]) -> Reason:
        """What keeps it from being ready; ORDER where nothing does."""
        if ticket.is_aside:
            return Reason.PYTHON
        if ticket.behind:
            return Reason.OWN
        return ticket.lacks if ticket.missing > 0 else self._held_for(ticket)

    def _held_for(self, ticket: Ticket[Payload]) -> Reason:
        """Why one of its islands will not take it now; it is offered again when that does. ORDER where all take it."""
        for gang in ticket.gangs:
            state = self._islands[gang.island]
            if state.paused or ticket.session in state.excluded:
                self._held.setdefault(gang.island, {})[ticket] = None
                return Reason.ISLAND if state.paused else Reason.FUNCTIONS
        return Reason.ORDER

    def _commit(self, ticket: Ticket[Payload]) -> None:
        if ticket.committed or ticket.dropped or ticket.missing > 0:
            return
        reason = self._held_for(ticket)
        if reason is not Reason.ORDER:
            ticket.wait_for(reason, self.now)
            return
        for gang in ticket.gangs:
            if gang.learnt is not None:
                gang.estimate = gang.learnt.expected
        lacking = self._reserve(ticket)
        if lacking is not None:
            ticket.wait_for(lacking, self.now)
            return
        ticket.committed = True
        for gang in ticket.gangs:
            state = self._islands[gang.island]
            state.committed.append(gang)
            state.policy.commit(gang)
            self.touched.add(gang.island)
        self._leave_lines(ticket)

    def _leave_lines(self, ticket: Ticket[Payload]) -> None:
        """The tickets behind this one move up."""
        for gang in ticket.gangs:
            lines = self._islands[gang.island].lines
            line = lines.get(ticket.session)
            if line is None:
                continue
            if line[0] is not ticket:
                line.remove(ticket)
                continue
            line.popleft()
            if not line:
                del lines[ticket.session]
                continue
            line[0].behind -= 1
            self._offer(line[0])

    def tickets(self, island: int) -> list[Ticket[Payload]]:
        """The tickets that wait for the island, committed ones first, those that stand aside last."""
        state = self._islands[island]
        in_line = (ticket for line in state.lines.values() for ticket in line)
        aside = (each for each in self._aside.values() if any(gang.island == island for gang in each.gangs))
        return [*(gang.ticket for gang in state.committed), *in_line, *aside]

    def others_wait(self, island: int, session: int) -> bool:
        """Whether sessions other than this one have tickets in line there."""
        lines = self._islands[island].lines
        return len(lines) > 1 or (len(lines) == 1 and session not in lines)

    def waits(self, island: int) -> list[Wait]:
        """Who waits for the island, and for what."""
        state = self._islands[island]
        hindrances = Hindrances(state.paused, state.draining, frozenset(state.excluded))
        return waits_of(island, state.lines, state.committed, self._aside.values(), hindrances)

    def statistics(self, island: int) -> SchedulerStatistics:
        state = self._islands[island]
        waiting = sum(len(line) for line in state.lines.values()) + len(state.committed)
        return SchedulerStatistics(waiting, state.in_flight, state.busy_ns, state.started, state.window)


def _enough(ticket: Ticket[Any]) -> None:
    """No memory is lacking, where nobody counts it."""
