"""Migrations: move virtual devices of a live session to other physical devices, with their arrays and functions.

See sections 4.1 and 4.2 of the paper. The client does not notice a migration: its handles, arrays and compiled
functions stay the same, and its requests wait. A migration has these stages:

1. *Quiescing*: the controller asks the proxy to hold its client back. Its reply follows everything it sent before.
2. *Draining*: the launches of the session run to their end at the old places.
3. *Compiling*: the proxy sends the sources of the functions that move, and they are compiled for the new places.
4. *Copying*: each array is copied to its new place, under an internal handle.
5. *Taking over*: the copies take the arrays' handles, programs are lowered again, and the proxy continues.

Nothing changes before the last stage, which cannot fail, so the session continues in its old place if a migration
fails. Each stage handles some functions, arrays or programs per flush. Resuming a suspended session
(`migration.suspensions`) begins at the second stage, and restores arrays instead of copying them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import islice

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
from atoll.state.stepped_work import taken

# Work in one flush for all migrations together: rounds, with so many functions or programs in each.
_ROUNDS = 4
_FUNCTIONS_AT_ONCE = 64
_PROGRAMS_AT_ONCE = 2

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
    TAKING_OVER = 4  # its devices have moved, and arrays, functions and programs follow


_S = MigrationState
TRANSITIONS: dict[MigrationState, frozenset[MigrationState]] = {
    _S.QUIESCING: frozenset({_S.DRAINING}),
    _S.DRAINING: frozenset({_S.COMPILING}),
    _S.COMPILING: frozenset({_S.COPYING}),
    _S.COPYING: frozenset({_S.TAKING_OVER}),
    _S.TAKING_OVER: frozenset(),
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
    requests: list[int] = field(default_factory=list)  # functions to be named, the next one last
    programs: list[int] = field(default_factory=list)  # to be lowered again, the next one last

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
        self.working: dict[int, None] = {}  # sessions whose migrations continue in the next flush
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
        """Advance the migrations as far as possible, with some of their functions, arrays and programs.

        Sessions take turns.
        """
        late: list[int] = []
        continued: list[int] = []
        left = _ROUNDS
        for number in dict.fromkeys([*self.working, *self.under_way]):
            migration = self.under_way.get(number)
            if not left:
                late.append(number)
            elif migration is not None:
                try:
                    while left and self._advance(migration):
                        left -= 1
                except StatusError as error:
                    self._abort(migration, error.status)
                if not left:
                    continued.append(number)
        self.working.clear()
        self.working.update(dict.fromkeys([*late, *continued]))

    def _advance(self, migration: Migration) -> bool:
        """Do a part of the work, and return whether more can be done now. Raises StatusError if the migration fails."""
        session = migration.session
        match migration.state:
            case MigrationState.DRAINING:
                if not self.has_no_work(session):
                    return False
                self._begin_to_compile(migration)
                return True
            case MigrationState.COMPILING if migration.requests:
                self._compile(migration)
                return True
            case MigrationState.COMPILING if self._is_compiled(session):
                migration.enter(MigrationState.COPYING)
                migration.mover.begin(session, migration.changes)
                return True
            case MigrationState.COPYING:
                if migration.mover.proceed(session, migration.changes):
                    return True
                if not migration.mover.is_ready(session):
                    return False
                self._begin_to_take_over(migration)
                return True
            case MigrationState.TAKING_OVER:
                return self._take_over(migration)
        return False

    def tick(self, now: float) -> None:
        """Abort migrations that stay in one stage for too long."""
        migrations = {(each.number, each.state): each for each in self.under_way.values()}
        for key, seconds in self._states.update(now, migrations).items():
            migration = migrations[key]
            if seconds <= _SECONDS.get(migration.state, math.inf):
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
            if lost.island in migration.islands and migration.state is not MigrationState.TAKING_OVER:
                self._abort(migration, lost.status)

    def session_closed(self, session: Session) -> None:
        migration = self.under_way.pop(session.number, None)
        self.working.pop(session.number, None)
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

    def _begin_to_compile(self, migration: Migration) -> None:
        session = migration.session
        if not session.is_suspended:  # more arrays may have arrived before its proxy was quiesced
            check_size(session)
        migration.changes, migration.islands = check_changes(
            session, migration.plan(), self._resources, may_stay=session.is_suspended
        )
        migration.requests = list(reversed(session.function_requests))
        migration.enter(MigrationState.COMPILING)

    def _compile(self, migration: Migration) -> None:
        """Have some functions be compiled for their new places."""
        session = migration.session
        after = {**session.devices.locations, **migration.changes}
        asked: list[tuple[int, tuple[int, ...]]] = []
        for function in taken(migration.requests, _FUNCTIONS_AT_ONCE):
            request = session.function_requests.get(function)
            if request is None or function not in session.functions:
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
        if asked:
            self._outbox.to_session(session.number, m.SendSources(tuple(asked)))

    def _begin_to_take_over(self, migration: Migration) -> None:
        """Change the places of the devices. From here on, the migration cannot fail: all is at its new place."""
        session = migration.session
        migration.enter(MigrationState.TAKING_OVER)
        migration.mover.begin_to_take(session)
        session.devices.relocate(migration.changes)
        migration.programs = list(reversed(session.definitions))

    def _take_over(self, migration: Migration) -> bool:
        """Let some functions, arrays and programs follow their devices. Return whether others are left."""
        session = migration.session
        if migration.functions:
            for function in list(islice(migration.functions, _FUNCTIONS_AT_ONCE)):
                self._replace_function(session, function, migration.functions.pop(function))
            return True
        if migration.mover.take(session):
            return True
        for number in taken(migration.programs, _PROGRAMS_AT_ONCE):
            self._lower_again(session, number, migration.changes)
        if migration.programs:
            return True
        del self.under_way[session.number]
        hosts = tuple((device, location.host) for device, location in migration.changes.items())
        self._outbox.to_session(session.number, m.Migrated(migration.number, hosts))
        migration.then(OK)
        return False

    def _replace_function(self, session: Session, function: int, name: str) -> None:
        old = session.functions.get(function)
        if old is None:
            self._compilation.drop_reference(name)
            return
        session.add_function(function, name, islands_of(self._compilation.functions.locations[name]))
        self._compilation.replaced(session, old)

    def _lower_again(self, session: Session, number: int, changes: Changes) -> None:
        definition = session.definitions.get(number)
        if definition is None:  # only a faulty proxy releases it meanwhile
            return
        old = session.programs.get(number)  # None for a session that an earlier cluster persisted
        if old is None or not all(changes.keys().isdisjoint(group) for group in device_groups(definition)):
            self._programs.lower_again(session, number)

    def _abort(self, migration: Migration, status: Status) -> None:
        """Abort a migration. The session continues in its old place."""
        session = migration.session
        if self.under_way.pop(session.number, None) is None:
            return
        self.working.pop(session.number, None)
        session.migrating.clear()
        session.migration_failure = None
        for name in migration.functions.values():
            self._compilation.forget(session, name)
            self._compilation.drop_reference(name)
        migration.mover.abort(session, status)
        if not session.is_suspended:
            self._outbox.to_session(session.number, m.Migrated(migration.number, ()))
        migration.then(status)
