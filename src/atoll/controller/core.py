"""The controller's state machine: messages of proxies and workers in, messages to them out.

No I/O and no clock: every event adds to the outbox, which the shell sends. The path of a request is: register a
program once (it is lowered to one plan a host); launch it (its gangs join their islands' lines); dispatch (one
message per host); completion (results become ready, memory goes, the client gets room for more).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atoll.controller.blame import Blame
from atoll.controller.directory import Entry
from atoll.controller.functions import FunctionRegistry, Registration, function_name, hosts_of
from atoll.controller.launcher import Launcher
from atoll.controller.leases import LEASE_SECONDS, Leases
from atoll.controller.mesh import Shape
from atoll.controller.moves import Moves
from atoll.controller.operators import Operators
from atoll.controller.outbox import Destination, Outbox
from atoll.controller.placement import Slices, groups_of
from atoll.controller.programs import RegisteredProgram, register
from atoll.controller.resources import Host, ResourceManager, Topology
from atoll.controller.session import Session
from atoll.controller.slices import SliceRequests
from atoll.errors import OK, Code, Status, StatusError, invalid, not_found
from atoll.ir.lowering import Placement, Seat
from atoll.ir.plan import Plan
from atoll.ir.program import Program
from atoll.transport import messages as m

# Launches that a session may have in the system; its proxy stops reading from its client beyond.
LAUNCH_WINDOW = 512
# Feeds that a session may have uploaded ahead of the launches that use them.
MAX_EARLY_FEEDS = 65536
# For an island to be up again.
RESTART_SECONDS = 120.0
# For the other hosts of a gang to end, once it has failed on one of them.
HALF_FAILED_SECONDS = 5.0

_LOST = "what was stored or ran on its island is lost"


@dataclass(frozen=True)
class Settings:
    """What whoever starts a controller decides."""

    sequential: bool = False  # how launches are dispatched: see `controller.launcher`
    lease_seconds: float = LEASE_SECONDS  # that a worker may be silent for
    device_memory: int = 0  # bytes of each device, whatever its platform says; 0: what that says
    mesh: Shape = ()  # of an island's devices, where its platform tells none; (): a line


class Controller:
    """All decisions of a cluster."""

    def __init__(self, topology: Topology, settings: Settings | None = None) -> None:
        settings = settings or Settings()
        self.resources = ResourceManager(topology, settings.mesh)
        self.slices = Slices()
        self.functions = FunctionRegistry()
        self.sessions: dict[int, Session] = {}
        self._outbox = Outbox()
        self.blame = Blame()
        self.leases = Leases(settings.lease_seconds)
        self._launcher = Launcher(
            self.resources, self.sessions, self._outbox, self._release_program, self.blame, settings.sequential
        )
        self.scheduler = self._launcher.scheduler
        self.memory = self._launcher.memory.ledger
        self._compiles: dict[tuple[int, int, int], m.Compile] = {}  # (session, host, feed)
        self._queries: dict[int, tuple[int, int, m.Inquire]] = {}  # to which host, of which session
        self._moves = Moves(
            self.resources,
            self.functions,
            self._launcher,
            self._outbox,
            self._lower,
            self._release_program,
            self._release_function,
            self._compiles,
            self._queries,
        )
        self._operators = Operators(
            self.sessions, self.resources, self.slices, self._moves, self._launcher, self._outbox
        )
        self._slice_requests = SliceRequests(self.resources, self.slices, self.memory.free, self._outbox)
        self._device_memory = settings.device_memory
        self._hanging: dict[int, float] = {}  # gangs by sequence, and since when
        self._restarting: dict[int, float] = {}  # islands, and since when
        self._running_at_loss: dict[int, set[str]] = {}  # functions, by island
        self._next_session = 1
        self._next_plan = 1
        self._next_query = 1

    def take_outbox(self) -> list[tuple[Destination, Any]]:
        """What is to be sent, in order; see `outbox` for destinations."""
        self._moves.proceed()
        self._launcher.pump()
        return self._outbox.take()

    # ---- workers

    def worker_joined(self, ready: m.WorkerReady, pid: int) -> Host:
        """A host is there. With the last of an island that was restarted, all sessions are told to go on."""
        again = self.resources.islands[ready.island].state == "restarting"
        added = self.resources.islands[ready.island].state == "starting" and self.resources.is_complete
        host = self.resources.join(ready, pid)
        for info in ready.devices:
            self.memory.declare((host.number, info.ordinal), self._device_memory or info.memory_bytes)
        for session in self.sessions.values():
            self._to_host(host.number, m.OpenStore(session.number, session.secret))
        for session in self.sessions.values():
            for program in session.programs.values():
                if isinstance(program, RegisteredProgram):
                    self._keep_plans(program, host.number)
        if again and self.resources.islands[ready.island].state == "ready":
            self._island_back(ready.island)
            self._operators.island_is_up(ready.island)
        if added and self.resources.islands[ready.island].state == "ready":
            self._operators.island_ready(ready.island)
        return host

    def _island_back(self, island: int) -> None:
        hosts = self.resources.hosts_of(island)
        addresses = tuple((number, self.resources.hosts[number].data_address) for number in hosts)
        for session in self.sessions.values():
            self._to_session(session.number, m.HostsBack(addresses))
            cold = {name for name in session.functions.values() if hosts_of(self.functions.seats[name]) & set(hosts)}
            if cold:
                session.cold[island] = cold
                self.scheduler.exclude(island, session.number)
        self._launcher.island_back(island)
        # A client that gets no answer to some of its questions ends its process.
        for query, (host, session_number, message) in list(self._queries.items()):
            if host in hosts and session_number in self.sessions:
                del self._queries[query]
                self._inquire(self.sessions[session_number], message)

    def worker_lost(self, host: int, reason: str) -> None:
        """The connection to a host's worker is gone."""
        record = self.resources.hosts[host]
        text = f"host {host} of island {record.island} is gone (worker {record.pid}: {reason})"
        self.island_lost(record.island, Status(Code.DATA_LOSS, f"{text}; {_LOST}"))

    def worker_ended(self, message: m.WorkerEnded) -> None:
        """The engine has seen a worker's end, which may have been the doing of what ran there."""
        record = self.resources.hosts.get(message.host)
        if record is None or record.pid != message.pid:
            return
        compiling = {name for name, host in self.functions.waiting if host == message.host}
        running = self._launcher.running(record.island) or self._running_at_loss.get(record.island, set())
        self.blame.crashed(message.status, message.text, running, compiling)
        self.worker_lost(message.host, message.text)
        self._running_at_loss.pop(record.island, None)
        for name, status in self.blame.refused.items():
            for waiting, host in list(self.functions.waiting):
                if waiting == name:
                    self._settle_function(name, host, status, b"")

    def tick(self, now: float) -> None:
        """Once a second: looks for hosts that are silent, and for gangs and islands that hang."""
        for host in self.leases.expired(now):
            record = self.resources.hosts[host]
            self._restart(
                record.island,
                f"host {host} of island {record.island} has not answered for {self.leases.seconds:.0f} s "
                f"(worker {record.pid} is stopped, or its machine cannot be reached)",
            )
        hanging = {gang.sequence: gang for gang in self._launcher.half_failed()}
        self._hanging = {sequence: self._hanging.get(sequence, now) for sequence in hanging}
        for sequence, since in self._hanging.items():
            gang = hanging[sequence]
            if now - since > HALF_FAILED_SECONDS:
                error = gang.work.failure or OK
                self._restart(
                    gang.island,
                    f"hosts {sorted(gang.work.hosts_left)} of island {gang.island} wait for another, where "
                    f"{gang.work.launch.program.name} failed: {error.message}",
                )
        self._moves.tick(now)
        self._operators.tick(now)
        self._launcher.settle_failures(now)
        self._launcher.fail_starving(now)
        for island in self.resources.islands.values():
            if island.state == "restarting":
                since = self._restarting.setdefault(island.number, now)
                if now - since > RESTART_SECONDS:
                    self.island_given_up(island.number, f"it was not up again within {RESTART_SECONDS:.0f} s")
            else:
                self._restarting.pop(island.number, None)

    def _restart(self, island: int, reason: str) -> None:
        if self.resources.islands[island].state == "ready":
            self._outbox.to_engine(m.RestartIsland(island, reason))
            self.island_lost(island, Status(Code.DEADLINE_EXCEEDED, f"{reason}; its island is restarted, and {_LOST}"))

    def island_lost(self, island: int, status: Status) -> None:
        """A host of the island is gone, and so the island: what was there or would have run there fails.

        `status` says what befell which host. What needs the island from now on waits until it is back.
        """
        record = self.resources.islands[island]
        if record.state in ("restarting", "lost", "drained"):
            return
        self._running_at_loss[island] = self._launcher.running(island)
        self.resources.lose(island, status)
        lost = set(self.resources.hosts_of(island))
        for host in lost:
            self._outbox.forget_host(host)
            self.leases.forget(host)
        self._launcher.island_lost(island, status)
        for session in self.sessions.values():
            session.unseen[island] = status
            self._to_session(session.number, m.HostsLost(tuple(sorted(lost))))
            for feeds in (session.early_feeds, session.unwanted_feeds):
                feeds.difference_update([key for key in feeds if key[0] in lost])
            for handle, entry in list(session.directory.entries.items()):
                if lost.intersection(entry.hosts):
                    session.has_errors = True
                    self._launcher.memory.release(entry)
                    if not entry.ready:
                        self._launcher.settle(session, handle, status.within(entry.maker))
                    elif entry.error is None:
                        entry.error = status.within(entry.maker)
        self._launcher.fail_doomed()
        self._moves.island_lost(island, status)

    def island_given_up(self, island: int, reason: str) -> None:
        """The island will not be back: what waits for it fails."""
        record = self.resources.islands[island]
        if record.state in ("lost", "drained"):
            return
        status = Status(Code.UNAVAILABLE, f"island {island} is gone for good: {reason}")
        if record.state == "ready":
            self.island_lost(island, status)
        record.state, record.last_failure = "lost", status
        self._operators.island_given_up(island, status)
        for launch in self._launcher.waiting_for(island):
            self._launcher.fail(launch, status)
        hosts = self.resources.hosts_of(island)
        for name, host in list(self.functions.waiting):
            if host in hosts:
                self._settle_function(name, host, status, b"")
        for query, (host, session, message) in list(self._queries.items()):
            if host in hosts:
                del self._queries[query]
                self._to_session(session, m.Answered(message.query, status, b""))

    def from_worker(self, host: int, message: Any) -> None:
        match message:
            case m.Done(runs=runs):
                for sequence, started, ended in runs:
                    self._launcher.run_ended(host, sequence, None, (started, ended))
            case m.Failed(sequence=sequence, status=status):
                self._launcher.run_ended(host, sequence, status)
            case m.Pong():
                return
            case m.Enqueued(sequence=sequence):
                self._launcher.enqueued(sequence)
            case m.Arrived(session=number, feeds=feeds):
                self._arrived(host, number, feeds)
            case m.Compiled(function=name, status=status, info=info):
                if status.ok:
                    self.functions.compiled += not message.cached
                    self.functions.cached += message.cached
                    self.functions.seconds += message.seconds
                    self.functions.scratch[name] = message.scratch_bytes
                self._settle_function(name, host, status, info)
            case m.Answer():
                asked = self._queries.pop(message.query, None)
                if asked is not None:
                    _, session, question = asked
                    self._to_session(session, m.Answered(question.query, message.status, message.payload))
            case _:
                raise invalid(f"a worker does not send {type(message).__name__}")

    def island_ended(self, island: int) -> None:
        """The engine has ended an island's workers, as it was told to."""
        self._operators.island_ended(island)
        for host in self.resources.hosts_of(island):
            self.leases.forget(host)

    def from_operator(self, operator: int, message: Any) -> None:
        """An operator asks for something that takes a while; see `operators`."""
        self._operators.hear(operator, message)

    def _arrived(self, host: int, number: int, feeds: tuple[int, ...]) -> None:
        session = self.sessions.get(number)
        if session is None:
            return
        for feed in feeds:
            key = (host, feed)
            compile_ = self._compiles.pop((number, host, feed), None)
            if compile_ is not None:
                self._to_host(host, compile_)
                continue
            if key in session.unwanted_feeds:
                session.unwanted_feeds.discard(key)
                self._to_host(host, m.DropFeed(number, feed))
                continue
            if self._launcher.feed_arrived(session, host, feed):
                continue
            if len(session.early_feeds) < MAX_EARLY_FEEDS:
                session.early_feeds.add(key)
            else:
                text = f"this session has {MAX_EARLY_FEEDS} buffers uploaded that it does not use"
                self._to_session(number, m.Closing(Status(Code.RESOURCE_EXHAUSTED, text)))
                self.close_session(number)
                return

    # ---- sessions

    def open_session(self, pid: int, label: str) -> Session:
        devices = self.slices.open(self._next_session, *self.resources.virtual_devices())
        session = Session(self._next_session, pid, label, os.urandom(16).hex(), devices)
        self._next_session += 1
        self.sessions[session.number] = session
        for host in self.resources.hosts:
            self._to_host(host, m.OpenStore(session.number, session.secret))
        first = self.resources.hosts[min(self.resources.hosts)]
        self._to_session(
            session.number,
            m.Welcome(
                session.number,
                session.secret,
                devices.virtual,
                self.resources.addresses(),
                first.platform,
                first.platform_version,
                LAUNCH_WINDOW,
            ),
        )
        return session

    def close_session(self, number: int) -> None:
        """The client is gone: all it owned goes."""
        session = self.sessions.pop(number, None)
        if session is None:
            return
        self.slices.close(number)
        self._outbox.forget_session(number)
        self._moves.session_closed(number)
        self._launcher.session_closed(session)
        for key in [key for key in self._compiles if key[0] == number]:
            del self._compiles[key]
        for host in self.resources.hosts:
            self._to_host(host, m.CloseStore(number))
        for program in session.programs.values():
            if isinstance(program, RegisteredProgram):
                self._release_program(program)
        for name in session.functions.values():
            self._release_function(name)

    def from_proxy(self, number: int, message: Any) -> None:
        session = self.sessions.get(number)
        if session is None:
            return
        match message:
            case m.Launch():
                self._launcher.launch(session, message)
            case m.Release(handles=handles, delete=delete):
                self._launcher.release(session, handles, delete)
            case m.Await(wait=wait, handles=handles):
                status = session.directory.wait(wait, handles)
                if status is not None:
                    self._to_session(number, m.Awaited(wait, status))
            case m.RegisterProgram():
                self._register_program(session, message)
            case m.ReleaseProgram(program=program):
                session.bodies.pop(program, None)
                known = session.programs.pop(program, None)
                if isinstance(known, RegisteredProgram):
                    self._release_program(known)
            case m.RegisterFunction():
                self._register_function(session, message)
            case m.LossSeen(hosts=hosts):
                for island in {self.resources.hosts[host].island for host in hosts if host in self.resources.hosts}:
                    session.unseen.pop(island, None)
            case m.CompileAgain(function=function, feed=feed):
                self._compile_again(session, function, feed)
            case m.ReleaseFunction(function=function):
                session.wishes.pop(function, None)
                name = session.functions.pop(function, None)
                if name is not None:
                    self._release_function(name)
                    self._warm(number, name)
            case m.MakeError(handles=handles, status=status):
                session.has_errors = True
                for handle in handles:
                    session.directory.add(handle, Entry((), 0, ready=True, error=status))
            case m.Inquire():
                self._inquire(session, message)
            case m.AddSlice():
                self._slice_requests.add(session, message)
            case m.ReleaseSlice(slice=number_of_slice):
                self._slice_requests.release(session, number_of_slice)
            case m.AtRest(move=move):
                self._moves.at_rest(session, move)
            case _:
                raise invalid(f"a proxy does not send {type(message).__name__}")

    # ---- functions

    def _register_function(self, session: Session, message: m.RegisterFunction) -> None:
        try:
            flat = [device for partitions in message.assignment for device in partitions]
            seats = tuple(tuple(self._seat(session, d) for d in partitions) for partitions in message.assignment)
            islands = {seat.island for partitions in seats for seat in partitions}
            if len(islands) != 1:
                raise invalid(session.devices.scattered(flat))
            session.devices.use("a compiled function", [tuple(flat)])
            given_up = self.resources.islands[islands.pop()].given_up
            if given_up is not None:
                given_up.raise_if_error()
            name = function_name(message.content, seats)
            self.blame.refused.get(name, OK).raise_if_error()
        except StatusError as error:
            self._to_session(session.number, m.FunctionReady(message.function, error.status, b""))
            return
        session.functions[message.function] = name
        session.wishes[message.function] = message
        self.functions.acquire(name)
        self.functions.seats[name] = seats
        self._compile(session, message.function, name, message.feed, hosts_of(seats))

    def _compile(self, session: Session, function: int, name: str, feed: int, hosts: set[int]) -> None:
        """Has the hosts compile what arrives, or has arrived, as `feed`."""
        seats = self.functions.seats[name]
        base = seats[0][0].island * self.resources.topology.hosts
        assignment = tuple(tuple((s.host - base, s.ordinal) for s in partitions) for partitions in seats)
        self.functions.expect(Registration(session.number, function, name, set(hosts)))
        compile_ = m.Compile(name, session.number, feed, assignment)
        for host in sorted(hosts):
            if (host, feed) in session.early_feeds:
                session.early_feeds.discard((host, feed))
                self._to_host(host, compile_)
            else:
                self._compiles.setdefault((session.number, host, feed), compile_)

    def _compile_again(self, session: Session, function: int, feed: int) -> None:
        """An island was restarted: its hosts have nothing of what they had compiled."""
        name = self._moves.name_of(session, function)
        if name is None:
            return  # released meanwhile
        self._compile(session, function, name, feed, hosts_of(self.functions.seats[name]))

    def _settle_function(self, name: str, host: int, status: Status, info: bytes) -> None:
        for done in self.functions.settle(name, host, status, info):
            failure = done.failure
            if self._moves.compiled(done.session, done.function, name, failure):
                continue
            if failure is not None and done.session in self.sessions:
                self.sessions[done.session].wishes.pop(done.function, None)
                self.sessions[done.session].functions.pop(done.function, None)
                self._release_function(name)
            self._to_session(done.session, m.FunctionReady(done.function, failure or OK, done.info))
            self._warm(done.session, name)

    def _warm(self, number: int, name: str) -> None:
        """A function that a session needs is where it was before its island was restarted, or is needed no more."""
        session = self.sessions.get(number)
        if session is None:
            return
        for island, cold in list(session.cold.items()):
            cold.discard(name)
            if not cold:
                del session.cold[island]
                self.scheduler.admit(island, number)

    def _release_function(self, name: str) -> None:
        if self.functions.release(name):
            for host in self.resources.hosts:
                self._to_host(host, m.DropFunction(name))

    # ---- programs

    def _register_program(self, session: Session, message: m.RegisterProgram) -> None:
        session.bodies[message.program] = message.body
        try:
            session.devices.use(message.body.name, groups_of(message.body))
            program = self._lower(session, message.body, session.devices.seats, session.functions)
        except StatusError as error:
            session.programs[message.program] = error.status
            return
        session.programs[message.program] = program

    def _lower(
        self, session: Session, body: Program, seats: Placement, functions: Mapping[int, str]
    ) -> RegisteredProgram:
        program = register(
            body,
            seats,
            functions,
            self.resources.topology.island_of,
            self._keep_plan,
            self.functions.scratch_of,
        )
        for name in program.functions:
            self.functions.acquire(name)
        return program

    def _keep_plan(self, host: int, plan: Plan) -> int:
        number = self._next_plan
        self._next_plan += 1
        self._to_host(host, m.KeepPlan(number, plan))
        return number

    def _keep_plans(self, program: RegisteredProgram, host: int) -> None:
        """A host that was restarted has no plans."""
        for gang in program.gangs:
            for run in gang.runs:
                if run.host == host:
                    self._to_host(host, m.KeepPlan(run.plan, run.body))

    def _release_program(self, program: RegisteredProgram) -> None:
        """Its session needs the program no more; it goes with the last gang of it that has yet to start."""
        program.released = True
        if program.waiting:
            return
        for gang in program.gangs:
            for run in gang.runs:
                self._to_host(run.host, m.DropPlan(run.plan))
        for name in program.functions:
            self._release_function(name)

    # ---- questions

    def _inquire(self, session: Session, message: m.Inquire) -> None:
        subject = ""
        if message.function >= 0:
            subject = session.functions.get(message.function, "")
            if not subject:
                status = not_found(f"function {message.function} does not exist in this session").status
                self._to_session(session.number, m.Answered(message.query, status, b""))
                return
        seat = self._seat(session, message.device)
        given_up = self.resources.islands[seat.island].given_up
        if given_up is not None:
            self._to_session(session.number, m.Answered(message.query, given_up, b""))
            return
        query = self._next_query
        self._next_query += 1
        self._queries[query] = (seat.host, session.number, message)
        if not self.resources.is_lost(seat.host):  # else it is asked when its island is back
            self._to_host(seat.host, m.Query(session.number, query, message.what, subject, message.payload))

    def _seat(self, session: Session, device: int) -> Seat:
        seat = session.devices.seats.get(device)
        if seat is None:
            raise invalid(f"device {device} does not exist")
        return seat

    # ---- outgoing

    def _to_host(self, host: int, message: Any) -> None:
        self._outbox.to_host(host, message)

    def _to_session(self, session: int, message: Any) -> None:
        self._outbox.to_session(session, message)
