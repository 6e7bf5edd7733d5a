"""Requests of the engine, and of host agents, whose messages to and from the engine the controller forwards."""

from __future__ import annotations

from atoll.controller.islands.island_recovery import IslandRecovery
from atoll.controller.operators.requests import Operators
from atoll.controller.state import ClusterState
from atoll.errors import Code, StatusError
from atoll.launch.connections import Peer
from atoll.protocol import messages as m
from atoll.protocol.events import Received


class EngineMessages:
    """Dispatches messages of the engine to the parts of the controller."""

    def __init__(self, recovery: IslandRecovery, agents: Agents, operators: Operators) -> None:
        self._recovery = recovery
        self._agents = agents
        self._operators = operators

    def received(self, peer: Peer, event: Received) -> None:
        match event.message:
            case m.WorkerEnded() as ended:
                self._recovery.worker_ended(ended)
            case m.IslandNotRestarted(island=island, text=text):
                self._recovery.remove(island, text)
            case m.TellAgent() as message:
                self._agents.tell(message)
            case m.EngineReport() as message:
                self._agents.report = message
            case m.DrainRequest() as message:  # because a machine is about to leave
                self._operators.handle(peer.connection, message)
            case m.IslandStarts() as message:
                self._recovery.island_starts(message)
                self._operators.island_starts(message)
            case m.IslandEnded(island=island):
                self._operators.drains.island_ended(island)


class Agents:
    """Forwards messages between host agents and the engine, unread. An agent is identified by its connection.

    `report` is the engine's last report on islands and machines.
    """

    def __init__(self, state: ClusterState) -> None:
        self.report = m.EngineReport((), ())
        self._connections = state.connections
        self._outbox = state.outbox
        self._agents: set[int] = set()

    def admit(self, peer: Peer) -> None:
        """Admit an agent. Raises StatusError while the engine has not connected yet."""
        if self._connections.engine is None:
            raise StatusError(Code.UNAVAILABLE, "the cluster is starting")
        self._agents.add(peer.connection)

    def reconnect(self) -> None:
        """Have all agents connect again, since a new engine does not know them, and forget what the former one knew."""
        self.report = m.EngineReport((), ())
        for agent in sorted(self._agents):
            self._outbox.close(agent)
        self._agents.clear()

    def dismiss(self) -> None:
        """Dismiss all agents because the cluster ends."""
        content = m.agent_content(m.Dismiss("the cluster has ended"))
        for agent in sorted(self._agents):
            self._outbox.send(agent, m.TellAgent(agent, content, close=True))

    def pending_reason(self, island: int) -> str:
        """Return what the island waits for, if the engine knows it, or ""."""
        return dict(self.report.waits).get(island, "")

    def departure_of(self, host: int) -> str:
        """Return why the machine of a host leaves, such as "m2 left: SIGTERM"; "" if it stays."""
        leaving = (each for each in self.report.machines if each.host == host and each.leaves)
        return next((f"{each.name} left: {each.leaves}" for each in leaving), "")

    def tell(self, message: m.TellAgent) -> None:
        """Forward a message of the engine to an agent, which may have left."""
        if message.agent in self._connections.peers:
            self._outbox.send(message.agent, message)
            if message.close:
                self._agents.discard(message.agent)
                self._outbox.close(message.agent)

    def received(self, peer: Peer, event: Received) -> None:
        message = event.message
        assert isinstance(message, m.AgentSays)  # the permission table allows agents nothing else
        self._outbox.to_engine(m.AgentSays(message.content, peer.connection))

    def lost(self, peer: Peer, reason: str) -> None:
        self._agents.discard(peer.connection)
        self._outbox.to_engine(m.AgentLost(peer.connection, reason))
