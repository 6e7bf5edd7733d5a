"""Persist sessions that are suspended on disk when their cluster ends, and restore them in the next cluster.

At the end, the proxies of these sessions learn that all hosts are gone, and wait. In the next cluster, the sessions are
suspended from the start and their islands count as restarted: proxies send the sources of functions, hosts compile
them, and `atoll resume` resumes the sessions.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.cluster.lifecycle import IslandReady
from atoll.controller.named_arrays.array_files import ArrayFiles
from atoll.controller.state import ClusterState
from atoll.errors import Code, Details, Kind, Status, failure
from atoll.launch.compilation import Compilation
from atoll.migration.array_spiller import ArraySpiller
from atoll.migration.persisted_sessions import (
    PersistedSession,
    PersistedSessions,
    can_persist,
    decode,
    encode,
    persisted_session,
    restored_session,
)
from atoll.migration.suspensions import Suspensions
from atoll.protocol import messages as m
from atoll.protocol.actions import PersistSessions
from atoll.protocol.events import SessionsPersisted
from atoll.state.compiled_functions import function_name, islands_of
from atoll.state.session import Session

_ENDED = failure(
    Code.DATA_LOSS, "the cluster was ended, and everything on its devices was lost", Details(Kind.CONTENTS)
)


class SessionPersistence:
    """Persists sessions at the end, and restores them at the start."""

    def __init__(
        self,
        state: ClusterState,
        compilation: Compilation,
        spiller: ArraySpiller,
        suspensions: Suspensions,
        files: ArrayFiles,
    ) -> None:
        self._sessions = state.sessions
        self._connections = state.connections
        self._outbox = state.outbox
        self._resources = state.resources
        self._slices = state.slices
        self._tenants = state.tenants
        self._compilation = compilation
        self._recompilations = compilation.recompilations
        self._spiller = spiller
        self._suspensions = suspensions
        self._files = files
        self._persist_none = False  # requested by an operator
        self._operators: list[int] = []  # connections of operators that requested the end

    # ---- the end of a cluster

    def stop_asked(self, operator: int, message: m.StopRequest) -> None:
        """Record a request to end the cluster. It is answered when the persisted sessions are known."""
        self._persist_none = message.all_sessions
        self._operators.append(operator)

    def stopping(self, persist: bool, seconds: float) -> None:
        """Let the shell persist sessions, whose proxies wait for `seconds`, and published arrays that are in files.

        Remove the files of all others.
        """
        connections = self._connections.sessions
        persisted: list[PersistedSession] = []
        for session, by_system in self._suspensions.on_disk():
            connection = connections.get(session.number)
            if persist and not self._persist_none and connection is not None and can_persist(session):
                address = self._connections.peers[connection].address
                persisted.append(persisted_session(session, connection, address, by_system))
                self._outbox.to_session(session.number, m.HostsFailed(tuple(sorted(self._resources.hosts))))
            else:
                self._spiller.session_closed(session)
        arrays = self._files.stopping(persist and not self._persist_none)
        if persisted or arrays is not None:
            following = max(self._sessions, default=0) + 1
            found = PersistedSessions(tuple(persisted), following, self._spiller.next_piece, arrays)
            numbers = {each.number: each.connection for each in persisted}
            secrets = {each.number: self._sessions[each.number].secret for each in persisted}
            versions = (
                () if arrays is None else tuple((each.tenant, each.name, each.number) for each in arrays.versions)
            )
            self._outbox.add(PersistSessions(self._outbox.cause, encode(found), numbers, secrets, versions))
        names = tuple((each.number, self._sessions[each.number].name) for each in persisted)
        for operator in self._operators:
            self._outbox.send(operator, m.StopReply(names, seconds))
            self._outbox.close(operator)

    # ---- the start of the next cluster

    def restore(self, event: SessionsPersisted, admit: Callable[[Session, int, str], None]) -> PersistedSessions:
        """Add the persisted sessions to this cluster. Return everything that the ended cluster has persisted.

        `admit(session, connection, address)` serves a session's proxy.
        """
        found = decode(event.content)
        self._spiller.next_piece = max(self._spiller.next_piece, found.next_piece)
        for each in found.sessions:
            tenant = self._tenants.by_name.get(each.tenant)
            if tenant is None:
                text = f"session {each.number} cannot continue: the tenant {each.tenant} does not exist anymore"
                self._outbox.send(each.connection, m.Closing(Status(Code.CANCELLED, text)))
                self._outbox.close(each.connection, text)
                self._spiller.drop_files(
                    buffer.spilled for buffer in each.buffers.values() if buffer.spilled is not None
                )
                continue
            devices = self._slices.open(each.number, each.virtual, each.initial_locations)
            session = restored_session(each, event.secrets[each.number], tenant, devices)
            tenant.sessions += 1
            self._sessions[session.number] = session
            self._connections.sessions[session.number] = each.connection
            self._register_functions(session)
            session.unacknowledged_failures = {island: [_ENDED] for island in self._resources.islands}
            self._suspensions.add_persisted(session, each.by_system)
            self._spiller.add_persisted(session)
            admit(session, each.connection, each.address)
        return found

    def _register_functions(self, session: Session) -> None:
        functions, places = self._compilation.functions, session.devices.locations
        for number, request in session.function_requests.items():
            locations = tuple(tuple(places[device] for device in row) for row in request.assignment)
            name = function_name(request.content, locations, session.tenant.name)
            session.add_function(number, name, islands_of(locations))
            functions.acquire(name)
            functions.locations[name] = locations
            functions.contents[name] = request.content

    def island_ready(self, ready: IslandReady) -> None:
        """Record that the hosts of the island have compiled no functions of persisted sessions."""
        for session in self._sessions.values():
            if session.functions:
                self._recompilations.invalidate_island(session, ready.island)
