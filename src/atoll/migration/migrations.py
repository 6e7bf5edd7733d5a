"""Migrations: move virtual devices of a live session to other physical devices, with their arrays and functions.

See sections 4.1 and 4.2 of the paper. The client does not notice a migration: its handles, arrays and compiled
functions stay the same, and its requests wait. A migration has these stages:

1. *Quiescing*: the controller asks the proxy to hold its client back. Its reply follows everything it sent before.
2. *Draining*: the launches of the session run to their end at the old places.
3. *Compiling*: the proxy sends the sources of the functions that move, and they are compiled for the new places.
4. *Copying*: each array is copied to its new place, under an internal handle.
5. In one step, the copies take the arrays' handles, programs are lowered again, and the proxy continues.

Nothing changes before the last step, so the session continues in its old place if a migration fails. Resuming a
suspended session (`migration.suspensions`) begins at the second stage, and restores arrays instead of copying them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

from atoll.cluster.lifecycle import IslandDrained, IslandFailed
from atoll.cluster.state_machine import StateMachine
from atoll.errors import OK, Code, Status, StatusError
from atoll.launch.compilation import Compilation
from atoll.launch.launches import Launches
from atoll.launch.registry import ProgramRegistry
from atoll.launch.shared_state import SharedState
from atoll.migration.array_spiller import ArraySpiller
from atoll.migration.internal_programs import InternalPrograms
from atoll.migration.movers import CopyingMover, Mover, RestoringMover
from atoll.migration.rules import Changes, check_changes, check_size
from atoll.protocol import messages as m
from atoll.protocol.number_ranges import COPY_HANDLES
from atoll.state.compiled_functions import DeviceAssignment, function_name, hosts_of, islands_of
from atoll.state.durations import Durations
from atoll.state.programs import device_groups
from atoll.state.session import Session
from atoll.state.session_states import SessionState

# For a proxy to hold its client back.
QUIESCE_SECONDS = 10.0
# For the launches of a session to end.
DRAIN_SECONDS = 60.0
# For functions to be compiled, and for arrays to be copied.
WORK_SECONDS = 300.0


class MigrationState(IntEnum):
    """The state of a migration that is under way."""

    QUIESCING = 0  # its proxy has yet to hold back its client
    DRAINING = 1  # its launches have yet to end
    COMPILING = 2  # its functions are being compiled at the destination
    COPYING = 3  # its arrays are being copied or restored


_S = MigrationState
TRANSITIONS: dict[MigrationState, frozenset[MigrationState]] = {
    _S.QUIESCING: frozenset({_S.DRAINING}),
    _S.DRAINING: frozenset({_S.COMPILING}),
    _S.COMPILING: frozenset({_S.COPYING}),
    _S.COPYING: frozenset(),
}

# For each state, the seconds that a migration may be in it.
_SECONDS = {
    MigrationState.QUIESCING: QUIESCE_SECONDS,
    MigrationState.DRAINING: DRAIN_SECONDS,
    MigrationState.COMPILING: WORK_SECONDS,
    MigrationState.COPYING: WORK_SECONDS,
}


@dataclass(eq=False)
class Migration(StateMachine[MigrationState]):
    """A session's migration.

    `plan()` returns the new locations, or raises StatusError if they are impossible. It is called again when the
    session has no unfinished work. `then(status)` is called once, at the end.
    """

    transitions = TRANSITIONS
    number: int
    session: Session
    plan: Callable[[], Changes]
    then: Callable[[Status], None]
    changes: Changes
    islands: set[int]  # whose loss ends the migration
    mover: Mover
    state: MigrationState = MigrationState.QUIESCING
    functions: dict[int, str] = field(default_factory=dict)  # their new names

    def _described(self) -> str:
        return f"the migration of {self.session.name}"


class Migrations:
    """The running migrations, at most one per session.

    `has_queries(session)` returns whether a session waits for replies to queries.
    """

    def __init__(
        self,
        shared: SharedState,
        launches: Launches,
        compilation: Compilation,
        programs: ProgramRegistry,
        internal: InternalPrograms,
        spiller: ArraySpiller,
        has_queries: Callable[[int], bool],
    ) -> None:
        self.under_way: dict[int, Migration] = {}  # by session
        self._resources = shared.resources
        self._compilation = compilation
        self._has_queries = has_queries
        self._launches = launches
        self._memory_waits = launches.reservations.waits
        self._programs = programs
        self._internal = internal
        self._spiller = spiller
        self._outbox = shared.outbox
        self._states: Durations[tuple[int, MigrationState]] = Durations()  # by migration and state
        self._next_handle = COPY_HANDLES.start  # of copies
        self._next_number = 1

    # ---- events

    def check(self, session: Session, plan: Callable[[], Changes]) -> tuple[Changes, set[int]]:
        """Return the changes and the islands they affect. Raises StatusError if the migration is impossible now."""
        self.check_free(session)
        if session.is_suspended:
            raise StatusError(Code.FAILED_PRECONDITION, f"session {session.number} is {session.suspension_text}")
        return check_changes(session, plan(), self._resources)

    def begin(self, session: Session, plan: Callable[[], Changes], then: Callable[[Status], None]) -> None:
        """Begin a migration. Raises StatusError if it is impossible."""
        changes, islands = self.check(session, plan)
        copies = CopyingMover(self._internal, self._launches, self._outbox, self._handle)
        migration = Migration(self.next_number(), session, plan, then, changes, islands, copies)
        self.under_way[session.number] = migration
        self._outbox.to_session(session.number, m.Quiesce(migration.number))

    def _handle(self) -> int:
        """Return a handle for a copy."""
        self._next_handle += 1
        return self._next_handle - 1

    def next_number(self) -> int:
        """Return a new number for quiescing a session."""
        self._next_number += 1
        return self._next_number - 1

    def check_free(self, session: Session) -> None:
        """Raise StatusError if the session is being moved, has no client, or is too large."""
        if session.number in self.under_way:
            raise StatusError(Code.FAILED_PRECONDITION, f"session {session.number} is being moved already")
        if session.state is SessionState.DETACHED:
            text = f"{session.name} is detached: its work cannot be moved without its script, and soon ends"
            raise StatusError(Code.FAILED_PRECONDITION, text)
        check_size(session)

    def concern(self, session: Session, island: int) -> bool:
        """Return whether the session is moving to the island or from it."""
        migration = self.under_way.get(session.number)
        return migration is not None and island in migration.islands

    def begin_resume(self, session: Session, plan: Callable[[], Changes], then: Callable[[Status], None]) -> None:
        """Begin to resume a suspended session, whose proxy is quiesced. If this fails, the session stays suspended."""
        changes, islands = check_changes(session, plan(), self._resources, may_stay=True)
        migration = Migration(
            self.next_number(),
            session,
            plan,
            then,
            changes,
            islands,
            RestoringMover(self._spiller),
            MigrationState.DRAINING,
        )
        self.under_way[session.number] = migration

    def quiesced(self, session: Session, number: int) -> None:
        """Handle that the proxy holds its client back. Everything it sent before has arrived."""
        migration = self.under_way.get(session.number)
        if migration is not None and migration.number == number and migration.state is MigrationState.QUIESCING:
            migration.enter(MigrationState.DRAINING)

    def proceed(self) -> None:
        """Advance the migrations as far as possible."""
        for migration in list(self.under_way.values()):
            try:
                if migration.state is MigrationState.DRAINING and self.has_no_work(migration.session):
                    self._compile(migration)
                if migration.state is MigrationState.COMPILING and self._is_compiled(migration.session):
                    self._copy(migration)
                if migration.state is MigrationState.COPYING and migration.mover.is_ready(migration.session):
                    self._take_over(migration)
            except StatusError as error:
                self._abort(migration, error.status)

    def tick(self, now: float) -> None:
        """Abort migrations that stay in one stage for too long."""
        migrations = {(each.number, each.state): each for each in self.under_way.values()}
        for key, seconds in self._states.update(now, migrations).items():
            migration = migrations[key]
            if seconds <= _SECONDS[migration.state]:
                continue
            session = migration.session
            text = {
                MigrationState.QUIESCING: "its proxy has not replied",
                MigrationState.DRAINING: f"{session.in_flight} of its launches have not ended",
                MigrationState.COMPILING: f"{len(session.migrating)} of its functions have not been compiled",
                MigrationState.COPYING: "its arrays have not been copied",
            }[migration.state]
            self._abort(migration, Status(Code.DEADLINE_EXCEEDED, f"{text} after {seconds:.0f} s"))

    def abort_on_island(self, lost: IslandFailed | IslandDrained) -> None:
        for migration in list(self.under_way.values()):
            if lost.island in migration.islands:
                self._abort(migration, lost.status)

    def session_closed(self, session: Session) -> None:
        migration = self.under_way.pop(session.number, None)
        if migration is not None:
            for name in migration.functions.values():
                self._compilation.drop_reference(name)
            migration.then(Status(Code.CANCELLED, f"{migration.session.name} has ended"))

    # ---- stages

    def has_no_work(self, session: Session) -> bool:
        """Whether the session has no unfinished work. Raises FAILED_PRECONDITION if it waits for memory."""
        if self._memory_waits.is_waiting(session.number):
            # Its client may be about to release memory, which it cannot do while it is held back.
            raise StatusError(Code.FAILED_PRECONDITION, "it waits for memory")
        return not (
            session.in_flight
            or session.publishing
            or session.reading
            or self._compilation.is_waiting(session.number)
            or self._has_queries(session.number)
        )

    def _is_compiled(self, session: Session) -> bool:
        """Whether all functions are compiled. Raises StatusError if one cannot be."""
        if session.migration_failure is not None:
            session.migration_failure.raise_if_error()
        return not session.migrating

    def _compile(self, migration: Migration) -> None:
        session = migration.session
        if not session.is_suspended:  # more arrays may have arrived before its proxy was quiesced
            check_size(session)
        migration.changes, migration.islands = check_changes(
            session, migration.plan(), self._resources, may_stay=session.is_suspended
        )
        after = {**session.devices.locations, **migration.changes}
        asked: list[tuple[int, tuple[int, ...]]] = []
        for function, request in session.function_requests.items():
            if function not in session.functions:
                continue
            locations: DeviceAssignment = tuple(tuple(after[device] for device in row) for row in request.assignment)
            name = function_name(request.content, locations, session.tenant.name)
            if name == session.functions[function]:
                continue
            self._compilation.functions.acquire(name)
            self._compilation.functions.locations[name] = locations
            migration.functions[function] = name
            session.migrating[function] = name
            asked.append((function, tuple(sorted(hosts_of(locations)))))
        migration.enter(MigrationState.COMPILING)
        if asked:
            self._outbox.to_session(session.number, m.SendSources(tuple(asked)))

    def _copy(self, migration: Migration) -> None:
        migration.enter(MigrationState.COPYING)
        migration.mover.begin(migration.session, migration.changes)

    def _take_over(self, migration: Migration) -> None:
        """Change the places of the devices. This cannot fail, since everything is at its new place."""
        session = migration.session
        del self.under_way[session.number]
        migration.mover.free_old_places(migration.session)
        session.devices.relocate(migration.changes)
        for function, name in migration.functions.items():
            old = session.functions.get(function)
            if old is None:
                self._compilation.drop_reference(name)
                continue
            session.add_function(function, name, islands_of(self._compilation.functions.locations[name]))
            self._compilation.replaced(session, old)
        migration.mover.take_handles(migration.session)
        self._lower_again(session, migration.changes)
        hosts = tuple((device, location.host) for device, location in migration.changes.items())
        self._outbox.to_session(session.number, m.Migrated(migration.number, hosts))
        migration.then(OK)

    def _lower_again(self, session: Session, changes: Changes) -> None:
        for number, definition in session.definitions.items():
            old = session.programs.get(number)  # None for a session that an earlier cluster persisted
            if old is not None and all(changes.keys().isdisjoint(group) for group in device_groups(definition)):
                continue
            self._programs.lower_again(session, number)

    def _abort(self, migration: Migration, status: Status) -> None:
        """Abort a migration. The session continues in its old place."""
        session = migration.session
        if self.under_way.pop(session.number, None) is None:
            return
        session.migrating.clear()
        session.migration_failure = None
        for name in migration.functions.values():
            self._compilation.forget(session, name)
            self._compilation.drop_reference(name)
        migration.mover.abort(session, status)
        if not session.is_suspended:
            self._outbox.to_session(session.number, m.Migrated(migration.number, ()))
        migration.then(status)
