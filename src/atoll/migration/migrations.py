"""Migrations: virtual devices of a live session get other physical ones, with all that is on them (paper, 4.1, 4.2).

The client does not notice. Its handles, arrays and compiled functions are what they were; what it does meanwhile waits.

1. *Quiescing*: the proxy is asked to hold its client back. Its answer comes after all that it has sent.
2. *Draining*: what the session has launched runs to its end where it was launched.
3. *Compiling*: the proxy sends the sources of the functions that move; they are compiled for their new places.
4. *Copying*: each array is copied to its new place, under a handle of the controller's own.
5. Then all at once: the copies take the arrays' handles, programs are lowered anew, the proxy goes on.

Up to the last step nothing has changed: a migration that fails is over, and the session goes on where it was. A session
that is suspended (`migration.suspensions`) begins at the third step, and its arrays come from where they are spilled.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.cluster.lifecycle import IslandFailed
from atoll.cluster.resources import ResourceManager
from atoll.errors import OK, Code, Status, StatusError
from atoll.migration.array_spiller import ArraySpiller
from atoll.migration.controller import Compiler, Launches, Out, Programs, Questions
from atoll.migration.device_copies import DeviceCopies
from atoll.migration.internal_programs import InternalPrograms
from atoll.migration.migration import Migration, Stage
from atoll.migration.restore import Restore
from atoll.migration.rules import Changes, check_changes
from atoll.protocol import messages as m
from atoll.scheduling.compiled_functions import DeviceAssignment, function_name, hosts_of
from atoll.scheduling.durations import Durations
from atoll.scheduling.programs import device_groups
from atoll.scheduling.session import Session

# For a proxy to hold its client back.
QUIESCE_SECONDS = 10.0
# For a session to be still: what it has launched must end.
REST_SECONDS = 60.0
# For functions to be compiled, and for arrays to be copied.
WORK_SECONDS = 300.0


_SECONDS = {
    Stage.QUIESCING: QUIESCE_SECONDS,
    Stage.DRAINING: REST_SECONDS,
    Stage.COMPILING: WORK_SECONDS,
    Stage.COPYING: WORK_SECONDS,
}


class Migrations:
    """All that are under way, one a session."""

    def __init__(
        self,
        resources: ResourceManager,
        compilation: Compiler,
        queries: Questions,
        launcher: Launches,
        programs: Programs,
        internal: InternalPrograms,
        spiller: ArraySpiller,
        outbox: Out,
    ) -> None:
        self.under_way: dict[int, Migration] = {}  # by session
        self._resources = resources
        self._compilation = compilation
        self._queries = queries
        self._launcher = launcher
        self._programs = programs
        self._internal = internal
        self._spiller = spiller
        self._outbox = outbox
        self._stages: Durations[tuple[int, Stage]] = Durations()  # by migration and stage
        self._next_handle = m.INTERNAL_HANDLES  # for copies, which are buffers of the session's
        self._next_number = 1

    # ---- events

    def check(self, session: Session, plan: Callable[[], Changes]) -> tuple[Changes, set[int]]:
        """What would change, and on which islands. Raises StatusError where there can be no such migration now."""
        self.check_free(session)
        if session.suspended:
            raise StatusError(Code.FAILED_PRECONDITION, f"session {session.number} is {session.suspended}")
        return check_changes(session, plan(), self._resources)

    def begin(self, session: Session, plan: Callable[[], Changes], then: Callable[[Status], None]) -> None:
        """Begins a migration. Raises StatusError where it cannot be."""
        changes, islands = self.check(session, plan)
        copies = DeviceCopies(self._internal, self._launcher, self._outbox, self._handle)
        migration = Migration(self.next_number(), session, plan, then, changes, islands, copies)
        self.under_way[session.number] = migration
        self._outbox.to_session(session.number, m.Quiesce(migration.number))

    def _handle(self) -> int:
        """For a copy."""
        self._next_handle += 1
        return self._next_handle - 1

    def next_number(self) -> int:
        """For whoever quiesces a session."""
        self._next_number += 1
        return self._next_number - 1

    def check_free(self, session: Session) -> None:
        """Raises FAILED_PRECONDITION for a session that is being moved."""
        if session.number in self.under_way:
            raise StatusError(Code.FAILED_PRECONDITION, f"session {session.number} is being moved already")

    def begin_resume(self, session: Session, plan: Callable[[], Changes], then: Callable[[Status], None]) -> None:
        """The same for a suspended session, whose proxy is quiesced. Where it fails, the session stays suspended."""
        changes, islands = check_changes(session, plan(), self._resources, can_persist=True)
        migration = Migration(
            self.next_number(), session, plan, then, changes, islands, Restore(self._spiller), Stage.DRAINING
        )
        self.under_way[session.number] = migration

    def quiesced(self, session: Session, number: int) -> None:
        """The proxy holds its client back; what it has sent before has come."""
        migration = self.under_way.get(session.number)
        if migration is not None and migration.number == number and migration.stage is Stage.QUIESCING:
            migration.stage = Stage.DRAINING

    def proceed(self) -> None:
        """Takes the migrations as far as they can go now."""
        for migration in list(self.under_way.values()):
            try:
                if migration.stage is Stage.DRAINING and self.is_still(migration.session):
                    self._compile(migration)
                if migration.stage is Stage.COMPILING and self._is_compiled(migration.session):
                    self._copy(migration)
                if migration.stage is Stage.COPYING and migration.mover.are_there(migration):
                    self._take_over(migration)
            except StatusError as error:
                self._give_up(migration, error.status)

    def tick(self, now: float) -> None:
        """Gives up what has stayed in one stage for too long, and says whom or what it waited for."""
        migrations = {(each.number, each.stage): each for each in self.under_way.values()}
        for key, seconds in self._stages.update(now, migrations).items():
            migration = migrations[key]
            if seconds <= _SECONDS[migration.stage]:
                continue
            session = migration.session
            text = {
                Stage.QUIESCING: "its proxy does not answer",
                Stage.DRAINING: f"{session.in_flight} of its launches have not ended",
                Stage.COMPILING: f"{len(session.migrating)} of its functions are not compiled yet",
                Stage.COPYING: "its arrays are not copied yet",
            }[migration.stage]
            self._give_up(migration, Status(Code.DEADLINE_EXCEEDED, f"{session.name}: {text}, after {seconds:.0f} s"))

    def island_failed(self, lost: IslandFailed) -> None:
        for migration in list(self.under_way.values()):
            if lost.island in migration.islands:
                self._give_up(migration, lost.status)

    def session_closed(self, session: Session) -> None:
        migration = self.under_way.pop(session.number, None)
        if migration is not None:
            for name in migration.functions.values():
                self._compilation.drop_reference(name)
            migration.then(Status(Code.CANCELLED, f"{migration.session.name} has ended"))

    # ---- stages

    def is_still(self, session: Session) -> bool:
        """Whether nothing of the session is under way. Raises FAILED_PRECONDITION where it waits for memory."""
        if self._launcher.memory.waits.is_waiting(session.number):
            # Its client may be about to release something: held back, it cannot.
            raise StatusError(Code.FAILED_PRECONDITION, "it waits for memory")
        return not (
            session.in_flight
            or self._compilation.is_waiting(session.number)
            or self._queries.is_waiting(session.number)
        )

    def _is_compiled(self, session: Session) -> bool:
        """Whether all functions are there. Raises StatusError where one cannot be."""
        if session.migration_failure is not None:
            session.migration_failure.raise_if_error()
        return not session.migrating

    def _compile(self, migration: Migration) -> None:
        session = migration.session
        migration.changes, migration.islands = check_changes(
            session, migration.plan(), self._resources, can_persist=bool(session.suspended)
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
        migration.stage = Stage.COMPILING
        if asked:
            self._outbox.to_session(session.number, m.SendSources(tuple(asked)))

    def _copy(self, migration: Migration) -> None:
        migration.stage = Stage.COPYING
        migration.mover.begin(migration)

    def _take_over(self, migration: Migration) -> None:
        """From here on everything is where it was to go: this cannot fail."""
        session = migration.session
        del self.under_way[session.number]
        migration.mover.leave(migration)
        session.devices.relocate(migration.changes)
        for function, name in migration.functions.items():
            old = session.functions.get(function)
            if old is None:
                self._compilation.drop_reference(name)
                continue
            session.functions[function] = name
            self._compilation.drop_reference(old)
        migration.mover.arrive(migration)
        self._lower_again(session, migration.changes)
        hosts = tuple((device, location.host) for device, location in migration.changes.items())
        self._outbox.to_session(session.number, m.Migrated(migration.number, hosts))
        migration.then(OK)

    def _lower_again(self, session: Session, changes: Changes) -> None:
        for number, definition in session.definitions.items():
            old = session.programs.get(number)  # None where an earlier cluster has left the session
            if old is not None and all(changes.keys().isdisjoint(group) for group in device_groups(definition)):
                continue
            self._programs.lower_again(session, number)

    def _give_up(self, migration: Migration, status: Status) -> None:
        """The session goes on where it was."""
        session = migration.session
        if self.under_way.pop(session.number, None) is None:
            return
        session.migrating.clear()
        session.migration_failure = None
        for name in migration.functions.values():
            self._compilation.forget(session, name)
            self._compilation.drop_reference(name)
        migration.mover.give_up(migration, status)
        if not session.suspended:
            self._outbox.to_session(session.number, m.Migrated(migration.number, ()))
        migration.then(status)
