"""Queries that only a worker can answer: layouts, costs, texts, memory.

Each query gets a reply even if its island restarts, because jaxlib's client ends its process if some of them fail.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

import msgspec

from atoll.controller.state import ClusterState
from atoll.errors import Code, Status, not_found
from atoll.launch.launch_checks import island_problem
from atoll.protocol import messages as m
from atoll.state.memory_ledger import MemoryLedger
from atoll.state.session import Session

# Of a session: queries without a reply, and the bytes of their payloads.
MAX_QUERIES = 4096
MAX_QUERY_BYTES = 16 << 20


class Queries:
    """The queries that have no reply yet."""

    def __init__(
        self,
        state: ClusterState,
        memory: MemoryLedger,
    ) -> None:
        self._resources = state.resources
        self._sessions = state.sessions
        self._outbox = state.outbox
        self._memory = memory
        self._next = 1
        self._asked: dict[int, tuple[int, int, m.Query]] = {}  # host, session and message
        self._loads: dict[int, list[int]] = {}  # number of these and bytes of their payloads, by session

    def ask(self, session: Session, message: m.Query) -> None:
        subject = ""
        if message.function >= 0:
            subject = session.functions.get(message.function, "")
            if not subject:
                status = not_found(f"function {message.function} does not exist in this session").status
                self._outbox.to_session(session.number, m.QueryReply(message.query, status, b""))
                return
        location = session.devices.location(message.device)
        loss = island_problem(session, self._resources.islands[location.island])
        if loss is not None:
            self._outbox.to_session(session.number, m.QueryReply(message.query, loss, b""))
            return
        count, nbytes = self._loads.get(session.number, (0, 0))
        if count >= MAX_QUERIES or nbytes + len(message.payload) > MAX_QUERY_BYTES:
            text = f"{count} queries of session {session.number}, of {nbytes} bytes, have no reply"
            self._outbox.to_session(
                session.number, m.QueryReply(message.query, Status(Code.RESOURCE_EXHAUSTED, text), b"")
            )
            return
        payload = message.payload
        if message.what is m.QueryKind.MEMORY:  # the worker adds what only its platform knows
            known = self._memory.statistics((location.host, location.ordinal))
            payload = msgspec.msgpack.encode(m.DeviceMemory(location.ordinal, known))
        query = self._next
        self._next += 1
        self._asked[query] = (location.host, session.number, message)
        self._count(session.number, 1, len(message.payload))
        if not self._resources.has_failed(location.host):  # otherwise it is sent when its island has restarted
            self._outbox.to_host(location.host, m.WorkerQuery(session.number, query, message.what, subject, payload))

    def _count(self, session: int, count: int, nbytes: int) -> None:
        load = self._loads.setdefault(session, [0, 0])
        load[0] += count
        load[1] += nbytes
        if not load[0]:
            del self._loads[session]

    def count_again(self) -> None:
        """Count the queries of each session, which is not stored."""
        self._loads.clear()
        for _, session, message in self._asked.values():
            self._count(session, 1, len(message.payload))

    def _take(self, query: int) -> tuple[int, int, m.Query] | None:
        """Remove and return a query, or return None if it has a reply or its session has ended."""
        asked = self._asked.pop(query, None)
        if asked is not None:
            self._count(asked[1], -1, -len(asked[2].payload))
        return asked

    def session_closed(self, session: Session) -> None:
        """Forget the session's queries. Workers may still answer them."""
        if session.number in self._loads:
            for query in [query for query, (_, number, _) in self._asked.items() if number == session.number]:
                self._take(query)

    def answered(self, host: int, message: m.WorkerAnswer) -> None:
        asked = self._take(message.query)
        if asked is not None:
            _, session, query = asked
            self._outbox.to_session(session, m.QueryReply(query.query, message.status, message.payload))

    def pending(self) -> Iterator[tuple[int, int, int, str]]:
        """Yield each query without a reply: its number, host, session and kind."""
        for query, (host, session, message) in self._asked.items():
            yield query, host, session, message.what

    def is_waiting(self, session: int) -> bool:
        """Whether the session waits for a reply."""
        return session in self._loads

    def ask_again(self, hosts: set[int]) -> None:
        """Send the queries of these hosts again, since their new workers do not know them."""
        for query, (host, session, message) in list(self._asked.items()):
            if host in hosts:
                self._take(query)
                if session in self._sessions:
                    self.ask(self._sessions[session], message)

    def fail_on(self, hosts: set[int], status: Status, sessions: Container[int] | None = None) -> None:
        """Fail the queries to these hosts, which are lost. With `sessions`, fail only the queries of these sessions."""
        for query, (host, session, message) in list(self._asked.items()):
            if host in hosts and (sessions is None or session in sessions):
                self._take(query)
                self._outbox.to_session(session, m.QueryReply(message.query, status, b""))
