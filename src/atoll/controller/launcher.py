"""Launches on their way: from a client's message over its gangs' places in line to results that are ready.

The rules of memory are here, too: a buffer's memory may go once the client has released it and the last gang that needs
it has started; a gang's inputs are checked when it is launched and again when its turn comes.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.controller.directory import Entry
from atoll.controller.outbox import Outbox
from atoll.controller.programs import RegisteredProgram
from atoll.controller.resources import ResourceManager
from atoll.controller.scheduler import Gang, IslandScheduler
from atoll.controller.session import Launch, Session, Work
from atoll.errors import Code, Status, invalid
from atoll.transport import messages as m

# More executions than this in flight on one host can deadlock XLA's CPU client (32 is its own limit).
GANG_WINDOW = 24
# Numbers that the controller gives to feeds and buffers between hosts start here; proxies count below.
OWN_NUMBERS = 1 << 48


class Launcher:
    """Puts gangs in line, starts them, and learns of their ends.

    `on_program_idle(program)` is called when the last gang of a released program has started.
    """

    def __init__(
        self,
        resources: ResourceManager,
        sessions: dict[int, Session],
        outbox: Outbox,
        on_program_idle: Callable[[RegisteredProgram], None],
    ) -> None:
        self.schedulers = {
            island: IslandScheduler[Work](GANG_WINDOW) for island in range(resources.topology.islands)
        }
        self._resources = resources
        self._sessions = sessions
        self._outbox = outbox
        self._on_program_idle = on_program_idle
        self._in_flight: dict[int, Gang[Work]] = {}
        self._next_sequence = 1
        self._next_own = OWN_NUMBERS
        self._stalled: set[int] = set()  # islands where a gang was dropped, which may have held back others

    # ---- events

    def launch(self, session: Session, message: m.Launch) -> None:
        """A client launches a program. What cannot run gives results that stand for the reason."""
        directory = session.directory
        entries = directory.entries
        program = session.programs.get(message.program)
        problem = self._launch_problem(session, program, message)
        if problem is not None or not isinstance(program, RegisteredProgram):
            session.has_errors = True
            for handle in message.results:
                directory.add(handle, Entry((), 0, ready=True, error=problem))
            if isinstance(program, RegisteredProgram):
                self._refuse_feeds(session, program, message.feeds)
            self._outbox.retire(session.number)
            return
        session.launches += 1
        for handle, hosts, size in zip(
            message.results, program.result_hosts, program.result_bytes, strict=True
        ):
            directory.add(handle, Entry(hosts, size))
        handles = message.arguments + message.results
        temporaries: tuple[int, ...] = ()
        if program.temporaries:
            temporaries = tuple(range(self._next_own, self._next_own + program.temporaries))
            self._next_own += program.temporaries
            handles += temporaries
        feeds = message.feeds
        if program.all_feeds > program.feeds:
            extra = program.all_feeds - program.feeds
            feeds += tuple(range(self._next_own, self._next_own + extra))
            self._next_own += extra
        launch = Launch(session.number, program, message.results, temporaries, len(program.gangs), [])
        program.waiting += len(program.gangs)
        session.in_flight += 1
        for island, runs in program.gangs:
            sequence = self._next_sequence
            self._next_sequence += 1
            used: set[int] = set()
            missing = 0
            gang = Gang(sequence, session.number, Work(launch, island))
            sends = []
            for run in runs:
                arguments = tuple([handles[i] for i in run.arguments])
                used.update(arguments)
                results = tuple([handles[i] for i in run.results])
                used.update(results)  # a result released before its gang starts must not be freed before it
                sends.append(
                    (run.host, m.Run(sequence, session.number, run.plan, arguments, results, feeds))
                )
                for feed in run.awaited:
                    key = (run.host, feeds[feed])
                    if key in session.early_feeds:
                        session.early_feeds.discard(key)
                    else:
                        session.awaited_feeds[key] = gang
                        missing += 1
            gang.missing = missing
            gang.work.runs = tuple(sends)
            gang.work.handles = tuple(used)
            gang.work.hosts_left = len(sends)
            for handle in used:
                entry = entries.get(handle)
                if entry is not None:
                    entry.uses += 1
            launch.gangs.append(gang)
            self.schedulers[island].enqueue(gang)
        for i in program.donated:
            entries[message.arguments[i]].consumed = True
        for island, _ in program.gangs:
            self.pump(island)

    def feed_arrived(self, session: Session, host: int, feed: int) -> int | None:
        """A feed is complete at a host's data port. Returns the island where a gang waited for it, if any."""
        gang = session.awaited_feeds.pop((host, feed), None)
        if gang is None:
            return None
        self.schedulers[gang.work.island].arrived(gang)
        return gang.work.island

    def run_ended(self, sequence: int, failure: Status | None = None) -> None:
        """One host has ended its run of a gang."""
        gang = self._in_flight.get(sequence)
        if gang is not None:
            if failure is not None:
                self._failed(gang, failure)
            self._finish(gang, 1)

    def island_lost(self, island: int, status: Status) -> None:
        """What runs on the island, or waits there for bytes, fails."""
        for gang in [g for g in self._in_flight.values() if g.work.island == island]:
            self._failed(gang, status)
            self._finish(gang, gang.work.hosts_left)
        for session in self._sessions.values():
            for gang in list(session.awaited_feeds.values()):
                if gang.work.island == island:
                    self._failed(gang, status)

    def session_closed(self, number: int) -> None:
        """Gangs of the session that have not started will not."""
        for scheduler in self.schedulers.values():
            for gang in scheduler.drop_session(number):
                if not gang.dropped:
                    self._gang_left(gang.work.launch.program)

    def release(self, session: Session, handles: tuple[int, ...], delete: bool) -> None:
        """The client needs the handles no more; with `delete`, nobody may use their memory either."""
        for handle in handles:
            if delete:
                entry = session.directory.entries.get(handle)
                if entry is not None:
                    entry.consumed = entry.delete = True
                    if entry.uses <= 0:
                        self._free(session, handle, entry, delete=True)
                continue
            entry = session.directory.release(handle)
            if entry is not None:
                self._free(session, handle, entry)

    def pump(self, island: int) -> None:
        """Starts what the island has room for."""
        scheduler = self.schedulers[island]
        while (gang := scheduler.next()) is not None:
            work = gang.work
            problem = self._gang_problem(gang)
            if problem is not None:
                scheduler.finished()
                self._failed(gang, problem)
                continue
            work.started = True
            self._in_flight[gang.sequence] = gang
            for host, run in work.runs:
                self._outbox.to_host(host, run)
            self._gang_left(work.launch.program)
            session = self._sessions.get(gang.session)
            if session is not None:
                for handle in work.handles:
                    self._used(session, handle)

    def pump_stalled(self) -> None:
        """Dropped gangs may have let others come to the head of their lines."""
        while self._stalled:
            self.pump(self._stalled.pop())

    def settle(self, session: Session, handle: int, error: Status | None) -> None:
        """The buffer is ready, or an error: tells those who wait."""
        for wait, status in session.directory.settle(handle, error):
            self._outbox.to_session(session.number, m.Awaited(wait, status))

    # ---- checks

    def _launch_problem(
        self, session: Session, program: RegisteredProgram | Status | None, message: m.Launch
    ) -> Status | None:
        if isinstance(program, Status):
            return program
        if program is None:
            return Status(Code.NOT_FOUND, f"program {message.program} does not exist in this session")
        if (len(message.arguments), len(message.results), len(message.feeds)) != (
            program.arguments,
            program.results,
            program.feeds,
        ):
            return Status(
                Code.INVALID_ARGUMENT,
                f"{program.name} takes {program.arguments} arguments, {program.feeds} feeds and gives "
                f"{program.results} results; launched with {len(message.arguments)}, {len(message.feeds)} and "
                f"{len(message.results)}",
            )
        for handle in message.arguments:
            problem = session.directory.problem(handle)
            if problem is not None:
                return problem
        for handle in message.results:
            if handle in session.directory.entries:
                raise invalid(f"array {handle} exists already")
        for _, runs in program.gangs:
            for run in runs:
                if self._resources.is_lost(run.host):
                    return Status(Code.UNAVAILABLE, f"host {run.host} is gone; {program.name} cannot run on it")
        return None

    def _gang_problem(self, gang: Gang[Work]) -> Status | None:
        """Why a gang whose turn has come cannot run: an input that failed since its launch, or a host that is gone."""
        for host, _ in gang.work.runs:
            loss = self._resources.hosts[host].loss
            if loss is not None:
                return loss
        session = self._sessions[gang.session]
        if session.has_errors:
            for handle in gang.work.handles:
                entry = session.directory.entries.get(handle)
                if entry is not None and entry.error is not None:
                    return entry.error
        return None

    # ---- ends

    def _finish(self, gang: Gang[Work], hosts: int) -> None:
        work = gang.work
        work.hosts_left -= hosts
        if work.hosts_left > 0:
            return
        self._in_flight.pop(gang.sequence, None)
        self.schedulers[work.island].finished()
        self._launch_part_done(work.launch)
        self.pump(work.island)

    def _launch_part_done(self, launch: Launch) -> None:
        launch.pending -= 1
        if launch.pending:
            return
        session = self._sessions.get(launch.session)
        if session is None:
            return
        for handle in launch.results:
            self.settle(session, handle, launch.error)
        if launch.temporaries:
            self._outbox.free(self._resources.hosts, launch.session, launch.temporaries)
        session.in_flight -= 1
        self._outbox.retire(launch.session)

    def _failed(self, gang: Gang[Work], status: Status) -> None:
        """A gang failed: what of its launch has not started will not, and nothing new may use its results."""
        launch = gang.work.launch
        if launch.error is None:
            launch.error = status
        session = self._sessions.get(launch.session)
        if session is not None:
            session.has_errors = True
            session.directory.fail(launch.results, status)
        for other in launch.gangs:
            if other.work.started or other.dropped:
                continue
            other.work.started = True
            self._gang_left(launch.program)
            self.schedulers[other.work.island].drop(other)
            self._stalled.add(other.work.island)
            if session is not None:
                for key in [k for k, g in session.awaited_feeds.items() if g is other]:
                    del session.awaited_feeds[key]
                    session.unwanted_feeds.add(key)
                for handle in other.work.handles:
                    self._used(session, handle)
            self._launch_part_done(launch)

    def _refuse_feeds(self, session: Session, program: RegisteredProgram, feeds: tuple[int, ...]) -> None:
        """Bytes on their way for a launch that will not be."""
        for _, runs in program.gangs:
            for run in runs:
                for feed in run.awaited:
                    if feed < len(feeds):
                        self._unwanted(session, run.host, feeds[feed])

    def _unwanted(self, session: Session, host: int, feed: int) -> None:
        if (host, feed) in session.early_feeds:
            session.early_feeds.discard((host, feed))
            self._outbox.to_host(host, m.DropFeed(session.number, feed))
        else:
            session.unwanted_feeds.add((host, feed))

    def _gang_left(self, program: RegisteredProgram) -> None:
        """A gang has started, or never will."""
        program.waiting -= 1
        if program.released and not program.waiting:
            self._on_program_idle(program)

    def _used(self, session: Session, handle: int) -> None:
        entry = session.directory.entries.get(handle)
        if entry is None:
            return
        unneeded = session.directory.used(handle) is not None
        if entry.delete and entry.uses <= 0:
            self._free(session, handle, entry, delete=True)
        if unneeded:
            self._free(session, handle, entry)

    def _free(self, session: Session, handle: int, entry: Entry, delete: bool = False) -> None:
        self._outbox.free(entry.hosts, session.number, (handle,), delete=delete)
