"""What the engine says: of workers, islands, agents, and machines that are about to go."""

from __future__ import annotations

from atoll.controller.islands.island_agents import Agents
from atoll.controller.islands.island_recovery import Recovery
from atoll.controller.operators.requests import Operators
from atoll.dispatch.connections import Peer
from atoll.protocol import messages as m
from atoll.protocol.events import Received


class EngineMessages:
    """Takes them to whom they are for."""

    def __init__(self, recovery: Recovery, agents: Agents, operators: Operators) -> None:
        self._recovery = recovery
        self._agents = agents
        self._operators = operators

    def received(self, peer: Peer, event: Received) -> None:
        match event.message:
            case m.WorkerEnded() as ended:
                self._recovery.worker_ended(ended)
            case m.IslandRemoved(island=island, text=text):
                self._recovery.remove(island, text)
            case m.TellAgent() as message:
                self._agents.tell(message)
            case m.EngineReport() as message:
                self._agents.report = message
            case m.DrainRequest() as message:  # as an operator's: a machine is about to go
                self._operators.handle(peer.connection, message)
            case m.IslandStarts() as message:
                self._recovery.island_starts(message)
                self._operators.island_starts(message)
            case m.IslandEnded(island=island):
                self._operators.drains.island_ended(island)
