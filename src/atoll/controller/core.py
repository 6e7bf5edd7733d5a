"""The controller's state machine: messages of proxies and workers in, messages to them out.

No I/O and no clock: every event adds to the outbox, which the shell sends. The path of a request is: register a
program once (it is lowered to one plan a host); launch it (its gangs join their islands' lines); dispatch (one
message per host); completion (results become ready, memory goes, the client gets room for more).
"""

from __future__ import annotations

import os
from typing import Any

from atoll.controller.directory import Entry
from atoll.controller.functions import FunctionRegistry, Registration, function_name
from atoll.controller.launcher import Launcher
from atoll.controller.outbox import Destination, Outbox
from atoll.controller.programs import RegisteredProgram, register
from atoll.controller.resources import Host, ResourceManager, Topology
from atoll.controller.session import Session
from atoll.errors import OK, Code, Status, StatusError, invalid, not_found
from atoll.ir.lowering import Seat
from atoll.ir.plan import Plan
from atoll.transport import messages as m

# Launches that a session may have in the system; its proxy stops reading from its client beyond.
LAUNCH_WINDOW = 512
# Feeds that a session may have uploaded ahead of the launches that use them.
MAX_EARLY_FEEDS = 65536


class Controller:
    """All decisions of a cluster."""

    def __init__(self, topology: Topology) -> None:
        self.resources = ResourceManager(topology)
        self.functions = FunctionRegistry()
        self.sessions: dict[int, Session] = {}
        self._outbox = Outbox()
        self._launcher = Launcher(self.resources, self.sessions, self._outbox, self._release_program)
        self.schedulers = self._launcher.schedulers
        self._compiles: dict[tuple[int, int, int], m.Compile] = {}  # (session, host, feed)
        self._next_session = 1
        self._next_plan = 1
        self._next_query = 1
        self._queries: dict[int, tuple[int, int, int]] = {}  # (host, session, the session's number for it)

    def take_outbox(self) -> list[tuple[Destination, Any]]:
        """What is to be sent, in order; a destination is ("host", number) or ("session", number)."""
        self._launcher.pump_stalled()
        return self._outbox.take()

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
        self._launcher.island_lost(host.island, status)
        for (name, waiting_host), _ in list(self.functions.waiting.items()):
            if waiting_host == number:
                self._settle_function(name, number, status, b"")
        for session in self.sessions.values():
            for handle, entry in list(session.directory.entries.items()):
                if number in entry.hosts:
                    session.has_errors = True
                    if not entry.ready:
                        self._launcher.settle(session, handle, status)
                    elif entry.error is None:
                        entry.error = status
        for query, (asked, session_number, client_query) in list(self._queries.items()):
            if asked == number:
                del self._queries[query]
                self._to_session(session_number, m.Answered(client_query, status, b""))
        self._launcher.pump(host.island)

    def from_worker(self, host: int, message: Any) -> None:
        match message:
            case m.Done(runs=runs):
                for sequence, _, _ in runs:
                    self._launcher.run_ended(sequence)
            case m.Failed(sequence=sequence, status=status):
                self._launcher.run_ended(sequence, status)
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

    def _arrived(self, host: int, number: int, feeds: tuple[int, ...]) -> None:
        session = self.sessions.get(number)
        if session is None:
            return
        islands = set()
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
            island = self._launcher.feed_arrived(session, host, feed)
            if island is not None:
                islands.add(island)
            elif len(session.early_feeds) < MAX_EARLY_FEEDS:
                session.early_feeds.add(key)
            else:
                text = f"this session has {MAX_EARLY_FEEDS} buffers uploaded that it does not use"
                self._to_session(number, m.Closing(Status(Code.RESOURCE_EXHAUSTED, text)))
                self.close_session(number)
                return
        for island in islands:
            self._launcher.pump(island)

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
        self._outbox.forget_session(number)
        self._launcher.session_closed(number)
        for key in [key for key in self._compiles if key[0] == number]:
            del self._compiles[key]
        for host in self.resources.hosts:
            self._to_host(host, m.CloseStore(number))
        for program in session.programs.values():
            if isinstance(program, RegisteredProgram):
                self._release_program(program)
        for name in session.functions.values():
            self._release_function(name)
        for island in self.schedulers:
            self._launcher.pump(island)

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
                known = session.programs.pop(program, None)
                if isinstance(known, RegisteredProgram):
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
                self._compiles.setdefault((session.number, host, message.feed), compile_)

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
        try:
            program = register(
                message.body,
                self.resources.seats,
                session.functions,
                self.resources.topology.island_of,
                self._keep_plan,
            )
        except StatusError as error:
            session.programs[message.program] = error.status
            return
        for name in program.functions:
            self.functions.acquire(name)
        session.programs[message.program] = program

    def _keep_plan(self, host: int, plan: Plan) -> int:
        number = self._next_plan
        self._next_plan += 1
        self._to_host(host, m.KeepPlan(number, plan))
        return number

    def _release_program(self, program: RegisteredProgram) -> None:
        """Its session needs the program no more; it goes with the last gang of it that has yet to start."""
        program.released = True
        if program.waiting:
            return
        for _, runs in program.gangs:
            for run in runs:
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
        seat = self._seat(message.device)
        loss = self.resources.hosts[seat.host].loss
        if loss is not None:
            self._to_session(session.number, m.Answered(message.query, loss, b""))
            return
        query = self._next_query
        self._next_query += 1
        self._queries[query] = (seat.host, session.number, message.query)
        self._to_host(seat.host, m.Query(session.number, query, message.what, subject, message.payload))

    def _seat(self, device: int) -> Seat:
        seat = self.resources.seats.get(device)
        if seat is None:
            raise invalid(f"device {device} does not exist")
        return seat

    # ---- outgoing

    def _to_host(self, host: int, message: Any) -> None:
        self._outbox.to_host(host, message)

    def _to_session(self, session: int, message: Any) -> None:
        self._outbox.to_session(session, message)
