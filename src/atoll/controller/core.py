"""The controller's state machine: messages of proxies and workers in, messages to them out.

No I/O and no clock: every event appends to `outbox`, which the shell sends. The path of a request is: register a
program once (it is lowered to one plan a host); launch it (its gangs join their islands' lines); dispatch (one
message per host); completion (results become ready, memory goes, the client gets room for more).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from atoll.controller.directory import Directory, Entry
from atoll.controller.functions import FunctionRegistry, Registration, function_name
from atoll.controller.resources import Host, ResourceManager, Topology
from atoll.controller.scheduler import Gang, IslandScheduler
from atoll.errors import OK, Code, Status, StatusError, invalid, not_found
from atoll.ir.lowering import lower
from atoll.ir.program import Call
from atoll.transport import messages as m

# More executions than this in flight on one host can deadlock XLA's CPU client (32 is its own limit).
GANG_WINDOW = 24
# Launches that a session may have in the system; its proxy stops reading from its client beyond.
LAUNCH_WINDOW = 512
# Feeds that a session may have uploaded ahead of the launches that use them.
MAX_EARLY_FEEDS = 65536
# Numbers that the controller gives to feeds and buffers between hosts start here; proxies count below.
OWN_NUMBERS = 1 << 48


@dataclass(slots=True)
class _RunTemplate:
    """A plan's part in a launch: which handles it takes, by their place in the launch's list of handles."""

    host: int
    plan: int
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    awaited: tuple[int, ...]


@dataclass(slots=True)
class _Program:
    name: str
    arguments: int
    results: int
    feeds: int  # the client's
    all_feeds: int  # and those between hosts
    temporaries: int
    gangs: list[tuple[int, tuple[_RunTemplate, ...]]]  # (island, runs)
    donated: frozenset[int]
    result_hosts: tuple[tuple[int, ...], ...]
    result_bytes: tuple[int, ...]
    functions: tuple[str, ...]
    # Gangs that have not started still need the plans, also of a program that its session has released.
    waiting: int = 0
    released: bool = False


@dataclass(slots=True)
class _Launch:
    session: int
    program: _Program
    results: tuple[int, ...]
    temporaries: tuple[int, ...]
    pending: int
    gangs: list[Gang[_Work]]
    error: Status | None = None


@dataclass(slots=True)
class _Work:
    launch: _Launch
    island: int
    runs: tuple[tuple[int, m.Run], ...]
    handles: tuple[int, ...]  # arguments and results, each once
    hosts_left: int = 0
    started: bool = False


@dataclass
class Session:
    """One client connection and all it owns."""

    number: int
    pid: int
    label: str
    secret: str
    directory: Directory = field(default_factory=Directory)
    programs: dict[int, _Program | Status] = field(default_factory=dict)  # or why it cannot be lowered
    functions: dict[int, str] = field(default_factory=dict)
    awaited_feeds: dict[tuple[int, int], Gang[_Work]] = field(default_factory=dict)  # (host, feed)
    early_feeds: set[tuple[int, int]] = field(default_factory=set)
    queries: set[int] = field(default_factory=set)
    in_flight: int = 0
    launches: int = 0
    has_errors: bool = False  # some buffer of it stands for an error


class Controller:
    """All decisions of a cluster. `outbox` holds (destination, message) in the order of sending.

    A destination is ("host", number) or ("session", number).
    """

    def __init__(self, topology: Topology) -> None:
        self.resources = ResourceManager(topology)
        self.schedulers = {i: IslandScheduler[_Work](GANG_WINDOW) for i in range(topology.islands)}
        self.functions = FunctionRegistry()
        self.sessions: dict[int, Session] = {}
        self.outbox: list[tuple[tuple[str, int], Any]] = []
        self._frees: dict[tuple[int, int, bool], list[int]] = {}
        self._retired: dict[int, int] = {}
        self._in_flight: dict[int, Gang[_Work]] = {}
        self._compiles: dict[tuple[int, int, int], list[m.Compile]] = {}  # (session, host, feed)
        self._next_session = 1
        self._next_sequence = 1
        self._next_plan = 1
        self._next_own = OWN_NUMBERS
        self._next_query = 1
        self._queries: dict[int, tuple[int, int, int]] = {}  # (host, session, the session's number for it)
        self._stalled: set[int] = set()  # islands where a gang was dropped, which may have held back others

    # ---- workers

    def worker_joined(self, ready: m.WorkerReady, pid: int) -> Host:
        host = self.resources.join(ready, pid)
        for session in self.sessions.values():
            self._to_host(host.number, m.OpenStore(session.number, session.secret))
        return host

    def worker_lost(self, number: int, reason: str) -> None:
        """A host is gone: what was on it or would have run on it fails, naming it."""
        host = self.resources.hosts.get(number)
        if host is None or host.state == "lost":
            return
        host.state = "lost"
        host.loss = Status(
            Code.DATA_LOSS,
            f"host {number} of island {host.island} is gone (worker {host.pid}: {reason}); "
            "what was computed or stored there is lost",
        )
        status = host.loss
        for gang in [g for g in self._in_flight.values() if g.work.island == host.island]:
            self._failed(gang, status)
            self._finish(gang, gang.work.hosts_left)
        for (name, waiting_host), _ in list(self.functions.waiting.items()):
            if waiting_host == number:
                self._settle_function(name, number, status, b"")
        for session in self.sessions.values():
            for handle, entry in list(session.directory.entries.items()):
                if number in entry.hosts:
                    session.has_errors = True
                    if not entry.ready:
                        self._settle(session, handle, status)
                    elif entry.error is None:
                        entry.error = status
            for gang in list(session.awaited_feeds.values()):
                if gang.work.island == host.island:
                    self._failed(gang, status)
        for query, (asked, session_number, client_query) in list(self._queries.items()):
            if asked == number:
                del self._queries[query]
                self._to_session(session_number, m.Answered(client_query, status, b""))
        self._pump(host.island)

    def from_worker(self, host: int, message: Any) -> None:
        match message:
            case m.Done(runs=runs):
                for sequence, _, _ in runs:
                    self._done(sequence)
            case m.Failed(sequence=sequence, status=status):
                gang = self._in_flight.get(sequence)
                if gang is not None:
                    self._failed(gang, status)
                    self._done(sequence)
            case m.Arrived(session=number, feeds=feeds):
                self._arrived(host, number, feeds)
            case m.Compiled(function=name, status=status, info=info):
                if status.ok:
                    self.functions.compiled += not message.cached
                    self.functions.cached += message.cached
                    self.functions.seconds += message.seconds
                self._settle_function(name, host, status, info)
            case m.Answer():
                asked = self._queries.pop(message.query, None)
                if asked is not None:
                    _, session, query = asked
                    self._to_session(session, m.Answered(query, message.status, message.payload))
            case _:
                raise invalid(f"a worker does not send {type(message).__name__}")

    # ---- sessions

    def open_session(self, pid: int, label: str) -> Session:
        session = Session(self._next_session, pid, label, os.urandom(16).hex())
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
                self.resources.virtual,
                tuple((h.number, h.data_address) for h in self.resources.hosts.values()),
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
        self._retired.pop(number, None)
        for scheduler in self.schedulers.values():
            for gang in scheduler.drop_session(number):
                if not gang.dropped:
                    self._gang_left(gang.work.launch.program)
        for key in [key for key in self._compiles if key[0] == number]:
            del self._compiles[key]
        for key in [key for key in self._frees if key[1] == number]:
            del self._frees[key]
        for host in self.resources.hosts:
            self._to_host(host, m.CloseStore(number))
        for program in session.programs.values():
            if isinstance(program, _Program):
                self._release_program(program)
        for name in session.functions.values():
            self._release_function(name)
        for island in self.schedulers:
            self._pump(island)

    def from_proxy(self, number: int, message: Any) -> None:
        session = self.sessions.get(number)
        if session is None:
            return
        match message:
            case m.Launch():
                self._launch(session, message)
            case m.Release(handles=handles, delete=delete):
                self._release(session, handles, delete)
            case m.Await(wait=wait, handles=handles):
                status = session.directory.wait(wait, handles)
                if status is not None:
                    self._to_session(number, m.Awaited(wait, status))
            case m.RegisterProgram():
                self._register_program(session, message)
            case m.ReleaseProgram(program=program):
                known = session.programs.pop(program, None)
                if isinstance(known, _Program):
                    self._release_program(known)
            case m.RegisterFunction():
                self._register_function(session, message)
            case m.ReleaseFunction(function=function):
                name = session.functions.pop(function, None)
                if name is not None:
                    self._release_function(name)
            case m.MakeError(handles=handles, status=status):
                session.has_errors = True
                for handle in handles:
                    session.directory.add(handle, Entry((), 0, ready=True, error=status))
            case m.Inquire():
                self._inquire(session, message)
            case _:
                raise invalid(f"a proxy does not send {type(message).__name__}")

    # ---- functions

    def _register_function(self, session: Session, message: m.RegisterFunction) -> None:
        try:
            seats = [[self._seat(d) for d in partitions] for partitions in message.assignment]
            islands = {seat.island for partitions in seats for seat in partitions}
            if len(islands) != 1:
                raise invalid(
                    f"the computation's devices lie on {len(islands)} islands; a mesh must lie inside one island "
                    "(jax.Device.slice_index tells which), and arrays move between islands with jax.device_put"
                )
        except StatusError as error:
            self._to_session(session.number, m.FunctionReady(message.function, error.status, b""))
            return
        name = function_name(message, self.resources.seats)
        session.functions[message.function] = name
        self.functions.acquire(name)
        base = islands.pop() * self.resources.topology.hosts
        assignment = tuple(tuple((s.host - base, s.ordinal) for s in partitions) for partitions in seats)
        hosts = sorted({seat.host for partitions in seats for seat in partitions})
        self.functions.expect(Registration(session.number, message.function, name, set(hosts)))
        for host in hosts:
            if self.resources.is_lost(host):
                lost = Status(Code.UNAVAILABLE, f"host {host} is gone; nothing can be compiled for it")
                self._settle_function(name, host, lost, b"")
                continue
            compile_ = m.Compile(name, session.number, message.feed, assignment)
            if (host, message.feed) in session.early_feeds:
                session.early_feeds.discard((host, message.feed))
                self._to_host(host, compile_)
            else:
                self._compiles.setdefault((session.number, host, message.feed), []).append(compile_)

    def _settle_function(self, name: str, host: int, status: Status, info: bytes) -> None:
        for done in self.functions.settle(name, host, status, info):
            failure = done.failure
            if failure is not None and done.session in self.sessions:
                self.sessions[done.session].functions.pop(done.function, None)
                self._release_function(name)
            self._to_session(done.session, m.FunctionReady(done.function, failure or OK, done.info))

    def _release_function(self, name: str) -> None:
        if self.functions.release(name):
            for host in self.resources.hosts:
                self._to_host(host, m.DropFunction(name))

    # ---- programs

    def _register_program(self, session: Session, message: m.RegisterProgram) -> None:
        body = message.body
        try:
            lowered = lower(body, self.resources.seats, session.functions)
        except StatusError as error:
            session.programs[message.program] = error.status
            return
        count = len(body.arguments)
        if len(set(body.results)) != len(body.results) or any(value < count for value in body.results):
            raise invalid(f"program {body.name!r} returns a value twice, or an argument")
        slots = {value: value for value in range(count)}
        slots.update((value, count + i) for i, value in enumerate(body.results))
        gangs: list[tuple[int, tuple[_RunTemplate, ...]]] = []
        for segment in lowered.segments:
            islands: dict[int, list[_RunTemplate]] = {}
            for host, plan in segment.items():
                for value in (*plan.arguments, *plan.results):
                    slots.setdefault(value, len(slots))
                number = self._next_plan
                self._next_plan += 1
                self._to_host(host, m.KeepPlan(number, plan))
                run = _RunTemplate(
                    host,
                    number,
                    tuple(slots[value] for value in plan.arguments),
                    tuple(slots[value] for value in plan.results),
                    plan.awaited,
                )
                islands.setdefault(self.resources.topology.island_of(host), []).append(run)
            gangs.extend((island, tuple(runs)) for island, runs in islands.items())
        functions = tuple(session.functions[node.function] for node in body.nodes if isinstance(node, Call))
        for name in functions:
            self.functions.acquire(name)
        session.programs[message.program] = _Program(
            body.name,
            count,
            len(body.results),
            body.feeds,
            lowered.feeds,
            len(slots) - count - len(body.results),
            gangs,
            lowered.donated,
            lowered.result_hosts,
            lowered.result_bytes,
            functions,
        )

    def _release_program(self, program: _Program) -> None:
        """Its session needs the program no more; it goes with the last gang of it that has yet to start."""
        program.released = True
        if program.waiting:
            return
        for _, runs in program.gangs:
            for run in runs:
                self._to_host(run.host, m.DropPlan(run.plan))
        for name in program.functions:
            self._release_function(name)

    def _gang_left(self, program: _Program) -> None:
        """A gang has started, or never will."""
        program.waiting -= 1
        if program.released and not program.waiting:
            self._release_program(program)

    # ---- launches

    def _launch(self, session: Session, message: m.Launch) -> None:
        directory = session.directory
        entries = directory.entries
        program = session.programs.get(message.program)
        problem = self._launch_problem(session, program, message)
        if problem is not None or not isinstance(program, _Program):
            session.has_errors = True
            for handle in message.results:
                directory.add(handle, Entry((), 0, ready=True, error=problem))
            self._retire(session.number)
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
        launch = _Launch(session.number, program, message.results, temporaries, len(program.gangs), [])
        program.waiting += len(program.gangs)
        session.in_flight += 1
        for island, runs in program.gangs:
            sequence = self._next_sequence
            self._next_sequence += 1
            used: set[int] = set()
            missing = 0
            gang = Gang(sequence, session.number, _Work(launch, island, (), ()))
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
            self._pump(island)

    def _launch_problem(
        self, session: Session, program: _Program | Status | None, message: m.Launch
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
                if self.resources.is_lost(run.host):
                    return Status(Code.UNAVAILABLE, f"host {run.host} is gone; {program.name} cannot run on it")
        return None

    def _pump(self, island: int) -> None:
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
                self.outbox.append((("host", host), run))
            self._gang_left(work.launch.program)
            session = self.sessions.get(gang.session)
            if session is not None:
                for handle in work.handles:
                    self._used(session, handle)

    def _gang_problem(self, gang: Gang[_Work]) -> Status | None:
        """Why a gang whose turn has come cannot run: an input that failed since its launch, or a host that is gone."""
        for host, _ in gang.work.runs:
            loss = self.resources.hosts[host].loss
            if loss is not None:
                return loss
        session = self.sessions[gang.session]
        if session.has_errors:
            for handle in gang.work.handles:
                entry = session.directory.entries.get(handle)
                if entry is not None and entry.error is not None:
                    return entry.error
        return None

    def _arrived(self, host: int, number: int, feeds: tuple[int, ...]) -> None:
        session = self.sessions.get(number)
        if session is None:
            return
        islands = set()
        for feed in feeds:
            key = (host, feed)
            for compile_ in self._compiles.pop((number, host, feed), ()):
                self._to_host(host, compile_)
                break
            else:
                gang = session.awaited_feeds.pop(key, None)
                if gang is not None:
                    islands.add(gang.work.island)
                    self.schedulers[gang.work.island].arrived(gang)
                elif len(session.early_feeds) < MAX_EARLY_FEEDS:
                    session.early_feeds.add(key)
                else:
                    text = f"this session has {MAX_EARLY_FEEDS} buffers uploaded that it does not use"
                    self._to_session(number, m.Closing(Status(Code.RESOURCE_EXHAUSTED, text)))
                    self.close_session(number)
                    return
        for island in islands:
            self._pump(island)

    def _done(self, sequence: int) -> None:
        gang = self._in_flight.get(sequence)
        if gang is not None:
            self._finish(gang, 1)

    def _finish(self, gang: Gang[_Work], hosts: int) -> None:
        work = gang.work
        work.hosts_left -= hosts
        if work.hosts_left > 0:
            return
        self._in_flight.pop(gang.sequence, None)
        self.schedulers[work.island].finished()
        self._launch_part_done(work.launch)
        self._pump(work.island)

    def _launch_part_done(self, launch: _Launch) -> None:
        launch.pending -= 1
        if launch.pending:
            return
        session = self.sessions.get(launch.session)
        if session is None:
            return
        for handle in launch.results:
            self._settle(session, handle, launch.error)
        if launch.temporaries:
            for host in self.resources.hosts:
                self._frees.setdefault((host, launch.session, False), []).extend(launch.temporaries)
        session.in_flight -= 1
        self._retire(launch.session)

    def _failed(self, gang: Gang[_Work], status: Status) -> None:
        """A gang failed: what of its launch has not started will not, and nothing new may use its results."""
        launch = gang.work.launch
        if launch.error is None:
            launch.error = status
        session = self.sessions.get(launch.session)
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
                for handle in other.work.handles:
                    self._used(session, handle)
            self._launch_part_done(launch)

    # ---- buffers

    def _release(self, session: Session, handles: tuple[int, ...], delete: bool) -> None:
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

    def _used(self, session: Session, handle: int) -> None:
        entry = session.directory.used(handle)
        if entry is not None:
            self._free(session, handle, entry)
            return
        entry = session.directory.entries.get(handle)
        if entry is not None and entry.delete and entry.uses <= 0:
            self._free(session, handle, entry, delete=True)

    def _free(self, session: Session, handle: int, entry: Entry, delete: bool = False) -> None:
        for host in entry.hosts:
            self._frees.setdefault((host, session.number, delete), []).append(handle)

    def _settle(self, session: Session, handle: int, error: Status | None) -> None:
        for wait, status in session.directory.settle(handle, error):
            self._to_session(session.number, m.Awaited(wait, status))

    # ---- questions

    def _inquire(self, session: Session, message: m.Inquire) -> None:
        subject = ""
        if message.function >= 0:
            subject = session.functions.get(message.function, "")
            if not subject:
                status = not_found(f"function {message.function} does not exist in this session").status
                self._to_session(session.number, m.Answered(message.query, status, b""))
                return
        seat = self._seat(message.device)
        loss = self.resources.hosts[seat.host].loss
        if loss is not None:
            self._to_session(session.number, m.Answered(message.query, loss, b""))
            return
        query = self._next_query
        self._next_query += 1
        self._queries[query] = (seat.host, session.number, message.query)
        self._to_host(seat.host, m.Query(session.number, query, message.what, subject, message.payload))

    def _seat(self, device: int) -> Any:
        seat = self.resources.seats.get(device)
        if seat is None:
            raise invalid(f"device {device} does not exist")
        return seat

    # ---- outgoing

    def _retire(self, session: int) -> None:
        self._retired[session] = self._retired.get(session, 0) + 1

    def _to_host(self, host: int, message: Any) -> None:
        self.outbox.append((("host", host), message))

    def _to_session(self, session: int, message: Any) -> None:
        self.outbox.append((("session", session), message))

    def take_outbox(self) -> list[tuple[tuple[str, int], Any]]:
        """What is to be sent, in order. Memory that goes is named once a host, after its last use."""
        while self._stalled:
            self._pump(self._stalled.pop())
        for (host, session, delete), handles in self._frees.items():
            self._to_host(host, m.Free(session, tuple(handles), delete))
        self._frees.clear()
        for session, count in self._retired.items():
            self._to_session(session, m.Retired(count))
        self._retired.clear()
        outbox, self.outbox = self.outbox, []
        return outbox
