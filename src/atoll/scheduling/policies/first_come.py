"""First come, first served: the simplest policy.

A session's next ticket becomes ready when the one before it is committed, so sessions with many launches in line
alternate, node by node.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from atoll.scheduling.policy import Policy
from atoll.scheduling.tickets import Ticket


class FirstComeFirstServed(Policy):
    """The ticket that has been ready for longest goes first."""

    def __init__(self) -> None:
        self._ready: deque[Ticket[Any]] = deque()

    def add(self, ticket: Ticket[Any]) -> None:
        self._ready.append(ticket)

    def take(self) -> Ticket[Any] | None:
        return self._ready.popleft() if self._ready else None
