"""Migrations: virtual devices of a live session get other physical ones, with all that is on them (paper, 4.1, 4.2).

The client does not notice. Its handles, arrays and compiled functions are what they were; what it does meanwhile waits.

1. *Quiescing*: the proxy is asked to hold its client back. Its answer comes after all that it has sent.
2. *Draining*: what the session has launched runs to its end where it was launched.
3. *Compiling*: the proxy sends the sources of the functions that move; they are compiled for their new places.
4. *Copying*: each array is copied to its new place, under a handle of the controller's own.
5. Then all at once: the copies take the arrays' handles, programs are lowered anew, the proxy goes on.

Up to the last step nothing has changed: a migration that fails is over, and the session goes on where it was. Copying,
and a copy's taking over of a handle, are programs of one transfer and of one view, launched like any others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from atoll.cluster.lifecycle import IslandLost
from atoll.cluster.locations import Placement
from atoll.cluster.resources import ResourceManager
from atoll.errors import OK, Code, Status, StatusError
from atoll.ir import program as ir
from atoll.ir.types import ArraySpec
from atoll.migration.controller import Compiler, Launches, Out, Programs, Questions
from atoll.migration.rules import Changes, check_changes, check_memory, is_affected
from atoll.protocol import messages as m
from atoll.scheduling.buffer_directory import Entry
from atoll.scheduling.durations import Durations
from atoll.scheduling.functions import DeviceAssignment, function_name, hosts_of
from atoll.scheduling.programs import RegisteredProgram, device_groups
from atoll.scheduling.session import Session

# Copies are buffers of the session's, under numbers that neither its client nor its proxy gives.
_OWN_HANDLES = 1 << 61
# Where a device is to be, in the program that copies to it.
_NEW = 1 << 40


# For a proxy to hold its client back.
QUIESCE_SECONDS = 10.0
# For a session to be still: what it has launched must end.
REST_SECONDS = 60.0
# For functions to be compiled, and for arrays to be copied.
WORK_SECONDS = 300.0


class Stage(Enum):
    """How far a migration has come."""

    QUIESCING = "quiescing"
    DRAINING = "draining"
    COMPILING = "compiling"
    COPYING = "copying"


_SECONDS = {
    Stage.QUIESCING: QUIESCE_SECONDS,
    Stage.DRAINING: REST_SECONDS,
    Stage.COMPILING: WORK_SECONDS,
    Stage.COPYING: WORK_SECONDS,
}


@dataclass(eq=False)
class Migration:
    """A session's migration. `plan()` says where devices go, and is asked again when the session is still: it raises
    StatusError where they cannot go there. `then(status)` is called once, at the end.
    """

    number: int
    session: Session
    plan: Callable[[], Changes]
    then: Callable[[Status], None]
    changes: Changes
    islands: set[int]  # that it is about
    stage: Stage = Stage.QUIESCING
    functions: dict[int, str] = field(default_factory=dict)  # their new names
    programs: dict[ArraySpec, int] = field(default_factory=dict)  # that copy
    copies: dict[int, int] = field(default_factory=dict)  # by the handle of what is copied


class Migrations:
    """All that are under way, one a session."""

    def __init__(
        self,
        resources: ResourceManager,
        compilation: Compiler,
        queries: Questions,
        launcher: Launches,
        programs: Programs,
        outbox: Out,
    ) -> None:
        self.under_way: dict[int, Migration] = {}  # by session
        self._resources = resources
        self._compilation = compilation
        self._queries = queries
        self._launcher = launcher
        self._programs = programs
        self._outbox = outbox
        self._stages: Durations[tuple[int, Stage]] = Durations()  # by migration and stage
        self._next = 1
        self._next_handle = _OWN_HANDLES

    # ---- events

    def check(self, session: Session, plan: Callable[[], Changes]) -> tuple[Changes, set[int]]:
        """What would change, and on which islands. Raises StatusError where there can be no such migration now."""
        if session.number in self.under_way:
            raise StatusError(Code.FAILED_PRECONDITION, f"session {session.number} is being moved already")
        return check_changes(session, plan(), self._resources)

    def begin(self, session: Session, plan: Callable[[], Changes], then: Callable[[Status], None]) -> None:
        """Begins a migration. Raises StatusError where it cannot be."""
        changes, islands = self.check(session, plan)
        migration = Migration(self._next, session, plan, then, changes, islands)
        self._next += 1
        self.under_way[session.number] = migration
        self._outbox.to_session(session.number, m.Quiesce(migration.number))

    def quiesced(self, session: Session, number: int) -> None:
        """The proxy holds its client back; what it has sent before has come."""
        migration = self.under_way.get(session.number)
        if migration is not None and migration.number == number and migration.stage is Stage.QUIESCING:
            migration.stage = Stage.DRAINING

    def proceed(self) -> None:
        """Takes the migrations as far as they can go now."""
        for migration in list(self.under_way.values()):
            try:
                if migration.stage is Stage.DRAINING and self._is_still(migration.session):
                    self._compile(migration)
                if migration.stage is Stage.COMPILING and self._is_compiled(migration.session):
                    self._copy(migration)
                if migration.stage is Stage.COPYING:
                    self._finish_copies(migration)
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

    def island_lost(self, lost: IslandLost) -> None:
        for migration in list(self.under_way.values()):
            if lost.island in migration.islands:
                self._give_up(migration, lost.status)

    def session_closed(self, number: int) -> None:
        migration = self.under_way.pop(number, None)
        if migration is not None:
            for name in migration.functions.values():
                self._compilation.drop_reference(name)
            migration.then(Status(Code.CANCELLED, f"{migration.session.name} has ended"))

    # ---- stages

    def _is_still(self, session: Session) -> bool:
        """Whether nothing of the session is under way. Raises FAILED_PRECONDITION where it waits for memory."""
        if self._launcher.memory.is_waiting(session.number):
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
        migration.changes, migration.islands = check_changes(session, migration.plan(), self._resources)
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
        session = migration.session
        entries = [
            (handle, entry)
            for handle, entry in session.directory.entries.items()
            if is_affected(entry, migration.changes)
        ]
        locations = session.devices.locations
        places = {
            **locations,
            **{_NEW + device: location for device, location in {**locations, **migration.changes}.items()},
        }
        for _, entry in entries:
            assert entry.spec is not None
            if entry.spec not in migration.programs:
                devices = tuple(_NEW + device for device in entry.spec.sharding.devices)
                sharding = msgspec.structs.replace(entry.spec.sharding, devices=devices)
                target = msgspec.structs.replace(entry.spec, sharding=sharding)
                definition = ir.single("move", (entry.spec,), ir.Transfer((0,), (target,)))
                migration.programs[entry.spec] = self._own_program(session, definition, places)
        copies = [migration.programs[entry.spec] for _, entry in entries if entry.spec is not None]
        check_memory(session, copies, self._launcher.memory.ledger)
        migration.stage = Stage.COPYING
        for handle, entry in entries:
            assert entry.spec is not None
            copy = migration.copies[handle] = self._next_handle
            self._next_handle += 1
            self._launch(session, migration.programs[entry.spec], handle, copy)

    def _finish_copies(self, migration: Migration) -> None:
        all_ready = True
        for copy in migration.copies.values():
            entry = migration.session.directory.entries.get(copy)
            if entry is None:  # only a proxy that lies can name it
                raise StatusError(Code.CANCELLED, "its proxy has released a copy that is not the client's")
            if entry.error is not None:
                raise StatusError(Code(entry.error.code), entry.error.message)
            all_ready &= entry.ready
        if all_ready and not migration.session.in_flight:
            self._take_over(migration)

    def _take_over(self, migration: Migration) -> None:
        """From here on everything is where it was to go: this cannot fail."""
        session = migration.session
        del self.under_way[session.number]
        entries = session.directory.entries
        kept: dict[int, Entry] = {}
        for handle in migration.copies:
            entry = entries.get(handle)
            if entry is not None and not entry.consumed:  # else the client has released it meanwhile
                kept[handle] = entry
                self._launcher.release(session, (handle,), delete=False)
        self._outbox.flush_frees()  # what lies there under the old handle goes before the new comes
        session.devices.relocate(migration.changes)
        for function, name in migration.functions.items():
            old = session.functions.get(function)
            if old is None:
                self._compilation.drop_reference(name)
                continue
            session.functions[function] = name
            self._compilation.drop_reference(old)
        views: dict[ArraySpec, int] = {}
        for handle, entry in kept.items():
            spec = entry.spec
            assert spec is not None
            if spec not in views:
                whole = (0, len(spec.sharding.devices), 1)
                view = ir.Rearrange((0,), (spec,), (ir.Mapping(0, 0, whole, whole),))
                views[spec] = self._own_program(session, ir.single("moved", (spec,), view), session.devices.locations)
            self._launch(session, views[spec], migration.copies[handle], handle)
            entries[handle].maker, entries[handle].context = entry.maker, entry.context
        self._launcher.release(session, tuple(migration.copies.values()), delete=False)
        for number in (*migration.programs.values(), *views.values()):
            self._drop_own(session, number)
        self._lower_again(session, migration.changes)
        hosts = tuple((device, location.host) for device, location in migration.changes.items())
        self._outbox.to_session(session.number, m.Migrated(migration.number, hosts))
        migration.then(OK)

    def _lower_again(self, session: Session, changes: Changes) -> None:
        for number, definition in session.definitions.items():
            if all(changes.keys().isdisjoint(group) for group in device_groups(definition)):
                continue
            old = session.programs.get(number)
            try:
                session.programs[number] = self._programs.lower(
                    session, definition, session.devices.locations, session.functions
                )
            except StatusError as error:
                session.programs[number] = error.status
            if isinstance(old, RegisteredProgram):
                self._programs.drop(old)

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
        self._launcher.release(session, tuple(migration.copies.values()), delete=False)
        for number in migration.programs.values():
            self._drop_own(session, number)
        self._outbox.to_session(session.number, m.Migrated(migration.number, ()))
        migration.then(status)

    # ---- the controller's own launches

    def _own_program(self, session: Session, definition: ir.Program, places: Placement) -> int:
        number = min((0, *session.programs)) - 1
        session.programs[number] = self._programs.lower(session, definition, places, {})
        return number

    def _drop_own(self, session: Session, number: int) -> None:
        program = session.programs.pop(number, None)
        if isinstance(program, RegisteredProgram):
            self._programs.drop(program)

    def _launch(self, session: Session, program: int, argument: int, result: int) -> None:
        self._outbox.return_credits(
            session.number, -1
        )  # it takes a credit of the session's, of which its proxy must know
        self._launcher.launch(session, m.Launch(program, (argument,), (result,), ()))
