"""Requests of users' commands, which wait for their turn: each flush of the controller answers one.

A report, or a part of a trace, takes a few milliseconds to make, and one read may bring a thousand requests. Operators'
requests do not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from atoll.dispatch.connections import Peer
from atoll.scheduling.turns import TurnFailedError, Turns

# Of one connection.
MOST_REQUESTS = 64


class WaitingRequests:
    """By connection. `answer(peer, message)` answers a request; `end(peer, reason)` ends a connection with too many."""

    def __init__(
        self, peers: Mapping[int, Peer], answer: Callable[[Peer, Any], None], end: Callable[[Peer, str], None]
    ) -> None:
        self._peers = peers
        self._answer = answer
        self._end = end
        self._turns: Turns[Any] = Turns()
        self.waiting = self._turns.waiting

    def add(self, peer: Peer, message: Any) -> None:
        """Answer the request after those that the connection has sent before."""
        assert peer.tenant is not None
        number = peer.connection
        self._turns.add(number, peer.tenant.name, message)
        if len(self.waiting[number]) > MOST_REQUESTS:
            self._turns.remove(number)
            self._end(peer, f"{MOST_REQUESTS} requests of this command wait: at most as many may")

    def proceed(self) -> None:
        """Answer one request of the connection whose turn it is. Tenants take turns, and then their connections."""
        number = self._turns.next()
        if number is None:
            return
        peer = self._peers.get(number)
        if peer is None:
            self._turns.remove(number)
            return
        message = self._turns.take(number)
        try:
            self._answer(peer, message)
        except Exception as error:
            raise TurnFailedError(connection=number) from error
