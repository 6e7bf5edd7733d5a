"""Drain islands: sessions move away or leave by themselves, published arrays are copied, and the island's workers end.

An operator requests a drain, or the engine if a machine is about to leave. The reply is sent when the island is empty
and has ended, or when the drain has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from atoll.cluster.lifecycle import Island, IslandDrained, IslandFailed, IslandState
from atoll.cluster.slice_placement import IslandDevices
from atoll.controller.named_arrays.array_copies import ArrayCopies
from atoll.controller.state import ClusterState
from atoll.errors import OK, Code, Status, StatusError
from atoll.launch.scheduler import Scheduler
from atoll.migration.migrations import Migrations
from atoll.migration.rules import Changes, has_arrays
from atoll.migration.suspensions import Suspensions
from atoll.protocol import messages as m
from atoll.state.durations import Durations
from atoll.state.session import GangRun, Session

# For the workers of a drained island to end.
END_SECONDS = 30.0
# For sessions that leave an island by themselves.
LEAVE_SECONDS = 60.0
# For published arrays to be copied to other islands, and for reads of those on the island to end.
COPY_SECONDS = 300.0

_LOST = "the island was lost meanwhile"


class _Drain(msgspec.Struct, eq=False):
    """An island that is being emptied and then ended."""

    operator: int
    island: int
    left: set[int]  # sessions that have yet to move
    leaving: set[int]  # sessions in `left` that move by themselves
    returns: bool = False  # one of its machines leaves: the island restarts on another machine or on the same one
    problems: list[str] = msgspec.field(default_factory=list)
    copies_since: float = 0.0  # time since which published arrays are copied


class Drains:
    """Drains islands.

    `forget_hosts(island)` is called when the workers of an island have ended, and `reply(operator, status, text)` with
    the outcome. `departure_of(host)` returns why the host's machine leaves, or "".
    """

    def __init__(
        self,
        state: ClusterState,
        migrations: Migrations,
        suspensions: Suspensions,
        scheduler: Scheduler[GangRun],
        copies: ArrayCopies,
        forget_hosts: Callable[[int], object],
        reply: Callable[..., None],
        departure_of: Callable[[int], str],
    ) -> None:
        self._sessions = state.sessions
        self._resources = state.resources
        self._lifecycle = state.lifecycle
        self._slices = state.slices
        self._outbox = state.outbox
        self._migrations = migrations
        self._suspensions = suspensions
        self._scheduler = scheduler
        self._copies = copies
        self._forget_hosts = forget_hosts
        self._reply = reply
        self._departure_of = departure_of
        self._ending: dict[int, _Drain] = {}  # by island: its workers are ending
        self._end_times: Durations[int] = Durations()
        self._leaving: dict[int, _Drain] = {}  # by island: it waits for sessions that leave by themselves
        self._leave_times: Durations[int] = Durations()
        self._copying: dict[int, _Drain] = {}  # by island: published arrays are being copied to others

    def tick(self, now: float) -> None:
        for island, seconds in self._end_times.update(now, self._ending).items():
            if seconds > END_SECONDS:
                self.island_ended(island)
        for island, seconds in self._leave_times.update(now, self._leaving).items():
            self._check_left(self._leaving[island], seconds > LEAVE_SECONDS)
        for drain in list(self._copying.values()):
            self._check_copied(drain, now - drain.copies_since > COPY_SECONDS)

    def begin(self, operator: int, record: Island, returns: bool, has_spares: bool = False) -> None:
        """Begin to drain an island. Raises StatusError if this is impossible.

        With `has_spares`, an island that is idle restarts on other machines at once.
        """
        island = record.number
        if record.state is IslandState.DRAINING:
            raise StatusError(Code.FAILED_PRECONDITION, f"island {island} is being drained already")
        if record.state is IslandState.REMOVED:
            self._end_island(_Drain(operator, island, set(), set()))  # it is empty already
            return
        if record.state is not IslandState.READY:
            raise StatusError(Code.FAILED_PRECONDITION, f"island {island} is {record.state}")
        others = [each.number for each in self._resources.islands.values() if each.state is IslandState.READY]
        is_in_use = any(self._suspensions.needs(each, island) for each in self._sessions.values())
        is_rebuilt = has_spares and not is_in_use and not self._copies.is_on(island)
        if others == [island] and not is_rebuilt:
            raise StatusError(Code.FAILED_PRECONDITION, f"island {island} is the only one that is ready")
        self._lifecycle.begin_drain(island)
        plans: dict[int, Callable[[], Changes]] = {}
        problems: list[str] = []
        leaving: set[int] = set()
        source = self._resources.devices(island)
        targets: list[IslandDevices] | None = None  # the same for all sessions
        for session in self._sessions.values():
            is_moving = self._migrations.concern(session, island)
            if is_moving or self._suspensions.needs(session, island):
                if session.leaves_islands and not is_moving:
                    leaving.add(session.number)
                    continue
                if targets is None:
                    targets = self._targets(source)
                try:
                    plans[session.number] = self._find_target(session, source, targets)
                except StatusError as error:
                    problems.append(f"{session.name}: {error.status.message}")
        drain = _Drain(operator, island, {*plans, *leaving}, leaving, returns, problems)
        if problems:
            self._stop_draining(drain)
            return
        if leaving:
            self._leaving[island] = drain
            self._notify_leaving(drain, stay=False)
        for number, plan in plans.items():
            self._migrations.begin(self._sessions[number], plan, partial(self._when_moved, drain, number))
        if not drain.left:
            self._copy_published(drain)

    def undo(self, record: Island) -> None:
        """Let a drained island start again, like one that is drained because a machine left.

        Raise StatusError if it is not drained, or was never ready: its sessions would not know its devices.
        """
        island = record.number
        problem = ""
        if record.state is not IslandState.DRAINED:
            problem = f"island {island} is {record.state}: only a drained island can be undrained"
        elif not record.was_ready:
            problem = f"island {island} has never started: add one with `atoll add-island`"
        elif island in self._ending:
            problem = f"the workers of island {island} are ending: try again in a few seconds"
        elif record.returns:
            problem = f"island {island} starts again when machines are available: `atoll status` shows what is missing"
        if problem:
            raise StatusError(Code.FAILED_PRECONDITION, problem)
        self._return(island)

    def _return(self, island: int) -> None:
        """Let the engine start a drained island as soon as there are machines for it."""
        self._resources.islands[island].returns = True
        self._outbox.to_engine(m.StartIsland(island))

    def _notify_leaving(self, drain: _Drain, stay: bool) -> None:
        hosts = tuple(sorted(self._resources.hosts_of(drain.island)))
        for number in drain.leaving & self._sessions.keys():
            self._outbox.to_session(number, m.HostsLeave(hosts, stay))

    def _check_left(self, drain: _Drain, is_late: bool) -> None:
        """Find sessions that have left. They keep their devices on the island, which wait for its return."""
        for number in sorted(drain.leaving & drain.left):
            session = self._sessions.get(number)
            status = OK
            if session is not None and has_arrays(session, drain.island):
                if not is_late:
                    continue
                status = Status(Code.DEADLINE_EXCEEDED, f"it has not left within {LEAVE_SECONDS:.0f} s")
            self._when_moved(drain, number, status)
        if not drain.leaving & drain.left:
            self._leaving.pop(drain.island, None)

    def _targets(self, source: IslandDevices) -> list[IslandDevices]:
        """Return the islands that match one that is drained, those with less load first."""
        load = self._slices.load()
        targets = [
            devices
            for devices in (self._resources.devices(each) for each in self._resources.islands)
            if not devices.closed and (devices.mesh, devices.kinds) == (source.mesh, source.kinds)
        ]
        return sorted(targets, key=lambda each: (sum(load[location] for location in each.locations), each.number))

    def _find_target(
        self, session: Session, source: IslandDevices, targets: Sequence[IslandDevices]
    ) -> Callable[[], Changes]:
        """Return a plan that moves the session's part on the island elsewhere. Raises StatusError with the obstacle."""
        if not targets:
            raise StatusError(Code.FAILED_PRECONDITION, f"no other island matches {source}")
        self._migrations.check_free(session)
        problem: StatusError | None = None
        for target in targets:
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
            drain.problems.append(f"{self._sessions[session].name}: {status.message}")
        if drain.left:
            return
        if self._resources.islands[drain.island].state is not IslandState.DRAINING and not drain.problems:
            drain.problems.append(_LOST)  # while the last session was taking over its new places
        if drain.problems:
            self._stop_draining(drain)
        else:
            self._copy_published(drain)

    def _copy_published(self, drain: _Drain) -> None:
        """Copy the published arrays on an island to others, and wait for what still runs there: reads of such arrays,
        and what sessions have launched that left the island by themselves.
        """
        if self._copies.is_on(drain.island) or not self._is_unused(drain.island):
            drain.copies_since = self._outbox.seconds
            self._copying[drain.island] = drain
            self._copies.leave(drain.island)
        else:
            self._end_island(drain)

    def _is_unused(self, island: int) -> bool:
        """Return whether nothing runs on the island, or waits for it."""
        return self._scheduler.is_idle(island) and not self._scheduler.nodes(island)

    def _check_copied(self, drain: _Drain, is_late: bool) -> None:
        """End the island if no published arrays are on it, and nothing runs there."""
        island = drain.island
        obstacles = self._copies.obstacles(island)
        if obstacles is None and is_late:
            obstacles = [f"published arrays have not been copied within {COPY_SECONDS:.0f} s"]
        elif not obstacles and not self._is_unused(island):
            obstacles = [f"its work has not ended within {COPY_SECONDS:.0f} s"] if is_late else None
        if obstacles is None:
            return
        del self._copying[island]
        drain.problems += obstacles
        if obstacles:
            self._stop_draining(drain)
        else:
            self._end_island(drain)

    def _stop_draining(self, drain: _Drain) -> None:
        self._lifecycle.stop_drain(drain.island)
        self._leaving.pop(drain.island, None)
        self._copies.stay(drain.island)
        self._notify_leaving(drain, stay=True)
        text = f"island {drain.island} is in use: {'; '.join(drain.problems)}"
        self._reply(drain.operator, Status(Code.FAILED_PRECONDITION, text))

    def _end_island(self, drain: _Drain) -> None:
        """End the workers of an island that no session uses."""
        island = drain.island
        self._ending[island] = drain
        self._lifecycle.end(island, Status(Code.DATA_LOSS, f"island {island} {self._cause_of(drain)}"))

    def _cause_of(self, drain: _Drain) -> str:
        """Return who has drained the island, as the end of a sentence about it."""
        if not drain.returns:
            return "was drained by its operator"
        departures = (self._departure_of(host) for host in self._resources.hosts_of(drain.island))
        left = "; ".join(each for each in departures if each) or "its machine left"
        return f"was drained because {left}"

    def island_failed(self, lost: IslandFailed) -> None:
        """End the drain of an island that has failed. Migrations from there have ended, or will end well."""
        for drains in (self._leaving, self._copying):
            drain = drains.pop(lost.island, None)
            if drain is not None:
                drain.problems.append(_LOST)
                drain.left -= drain.leaving
                if not drain.left:
                    self._stop_draining(drain)

    def island_drained(self, drained: IslandDrained) -> None:
        """Let the workers of a drained island end."""
        hosts = tuple(self._resources.hosts_of(drained.island))
        for session in self._sessions.values() if hosts else ():
            self._outbox.to_session(session.number, m.HostsFailed(hosts))
        self._outbox.to_engine(m.EndIsland(drained.island))

    def island_ended(self, island: int) -> None:
        """Handle that the engine has ended the island's workers."""
        self._forget_hosts(island)
        drain = self._ending.pop(island, None)
        if drain is not None:
            self._reply(drain.operator, OK, f"island {island} is empty, and its workers have ended")
            if drain.returns:
                self._return(island)


def _moved(session: Session, source: IslandDevices, target: IslandDevices) -> Changes:
    """Map the session's devices on one island to the devices of the other with equal coordinates."""
    there = dict(zip(source.locations, target.locations, strict=True))
    locations = session.devices.locations
    return {device: there[location] for device, location in locations.items() if location.island == source.number}
