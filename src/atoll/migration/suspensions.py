"""Suspended sessions: their arrays are spilled, and other sessions use their devices (paper, 4.1 and 4.3).

The session's proxy stays quiesced, so its script waits in its next request for as long as necessary. The controller
keeps the session's handles, functions, programs and slices. The contents of its arrays are in host memory or in files.
The session is resumed as a migration that restores its arrays (`migration.movers`), at the same places or on other
islands of the same shape. If there is no space, it waits, and its state says what it waits for.

Nothing changes before all arrays are spilled, so the session continues if a suspension fails. If resuming fails, the
session stays suspended.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from atoll.cluster.lifecycle import IslandDrained, IslandFailed
from atoll.cluster.slice_placement import Slices
from atoll.errors import OK, Code, Status, StatusError
from atoll.launch.launches import Launches
from atoll.launch.shared_state import SharedState
from atoll.migration.array_spiller import ArraySpiller
from atoll.migration.migrations import DRAIN_SECONDS, QUIESCE_SECONDS, WORK_SECONDS, Migrations
from atoll.migration.rules import Changes, MemoryNeed, check_size, current_places, places_on
from atoll.protocol import messages as m
from atoll.quantities import human_bytes
from atoll.state.durations import Durations
from atoll.state.session import Session
from atoll.state.session_states import SessionState
from atoll.telemetry.history import History

# By state of a session: how long it may take, and the reason to report after that.
_DEADLINES = {
    SessionState.QUIESCING: (QUIESCE_SECONDS, "its proxy has not replied"),
    SessionState.DRAINING: (DRAIN_SECONDS, "{in_flight} of its launches have not ended"),
    SessionState.SPILLING: (WORK_SECONDS, "its arrays have not been copied"),
}
_SUSPENDED = (SessionState.SUSPENDED, SessionState.WAITING)


class _Resumption(msgspec.Struct, eq=False):
    """A request to resume a session: on which islands, how long it may wait for space, and whom to notify."""

    islands: tuple[int, ...]
    seconds: float
    then: Callable[[Status], None]
    since: float | None = None  # time of the first tick that looked for space


class Suspension(msgspec.Struct, eq=False):
    """The suspension of a session. `then(status)` is called once, when the session is suspended or cannot be."""

    number: int
    session: Session
    then: Callable[[Status], None]
    by_system: bool = False  # it is resumed as soon as there is space
    need: MemoryNeed = msgspec.field(default_factory=MemoryNeed)
    resumption: _Resumption | None = None


class Suspensions:
    """All suspensions, at most one per session."""

    def __init__(
        self,
        shared: SharedState,
        launches: Launches,
        migrations: Migrations,
        spiller: ArraySpiller,
        slices: Slices,
        history: History,
    ) -> None:
        self.by_session: dict[int, Suspension] = {}
        self._migrations = migrations
        self._spiller = spiller
        self._resources = shared.resources
        self._slices = slices
        self._reservations = launches.reservations
        self._history = history
        self._outbox = shared.outbox
        self._directory = shared.settings.suspend_directory  # of hosts; "": their own
        self._patience = shared.settings.suspended_seconds  # that proxies of sessions on disk wait for a cluster
        self._states: Durations[tuple[int, SessionState]] = Durations()
        self._now = 0.0

    # ---- requests

    def suspend(
        self, session: Session, to_files: bool, then: Callable[[Status], None], by_system: bool = False
    ) -> None:
        """Begin to suspend a session. Raises StatusError if it is suspended or being moved, or too large."""
        self._migrations.check_free(session)
        before = self.by_session.get(session.number)
        if before is not None:
            before.by_system = before.by_system and by_system  # after a user's request, only a user resumes it
            text = f"session {session.number} is {session.suspension_text} already"
            raise StatusError(Code.FAILED_PRECONDITION, text)
        suspension = Suspension(self._migrations.next_number(), session, then, by_system)
        self.by_session[session.number] = suspension
        session.enter(SessionState.QUIESCING)
        session.is_on_disk = to_files
        self._outbox.to_session(session.number, m.Quiesce(suspension.number))

    def resume(
        self, session: Session, islands: tuple[int, ...], seconds: float, then: Callable[[Status], None]
    ) -> None:
        """Resume a session as soon as there is space, and wait at most `seconds` for it.

        `islands` replaces the session's islands one by one; if it is empty, the session resumes in its old place.
        Raises FAILED_PRECONDITION if the session is not suspended or can never be there.
        """
        suspension = self.by_session.get(session.number)
        if suspension is None or session.state not in _SUSPENDED:
            state = session.suspension_text or "not suspended"
            raise StatusError(Code.FAILED_PRECONDITION, f"session {session.number} is {state}")
        self._plan(session, islands)  # raises if this is impossible
        before, suspension.resumption = suspension.resumption, _Resumption(islands, seconds, then)
        if before is not None:
            before.then(Status(Code.CANCELLED, "another request to resume the session replaced this one"))
        if session.state is not SessionState.WAITING:
            session.enter(SessionState.WAITING)
        session.waits_for = ""
        self._try_to_resume(suspension)

    def needs(self, session: Session, island: int) -> bool:
        """Whether the session would lose anything with the island. A session on disk would not.

        Published arrays do not count: they are copied when no session needs the island.
        """
        if session.is_vault:
            return False
        if session.state in _SUSPENDED:
            hosts = set(self._resources.hosts_of(island))
            spilled_arrays = (entry.spilled for entry in session.directory.entries.values())
            return any(each is not None and not hosts.isdisjoint(each.memory_hosts) for each in spilled_arrays)
        return any(location.island == island for location in session.devices.locations.values())

    def being_suspended(self) -> list[Session]:
        """Return the sessions whose memory will soon be free."""
        on_the_way = (SessionState.QUIESCING, SessionState.DRAINING, SessionState.SPILLING)
        return [each.session for each in self.by_session.values() if each.session.state in on_the_way]

    def client_left(self, session: Session) -> None:
        """Abort the suspension of a session whose client has left, unless its arrays are spilled: it is RUNNING."""
        if session.state in _DEADLINES:
            self._abort(self.by_session[session.number], Status(Code.CANCELLED, f"the script of {session.name} ended"))

    def on_disk(self) -> list[tuple[Session, bool]]:
        """Return the sessions that are suspended on disk, and whether the cluster suspended them by itself."""
        found = [(each.session, each.by_system) for each in self.by_session.values()]
        return [each for each in found if each[0].is_on_disk and each[0].state in _SUSPENDED]

    def add_persisted(self, session: Session, by_system: bool) -> None:
        """Add a session that an earlier cluster suspended on disk."""
        suspension = Suspension(self._migrations.next_number(), session, _ignore, by_system)
        suspension.need = MemoryNeed.of(session)
        self.by_session[session.number] = suspension
        session.is_on_disk = True
        self._enter_suspended(session)

    def quiesced(self, session: Session, number: int) -> None:
        """Handle that the proxy holds its client back. Everything it sent before has arrived."""
        suspension = self.by_session.get(session.number)
        if suspension is not None and suspension.number == number and session.state is SessionState.QUIESCING:
            session.enter(SessionState.DRAINING)

    # ---- time, and losses

    def proceed(self) -> None:
        """Advance the suspensions as far as possible."""
        for suspension in list(self.by_session.values()):
            if suspension.session.state is SessionState.DRAINING:
                try:
                    if self._migrations.has_no_work(suspension.session):
                        self._spill(suspension)
                except StatusError as error:
                    self._abort(suspension, error.status)

    def tick(self, now: float) -> None:
        """Abort suspensions that take too long, and look for space for waiting sessions. Call this once per second."""
        self._now = now
        states = {
            (each.number, each.session.state): each
            for each in self.by_session.values()
            if each.session.state in _DEADLINES
        }
        for key, seconds in self._states.update(now, states).items():
            suspension, session = states[key], states[key].session
            most, text = _DEADLINES[key[1]]
            if seconds > most:
                text = f"{session.name}: {text.format(in_flight=session.in_flight)} after {seconds:.0f} s"
                self._abort(suspension, Status(Code.DEADLINE_EXCEEDED, text))
        for suspension in self._waiting():
            if suspension.resumption is not None and suspension.resumption.since is None:
                suspension.resumption.since = now
            self._try_to_resume(suspension)

    def _waiting(self) -> Iterator[Suspension]:
        """Yield the sessions to resume: higher priorities first, then those that were suspended first."""
        all_of_them = self.by_session.values()
        found = [each for each in all_of_them if each.session.state is SessionState.WAITING]
        found += [each for each in all_of_them if each.session.state is SessionState.SUSPENDED and each.by_system]
        yield from sorted(found, key=lambda each: (-each.session.tenant.settings.priority, each.number))

    def lose_spilled_arrays(self, lost: IslandFailed | IslandDrained) -> None:
        self._spiller.hosts_failed(set(self._resources.hosts_of(lost.island)), lost.status)

    def session_closed(self, session: Session) -> None:
        suspension = self.by_session.pop(session.number, None)
        self._spiller.session_closed(session)
        if suspension is not None:
            ended = Status(Code.CANCELLED, f"{session.name} has ended")
            if suspension.resumption is not None:
                suspension.resumption.then(ended)
            elif session.state is not SessionState.SUSPENDED:
                suspension.then(ended)

    # ---- suspending

    def _enter_suspended(self, session: Session) -> None:
        session.enter(SessionState.SUSPENDED)
        if session.is_on_disk:
            self._outbox.set_patience(session.number, self._patience)

    def _spill(self, suspension: Suspension) -> None:
        session = suspension.session
        check_size(session)  # more arrays may have arrived before its proxy was quiesced
        session.enter(SessionState.SPILLING)
        handles = [
            handle
            for handle, entry in session.directory.entries.items()
            if entry.is_idle and entry.spec is not None and entry.spec.dtype not in ("token", "opaque")
        ]
        directory = self._directory_of(session) if session.is_on_disk else ""
        self._spiller.spill(session, handles, partial(self._spilled, suspension), directory)

    def _directory_of(self, session: Session) -> str:
        """Return a directory name that no other session of any cluster has."""
        name = f"session-{session.number}-{hashlib.sha256(session.secret.encode()).hexdigest()[:12]}"
        return f"{self._directory}/{name}" if self._directory else name

    def _spilled(self, suspension: Suspension, status: Status) -> None:
        session = suspension.session
        if self.by_session.get(session.number) is not suspension:
            return
        if not status.ok:
            self._abort(suspension, status)
            return
        suspension.need = MemoryNeed.of(session)
        session.devices.are_free = True
        self._enter_suspended(session)
        text = f"{session.name}: {human_bytes(suspension.need.nbytes)}"
        self._history.record("session suspended", text, -1, session.number, session.tenant.name)
        suspension.then(OK)

    def _abort(self, suspension: Suspension, status: Status) -> None:
        """Abort a suspension. The session continues."""
        session = suspension.session
        if self.by_session.pop(session.number, None) is None:
            return
        session.enter(SessionState.RUNNING)
        self._spiller.cancel(session, status)
        self._outbox.to_session(session.number, m.Migrated(suspension.number, ()))
        suspension.then(status)

    # ---- resuming

    def _plan(self, session: Session, islands: tuple[int, ...]) -> Changes:
        """Return the new locations of the devices. Raises StatusError if they cannot be there, now or ever."""
        return places_on(session, islands, self._resources) if islands else current_places(session)

    def _try_to_resume(self, suspension: Suspension) -> None:
        session = suspension.session
        resumption = suspension.resumption
        islands = () if resumption is None else resumption.islands
        try:
            places = self._plan(session, islands)
            lacking = suspension.need.lacking(session, places, self._resources, self._slices, self._reservations)
            if not lacking and suspension.by_system and self._reservations.waits.is_wanted(session.tenant):
                lacking = "sessions of a higher priority"
            if not lacking:
                self._begin_resume(suspension, islands)
                return
        except StatusError as error:
            lacking = error.status.message
        if resumption is None:
            return
        session.waits_for = lacking
        # `since` is None if the request is newer than the last tick.
        has_waited = 0.0 if resumption.since is None else self._now - resumption.since
        if has_waited >= resumption.seconds:
            suspension.resumption = None
            self._enter_suspended(session)
            resumption.then(Status(Code.RESOURCE_EXHAUSTED, f"session {session.number} waits for {lacking}"))

    def _begin_resume(self, suspension: Suspension, islands: tuple[int, ...]) -> None:
        session = suspension.session
        plan = partial(self._plan, session, islands)
        self._migrations.begin_resume(session, plan, partial(self._resumed, suspension))
        session.devices.are_free = False
        session.enter(SessionState.RESUMING)
        if session.is_on_disk:
            self._outbox.set_patience(session.number, 0.0)

    def _resumed(self, suspension: Suspension, status: Status) -> None:
        session = suspension.session
        if self.by_session.get(session.number) is not suspension:
            return
        resumption = suspension.resumption
        if status.ok:
            del self.by_session[session.number]
            session.enter(SessionState.RUNNING)
            self._history.record("session resumed", session.name, -1, session.number, session.tenant.name)
        else:
            session.devices.are_free = True
            suspension.resumption = None
            if suspension.by_system and status.code not in (Code.RESOURCE_EXHAUSTED, Code.FAILED_PRECONDITION):
                suspension.by_system = False  # it would fail again
            self._history.operation(status, "")
            self._enter_suspended(session)
        if resumption is not None:
            resumption.then(status)


def _ignore(status: Status) -> None:
    """Ignore the status, which an earlier cluster reported to the requester."""
