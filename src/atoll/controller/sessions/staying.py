"""Sessions that outlive their cluster: suspended on disk when it ends, they are kept for the next one.

At the end, proxies of such sessions learn that all hosts are gone, and wait. In the next cluster they are suspended
sessions from the start, whose islands have just come back: proxies send the sources of functions, hosts compile them,
and `atoll resume` does the rest.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.cluster.lifecycle import IslandReady
from atoll.controller.state import ClusterState
from atoll.dispatch.compilation import Compilation
from atoll.errors import Code, Status
from atoll.migration.array_spiller import ArraySpiller
from atoll.migration.staying import (
    StayingSession,
    StayingSessions,
    decode,
    encode,
    make_again,
    may_stay,
    staying_session,
)
from atoll.migration.suspensions import Suspensions
from atoll.protocol import messages as m
from atoll.protocol.actions import KeepSessions
from atoll.protocol.events import SessionsKept
from atoll.scheduling.functions import function_name
from atoll.scheduling.session import Session

_ENDED = Status(Code.DATA_LOSS, "the cluster was ended, and what was on its devices with it")


class SessionsThatStay:
    """Keeps them at the end, and takes them at the beginning. `admit(session, connection)` has their proxies served."""

    def __init__(
        self,
        state: ClusterState,
        compilation: Compilation,
        spiller: ArraySpiller,
        suspensions: Suspensions,
        admit: Callable[[Session, int], None],
    ) -> None:
        self._sessions = state.sessions
        self._connections = state.connections
        self._outbox = state.outbox
        self._resources = state.resources
        self._slices = state.slices
        self._tenants = state.tenants
        self._compilation = compilation
        self._spiller = spiller
        self._suspensions = suspensions
        self._admit = admit
        self._none_stays = False  # its operator has said so
        self._operators: list[int] = []  # who have asked for the end, by their connections

    # ---- the end of a cluster

    def stop_asked(self, operator: int, message: m.StopRequest) -> None:
        """The operator gets its answer when it is known who stays."""
        self._none_stays = message.all_sessions
        self._operators.append(operator)

    def stopping(self, keeps: bool, seconds: float) -> None:
        """Has the shell keep the sessions that stay, where it can; they wait for so long. Files of the others go."""
        connections = self._connections.sessions
        staying: list[StayingSession] = []
        for session, by_system in self._suspensions.on_disk():
            connection = connections.get(session.number)
            if keeps and not self._none_stays and connection is not None and may_stay(session):
                staying.append(staying_session(session, connection, by_system))
                self._outbox.to_session(session.number, m.HostsLost(tuple(sorted(self._resources.hosts))))
            else:
                self._spiller.session_closed(session)
        if staying:
            found = StayingSessions(tuple(staying), max(self._sessions) + 1, self._spiller.next_piece)
            numbers = {each.number: each.connection for each in staying}
            secrets = {each.number: self._sessions[each.number].secret for each in staying}
            self._outbox.add(KeepSessions(self._outbox.cause, encode(found), numbers, secrets))
        names = tuple((each.number, self._sessions[each.number].name) for each in staying)
        for operator in self._operators:
            self._outbox.send(operator, m.StopReply(names, seconds))
            self._outbox.close(operator)

    # ---- the beginning of the next

    def take(self, event: SessionsKept) -> int:
        """They are sessions of this cluster from now on. Returns the first number that none of them has."""
        found = decode(event.content)
        self._spiller.next_piece = max(self._spiller.next_piece, found.next_piece)
        for each in found.sessions:
            tenant = self._tenants.by_name.get(each.tenant)
            if tenant is None:
                text = f"session {each.number} is not taken over: there is no tenant {each.tenant} any more"
                self._outbox.send(each.connection, m.Closing(Status(Code.CANCELLED, text)))
                self._outbox.close(each.connection, text)
                continue
            devices = self._slices.open(each.number, each.virtual, each.initial_locations)
            session = make_again(each, event.secrets[each.number], tenant, devices)
            tenant.sessions += 1
            self._sessions[session.number] = session
            self._connections.sessions[session.number] = each.connection
            self._register_functions(session)
            session.unseen = {island: [_ENDED] for island in self._resources.islands}
            self._suspensions.take(session, each.by_system)
            self._admit(session, each.connection)
        return found.next_session

    def _register_functions(self, session: Session) -> None:
        functions, places = self._compilation.functions, session.devices.locations
        for number, request in session.function_requests.items():
            locations = tuple(tuple(places[device] for device in row) for row in request.assignment)
            name = function_name(request.content, locations, session.tenant.name)
            session.functions[number] = name
            functions.acquire(name)
            functions.locations[name] = locations
            functions.contents[name] = request.content

    def island_ready(self, ready: IslandReady) -> None:
        """Its hosts have nothing compiled of the sessions that were there before them."""
        for session in self._sessions.values():
            if session.functions:
                self._compilation.chill(session, ready.island)
