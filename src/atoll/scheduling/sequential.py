"""Sequential dispatch: a session's gangs are dispatched one after another, each when the one before is known to be
enqueued on all of its hosts.

The fallback for what cannot be dispatched ahead, and what parallel dispatch is measured against (section 4.5 of the
Pathways paper).
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from atoll.scheduling.scheduler import Gang, Scheduler, Ticket

Work = TypeVar("Work")


class Turns(Generic[Work]):
    """Whose turn it is, by session. `join` comes before the ticket is enqueued."""

    def __init__(self, scheduler: Scheduler[Work]) -> None:
        self._scheduler = scheduler
        self._current: dict[int, Ticket[Work]] = {}
        self._next: dict[int, deque[Ticket[Work]]] = {}
        self._unacknowledged: dict[int, int] = {}  # hosts that have yet to say so, by sequence
        self._unstarted: dict[int, int] = {}  # gangs of the current ticket, by its number

    def join(self, ticket: Ticket[Work]) -> None:
        """The ticket waits for all of its session that joined before it."""
        if ticket.session in self._current:
            ticket.missing += 1
            self._next.setdefault(ticket.session, deque()).append(ticket)
        else:
            self._begin(ticket)

    def started(self, gang: Gang[Work], hosts: int) -> None:
        """The gang was sent to so many hosts."""
        self._unacknowledged[gang.sequence] = hosts
        self._unstarted[gang.ticket.number] -= 1

    def enqueued(self, gang: Gang[Work]) -> None:
        """One of its hosts has enqueued the gang."""
        left = self._unacknowledged.get(gang.sequence, 0) - 1
        if left > 0:
            self._unacknowledged[gang.sequence] = left
        else:
            self.ended(gang)

    def ended(self, gang: Gang[Work]) -> None:
        """Nothing more is to be heard of the gang: all of its hosts have enqueued it, or it has ended."""
        self._unacknowledged.pop(gang.sequence, None)
        ticket = gang.ticket
        is_through = not any(other.sequence in self._unacknowledged for other in ticket.gangs)
        if is_through and self._unstarted.get(ticket.number) == 0:
            self.over(ticket)

    def over(self, ticket: Ticket[Work]) -> None:
        """The ticket's turn is over, or it will have none."""
        if self._current.get(ticket.session) is not ticket:
            return
        del self._current[ticket.session], self._unstarted[ticket.number]
        line = self._next.get(ticket.session)
        while line:
            following = line.popleft()
            if not following.dropped:
                self._begin(following)
                self._scheduler.arrived(following)
                return
        self._next.pop(ticket.session, None)

    def forget(self, session: int) -> None:
        """The session has ended."""
        self._next.pop(session, None)
        ticket = self._current.pop(session, None)
        if ticket is not None:
            del self._unstarted[ticket.number]

    def _begin(self, ticket: Ticket[Work]) -> None:
        self._current[ticket.session] = ticket
        self._unstarted[ticket.number] = len(ticket.gangs)
