"""Launches on their way: from a client's message over its gangs' places in line to results that are ready.

The rules of memory are here, too: a buffer's memory may go once the client has released it and the last gang that needs
it has started; a gang's inputs are checked when it is launched and again when its turn comes.

Dispatch is parallel: all hosts of a launch hear of it at once, before anything that it needs has run; what comes from
another host is awaited by the worker. With `sequential`, a session's launch is dispatched when the one before is known
to be enqueued: for what cannot be dispatched ahead, and to measure what the other way is worth.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from atoll.controller.blame import Blame
from atoll.controller.directory import Entry
from atoll.controller.outbox import Outbox
from atoll.controller.programs import GangTemplate, RegisteredProgram
from atoll.controller.reservations import Reservations
from atoll.controller.resources import ResourceManager
from atoll.controller.scheduler import Gang, Scheduler, Ticket
from atoll.controller.session import Launch, Session, Work
from atoll.errors import Code, Status, invalid
from atoll.transport import messages as m

# More executions than this in flight on one host can deadlock XLA's CPU client (32 is its own limit).
GANG_WINDOW = 24
# The end of a worker is known after so long.
LOSS_KNOWN_SECONDS = 0.5


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
        blame: Blame,
        sequential: bool = False,
    ) -> None:
        self.scheduler = Scheduler[Work](resources.topology.islands, GANG_WINDOW)
        self._resources = resources
        self._sessions = sessions
        self._outbox = outbox
        self._on_program_idle = on_program_idle
        self._blame = blame
        self.memory = Reservations(sessions, self.scheduler, resources.topology.hosts)
        self._in_flight: dict[int, Gang[Work]] = {}
        self._next_sequence = 1
        self._next_own = m.OWN_NUMBERS
        self._failed_since: dict[int, float] = {}  # gangs by sequence
        self._last_end: dict[int, int] = {}  # by host: when its last run ended, by its own clock
        self._sequential = sequential
        self._unacknowledged: dict[int, tuple[Launch, int]] = {}  # by sequence: and how many hosts have yet to
        self._enqueueing: dict[int, Launch] = {}  # by session, the launch that the next one waits for
        self._next: dict[int, deque[Ticket[Work]]] = {}

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
        for handle, hosts, size, spec in zip(
            message.results, program.result_hosts, program.result_bytes, program.result_specs, strict=True
        ):
            directory.add(handle, Entry(hosts, size, maker=program.name, context=message.context, spec=spec))
        handles = message.arguments + message.results
        feeds = message.feeds
        if program.all_feeds > program.feeds:
            extra = program.all_feeds - program.feeds
            feeds += tuple(range(self._next_own, self._next_own + extra))
            self._next_own += extra
        ticket = Ticket[Work](self._next_sequence, session.number)
        launch = Launch(
            session.number, program, message.results, message.arguments, feeds, len(program.gangs), ticket
        )
        program.waiting += len(program.gangs)
        session.in_flight += 1
        ticket.gangs = tuple(self._gang(session, launch, template, handles) for template in program.gangs)
        for i in program.donated:
            entries[message.arguments[i]].consumed = True
        if not ticket.gangs:
            self._launch_done(launch)
            return
        if self._sequential:
            self._in_turn(launch)
        self.scheduler.enqueue(ticket)
        self.pump()

    def _gang(self, session: Session, launch: Launch, template: GangTemplate, handles: tuple[int, ...]) -> Gang[Work]:
        """The launch's part on one island. What it waits for is noted, and so are the buffers that it needs."""
        sequence = self._next_sequence
        self._next_sequence += 1
        used: set[int] = set()
        sends = []
        for run in template.runs:
            arguments = tuple([handles[i] for i in run.arguments])
            used.update(arguments)
            results = tuple([handles[i] for i in run.results])
            used.update(results)  # a result released before its gang starts must not be freed before it
            sends.append(
                (
                    run.host,
                    m.Run(sequence, session.number, run.plan, arguments, results, launch.feeds, self._sequential),
                )
            )
            for feed in run.awaited:
                key = (run.host, launch.feeds[feed])
                if key in session.early_feeds:
                    session.early_feeds.discard(key)
                else:
                    session.awaited_feeds[key] = launch.ticket
                    launch.ticket.missing += 1
        for handle in used:
            entry = session.directory.entries.get(handle)
            if entry is not None:
                entry.uses += 1
        work = Work(launch, template, tuple(sends), tuple(used), {host for host, _ in sends})
        alone = bool(self._blame.suspects) and not self._blame.suspects.isdisjoint(launch.program.functions)
        return Gang(sequence, template.island, launch.ticket, work, template.estimate, alone)

    def feed_arrived(self, session: Session, host: int, feed: int) -> bool:
        """A client's feed is complete at a host's data port; True where a launch waited for it."""
        ticket = session.awaited_feeds.pop((host, feed), None)
        if ticket is None:
            return False
        self.scheduler.arrived(ticket)
        return True

    def run_ended(
        self, host: int, sequence: int, failure: Status | None = None, times: tuple[int, int] = (0, 0)
    ) -> None:
        """A host has ended its run of a gang; `times` are its start and end in nanoseconds of the host's clock."""
        gang = self._in_flight.get(sequence)
        if gang is None or host not in gang.work.hosts_left:
            return
        started, ended = times
        gang.work.duration = max(gang.work.duration, ended - max(started, self._last_end.get(host, 0)))
        self._last_end[host] = max(ended, self._last_end.get(host, 0))
        gang.work.hosts_left.discard(host)
        if failure is not None and gang.work.template.together:
            # It may be the loss of another host that failed it here: that has a name of its own, which comes soon.
            gang.work.failure = gang.work.failure or failure
        elif failure is not None:
            self._failed(gang.work.launch, failure)
        if not gang.work.hosts_left and gang.work.failure is None:
            if gang.work.launch.error is None:
                gang.work.template.learn(gang.work.duration)
                if gang.alone:
                    for name in gang.work.launch.program.functions:
                        self._blame.ended_well(name)
            self._finish(gang)

    def island_lost(self, island: int, status: Status) -> None:
        """What runs on the island, or has its place in its order, or its bytes there, fails; the rest waits for it."""
        self.scheduler.pause(island)
        for gang in [g for g in self._in_flight.values() if g.island == island]:
            self._failed(gang.work.launch, status.within(gang.work.launch.program.name))
            self._finish(gang)
        for ticket in self.scheduler.tickets(island):
            if ticket.committed or any(g.island == island and _has_feeds(g.work) for g in ticket.gangs):
                launch = ticket.gangs[0].work.launch
                self._failed(launch, status.within(launch.program.name))

    def fail_doomed(self) -> None:
        """What waits in line for a turn that it could do nothing with, since an input of it is lost, fails now."""
        islands = self._resources.islands
        tickets = {ticket.number: ticket for island in islands for ticket in self.scheduler.tickets(island)}
        for _, ticket in sorted(tickets.items()):
            for gang in ticket.gangs:
                problem = self._gang_problem(gang)
                if problem is not None:
                    self._failed(gang.work.launch, problem)

    def island_back(self, island: int) -> None:
        """The island's hosts have started anew, with nothing on them."""
        for host in self._resources.hosts_of(island):
            self._last_end.pop(host, None)
        self.scheduler.resume(island)

    def running(self, island: int) -> set[str]:
        """The functions in flight on the island."""
        gangs = (gang for gang in self._in_flight.values() if gang.island == island)
        return {name for gang in gangs for name in gang.work.launch.program.functions}

    def half_failed(self) -> list[Gang[Work]]:
        """Gangs that failed on one host while others of their island still run them: these may wait for it in vain."""
        return [gang for gang in self._in_flight.values() if gang.work.failure is not None and gang.work.hosts_left]

    def settle_failures(self, now: float) -> None:
        """Gangs that failed on hosts of an island that is still there a while later have failed by themselves."""
        failed = [g for g in self._in_flight.values() if g.work.failure is not None and not g.work.hosts_left]
        for gang in failed:
            since = self._failed_since.setdefault(gang.sequence, now)
            if now - since >= LOSS_KNOWN_SECONDS:
                del self._failed_since[gang.sequence]
                assert gang.work.failure is not None
                self._failed(gang.work.launch, gang.work.failure)
                self._finish(gang)
        self._failed_since = {s: since for s, since in self._failed_since.items() if s in self._in_flight}

    def fail_starving(self, now: float) -> None:
        """What has waited for memory in vain fails, with the name of who holds it."""
        idle = {n: self.scheduler.statistics(n).in_flight == 0 for n in self._resources.islands}
        for gang, status in self.memory.starving(now, idle):
            self._failed(gang.work.launch, status)

    def waiting_for(self, island: int) -> list[Launch]:
        """Launches in line that need the island."""
        return [ticket.gangs[0].work.launch for ticket in self.scheduler.tickets(island)]

    def fail(self, launch: Launch, status: Status) -> None:
        """The launch fails, as far as it has not run."""
        self._failed(launch, status)

    def session_closed(self, session: Session) -> None:
        """Gangs of the session that have not started will not, and its memory goes."""
        number = session.number
        for entry in session.directory.entries.values():
            self.memory.release(entry)
        self._next.pop(number, None)
        self._enqueueing.pop(number, None)
        ended = Status(Code.CANCELLED, f"session {number} has ended")
        for ticket in self.scheduler.drop_session(number):
            for gang in ticket.gangs:
                if gang.work.started:
                    self._fail_incoming(gang, ended)  # from the parts that will not start
                else:
                    gang.work.started = True
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

    def pump(self) -> None:
        """Starts what the islands have room for."""
        touched = self.scheduler.touched
        while touched:
            island = min(touched)  # any would do; but decisions replay
            touched.discard(island)
            while (gang := self.scheduler.next(island)) is not None:
                self._start(gang)

    def _start(self, gang: Gang[Work]) -> None:
        work = gang.work
        problem = self._gang_problem(gang)
        if problem is not None:
            self.scheduler.finished(gang)
            self._failed(work.launch, problem)
            return
        if not self.memory.reserve(self._sessions[gang.ticket.session], gang):
            self.scheduler.hold_back(gang)
            return
        if self.memory.ledger.capacity:
            self._outbox.flush_frees()
        work.started = True
        self._in_flight[gang.sequence] = gang
        for host, run in work.runs:
            self._outbox.to_host(host, run)
        if self._sequential:
            self._unacknowledged[gang.sequence] = (work.launch, len(work.runs))
        self._gang_left(work.launch.program)
        session = self._sessions.get(gang.ticket.session)
        if session is not None:
            for handle in work.handles:
                self._used(session, handle)

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
        if self._blame.refused:
            for name in program.functions:
                if name in self._blame.refused:
                    return self._blame.refused[name].within(program.name)
        for gang in program.gangs:
            loss = self._resources.islands[gang.island].given_up
            if loss is not None:
                return loss
            if gang.island in session.unseen and any(run.awaited for run in gang.runs):
                return session.unseen[gang.island]
        return None

    def _gang_problem(self, gang: Gang[Work]) -> Status | None:
        """Why a gang whose turn has come cannot run: an input that failed since its launch."""
        if gang.work.launch.error is not None:
            return gang.work.launch.error
        session = self._sessions.get(gang.ticket.session)
        if session is None:
            return Status(Code.CANCELLED, "its session has ended")
        if session.has_errors:
            for handle in gang.work.handles:
                entry = session.directory.entries.get(handle)
                if entry is not None and entry.error is not None:
                    return entry.error
        return None

    # ---- sequential dispatch

    def _in_turn(self, launch: Launch) -> None:
        """The launch waits for the one before it in its session."""
        number = launch.session
        if number in self._enqueueing:
            launch.ticket.missing += 1
            self._next.setdefault(number, deque()).append(launch.ticket)
        else:
            self._enqueueing[number] = launch

    def enqueued(self, sequence: int) -> None:
        """A host has enqueued its run of a gang."""
        launch, hosts = self._unacknowledged.pop(sequence, (None, 0))
        if launch is None:
            return
        if hosts > 1:
            self._unacknowledged[sequence] = (launch, hosts - 1)
        elif not any(gang.sequence in self._unacknowledged or not gang.work.started for gang in launch.ticket.gangs):
            self._turn_over(launch)

    def _turn_over(self, launch: Launch) -> None:
        if self._enqueueing.get(launch.session) is not launch:
            return
        del self._enqueueing[launch.session]
        line = self._next.get(launch.session)
        while line:
            ticket = line.popleft()
            if not ticket.dropped:
                self._enqueueing[launch.session] = ticket.gangs[0].work.launch
                self.scheduler.arrived(ticket)
                return

    # ---- ends

    def _finish(self, gang: Gang[Work]) -> None:
        self._in_flight.pop(gang.sequence, None)
        self.memory.ended(gang)
        self.scheduler.finished(gang)
        self._gang_ended(gang.work.launch)

    def _gang_ended(self, launch: Launch) -> None:
        launch.pending -= 1
        if not launch.pending:
            self._launch_done(launch)

    def _launch_done(self, launch: Launch) -> None:
        if self._sequential:
            self._turn_over(launch)
        session = self._sessions.get(launch.session)
        if session is None:
            return
        for handle in launch.results:
            if launch.error is not None and handle in session.directory.entries:
                self.memory.release(session.directory.entries[handle])
            self.settle(session, handle, launch.error)
        session.in_flight -= 1
        self._outbox.retire(launch.session)

    def _failed(self, launch: Launch, status: Status) -> None:
        """A launch failed: what of it has not started will not, and nothing new may use its results."""
        if launch.error is not None:
            return
        launch.error = status
        session = self._sessions.get(launch.session)
        if session is not None:
            session.has_errors = True
            session.directory.fail(launch.results, status)
        self.scheduler.drop(launch.ticket)
        unstarted = [gang for gang in launch.ticket.gangs if not gang.work.started]
        for gang in launch.ticket.gangs:
            self._fail_incoming(gang, status)
        for gang in unstarted:
            gang.work.started = True
            self._gang_left(launch.program)
            if session is not None:
                self._forget_feeds(session, gang)
                for handle in gang.work.handles:
                    self._used(session, handle)
        for _ in unstarted:
            self._gang_ended(launch)

    def _fail_incoming(self, gang: Gang[Work], status: Status) -> None:
        """Its hosts shall not wait for what others would have sent them, nor keep what arrives all the same."""
        if gang.work.started and not gang.work.hosts_left:
            return
        for run in gang.work.template.runs:
            if run.incoming and not self._resources.is_lost(run.host):
                feeds = tuple(gang.work.launch.feeds[feed] for feed in run.incoming)
                self._outbox.to_host(run.host, m.FailFeeds(gang.ticket.session, feeds, status))

    def _forget_feeds(self, session: Session, gang: Gang[Work]) -> None:
        """The client's bytes for a gang that will not start: those that have come, and those that are on their way."""
        for run in gang.work.template.runs:
            for feed in run.awaited:
                key = (run.host, gang.work.launch.feeds[feed])
                if session.awaited_feeds.pop(key, None) is not None:
                    session.unwanted_feeds.add(key)
                else:
                    self._outbox.to_host(run.host, m.DropFeed(session.number, key[1]))

    def _refuse_feeds(self, session: Session, program: RegisteredProgram, feeds: tuple[int, ...]) -> None:
        """The client's bytes for a launch that will not be."""
        for gang in program.gangs:
            for run in gang.runs:
                for feed in run.awaited:
                    if feed >= len(feeds):
                        continue
                    key = (run.host, feeds[feed])
                    if key in session.early_feeds:
                        session.early_feeds.discard(key)
                        self._outbox.to_host(run.host, m.DropFeed(session.number, key[1]))
                    else:
                        session.unwanted_feeds.add(key)

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
        self.memory.release(entry)
        self._outbox.free(entry.hosts, session.number, (handle,), delete=delete)


def _has_feeds(work: Work) -> bool:
    """Whether the gang takes bytes that a client has sent to its hosts, or is sending."""
    return any(run.awaited for run in work.template.runs)
