"""What operators ask a running cluster to do: to move what is on its devices, and to have more islands or fewer.

Each request gets one reply, `OperationReply`, when it is done or refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from atoll.cluster.lifecycle import (
    Island,
    IslandBack,
    IslandDrained,
    IslandGivenUp,
    IslandReady,
    IslandState,
    Lifecycle,
)
from atoll.cluster.locations import DeviceLocation
from atoll.cluster.placement import IslandDevices, Slices
from atoll.cluster.resources import ResourceManager
from atoll.cluster.topology import IslandShape
from atoll.controller.outbox import Outbox
from atoll.controller.programs.launcher import Launcher
from atoll.errors import OK, Code, Status, StatusError, invalid, not_found
from atoll.migration.migrations import Migrations
from atoll.migration.room import homes
from atoll.migration.rules import Changes, has_arrays
from atoll.migration.suspensions import Suspensions
from atoll.protocol import messages as m
from atoll.scheduling.durations import Durations
from atoll.scheduling.session import Session
from atoll.telemetry.history import History

# For the workers of an island that was drained to end.
END_SECONDS = 30.0
_MOST_ISLANDS = 1 << 16
Operation = m.RemapRequest | m.SuspendRequest | m.ResumeRequest | m.AddIslandRequest | m.DrainRequest


@dataclass(frozen=True)
class _Start:
    """A new island that is awaited, for so many seconds."""

    operator: int
    seconds: float


# For the sessions that leave an island by themselves to have done so.
LEAVE_SECONDS = 60.0


@dataclass(eq=False)
class _Drain:
    """An island that is being emptied, and then ended."""

    operator: int
    island: int
    left: set[int]  # sessions that have yet to move
    leaving: set[int]  # those of them that do so by themselves
    returns: bool = False  # a machine of it leaves: it comes back on another, or on the same one
    problems: list[str] = field(default_factory=list)


class Operators:
    """Handles operators' requests; an operator is known by its connection.

    `forget_hosts(island)` is called when the workers of an island have ended. A new island is to be up within
    `start_seconds`; `wait_of(island)` says what it waits for.
    """

    def __init__(
        self,
        sessions: Mapping[int, Session],
        resources: ResourceManager,
        lifecycle: Lifecycle,
        slices: Slices,
        migrations: Migrations,
        suspensions: Suspensions,
        launcher: Launcher,
        forget_hosts: Callable[[int], object],
        outbox: Outbox,
        start_seconds: float,
        wait_of: Callable[[int], str],
        history: History,
    ) -> None:
        self._wait_of = wait_of
        self._history = history
        self._sessions = sessions
        self._resources = resources
        self._lifecycle = lifecycle
        self._slices = slices
        self._migrations = migrations
        self._suspensions = suspensions
        self._launcher = launcher
        self._forget_hosts = forget_hosts
        self._outbox = outbox
        self._start_seconds = start_seconds
        self._starting: dict[int, _Start] = {}  # by island
        self._ending: dict[int, _Drain] = {}  # by island: its workers were asked to end
        self._start_times: Durations[int] = Durations()  # islands
        self._end_times: Durations[int] = Durations()
        self._leaving: dict[int, _Drain] = {}  # by island: it waits for sessions that leave by themselves
        self._leave_times: Durations[int] = Durations()

    def handle(self, operator: int, message: Operation) -> None:
        try:
            match message:
                case m.RemapRequest():
                    self._remap(operator, message)
                case m.SuspendRequest():
                    self._suspend(operator, message)
                case m.ResumeRequest():
                    self._resume(operator, message)
                case m.AddIslandRequest():
                    self._add_island(operator, message)
                case m.DrainRequest(island=island, returns=returns):
                    self._drain(operator, island, returns)
        except StatusError as error:
            self._reply(operator, error.status)

    def tick(self, now: float) -> None:
        for island, seconds in self._start_times.update(now, self._starting).items():
            if seconds > self._starting[island].seconds:
                text = f"it was not up within {self._starting[island].seconds:.0f} s"
                wait = self._wait_of(island)
                self._lifecycle.give_up(island, Status(Code.DEADLINE_EXCEEDED, text + (f": {wait}" if wait else "")))
        for island, seconds in self._end_times.update(now, self._ending).items():
            if seconds > END_SECONDS:
                self.island_ended(island)
        for island, seconds in self._leave_times.update(now, self._leaving).items():
            self._look_who_has_left(self._leaving[island], seconds > LEAVE_SECONDS)

    # ---- slices

    def _remap(self, operator: int, ask: m.RemapRequest) -> None:
        session = self._session(ask.session)
        session.devices.get(ask.slice)
        self._known(ask.island)
        wanted = tuple(self._location(number, ask.island) for number in ask.devices)
        plan = partial(self._remapped, session, ask, wanted)
        self._migrations.begin(session, plan, partial(self._when_remapped, operator, session, ask))

    def _remapped(self, session: Session, ask: m.RemapRequest, wanted: tuple[DeviceLocation, ...]) -> Changes:
        devices = self._resources.devices_for(ask.island, session.platform)
        return self._slices.target(ask.session, ask.slice, devices, wanted)

    def _when_remapped(self, operator: int, session: Session, ask: m.RemapRequest, status: Status) -> None:
        if not status.ok:
            text = f"slice {ask.slice} of session {ask.session} stays where it is: {status.message}"
            self._reply(operator, Status(status.code, text))
            return
        places = (session.devices.locations[device] for device in session.devices.slices[ask.slice].devices)
        numbers = ", ".join(str(self._resources.number_of(location)) for location in places)
        self._reply(operator, OK, f"slice {ask.slice} of session {ask.session} is on devices {numbers} now")

    # ---- sessions that are put aside

    def _session(self, number: int) -> Session:
        session = self._sessions.get(number)
        if session is None:
            raise not_found(f"session {number} does not exist (atoll status lists them)")
        return session

    def _suspend(self, operator: int, ask: m.SuspendRequest) -> None:
        session = self._session(ask.session)
        self._suspensions.suspend(session, ask.to_disk, partial(self._when_suspended, operator, session))

    def _when_suspended(self, operator: int, session: Session, status: Status) -> None:
        if status.ok:
            self._reply(operator, OK, f"session {session.number} is {session.suspended}")
        else:
            self._reply(operator, Status(status.code, f"session {session.number} goes on: {status.message}"))

    def _resume(self, operator: int, ask: m.ResumeRequest) -> None:
        session = self._session(ask.session)
        then = partial(self._when_resumed, operator, session)
        self._suspensions.resume(session, ask.islands, ask.wait_seconds, then)

    def _when_resumed(self, operator: int, session: Session, status: Status) -> None:
        if not status.ok:
            text = f"session {session.number} stays suspended: {status.message}"
            self._reply(operator, Status(status.code, text))
            return
        islands = sorted({location.island for location in homes(session).values()})
        where = f" on island {', '.join(map(str, islands))}" if islands else ""
        self._reply(operator, OK, f"session {session.number} goes on{where}")

    # ---- islands

    def _known(self, island: int) -> Island:
        """Raises StatusError for an island that does not exist, yet or any more."""
        record = self._resources.islands.get(island)
        if record is None or record.state is IslandState.STARTING:
            raise not_found(f"island {island} does not exist (atoll status lists them)")
        if record.state is IslandState.DRAINED:
            if record.was_ready:
                raise StatusError(Code.FAILED_PRECONDITION, f"island {island} was drained already")
            assert record.last_failure is not None
            raise StatusError(Code.FAILED_PRECONDITION, record.last_failure.message)
        return record

    def _location(self, number: int, island: int) -> DeviceLocation:
        for location in self._resources.devices(island).locations:
            if self._resources.number_of(location) == number:
                return location
        raise invalid(f"device {number} is not one of island {island}")

    # ---- one island more

    def _add_island(self, operator: int, ask: m.AddIslandRequest) -> None:
        if len(self._resources.islands) >= _MOST_ISLANDS:
            raise StatusError(Code.RESOURCE_EXHAUSTED, f"a cluster has at most {_MOST_ISLANDS} islands")
        shape = ask.shape or self._shape_like(ask.like)
        try:
            shape.check()
        except ValueError as error:
            raise invalid(str(error)) from None
        island = self._resources.add_island(shape)
        self._launcher.scheduler.add_island(shape.hosts)
        self._starting[island] = _Start(operator, ask.wait_seconds or self._start_seconds)
        self._outbox.to_engine(m.StartIsland(island, shape))

    def _shape_like(self, island: int) -> IslandShape:
        """That of an island, or of all where none is named."""
        shapes = self._resources.topology.shapes
        if island >= len(shapes):
            raise not_found(f"island {island} does not exist (atoll status lists them)")
        if island >= 0:
            return shapes[island]
        if len(set(shapes)) > 1:
            text = "; ".join(f"island {number} has {shape}" for number, shape in enumerate(shapes))
            raise StatusError(
                Code.FAILED_PRECONDITION,
                f"which island is the new one to be like? Say it with --like, or --shape: {text}",
            )
        return shapes[0]

    def island_ready(self, ready: IslandReady) -> None:
        """A new island is up: all sessions may be moved there, and new ones have its devices."""
        for session in self._sessions.values():
            self._outbox.to_session(session.number, m.HostsBack(self._resources.addresses_of(ready.island)))
        self._report_up(ready.island)

    def island_back(self, back: IslandBack) -> None:
        """Where it was a new one that was lost before it was up, it is up now."""
        self._report_up(back.island)

    def _report_up(self, island: int) -> None:
        start = self._starting.pop(island, None)
        if start is not None:
            devices = ", ".join(
                str(self._resources.number_of(location)) for location in self._resources.devices(island).locations
            )
            self._reply(start.operator, OK, f"island {island} is up, with devices {devices}")

    def island_given_up(self, given_up: IslandGivenUp) -> None:
        """Where it was a new one, it will not be."""
        island, status = given_up.island, given_up.status
        start = self._starting.pop(island, None)
        if start is not None:
            self._lifecycle.end(island, Status(status.code, f"island {island} never was up: {status.message}"))
            self._reply(start.operator, Status(status.code, f"island {island} does not start: {status.message}"))

    # ---- one island fewer

    def _drain(self, operator: int, island: int, returns: bool) -> None:
        record = self._known(island)
        if record.state is IslandState.DRAINING:
            raise StatusError(Code.FAILED_PRECONDITION, f"island {island} is being drained already")
        if record.state is IslandState.GIVEN_UP:
            self._end_island(_Drain(operator, island, set(), set()))  # nothing is there any more
            return
        if record.state is not IslandState.READY:
            raise StatusError(Code.FAILED_PRECONDITION, f"island {island} is {record.state}")
        others = [each.number for each in self._resources.islands.values() if each.state is IslandState.READY]
        if others == [island]:
            raise StatusError(Code.FAILED_PRECONDITION, f"island {island} is the only one that is ready")
        self._lifecycle.begin_drain(island)
        plans: dict[int, Callable[[], Changes]] = {}
        problems: list[str] = []
        leaving: set[int] = set()
        for session in self._sessions.values():
            if self._suspensions.needs(session, island):
                if session.leaves_islands:
                    leaving.add(session.number)
                    continue
                try:
                    plans[session.number] = self._way_out(session, island)
                except StatusError as error:
                    problems.append(f"{session.name}: {error.status.message}")
        drain = _Drain(operator, island, {*plans, *leaving}, leaving, returns, problems)
        if problems:
            self._stop_draining(drain)
            return
        if leaving:
            self._leaving[island] = drain
            self._tell_leaving(drain, stay=False)
        for number, plan in plans.items():
            self._migrations.begin(self._sessions[number], plan, partial(self._when_moved, drain, number))
        if not drain.left:
            self._end_island(drain)

    def _tell_leaving(self, drain: _Drain, stay: bool) -> None:
        hosts = tuple(sorted(self._resources.hosts_of(drain.island)))
        for number in drain.leaving & self._sessions.keys():
            self._outbox.to_session(number, m.HostsLeave(hosts, stay))

    def _look_who_has_left(self, drain: _Drain, is_late: bool) -> None:
        """Those that have nothing on the island any more need not be moved: their devices wait for its return."""
        is_lost = self._resources.islands[drain.island].state is not IslandState.DRAINING
        for number in sorted(drain.leaving & drain.left):
            session = self._sessions.get(number)
            status = OK
            if is_lost:
                status = Status(Code.DATA_LOSS, "it was lost meanwhile")
            elif session is not None and has_arrays(session, drain.island):
                if not is_late:
                    continue
                status = Status(Code.DEADLINE_EXCEEDED, f"it has not left within {LEAVE_SECONDS:.0f} s")
            self._when_moved(drain, number, status)
        if not drain.leaving & drain.left:
            self._leaving.pop(drain.island, None)

    def _way_out(self, session: Session, island: int) -> Callable[[], Changes]:
        """To where all of a session that is on the island can go. Raises StatusError, with what is in the way."""
        source = self._resources.devices(island)
        load = self._slices.load()
        targets = [
            devices
            for devices in (self._resources.devices(each) for each in self._resources.islands)
            if not devices.closed and (devices.mesh, devices.kinds) == (source.mesh, source.kinds)
        ]
        if not targets:
            raise StatusError(Code.FAILED_PRECONDITION, f"no other island is like {source}")
        problem: StatusError | None = None
        for target in sorted(
            targets, key=lambda each: (sum(load[location] for location in each.locations), each.number)
        ):
            plan = partial(_moved, session, source, target)
            try:
                self._migrations.check(session, plan)
            except StatusError as error:
                problem = problem or error
            else:
                return plan
        assert problem is not None
        raise problem

    def _when_moved(self, drain: _Drain, session: int, status: Status) -> None:
        drain.left.discard(session)
        if not status.ok and session in self._sessions:
            name = self._sessions[session].name
            text = status.message if status.message.startswith(name) else f"{name}: {status.message}"
            drain.problems.append(text)
        if drain.left:
            return
        if drain.problems:
            self._stop_draining(drain)
        else:
            self._end_island(drain)

    def _stop_draining(self, drain: _Drain) -> None:
        self._lifecycle.stop_drain(drain.island)
        self._leaving.pop(drain.island, None)
        self._tell_leaving(drain, stay=True)
        text = f"island {drain.island} is in use: {'; '.join(drain.problems)}"
        self._reply(drain.operator, Status(Code.FAILED_PRECONDITION, text))

    def _end_island(self, drain: _Drain) -> None:
        """Nothing of any session is there."""
        island = drain.island
        self._ending[island] = drain
        self._lifecycle.end(island, Status(Code.DATA_LOSS, f"island {island} was drained by its operator"))

    def island_drained(self, drained: IslandDrained) -> None:
        """Its workers may end."""
        hosts = tuple(self._resources.hosts_of(drained.island))
        for session in self._sessions.values() if hosts else ():
            self._outbox.to_session(session.number, m.HostsLost(hosts))
        self._outbox.to_engine(m.EndIsland(drained.island))

    def island_ended(self, island: int) -> None:
        """The engine has ended its workers, as it was asked to."""
        self._forget_hosts(island)
        drain = self._ending.pop(island, None)
        if drain is not None:
            self._reply(drain.operator, OK, f"island {island} is empty, and its workers have ended")
            if drain.returns:
                self._resources.islands[island].returns = True
                self._outbox.to_engine(m.StartIsland(island))

    def island_starts(self, message: m.IslandStarts) -> None:
        """The engine has found the machines for an island."""
        record = self._resources.islands[message.island]
        record.incarnation, record.machines = message.incarnation, message.machines
        if record.is_drained and record.returns:
            self._lifecycle.begin_return(message.island)

    def _reply(self, operator: int, status: Status, text: str = "") -> None:
        self._history.operation(status, text)
        self._outbox.send(operator, m.OperationReply(status, text))


def _moved(session: Session, source: IslandDevices, target: IslandDevices) -> Changes:
    """Each of the session's devices on the one island, with the device of the other that stands where it does."""
    there = dict(zip(source.locations, target.locations, strict=True))
    locations = session.devices.locations
    return {device: there[location] for device, location in locations.items() if location.island == source.number}
