"""The order of gangs: one line an island, none of which contradicts another.

Each node of a launch is a ticket, with one gang on each of the node's islands. A session's tickets wait in lines, one
an island; one that is at the head of all of its lines, and lacks nothing, is *ready*. When an island has room, its
policy picks a ready ticket, and that is *committed*: at this moment its gangs get their places in the order of all of
its islands, whether these have room now or later. So all islands start their gangs in one total order, that of
commitment, and what a gang awaits from another island stands earlier in it: nobody can wait in a circle.

Bounded, host by host: an island starts gangs while those in flight on each of their hosts keep it busy for less than
`BUSY_NS`, at most `window` of them; one whose hosts have no room holds back what comes after it.
Tickets are committed as late as that allows, so that a newcomer gets in within milliseconds, also between the nodes of
a long program.

Pure: `enqueue`, `arrived`, `finished`, `drop`, `pause` and their like are the events; `next` hands out the gangs to
start, in order, and `touched` names the islands that may have some.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

Work = TypeVar("Work")

# Work in flight on a host, by what its gangs took before.
BUSY_NS = 8_000_000
# What a gang counts that has not run yet: enough to keep a few of them in flight, whatever they turn out to be.
UNKNOWN_NS = 200_000
# However long gangs take: one runs, one is enqueued behind it, and one is on its way.
_LEAST_IN_FLIGHT = 3


@dataclass(slots=True, eq=False)
class Ticket(Generic[Work]):
    """A node of a launch, in line. `number` is its age; `missing` counts what it still waits for, such as its client's
    bytes.
    """

    number: int
    session: int
    missing: int = 0
    gangs: tuple[Gang[Work], ...] = ()
    behind: int = 0  # in how many lines it is not at the head
    committed: bool = False
    dropped: bool = False


@dataclass(slots=True, eq=False)
class Gang(Generic[Work]):
    """A node's part on one island: what its hosts start together.

    `estimate` is the time it keeps them busy, in nanoseconds; `weight` is how much of the window it takes; with
    `exclusive`, nothing else is in flight meanwhile. `hosts` are those of the island that it runs on.
    """

    sequence: int
    island: int
    ticket: Ticket[Work]
    work: Work
    estimate: int = UNKNOWN_NS
    exclusive: bool = False
    weight: int = 1
    hosts: tuple[int, ...] = (0,)


class Policy(Protocol):
    """Which of an island's ready tickets goes next."""

    def add(self, ticket: Ticket[Any]) -> None:
        """The ticket is ready."""

    def take(self) -> Ticket[Any] | None:
        """The next ticket, which is the policy's no more; those committed or dropped meanwhile are passed over."""


class FirstComeFirstServed:
    """Who has been ready for longest goes first: sessions with many launches in line take turns."""

    def __init__(self) -> None:
        self._line: deque[Ticket[Any]] = deque()
        self._numbers: set[int] = set()  # of those in line

    def add(self, ticket: Ticket[Any]) -> None:
        if ticket.number not in self._numbers:
            self._numbers.add(ticket.number)
            self._line.append(ticket)

    def take(self) -> Ticket[Any] | None:
        while self._line:
            ticket = self._line.popleft()
            self._numbers.discard(ticket.number)
            if not ticket.committed and not ticket.dropped:
                return ticket
        return None


@dataclass(frozen=True)
class SchedulerStatistics:
    """An island's gangs: that wait, are in flight (and the time that these are expected to take), and were started."""

    waiting: int
    in_flight: int
    busy_ns: int
    started: int
    window: int


@dataclass(slots=True)
class _Load:
    """What is in flight on one host."""

    in_flight: int = 0
    busy_ns: int = 0
    full: bool = False


@dataclass(slots=True)
class _Island(Generic[Work]):
    policy: Policy
    window: int
    loads: dict[int, _Load] = field(default_factory=dict)  # by host, of those that have had work
    full_hosts: int = 0
    lines: dict[int, deque[Ticket[Work]]] = field(default_factory=dict)  # by session
    committed: deque[Gang[Work]] = field(default_factory=deque)
    paused: bool = False
    absent: set[int] = field(default_factory=set)  # sessions that may not start anything here
    blocked: bool = False
    draining: bool = False  # until nothing is in flight: for a gang that runs alone
    in_flight: int = 0
    busy_ns: int = 0
    started: int = 0


