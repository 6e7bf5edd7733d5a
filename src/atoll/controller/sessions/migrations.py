"""Moves: virtual devices of a live session come to sit elsewhere, with all that is on them (paper, sections 4.1, 4.2).

The client does not notice. Its handles, arrays and compiled functions are what they were; what it does meanwhile waits.

1. *Holding*: the proxy is asked to hold its client back. Its answer comes after all that it has sent.
2. *Draining*: what the session has launched runs to its end where it was launched.
3. *Compiling*: the proxy sends the sources of the functions that move; they are compiled for their new places.
4. *Copying*: each array is copied to its new places, under a handle of the controller's own.
5. Then all at once: the copies take the arrays' handles, seats change, programs are lowered anew, the proxy goes on.

Up to the last step nothing has changed, so that a move that fails is over, and the session goes on where it was.
Copying, and a copy's taking over of a handle, are programs of one transfer and of one view, launched like any others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from atoll.cluster.locations import DeviceLocation, MemoryRequirement, Placement, total
from atoll.cluster.virtual_devices import check_apart
from atoll.controller.durations import Durations
from atoll.controller.islands.resources import ResourceManager
from atoll.controller.memory.directory import Entry
from atoll.controller.outbox import Outbox
from atoll.controller.programs.compilation import Compilation
from atoll.controller.programs.functions import DeviceAssignment, function_name, hosts_of
from atoll.controller.programs.launcher import Launcher
from atoll.controller.programs.registered import RegisteredProgram, device_groups
from atoll.controller.sessions.queries import Questions
from atoll.controller.sessions.session import Session
from atoll.errors import OK, Code, Status, StatusError, unimplemented
from atoll.ir import program as ir
from atoll.ir.types import ArraySpec, Opaque
from atoll.protocol import messages as m
from atoll.quantities import human_bytes

# For a session to come to rest: what it has launched must end.
REST_SECONDS = 60.0
# For functions to be compiled, and for arrays to be copied.
WORK_SECONDS = 300.0
# Copies are buffers of the session's, under numbers that neither its client nor its proxy gives.
_OWN_HANDLES = 1 << 61
# Where a device is to be, in the program that copies to it.
_NEW = 1 << 40

Changes = Mapping[int, DeviceLocation]
# Lowers a program of the session, for these seats and functions.
Lower = Callable[[ir.Program, Placement, Mapping[int, str]], RegisteredProgram]


@dataclass(eq=False)
class Move:
    """A session's move. `plan()` says where devices go, at rest once more: it raises StatusError where they cannot.

    `then(status)` is called once, at its end.
    """

    number: int
    session: Session
    plan: Callable[[], Changes]
    then: Callable[[Status], None]
    stage: str = "holding"
    changes: Changes = field(default_factory=dict)
    islands: set[int] = field(default_factory=set)  # that it is about
    functions: dict[int, str] = field(default_factory=dict)  # their new names
    compiling: set[int] = field(default_factory=set)
    programs: dict[ArraySpec, int] = field(default_factory=dict)  # that copy
    copies: dict[int, int] = field(default_factory=dict)  # by the handle of what is copied


class Moves:
    """All moves under way, one a session.

    `release_program(program)` lets go of what a session had.
    """

    def __init__(
        self,
        resources: ResourceManager,
        compilation: Compilation,
        questions: Questions,
        launcher: Launcher,
        outbox: Outbox,
        lower: Lower,
        release_program: Callable[[RegisteredProgram], None],
    ) -> None:
        self.under_way: dict[int, Move] = {}  # by session
        self._resources = resources
        self._compilation = compilation
        self._questions = questions
        self._launcher = launcher
        self._outbox = outbox
        self._lower = lower
        self._release_program = release_program
        self._stages: Durations[tuple[int, str]] = Durations()  # by move and stage
        self._next = 1
        self._next_handle = _OWN_HANDLES

    # ---- events

    def check(self, session: Session, plan: Callable[[], Changes]) -> None:
        """Raises StatusError where there can be no such move now."""
        if session.number in self.under_way:
            raise StatusError(Code.FAILED_PRECONDITION, f"session {session.number} is being moved already")
        self._plan(Move(0, session, plan, lambda status: None))

    def begin(self, session: Session, plan: Callable[[], Changes], then: Callable[[Status], None]) -> None:
        """Begins a move. Raises StatusError where it cannot be."""
        self.check(session, plan)
        move = Move(self._next, session, plan, then)
        self._next += 1
        self.under_way[session.number] = move
        self._outbox.to_session(session.number, m.Quiesce(move.number))

    def at_rest(self, session: Session, number: int) -> None:
        """The proxy holds its client back; what it has sent before has come."""
        move = self.under_way.get(session.number)
        if move is not None and move.number == number and move.stage == "holding":
            move.stage = "draining"

    def proceed(self) -> None:
        """Takes the moves as far as they can go now."""
        for move in list(self.under_way.values()):
            try:
                if move.stage == "draining" and self._is_still(move.session):
                    self._compile(move)
                if move.stage == "compiling" and not move.compiling:
                    self._copy(move)
                if move.stage == "copying":
                    self._finish_copies(move)
            except StatusError as error:
                self._give_up(move, error.status)

    def name_of(self, session: Session, function: int) -> str | None:
        """What a function is compiled as; None where the session does not have it."""
        move = self.under_way.get(session.number)
        if move is not None and function in move.compiling:
            return move.functions[function]
        return session.functions.get(function)

    def compiled(self, session: int, function: int, name: str, failure: Status | None) -> bool:
        """A function has been compiled, or not; True where that was for a move."""
        move = self.under_way.get(session)
        if move is None or move.functions.get(function) != name or function not in move.compiling:
            return False
        move.compiling.discard(function)
        if failure is not None:
            self._give_up(move, failure)
        return True

    def tick(self, now: float) -> None:
        moves = {(move.number, move.stage): move for move in self.under_way.values()}
        for key, seconds in self._stages.update(now, moves).items():
            move = moves[key]
            if seconds <= (REST_SECONDS if move.stage in ("holding", "draining") else WORK_SECONDS):
                continue
            left = move.session.in_flight
            text = {
                "holding": "its proxy does not answer",
                "draining": f"{left} of its launches have not ended",
                "compiling": f"{len(move.compiling)} of its functions are not compiled yet",
            }.get(move.stage, "its arrays are not copied yet")
            self._give_up(move, Status(Code.DEADLINE_EXCEEDED, f"{text}, after {seconds:.0f} s"))

    def island_lost(self, island: int, status: Status) -> None:
        for move in list(self.under_way.values()):
            if island in move.islands:
                self._give_up(move, status)

    def session_closed(self, number: int) -> None:
        move = self.under_way.pop(number, None)
        if move is not None:
            for name in move.functions.values():
                self._compilation.drop_reference(name)
            move.then(Status(Code.CANCELLED, f"session {number} has ended"))

    # ---- what is where, now and then

    def _plan(self, move: Move) -> None:
        """Where everything goes. Raises FAILED_PRECONDITION for what would be torn apart, or cannot be there."""
        session, locations = move.session, move.session.devices.locations
        changes = {device: location for device, location in move.plan().items() if locations[device] != location}
        if not changes:
            raise StatusError(Code.FAILED_PRECONDITION, "they are there already")
        islands = {location.island for location in changes.values()} | {locations[device].island for device in changes}
        for island in sorted(islands):
            if self._resources.islands[island].state != "ready" or island in session.unseen or island in session.cold:
                state = self._resources.islands[island].state
                raise StatusError(Code.FAILED_PRECONDITION, f"island {island} is {state}, or has just come back")
        after = {**locations, **changes}
        for body in session.bodies.values():
            for group in device_groups(body):
                if not changes.keys().isdisjoint(group):
                    check_apart(body.name, after, group, "would share")
            for node in body.nodes:
                if isinstance(node, ir.Call):
                    _check_together(f"{body.name!r}", node.devices, changes, after)
        for slice_request in session.function_requests.values():
            devices = [device for row in slice_request.assignment for device in row]
            _check_together("a compiled function", devices, changes, after)
            if not changes.keys().isdisjoint(devices):
                check_apart("a compiled function", after, devices, "would share")
        for handle, entry in session.directory.entries.items():
            if self._moves_with(entry, changes):
                assert entry.spec is not None
                check_apart(f"array {handle}", after, entry.spec.sharding.devices, "would share")
                if isinstance(entry.spec.sharding.tiling, Opaque) or entry.spec.dtype in ("token", "opaque"):
                    raise unimplemented(f"array {handle}, made by {entry.maker!r}, is of a kind that cannot be moved")
        move.changes, move.islands = changes, islands

    def _moves_with(self, entry: Entry, changes: Changes) -> bool:
        return (
            entry.spec is not None
            and not entry.consumed
            and entry.error is None
            and not changes.keys().isdisjoint(entry.spec.sharding.devices)
        )

    def _is_still(self, session: Session) -> bool:
        """Whether nothing of the session is under way. Raises FAILED_PRECONDITION where it waits for memory."""
        if self._launcher.memory.is_waiting(session.number):
            # Its client may be about to let go of something: held back, it cannot.
            raise StatusError(Code.FAILED_PRECONDITION, "it waits for memory")
        return not (
            session.in_flight
            or self._compilation.is_waiting(session.number)
            or self._questions.is_waiting(session.number)
        )

    # ---- stages

    def _compile(self, move: Move) -> None:
        self._plan(move)
        session = move.session
        after = {**session.devices.locations, **move.changes}
        asked: list[tuple[int, tuple[int, ...]]] = []
        for function, slice_request in session.function_requests.items():
            if function not in session.functions:
                continue
            locations: DeviceAssignment = tuple(
                tuple(after[device] for device in row) for row in slice_request.assignment
            )
            name = function_name(slice_request.content, locations)
            if name == session.functions[function]:
                continue
            self._compilation.functions.acquire(name)
            self._compilation.functions.locations[name] = locations
            move.functions[function] = name
            move.compiling.add(function)
            asked.append((function, tuple(sorted(hosts_of(locations)))))
        move.stage = "compiling"
        if asked:
            self._outbox.to_session(session.number, m.SendSources(tuple(asked)))

    def _copy(self, move: Move) -> None:
        session = move.session
        entries = [
            (handle, entry)
            for handle, entry in session.directory.entries.items()
            if self._moves_with(entry, move.changes)
        ]
        locations = session.devices.locations
        places = {
            **locations,
            **{_NEW + device: location for device, location in {**locations, **move.changes}.items()},
        }
        for _, entry in entries:
            assert entry.spec is not None
            if entry.spec not in move.programs:
                devices = tuple(_NEW + device for device in entry.spec.sharding.devices)
                sharding = msgspec.structs.replace(entry.spec.sharding, devices=devices)
                target = msgspec.structs.replace(entry.spec, sharding=sharding)
                body = ir.single("move", (entry.spec,), ir.Transfer((0,), (target,)))
                move.programs[entry.spec] = self._own_program(session, body, places)
        self._check_room(session, [move.programs[entry.spec] for _, entry in entries if entry.spec is not None])
        move.stage = "copying"
        for handle, entry in entries:
            assert entry.spec is not None
            copy = move.copies[handle] = self._next_handle
            self._next_handle += 1
            self._launch(session, move.programs[entry.spec], handle, copy)

    def _check_room(self, session: Session, programs: Iterable[int]) -> None:
        """Raises RESOURCE_EXHAUSTED where not all copies fit at once: nobody shall wait for them in vain."""
        needs: list[MemoryRequirement] = []
        for number in programs:
            program = session.programs[number]
            assert isinstance(program, RegisteredProgram)
            for gang in program.gangs:
                needs.extend(each.requirement for each in gang.makes)
                needs.append(gang.scratch)
        ledger = self._launcher.memory.ledger
        wanted = total(needs)
        lacking = ledger.lacking(wanted)
        if lacking is not None:
            raise StatusError(
                Code.RESOURCE_EXHAUSTED,
                f"its arrays need {human_bytes(dict(wanted)[lacking])} on device {lacking[1]} of host {lacking[0]}, "
                f"where {human_bytes(max(0, ledger.free(lacking)))} are free",
            )

    def _finish_copies(self, move: Move) -> None:
        entries = move.session.directory.entries
        for copy in move.copies.values():
            if entries[copy].error is not None:
                raise StatusError(Code(entries[copy].error.code), entries[copy].error.message)  # type: ignore[union-attr]
        if all(entries[copy].ready for copy in move.copies.values()) and not move.session.in_flight:
            self._take_over(move)

    def _take_over(self, move: Move) -> None:
        """From here on everything is where it was to go: this cannot fail."""
        session = move.session
        del self.under_way[session.number]
        entries = session.directory.entries
        kept: dict[int, Entry] = {}
        for handle in move.copies:
            entry = entries.get(handle)
            if entry is not None and not entry.consumed:  # else the client has let go of it meanwhile
                kept[handle] = entry
                self._launcher.release(session, (handle,), delete=False)
        self._outbox.flush_frees()  # what lies there under the old handle goes before the new comes
        session.devices.relocate(move.changes)
        for function, name in move.functions.items():
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
            self._launch(session, views[spec], move.copies[handle], handle)
            entries[handle].maker, entries[handle].context = entry.maker, entry.context
        self._launcher.release(session, tuple(move.copies.values()), delete=False)
        for number in (*move.programs.values(), *views.values()):
            self._drop_own(session, number)
        self._lower_again(session, move.changes)
        hosts = tuple((device, location.host) for device, location in move.changes.items())
        self._outbox.to_session(session.number, m.Migrated(move.number, hosts))
        move.then(OK)

    def _lower_again(self, session: Session, changes: Changes) -> None:
        for number, body in session.bodies.items():
            if all(changes.keys().isdisjoint(group) for group in device_groups(body)):
                continue
            old = session.programs.get(number)
            try:
                session.programs[number] = self._lower(body, session.devices.locations, session.functions)
            except StatusError as error:
                session.programs[number] = error.status
            if isinstance(old, RegisteredProgram):
                self._release_program(old)

    def _give_up(self, move: Move, status: Status) -> None:
        """The session goes on where it was."""
        session = move.session
        if self.under_way.pop(session.number, None) is None:
            return
        for name in move.functions.values():
            self._compilation.forget(session, name)
            self._compilation.drop_reference(name)
        self._launcher.release(session, tuple(move.copies.values()), delete=False)
        for number in move.programs.values():
            self._drop_own(session, number)
        self._outbox.to_session(session.number, m.Migrated(move.number, ()))
        move.then(status)

    # ---- the controller's own launches

    def _own_program(self, session: Session, body: ir.Program, places: Placement) -> int:
        number = min((0, *session.programs)) - 1
        session.programs[number] = self._lower(body, places, {})
        return number

    def _drop_own(self, session: Session, number: int) -> None:
        program = session.programs.pop(number, None)
        if isinstance(program, RegisteredProgram):
            self._release_program(program)

    def _launch(self, session: Session, program: int, argument: int, result: int) -> None:
        self._outbox.retire(session.number, -1)  # it takes room in the session's window, of which its proxy must know
        self._launcher.launch(session, m.Launch(program, (argument,), (result,), ()))


def _check_together(what: str, devices: Iterable[int], changes: Changes, after: Mapping[int, DeviceLocation]) -> None:
    devices = list(devices)
    islands = sorted({after[device].island for device in devices if device in after})
    if len(islands) > 1 and not changes.keys().isdisjoint(devices):
        outside = sorted(device for device in devices if device not in changes)
        raise StatusError(
            Code.FAILED_PRECONDITION,
            f"{what} runs on virtual devices that move and on others ({', '.join(map(str, outside))}): it would lie on "
            f"the islands {', '.join(map(str, islands))}",
        )
