"""Host agents: what they say goes to the engine, and back. The controller reads none of it."""

from __future__ import annotations

from atoll.controller.state import ClusterState
from atoll.dispatch.connections import Peer
from atoll.errors import Code, StatusError
from atoll.protocol import messages as m
from atoll.protocol.events import Received


class Agents:
    """An agent is known by its connection. `report` is what the engine has said last of islands and machines."""

    def __init__(self, state: ClusterState) -> None:
        self.report = m.EngineReport((), ())
        self._connections = state.connections
        self._outbox = state.outbox
        self._agents: set[int] = set()

    def admit(self, peer: Peer) -> None:
        """Raises StatusError while no engine is there, which may yet come."""
        if self._connections.engine is None:
            raise StatusError(Code.UNAVAILABLE, "the cluster is starting")
        peer.handle = self._received
        peer.lose = self._lost
        self._agents.add(peer.connection)

    def dismiss(self) -> None:
        """The cluster ends: agents are free to go."""
        content = m.agent_content(m.Dismiss("the cluster has ended"))
        for agent in sorted(self._agents):
            self._outbox.send(agent, m.TellAgent(agent, content, close=True))

    def pending_reason(self, island: int) -> str:
        """What the island waits for, as far as the engine knows; "" where it waits for nothing."""
        return dict(self.report.waits).get(island, "")

    def departure_of(self, host: int) -> str:
        """Return why the machine of a host leaves, such as "m2 left: SIGTERM"; "" if it stays."""
        leaving = (each for each in self.report.machines if each.host == host and each.leaves)
        return next((f"{each.name} left: {each.leaves}" for each in leaving), "")

    def tell(self, message: m.TellAgent) -> None:
        """Something of the engine's for an agent, which may be gone."""
        if message.agent in self._connections.peers:
            self._outbox.send(message.agent, message)
            if message.close:
                self._agents.discard(message.agent)
                self._outbox.close(message.agent)

    def _received(self, peer: Peer, event: Received) -> None:
        message = event.message
        assert isinstance(message, m.AgentSays)  # as the table of permissions has it
        self._outbox.to_engine(m.AgentSays(message.content, peer.connection))

    def _lost(self, peer: Peer, reason: str) -> None:
        self._agents.discard(peer.connection)
        self._outbox.to_engine(m.AgentLost(peer.connection, reason))
