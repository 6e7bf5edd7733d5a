"""Queries that only a worker can answer: layouts, costs, texts, memory.

Each is answered once, also where its island restarts: jaxlib's client ends its process where some of them fail.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator

import msgspec

from atoll.cluster.locations import DeviceLocation
from atoll.controller.state import ClusterState
from atoll.errors import Status, not_found
from atoll.protocol import messages as m
from atoll.scheduling.launch_checks import island_problem
from atoll.scheduling.memory_ledger import MemoryLedger
from atoll.scheduling.session import Session


class Queries:
    """Those that were asked, and not answered yet."""

    def __init__(
        self,
        state: ClusterState,
        location_of: Callable[[Session, int], DeviceLocation],
        memory: MemoryLedger,
    ) -> None:
        self._resources = state.resources
        self._sessions = state.sessions
        self._outbox = state.outbox
        self._location_of = location_of
        self._memory = memory
        self._next = 1
        self._asked: dict[int, tuple[int, int, m.Query]] = {}  # to which host, of which session

    def ask(self, session: Session, message: m.Query) -> None:
        subject = ""
        if message.function >= 0:
            subject = session.functions.get(message.function, "")
            if not subject:
                status = not_found(f"function {message.function} does not exist in this session").status
                self._outbox.to_session(session.number, m.QueryReply(message.query, status, b""))
                return
        location = self._location_of(session, message.device)
        loss = island_problem(session, self._resources.islands[location.island])
        if loss is not None:
            self._outbox.to_session(session.number, m.QueryReply(message.query, loss, b""))
            return
        payload = message.payload
        if message.what == "memory":  # the worker adds what only its platform knows
            known = self._memory.statistics((location.host, location.ordinal))
            payload = msgspec.msgpack.encode((location.ordinal, known))
        query = self._next
        self._next += 1
        self._asked[query] = (location.host, session.number, message)
        if not self._resources.has_failed(location.host):  # else it is asked when its island is back
            self._outbox.to_host(location.host, m.WorkerQuery(session.number, query, message.what, subject, payload))

    def answered(self, host: int, message: m.WorkerAnswer) -> None:
        asked = self._asked.pop(message.query, None)
        if asked is not None:
            _, session, query = asked
            self._outbox.to_session(session, m.QueryReply(query.query, message.status, message.payload))

    def pending(self) -> Iterator[tuple[int, int, int, str]]:
        """Yield each query without an answer: its number, its host, its session, and its kind."""
        for query, (host, session, message) in self._asked.items():
            yield query, host, session, message.what

    def is_waiting(self, session: int) -> bool:
        """Whether the session waits for an answer."""
        return any(number == session for _, number, _ in self._asked.values())

    def ask_again(self, hosts: set[int]) -> None:
        """These hosts' workers were started anew, and know of no queries."""
        for query, (host, session, message) in list(self._asked.items()):
            if host in hosts:
                del self._asked[query]
                if session in self._sessions:
                    self.ask(self._sessions[session], message)

    def give_up(self, hosts: set[int], status: Status, of: Container[int] | None = None) -> None:
        """These hosts will not be back; or only the sessions `of` which this is do not wait for them."""
        for query, (host, session, message) in list(self._asked.items()):
            if host in hosts and (of is None or session in of):
                del self._asked[query]
                self._outbox.to_session(session, m.QueryReply(message.query, status, b""))
