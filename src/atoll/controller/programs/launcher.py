"""Launches on their way: from a client's message over its gangs' places in line to results that are ready.

The rules of memory are here, too: a buffer's memory may go once the client has released it and the last gang that needs
it has started; a gang's inputs are checked when it is launched and again when its turn comes.

Dispatch is parallel: a node's gangs are started before anything that they need has run; what comes from another host is
awaited by the worker. `controller.turns` has the other way.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.controller.islands.resources import ResourceManager
from atoll.controller.memory.directory import Entry
from atoll.controller.memory.reservations import Reservations
from atoll.controller.operators.trace import Trace
from atoll.controller.outbox import Outbox
from atoll.controller.programs.checks import gang_problem, launch_problem
from atoll.controller.programs.feeds import Key
from atoll.controller.programs.quarantine import Quarantine
from atoll.controller.programs.registered import RegisteredProgram
from atoll.controller.sessions.session import Launch, Session, Work
from atoll.errors import Code, Status
from atoll.protocol import messages as m
from atoll.scheduling.gangs import GangSpec
from atoll.scheduling.scheduler import Gang, Scheduler, Ticket
from atoll.scheduling.sequential import Turns

# Until an island's hosts have said how many runs may be in flight on them.
GANG_WINDOW = 24


class Launcher:
    """Puts gangs in line, starts them, and learns of their ends.

    `on_program_idle(program)` is called when the last gang of a released program has started. With `sequential`, gangs
    are dispatched one after another.
    """

    def __init__(
        self,
        resources: ResourceManager,
        sessions: dict[int, Session],
        outbox: Outbox,
        on_program_idle: Callable[[RegisteredProgram], None],
        quarantine: Quarantine,
        sequential: bool = False,
    ) -> None:
        self.scheduler = Scheduler[Work](resources.topology.islands, GANG_WINDOW, hosts=resources.topology.hosts)
        self._resources = resources
        self._sessions = sessions
        self._outbox = outbox
        self._on_program_idle = on_program_idle
        self._quarantine = quarantine
        self.trace = Trace()
        self.memory = Reservations(sessions, self.scheduler, resources.topology.hosts)
        self.in_flight: dict[int, Gang[Work]] = {}
        self._next_sequence = 1
        self._next_own = m.OWN_NUMBERS
        self._last_end: dict[int, int] = {}  # by host: when its last run ended, by its own clock
        self._turns: Turns[Work] | None = Turns(self.scheduler) if sequential else None

    # ---- events

    def launch(self, session: Session, message: m.Launch) -> None:
        """A client launches a program. What cannot run gives results that stand for the reason.

        Raises INVALID_ARGUMENT where the results cannot be named so.
        """
        session.directory.check_new(message.results)
        program = session.programs.get(message.program)
        problem = launch_problem(session, program, message, self._quarantine, self._resources)
        if problem is not None or not isinstance(program, RegisteredProgram):
            session.has_errors = True
            for handle in message.results:
                session.directory.add(handle, Entry((), 0, ready=True, error=problem))
            if isinstance(program, RegisteredProgram):
                self._refuse_feeds(session, program.gangs, message.feeds)
            self._outbox.return_credits(session.number, message.credits)
            return
        session.launches += 1
        session.in_flight += 1
        launch = self._new_launch(session, program, message)
        may_share = self._turns is None and not self._quarantine.suspects and not self._is_contended(session, program)
        for node in program.turns.next_launch(may_share=may_share):
            self._join_line(session, launch, node)
        for i in program.donated:
            launch.entries[i].consumed = True
        if not launch.pending:
            self._launch_done(launch)
            return
        for ticket in launch.tickets:
            if self._turns is not None:
                self._turns.join(ticket)
            self.scheduler.enqueue(ticket)
        self.pump()

    def _new_launch(self, session: Session, program: RegisteredProgram, message: m.Launch) -> Launch:
        directory = session.directory
        entries = [directory.entries[handle] for handle in message.arguments]
        for made in program.values:
            entry = Entry(made.hosts, made.nbytes, maker=program.name, context=message.context)
            if made.result >= 0:
                entry.spec = program.result_specs[made.result]
                directory.add(message.results[made.result], entry)
            entries.append(entry)
        feeds = message.feeds
        if program.all_feeds > program.feeds:
            extra = program.all_feeds - program.feeds
            feeds += tuple(range(self._next_own, self._next_own + extra))
            self._next_own += extra
        return Launch(
            session.number,
            program,
            message.arguments,
            message.results,
            feeds,
            entries,
            credits=message.credits,
        )

    def _is_contended(self, session: Session, program: RegisteredProgram) -> bool:
        """Whether somebody else waits for an island that the program needs."""
        return any(self.scheduler.others_wait(island, session.number) for island in program.islands)

    def _join_line(self, session: Session, launch: Launch, node: tuple[GangSpec, ...]) -> None:
        """A node of the launch gets its ticket. What it waits for is noted, and so are the buffers that it needs."""
        ticket: Ticket[Work] = Ticket(self._next_sequence, session.number)
        launch.tickets.append(ticket)
        handles, entries = launch.handles, session.directory.entries
        gangs = []
        for template in node:
            sequence = self._next_sequence
            self._next_sequence += 1
            for host, feed in template.awaited:
                key = (host, launch.feeds[feed])
                if not session.feeds.is_here(key):
                    session.feeds.awaited[key] = ticket
                    ticket.missing += 1
            # A result that is released before its gang starts must not be freed before it: it is counted, too.
            for place in template.handles:
                entries[handles[place]].uses += 1
            exclusive = not self._quarantine.suspects.isdisjoint(template.functions)
            work = Work(launch, template, set(template.hosts))
            island, hosts = template.island, template.hosts
            gangs.append(Gang(sequence, island, ticket, work, template.estimate, exclusive, template.segments, hosts))
        ticket.gangs = tuple(gangs)
        launch.pending += len(gangs)
        launch.program.waiting += len(gangs)

    def feed_arrived(self, session: Session, host: int, feed: int) -> bool:
        """A client's feed is complete at a host's data port; True where a launch waited for it."""
        ticket = session.feeds.awaited.pop((host, feed), None)
        if ticket is None:
            return False
        self.scheduler.arrived(ticket)
        return True

    def run_ended(
        self, host: int, sequence: int, failure: Status | None = None, times: tuple[int, int] = (0, 0)
    ) -> None:
        """A host has ended its part of a gang; `times` are its start and end in nanoseconds of the host's clock."""
        gang = self.in_flight.get(sequence)
        if gang is None or host not in gang.work.hosts_left:
            return
        launch, template = gang.work.launch, gang.work.template
        started, ended = max(times[0], self._last_end.get(host, 0)), times[1]
        if failure is None:
            self.trace.add(
                gang.island,
                host,
                launch.session,
                launch.program.name,
                template.work,
                sequence,
                started,
                ended,
                template.segments,
            )
        gang.work.duration = max(gang.work.duration, ended - started)
        self._last_end[host] = max(ended, self._last_end.get(host, 0))
        gang.work.hosts_left.discard(host)
        if failure is not None and self._may_be_of_another_host(gang, failure):
            # That has a name of its own, which comes soon.
            gang.work.failure = gang.work.failure or failure
        elif failure is not None:
            self.fail(launch, failure)
        if not gang.work.hosts_left and (gang.work.failure is None or launch.error is not None):
            if launch.error is None:
                template.learn(gang.work.duration)
                if gang.exclusive:
                    for name in template.functions:
                        self._quarantine.ended_well(name)
            self.finish(gang)

    def _may_be_of_another_host(self, gang: Gang[Work], failure: Status) -> bool:
        """Whether the loss of another host may be what failed a gang on this one."""
        if gang.work.template.collective or failure.code == Code.UNAVAILABLE:
            return True
        launch = gang.work.launch
        # What it reads may be made together with others, and be broken before that is known to be.
        reads_unready = any(not entry.ready for entry in launch.entries[: len(launch.arguments)])
        return len(self._resources.hosts_of(gang.island)) > 1 and (reads_unready or len(launch.tickets) > 1)

    def enqueued(self, sequence: int) -> None:
        """A host has enqueued its part of a gang, and says so because it was asked to."""
        gang = self.in_flight.get(sequence)
        if self._turns is not None and gang is not None:
            self._turns.enqueued(gang)

    def island_back(self, island: int) -> None:
        """The island's hosts have started anew, with nothing on them."""
        for host in self._resources.hosts_of(island):
            self._last_end.pop(host, None)
        self.scheduler.resume(island)

    def session_closed(self, session: Session) -> None:
        """Gangs of the session that have not started will not, and its memory goes."""
        for entry in session.directory.entries.values():
            self.memory.release(entry)
        if self._turns is not None:
            self._turns.forget(session.number)
        ended = Status(Code.CANCELLED, f"session {session.number} has ended")
        for ticket in self.scheduler.drop_session(session.number):
            for gang in ticket.gangs:
                if gang.work.started:
                    self._fail_incoming(gang, ended)  # from the parts that will not start
                else:
                    gang.work.started = True
                    self._gang_left(gang.work.launch.program)
                    self._gang_ended(gang.work.launch)

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
        work, launch = gang.work, gang.work.launch
        session = self._sessions.get(launch.session)
        problem = gang_problem(session, gang)
        if problem is not None or session is None:
            self.scheduler.finished(gang)
            self.fail(launch, problem or Status(Code.CANCELLED))
            return
        if not self.memory.reserve(gang):
            self.scheduler.hold_back(gang)
            return
        if self.memory.ledger.capacity:
            self._outbox.flush_frees()
        work.started = True
        self.in_flight[gang.sequence] = gang
        for host in work.template.hosts:
            self._send(launch, host, gang.sequence, work.template.segments)
        if self._turns is not None:
            self._turns.started(gang, len(work.template.hosts))
        self._gang_left(launch.program)
        self._let_go(session, gang)

    def _send(self, launch: Launch, host: int, sequence: int, segments: int) -> None:
        """A host hears of a launch once, with all that it will need; later, whose turn it is."""
        first = launch.begun.get(host)
        if first is not None:
            self._outbox.dispatch(host, launch.session, first, sequence, segments)
            return
        launch.begun[host] = sequence
        plan = launch.program.plans[host]
        handles = launch.handles
        run = m.Run(
            sequence,
            launch.session,
            plan.number,
            tuple([handles[place] for place in plan.arguments]),
            tuple([handles[place] for place in plan.results]),
            launch.feeds,
            self._turns is not None,
            segments,
        )
        self._outbox.to_host(host, run)

    def settle(self, session: Session, handle: int, error: Status | None) -> None:
        """The buffer is ready, or an error: tells those who wait."""
        for wait, status in session.directory.settle(handle, error):
            self._outbox.to_session(session.number, m.Awaited(wait, status))

    # ---- ends

    def finish(self, gang: Gang[Work]) -> None:
        """A gang that was started has left its island, whatever came of it."""
        self.in_flight.pop(gang.sequence, None)
        if self._turns is not None:
            self._turns.ended(gang)
        self.memory.ended(gang)
        self.scheduler.finished(gang)
        self._gang_ended(gang.work.launch)

    def _gang_ended(self, launch: Launch) -> None:
        launch.pending -= 1
        if not launch.pending:
            self._launch_done(launch)

    def _launch_done(self, launch: Launch) -> None:
        session = self._sessions.get(launch.session)
        for made, entry in zip(launch.program.values, launch.entries[launch.program.arguments :], strict=True):
            if made.result < 0 or launch.error is not None or session is None:
                self.memory.release(entry)
        if session is None:
            return
        for handle in launch.results:
            self.settle(session, handle, launch.error)
        session.in_flight -= 1
        self._outbox.return_credits(launch.session, launch.credits)

    def fail(self, launch: Launch, status: Status) -> None:
        """A launch fails: what of it has not started will not, and nothing new may use its results."""
        if launch.error is not None:
            return
        launch.error = status
        session = self._sessions.get(launch.session)
        if session is not None:
            session.has_errors = True
            session.directory.fail(launch.results, status)
        gangs = [gang for ticket in launch.tickets for gang in ticket.gangs]
        for ticket in launch.tickets:
            self.scheduler.drop(ticket)
        unstarted = [gang for gang in gangs if not gang.work.started]
        for gang in gangs:
            self._fail_incoming(gang, status)
        for host in {host for gang in unstarted for host in gang.work.template.hosts}:
            if host in launch.begun and not self._resources.is_lost(host):
                self._outbox.to_host(host, m.DropRun(launch.session, launch.begun[host]))
        for gang in unstarted:
            gang.work.started = True
            self._gang_left(launch.program)
            if session is not None:
                self._refuse_feeds(session, [gang.work.template], launch.feeds, taken=True)
                self._let_go(session, gang)
        if self._turns is not None:
            for ticket in launch.tickets:
                self._turns.over(ticket)
        for _ in unstarted:
            self._gang_ended(launch)

    def _fail_incoming(self, gang: Gang[Work], status: Status) -> None:
        """Its hosts shall not wait for what others would have sent them, nor keep what arrives all the same."""
        if gang.work.started and not gang.work.hosts_left:
            return
        for host, incoming in gang.work.template.incoming:
            if not self._resources.is_lost(host):
                feeds = tuple(gang.work.launch.feeds[feed] for feed in incoming)
                self._outbox.to_host(host, m.FailFeeds(gang.ticket.session, feeds, status))

    def _refuse_feeds(
        self, session: Session, gangs: list[GangSpec], feeds: tuple[int, ...], taken: bool = False
    ) -> None:
        """The client's bytes for gangs that will not be: those that have come, and those that are on their way.

        With `taken`, the launch has noted which it still awaits.
        """
        for gang in gangs:
            for host, feed in gang.awaited:
                if feed >= len(feeds):
                    continue
                key: Key = (host, feeds[feed])
                has_come = taken and key not in session.feeds.awaited
                if has_come or session.feeds.refuse(key):
                    self._outbox.to_host(host, m.DropFeed(session.number, key[1]))

    def _gang_left(self, program: RegisteredProgram) -> None:
        """A gang has started, or never will."""
        program.waiting -= 1
        if program.released and not program.waiting:
            self._on_program_idle(program)

    def _let_go(self, session: Session, gang: Gang[Work]) -> None:
        """The gang has started, or never will: it keeps none of its buffers from being freed any more."""
        handles = gang.work.launch.handles
        for place in gang.work.template.handles:
            handle = handles[place]
            entry = session.directory.entries.get(handle)
            if entry is None:
                continue
            unneeded = session.directory.used(handle) is not None
            if entry.delete and entry.uses <= 0:
                self._free(session, handle, entry, delete=True)
            if unneeded:
                self._free(session, handle, entry)

    def _free(self, session: Session, handle: int, entry: Entry, delete: bool = False) -> None:
        self.memory.release(entry)
        self._outbox.free(entry.hosts, session.number, (handle,), delete=delete)
