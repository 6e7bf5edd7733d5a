"""Sequential dispatch: a session's gangs are dispatched one after another, each when the one before is known to be
enqueued on all of its hosts.

The fallback for what cannot be dispatched ahead, and what parallel dispatch is measured against (section 4.5 of the
Pathways paper).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic

from atoll.scheduling.reasons import Reason
from atoll.scheduling.scheduler import Scheduler
from atoll.scheduling.tickets import Gang, Payload, Ticket


class SequentialDispatch(Generic[Payload]):
    """The ticket of each session that is dispatched now, and those that wait for it.

    A ticket joins before it is enqueued with the scheduler.
    """

    def __init__(self, scheduler: Scheduler[Payload]) -> None:
        self._scheduler = scheduler
        self._current: dict[int, Ticket[Payload]] = {}
        self._next: dict[int, deque[Ticket[Payload]]] = {}
        self._unacknowledged: dict[int, int] = {}  # hosts that have yet to acknowledge, by sequence
        self._unstarted: dict[int, int] = {}  # gangs of the current ticket, by its number
        self._joined = 0

    def join(self, ticket: Ticket[Payload]) -> None:
        """The ticket waits for all of its session that joined before it: in its lines, too, whatever its age."""
        self._joined += 1
        ticket.age = self._joined
        if ticket.session in self._current:
            self._scheduler.lacks(ticket, Reason.OWN)
            self._next.setdefault(ticket.session, deque()).append(ticket)
        else:
            self._begin(ticket)

    def started(self, gang: Gang[Payload], hosts: int) -> None:
        """The gang was sent to so many hosts."""
        self._unacknowledged[gang.sequence] = hosts
        self._unstarted[gang.ticket.number] -= 1

    def enqueued(self, gang: Gang[Payload]) -> None:
        """One of its hosts has enqueued the gang."""
        left = self._unacknowledged.get(gang.sequence, 0) - 1
        if left > 0:
            self._unacknowledged[gang.sequence] = left
        else:
            self.ended(gang)

    def ended(self, gang: Gang[Payload]) -> None:
        """All hosts of the gang have enqueued it, or it has ended: no more is reported of it."""
        self._unacknowledged.pop(gang.sequence, None)
        ticket = gang.ticket
        is_dispatched = not any(other.sequence in self._unacknowledged for other in ticket.gangs)
        if is_dispatched and self._unstarted.get(ticket.number) == 0:
            self.leave(ticket)

    def leave(self, ticket: Ticket[Payload]) -> None:
        """The ticket has been dispatched, or never will be: the next of its session follows."""
        if self._current.get(ticket.session) is not ticket:
            return
        del self._current[ticket.session], self._unstarted[ticket.number]
        self._go_on(ticket.session)

    def withdraw(self, ticket: Ticket[Payload]) -> None:
        """Forget a dropped ticket, which others will replace: see `precede`."""
        for gang in ticket.gangs:
            self._unacknowledged.pop(gang.sequence, None)
        if self._current.get(ticket.session) is ticket:
            del self._current[ticket.session], self._unstarted[ticket.number]

    def precede(self, tickets: Sequence[Ticket[Payload]]) -> None:
        """Dispatch these tickets, in this order, before all tickets of their sessions that are still in line.

        The tickets have the ages of those that they replace.
        """
        by_session: dict[int, list[Ticket[Payload]]] = {}
        for ticket in tickets:
            self._scheduler.lacks(ticket, Reason.OWN)
            by_session.setdefault(ticket.session, []).append(ticket)
        for session, own in by_session.items():
            line = self._next.setdefault(session, deque())
            current = self._current.get(session)
            if current is not None and not current.committed:
                self._scheduler.lacks(current, Reason.OWN)
                del self._current[session], self._unstarted[current.number]
                own.append(current)
            line.extendleft(reversed(own))
            if session not in self._current:
                self._go_on(session)

    def forget(self, session: int) -> None:
        """The session has ended."""
        self._next.pop(session, None)
        ticket = self._current.pop(session, None)
        if ticket is not None:
            del self._unstarted[ticket.number]

    def _go_on(self, session: int) -> None:
        line = self._next.get(session)
        while line:
            following = line.popleft()
            if not following.dropped:
                self._begin(following)
                self._scheduler.arrived(following)
                return
        self._next.pop(session, None)

    def _begin(self, ticket: Ticket[Payload]) -> None:
        self._current[ticket.session] = ticket
        self._unstarted[ticket.number] = len(ticket.gangs)
