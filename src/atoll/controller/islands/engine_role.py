"""The role of the engine: which process has it, and the spare engine, which takes it if the engine is lost."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import structs

from atoll.controller.islands.engine_requests import Agents
from atoll.controller.islands.island_recovery import IslandRecovery
from atoll.controller.state import ClusterState
from atoll.errors import Code, Status, StatusError
from atoll.launch.connections import Peer, PeerHandlers
from atoll.protocol import messages as m
from atoll.protocol.events import Received

# The engine whose workers continue without it, so that a spare engine can take its role.
SPARED_ENGINE = "hosts"
# For the engine to reconnect before the spare engine takes its role.
ENGINE_AWAY_SECONDS = 5.0


class EngineRole:
    """Gives the role of the engine to one process.

    `received` handles the engine's messages, and `expel` disconnects a peer that has sent a forbidden message.
    """

    def __init__(
        self,
        state: ClusterState,
        recovery: IslandRecovery,
        agents: Agents,
        received: Callable[[Peer, Received], None],
        expel: Callable[[Peer, Status], None],
    ) -> None:
        self._settings = state.settings
        self._connections = state.connections
        self._outbox = state.outbox
        self._history = state.history
        self._recovery = recovery
        self._agents = agents
        self._lost_at: float | None = None  # None while there is an engine
        self.engine = PeerHandlers("engine", received, expel)
        self.spare_engine = PeerHandlers("spare engine", lambda peer, event: None, expel)

    def admit(self, peer: Peer, hello: m.Hello) -> None:
        """Make a process the engine. Raises StatusError if there is one."""
        if self._connections.engine is not None:
            raise StatusError(Code.ALREADY_EXISTS, "this cluster has its engine")
        self._give_to(peer)

    def admit_spare(self, peer: Peer, hello: m.Hello) -> None:
        """Make a process the spare engine. Raises StatusError if there is one, or if it could not take the role."""
        engine = self._settings.engine
        if engine != SPARED_ENGINE:
            text = f"this cluster's engine is {engine!r}, whose workers end with it: only {SPARED_ENGINE!r} has spares"
            raise StatusError(Code.FAILED_PRECONDITION, text)
        former = self._connections.spare_engine
        if former is not None and former not in self._connections.away:
            raise StatusError(Code.ALREADY_EXISTS, "this cluster has a spare engine")
        if former is not None:
            self._outbox.close(former, "a process that started later offers a spare engine in its place")
        peer.handlers = self.spare_engine
        self._connections.spare_engine = peer.connection
        self._outbox.name(peer.connection, "the spare engine")

    def tick(self, now: float) -> None:
        """Give the spare engine, if there is one, the role of an engine that is lost. Called once per second."""
        if self._connections.has_engine:
            self._lost_at = None
        elif self._lost_at is None:
            self._lost_at = now
        elif now - self._lost_at > ENGINE_AWAY_SECONDS:
            self._replace()

    def _replace(self) -> None:
        spare, engine = self._connections.spare_engine, self._connections.engine
        if spare is None or spare in self._connections.away:
            return
        if engine is not None:
            self._outbox.close(engine, "the engine is lost: the spare engine takes its role")
        self._connections.spare_engine = None
        settings = structs.replace(self._settings, tenants=())
        self._outbox.send(spare, m.BecomeEngine(settings, self._recovery.known_islands()))
        self._give_to(self._connections.peers[spare])
        self._history.record("engine replaced", "the engine was lost, and the spare engine has its role")

    def _give_to(self, peer: Peer) -> None:
        peer.handlers = self.engine
        self._connections.engine = peer.connection
        self._outbox.name(peer.connection, "the engine")
        self._agents.reconnect()
        self._recovery.engine_joined()