class Scheduler(Generic[Work]):
    """Decides what each island, of so many `hosts`, runs next.

    Once the window of a host is full, it is filled again only when it is half empty: gangs then leave in batches,
    one message for many, and the host still has half a window of work.
    """

    def __init__(
        self,
        islands: int,
        window: int,
        policy: Callable[[], Policy] = FirstComeFirstServed,
        busy_ns: int = BUSY_NS,
        hosts: int = 1,
    ) -> None:
        self.window = window
        self._hosts = hosts  # of an island
        self._busy_ns = busy_ns
        self._policy = policy
        self._islands: list[_Island[Work]] = [_Island(policy(), window) for _ in range(islands)]
        self._held: dict[int, list[Ticket[Work]]] = {}  # ready, by the paused island that they need
        self.touched: set[int] = set()  # islands that may have something to start now

    # ---- events

    def add_island(self) -> None:
        """There is one more, with the next number."""
        self._islands.append(_Island(self._policy(), self.window))

    def set_window(self, island: int, window: int) -> None:
        """From now on at most so many gangs are in flight on each host of the island: what its devices can take."""
        self._islands[island].window = window

    def enqueue(self, ticket: Ticket[Work]) -> None:
        """The ticket joins the ends of its session's lines. Numbers rise."""
        for gang in ticket.gangs:
            line = self._islands[gang.island].lines.setdefault(ticket.session, deque())
            ticket.behind += bool(line)
            line.append(ticket)
        self._offer(ticket)

    def arrived(self, ticket: Ticket[Work]) -> None:
        """One of the things that the ticket waited for is here."""
        ticket.missing -= 1
        self._offer(ticket)

    def next(self, island: int) -> Gang[Work] | None:
        """The next gang to start there, or None while the island is full, or paused, or nobody is ready."""
        state = self._islands[island]
        while not state.draining and not state.paused and not state.blocked:
            if not state.committed:
                if state.full_hosts == self._hosts:
                    return None
                ticket = state.policy.take()
                if ticket is None:
                    return None
                self._commit(ticket)
                continue
            gang = state.committed[0]
            if gang.ticket.dropped:
                state.committed.popleft()
                continue
            loads = self._loads(state, gang)
            if any(load.full for load in loads):
                return None
            if gang.exclusive and state.in_flight:
                state.draining = True
                return None
            state.committed.popleft()
            state.in_flight += gang.weight
            state.busy_ns += gang.estimate
            state.started += 1
            state.draining = gang.exclusive
            for load in loads:
                load.in_flight += gang.weight
                load.busy_ns += gang.estimate
                load.full = load.in_flight >= state.window or (
                    load.busy_ns >= self._busy_ns and load.in_flight >= _LEAST_IN_FLIGHT
                )
                state.full_hosts += load.full
            return gang
        return None

    def _loads(self, state: _Island[Work], gang: Gang[Work]) -> list[_Load]:
        """Of the gang's hosts."""
        for host in gang.hosts:
            if host not in state.loads:
                state.loads[host] = _Load()
        return [state.loads[host] for host in gang.hosts]

    def finished(self, gang: Gang[Work]) -> None:
        """A gang that was started has left its island."""
        state = self._islands[gang.island]
        state.in_flight -= gang.weight
        state.busy_ns -= gang.estimate
        for load in self._loads(state, gang):
            load.in_flight -= gang.weight
            load.busy_ns -= gang.estimate
            has_room = load.in_flight < _LEAST_IN_FLIGHT or (
                load.in_flight <= state.window // 2 and load.busy_ns <= self._busy_ns // 2
            )
            if load.full and has_room:
                load.full = False
                state.full_hosts -= 1
                self.touched.add(gang.island)
        if state.draining and state.in_flight == 0:
            state.draining = False
            self.touched.add(gang.island)

    def hold_back(self, gang: Gang[Work]) -> None:
        """The gang that `next` has just given cannot start: it stays at the head of its island's order.

        Its island starts nothing until `go_on`.
        """
        state = self._islands[gang.island]
        state.committed.appendleft(gang)
        state.in_flight -= gang.weight
        state.busy_ns -= gang.estimate
        state.started -= 1
        state.blocked = True
        state.draining = False
        for load in self._loads(state, gang):
            load.in_flight -= gang.weight
            load.busy_ns -= gang.estimate
            state.full_hosts -= load.full
            load.full = False

    def go_on(self, island: int) -> None:
        """What held a gang back may have changed."""
        state = self._islands[island]
        if state.blocked:
            state.blocked = False
            self.touched.add(island)

    def drop(self, ticket: Ticket[Work]) -> None:
        """The ticket's gangs will not run, where they have not started yet."""
        if ticket.dropped:
            return
        ticket.dropped = True
        for gang in ticket.gangs:
            self.go_on(gang.island)  # it may have been the one that was held back
        if not ticket.committed:
            self._leave_lines(ticket)

    def drop_session(self, session: int) -> list[Ticket[Work]]:
        """The session has ended; returns its tickets of which something has not started."""
        waiting = {
            ticket.number: ticket
            for island in range(len(self._islands))
            for ticket in self.tickets(island)
            if ticket.session == session
        }
        for ticket in waiting.values():
            ticket.dropped = True
            for gang in ticket.gangs:
                self.go_on(gang.island)
        for state in self._islands:
            state.lines.pop(session, None)
            state.absent.discard(session)
        return list(waiting.values())

    def pause(self, island: int) -> None:
        """The island starts nothing until `resume`; nor does any ticket that needs it."""
        self._islands[island].paused = True

    def resume(self, island: int) -> None:
        self._islands[island].paused = False
        self._offer_held(island)

    def exclude(self, island: int, session: int) -> None:
        """The session starts nothing on the island until `admit`: something that it needs there is missing."""
        self._islands[island].absent.add(session)

    def admit(self, island: int, session: int) -> None:
        self._islands[island].absent.discard(session)
        self._offer_held(island)

    def _offer_held(self, island: int) -> None:
        self.touched.add(island)
        for ticket in self._held.pop(island, ()):
            self._offer(ticket)

    # ---- lines

    def _offer(self, ticket: Ticket[Work]) -> None:
        if ticket.behind or ticket.missing > 0 or ticket.committed or ticket.dropped:
            return
        if self._is_held(ticket):
            return
        for gang in ticket.gangs:
            self._islands[gang.island].policy.add(ticket)
            self.touched.add(gang.island)

    def _is_held(self, ticket: Ticket[Work]) -> bool:
        """Whether one of its islands will not take it now; then it is offered again when that does."""
        for gang in ticket.gangs:
            state = self._islands[gang.island]
            if state.paused or ticket.session in state.absent:
                self._held.setdefault(gang.island, []).append(ticket)
                return True
        return False

    def _commit(self, ticket: Ticket[Work]) -> None:
        if self._is_held(ticket):
            return
        ticket.committed = True
        for gang in ticket.gangs:
            self._islands[gang.island].committed.append(gang)
            self.touched.add(gang.island)
        self._leave_lines(ticket)

    def _leave_lines(self, ticket: Ticket[Work]) -> None:
        """Whoever stood behind the ticket moves up."""
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

    def tickets(self, island: int) -> list[Ticket[Work]]:
        """The tickets that wait for their turn on the island."""
        state = self._islands[island]
        in_line = (ticket for line in state.lines.values() for ticket in line)
        return [*(gang.ticket for gang in state.committed), *in_line]

    def others_wait(self, island: int, session: int) -> bool:
        """Whether sessions other than this one have tickets in line there."""
        lines = self._islands[island].lines
        return len(lines) > 1 or (len(lines) == 1 and session not in lines)

    def statistics(self, island: int) -> SchedulerStatistics:
        state = self._islands[island]
        waiting = sum(len(line) for line in state.lines.values()) + len(state.committed)
        return SchedulerStatistics(waiting, state.in_flight, state.busy_ns, state.started, state.window)
