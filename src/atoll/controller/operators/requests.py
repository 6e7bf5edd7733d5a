"""Operators' requests that change a cluster: move or suspend sessions, add or drain islands.

Each request gets one `OperationReply`, when it is done or refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from atoll.cluster.lifecycle import (
    Island,
    IslandReady,
    IslandRemoved,
    IslandRestarted,
    IslandState,
)
from atoll.cluster.locations import DeviceLocation
from atoll.cluster.topology import IslandShape
from atoll.controller.named_arrays.array_copies import ArrayCopies
from atoll.controller.operators.drains import Drains
from atoll.controller.state import ClusterState
from atoll.errors import OK, Code, Status, StatusError, invalid, not_found
from atoll.launch.launches import Launches
from atoll.migration.migrations import Migrations
from atoll.migration.rules import Changes, current_places
from atoll.migration.suspensions import Suspensions
from atoll.protocol import messages as m
from atoll.state.durations import Durations
from atoll.state.session import Session

Operation = m.RemapRequest | m.SuspendRequest | m.ResumeRequest | m.AddIslandRequest | m.DrainRequest | m.UndrainRequest


class _Start(msgspec.Struct, frozen=True):
    """A new island that is starting, and for how long its operator waits for it."""

    operator: int
    seconds: float


class Operators:
    """Handles operators' requests. An operator is identified by its connection.

    `forget_hosts(island)` is called when the workers of an island have ended. `pending_reason(island)` returns the
    reason why a new island has not started, and `departure_of(host)` the reason why a host's machine leaves.
    """

    def __init__(
        self,
        state: ClusterState,
        migrations: Migrations,
        suspensions: Suspensions,
        launches: Launches,
        copies: ArrayCopies,
        forget_hosts: Callable[[int], object],
        pending_reason: Callable[[int], str],
        departure_of: Callable[[int], str],
    ) -> None:
        self._sessions = state.sessions
        self._connections = state.connections
        self._refused = ""  # the last refusal sent to the engine
        self._resources = state.resources
        self._lifecycle = state.lifecycle
        self._slices = state.slices
        self._outbox = state.outbox
        self._history = state.history
        self._start_seconds = state.settings.start_seconds
        self._migrations = migrations
        self._suspensions = suspensions
        self._scheduler = launches.scheduler
        self._pending_reason = pending_reason
        self._starting: dict[int, _Start] = {}  # by island
        self._start_times: Durations[int] = Durations()  # islands
        self.drains = Drains(
            state, migrations, suspensions, launches.scheduler, copies, forget_hosts, self._reply, departure_of
        )

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
                case m.DrainRequest(island=island, returns=returns, has_spares=has_spares):
                    self.drains.begin(operator, self._known(island), returns, has_spares)
                case m.UndrainRequest(island=island):
                    self._undrain(operator, island)
        except StatusError as error:
            self._reply(operator, error.status)

    def tick(self, now: float) -> None:
        for island, seconds in self._start_times.update(now, self._starting).items():
            if seconds > self._starting[island].seconds:
                text = f"it was not up within {self._starting[island].seconds:.0f} s"
                wait = self._pending_reason(island)
                self._lifecycle.remove(island, Status(Code.DEADLINE_EXCEEDED, text + (f": {wait}" if wait else "")))
        self.drains.tick(now)

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
            self._reply(operator, status.reworded(text))
            return
        places = (session.devices.locations[device] for device in session.devices.slices[ask.slice].devices)
        numbers = ", ".join(str(self._resources.number_of(location)) for location in places)
        self._reply(operator, OK, f"slice {ask.slice} of session {ask.session} is on devices {numbers} now")

    # ---- suspended sessions

    def _session(self, number: int) -> Session:
        session = self._sessions.get(number)
        if session is None or session.is_vault:
            raise not_found(f"session {number} does not exist (atoll status lists them)")
        return session

    def _suspend(self, operator: int, ask: m.SuspendRequest) -> None:
        session = self._session(ask.session)
        self._suspensions.suspend(session, ask.to_disk, partial(self._when_suspended, operator, session))

    def _when_suspended(self, operator: int, session: Session, status: Status) -> None:
        if status.ok:
            self._reply(operator, OK, f"session {session.number} is {session.suspension_text}")
        else:
            self._reply(operator, status.reworded(f"session {session.number} continues: {status.message}"))

    def _resume(self, operator: int, ask: m.ResumeRequest) -> None:
        session = self._session(ask.session)
        then = partial(self._when_resumed, operator, session)
        self._suspensions.resume(session, ask.islands, ask.wait_seconds, then)

    def _when_resumed(self, operator: int, session: Session, status: Status) -> None:
        if not status.ok:
            stays = session.number in self._suspensions.by_session
            text = f"session {session.number} stays suspended: {status.message}" if stays else status.message
            self._reply(operator, status.reworded(text))
            return
        islands = sorted({location.island for location in current_places(session).values()})
        where = f" on island {', '.join(map(str, islands))}" if islands else ""
        self._reply(operator, OK, f"session {session.number} continues{where}")

    # ---- islands

    def _known(self, island: int) -> Island:
        """Return an island. Raises StatusError if it does not exist yet or anymore."""
        record = self._resources.islands.get(island)
        if record is None or record.state is IslandState.STARTING:
            raise not_found(f"island {island} does not exist (atoll status lists them)")
        if record.state is IslandState.DRAINED:
            if record.was_ready:
                raise StatusError(
                    Code.FAILED_PRECONDITION, f"island {island} was drained already (see `atoll undrain`)"
                )
            assert record.last_failure is not None
            raise StatusError(Code.FAILED_PRECONDITION, record.last_failure.message)
        return record

    def _undrain(self, operator: int, island: int) -> None:
        record = self._resources.islands.get(island)
        if record is None:
            raise not_found(f"island {island} does not exist (atoll status lists them)")
        self.drains.undo(record)
        self._reply(operator, OK, f"island {island} starts again: `atoll status` shows what it waits for")

    def _location(self, number: int, island: int) -> DeviceLocation:
        for location in self._resources.devices(island).locations:
            if self._resources.number_of(location) == number:
                return location
        raise invalid(f"device {number} is not one of island {island}")

    # ---- new islands

    def _add_island(self, operator: int, ask: m.AddIslandRequest) -> None:
        shape = ask.shape or self._shape_like(ask.like)
        try:
            self._resources.topology.with_island(shape).check()
        except ValueError as error:
            raise invalid(str(error)) from None
        island = self._resources.add_island(shape)
        self._scheduler.add_island(self._resources.islands[island], shape.hosts)
        self._starting[island] = _Start(operator, ask.wait_seconds or self._start_seconds)
        self._outbox.to_engine(m.StartIsland(island, shape))

    def _shape_like(self, island: int) -> IslandShape:
        """Return the shape of an island, or of all islands if none is named."""
        shapes = self._resources.topology.shapes
        if island >= len(shapes):
            raise not_found(f"island {island} does not exist (atoll status lists them)")
        if island >= 0:
            return shapes[island]
        if len(set(shapes)) > 1:
            text = "; ".join(f"island {number} has {shape}" for number, shape in enumerate(shapes))
            raise StatusError(
                Code.FAILED_PRECONDITION,
                f"the islands differ: choose the shape of one with --like, or name a shape with --shape: {text}",
            )
        return shapes[0]

    def island_ready(self, ready: IslandReady) -> None:
        """Announce the hosts of a new island to all sessions: sessions may move there, and new ones get its devices."""
        for session in self._sessions.values():
            self._outbox.to_session(session.number, m.HostsRestarted(self._resources.addresses_of(ready.island)))
        self._report_up(ready.island)

    def island_restarted(self, back: IslandRestarted) -> None:
        """Report a new island that failed and restarted before it was ready."""
        self._report_up(back.island)

    def _report_up(self, island: int) -> None:
        start = self._starting.pop(island, None)
        if start is not None:
            devices = ", ".join(
                str(self._resources.number_of(location)) for location in self._resources.devices(island).locations
            )
            self._reply(start.operator, OK, f"island {island} is up, with devices {devices}")

    def island_removed(self, removed: IslandRemoved) -> None:
        """Report a new island that failed to start."""
        island, status = removed.island, removed.status
        start = self._starting.pop(island, None)
        if start is not None:
            self._lifecycle.end(island, status.reworded(f"island {island} never started: {status.message}"))
            self._reply(start.operator, status.reworded(f"island {island} did not start: {status.message}"))

    # ---- the engine

    def island_starts(self, message: m.IslandStarts) -> None:
        """Handle that the engine has found machines for an island."""
        record = self._resources.islands[message.island]
        record.incarnation, record.machines = message.incarnation, message.machines
        if record.is_drained and record.returns:
            self._lifecycle.begin_return(message.island)

    def _reply(self, operator: int, status: Status, text: str = "") -> None:
        is_engine = operator == self._connections.engine
        if not is_engine or status.ok or status.message != self._refused:
            peer = self._connections.peers.get(operator)
            self._history.operation(status, text, peer.actor if peer is not None else "")
        if is_engine:  # it repeats requests while a machine leaves
            self._refused = status.message
        self._outbox.send(operator, m.OperationReply(status, text))
