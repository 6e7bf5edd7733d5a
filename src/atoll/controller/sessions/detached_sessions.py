"""Detached sessions: their scripts have ended, and their submitted work continues for a limited time.

A session with a named run and a time to be detached does not close when its proxy is lost. It is DETACHED until its
launches have ended and the arrays that it has published are complete, at most for this time. Then it closes like each
other session. Its name is free for another session at that time.

A detached session has no proxy, so nothing can be sent to the hosts in its name. If an island that it uses fails, it
ends, and a launch fails if it needs bytes that the proxy has not sent.
"""

from __future__ import annotations

from collections.abc import Container

from atoll.cluster.lifecycle import IslandFailed
from atoll.controller.sessions.sessions import Sessions
from atoll.controller.state import ClusterState
from atoll.errors import Code, Status
from atoll.launch.failures import Failures
from atoll.migration.suspensions import Suspensions
from atoll.protocol import messages as m
from atoll.quantities import counted
from atoll.state.durations import Durations
from atoll.state.session import Session
from atoll.state.session_states import SessionState
from atoll.state.tenants import Tenant

MAX_DETACHED = 64  # sessions of a tenant
# Bytes of the script that have not arrived after this time were lost with its proxy. It counts while the hosts are
# connected: after a restart of the controller, they first have to connect again, and repeat what has arrived.
ARRIVAL_SECONDS = 5.0


class DetachedSessions:
    """The detached sessions, and the times at which they end at the latest."""

    def __init__(self, state: ClusterState, sessions: Sessions, failures: Failures, suspensions: Suspensions) -> None:
        self.until: dict[int, float] = {}  # by session
        self._open = state.sessions
        self._connections = state.connections
        self._outbox = state.outbox
        self._history = state.history
        self._sessions = sessions
        self._failures = failures
        self._suspensions = suspensions
        self._awaiting: Durations[int] = Durations()  # sessions whose launches wait for bytes

    def holder(self, tenant: Tenant, name: str) -> Session | None:
        """Return the session of the tenant whose run has the name, or None."""
        own = (each for each in self._open.values() if each.run.name == name and each.tenant is tenant)
        return next(own, None) if name else None

    def held(self) -> set[tuple[Tenant, str]]:
        """Return the names of runs that sessions have, with their tenants."""
        return {(each.tenant, each.run.name) for each in self._open.values() if each.run.name}

    def client_left(self, number: int) -> None:
        """Detach the session whose client has left, or close it if it cannot be detached."""
        session = self._open.get(number)
        if session is None or not self._detach(session):
            self._sessions.close(number)

    def client_silent(self, number: int, status: Status) -> None:
        """Detach or end the session whose proxy is silent. The proxy gets `status` in case it still runs."""
        connection = self._connections.sessions.get(number)
        session = self._open.get(number)
        if session is None or connection is None or not self._detach(session):
            self._sessions.end(number, status)
            return
        self._outbox.send(connection, m.Closing(status))
        self._outbox.close(connection, f"session {number} is detached: {status}")

    def _detach(self, session: Session) -> bool:
        """Detach the session. Return whether that is possible."""
        if not session.run.detach:
            return False
        if sum(self._open[number].tenant is session.tenant for number in self.until) >= MAX_DETACHED:
            return False
        self._suspensions.client_left(session)
        if session.state is not SessionState.RUNNING:
            return False
        number = session.number
        session.enter(SessionState.DETACHED)
        session.tenant.left()
        self._sessions.leases.forget(number)
        self._connections.sessions.pop(number, None)
        self.until[number] = self._outbox.seconds + session.run.detach
        text = f"{session.run.name}: {_work_of(session)}"
        self._history.record("session detached", text, -1, number, session.tenant.name)
        return True

    def proceed(self, waiting: Container[int]) -> None:
        """Close the sessions that have no work left. `waiting` are the sessions with messages to be handled."""
        for number in list(self.until):
            session = self._open[number]
            if not (session.in_flight or session.publishing or session.in_steps or number in waiting):
                self._sessions.close(number)

    def tick(self, now: float) -> None:
        """End the sessions whose time is over, and fail launches that wait for bytes of a script that has ended."""
        for number, until in list(self.until.items()):
            session = self._open[number]
            if until <= now:
                text = (
                    f"{session.name} was detached for {session.run.detach:.0f} s, and {_work_of(session)} had not ended"
                )
                self._sessions.close(number, Status(Code.DEADLINE_EXCEEDED, text))
        waits = [number for number in self.until if self._awaits_bytes_of_present_hosts(self._open[number])]
        for number, seconds in self._awaiting.update(now, waits).items():
            if seconds >= ARRIVAL_SECONDS:
                session = self._open[number]
                gone = Status(Code.CANCELLED, f"the script of {session.name} has ended")
                self._failures.feeds_lost(list(session.feeds.awaited.items()), gone)
                self._failures.fail_without_inputs()

    def _awaits_bytes_of_present_hosts(self, session: Session) -> bool:
        """Return whether launches wait for bytes of the script, and all of their hosts could report the arrival."""
        hosts = {host for host, _ in session.feeds.awaited}
        return bool(hosts) and hosts <= self._connections.present_hosts().keys()

    def island_failed(self, lost: IslandFailed) -> None:
        """End the detached sessions that use the island, since no proxy can compile their functions again."""
        for number in list(self.until):
            session = self._open[number]
            locations = session.devices.locations
            if any(locations[device].island == lost.island for device in session.devices.used):
                text = f"{session.name} is detached, and island {lost.island} has failed: {lost.status.message}"
                self._sessions.close(number, Status(Code.DATA_LOSS, text))

    def session_closed(self, session: Session) -> None:
        self.until.pop(session.number, None)


def held_text(session: Session, name: str) -> str:
    """Return why another session cannot have the name now, and what to do."""
    if session.state is SessionState.DETACHED:
        return (
            f"{name} still runs: {session.name} is detached, and {_work_of(session)} had not ended. Wait for it, "
            f"or end it with `atoll end-session {session.number}`"
        )
    return (
        f"{name} is attached to {session.name}, process {session.pid}. End that script, or end its session with "
        f"`atoll end-session {session.number}`"
    )


def _work_of(session: Session) -> str:
    """Return the work of a session that has not ended."""
    return f"{counted(session.in_flight, 'launch')} and {counted(session.publishing, 'version')} of arrays"
