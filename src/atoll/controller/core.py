"""The controller's state machine: messages of proxies and workers in, messages to them out.

No I/O and no clock: every event adds to the outbox, which the shell sends. The path of a request is: register a
program once (it is lowered to one plan a host); launch it (its gangs join their islands' lines); dispatch (one
message per host); completion (results become ready, memory goes, the client gets room for more).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from atoll.cluster.locations import DeviceLocation, Placement
from atoll.cluster.mesh import parse_mesh
from atoll.cluster.placement import Slices
from atoll.cluster.settings import ClusterSettings
from atoll.cluster.topology import Topology
from atoll.controller.islands.recovery import Recovery
from atoll.controller.islands.resources import Host, ResourceManager
from atoll.controller.memory.directory import Entry
from atoll.controller.operators.requests import Operators
from atoll.controller.outbox import Destination, Outbox
from atoll.controller.programs.compilation import Compilation
from atoll.controller.programs.failures import Failures
from atoll.controller.programs.launcher import Launcher
from atoll.controller.programs.quarantine import Quarantine
from atoll.controller.programs.registered import RegisteredProgram, device_groups, register
from atoll.controller.sessions.migrations import Moves
from atoll.controller.sessions.queries import Questions
from atoll.controller.sessions.session import Session
from atoll.controller.sessions.slices import SliceRequests
from atoll.errors import Code, Status, StatusError, invalid
from atoll.ir.plan import Plan
from atoll.ir.program import Program
from atoll.processes.leases import Leases
from atoll.protocol import messages as m
from atoll.scheduling.policies import find_policy

# Launches that a session may have in the system; its proxy stops reading from its client beyond.
LAUNCH_WINDOW = 512
# Feeds that a session may have uploaded ahead of the launches that use them.
MAX_EARLY_FEEDS = 65536


class Controller:
    """All decisions of a cluster."""

    def __init__(self, topology: Topology, settings: ClusterSettings | None = None) -> None:
        settings = settings or ClusterSettings()
        self.resources = ResourceManager(topology, parse_mesh(settings.mesh))
        self.slices = Slices()
        self.sessions: dict[int, Session] = {}
        self.quarantine = Quarantine()
        self.leases = Leases(settings.lease_seconds)
        self._outbox = Outbox()
        self._launcher = Launcher(
            self.resources,
            self.sessions,
            self._outbox,
            self._release_program,
            self.quarantine,
            settings.sequential,
            find_policy(settings.policy),
        )
        self._failures = Failures(self._launcher, self.resources, self.sessions)
        self.scheduler = self._launcher.scheduler
        self.memory = self._launcher.memory.ledger
        self.trace = self._launcher.trace
        self._compilation = Compilation(
            self.resources, self.sessions, self._outbox, self.quarantine, self.scheduler, self._location
        )
        self.functions = self._compilation.functions
        self._questions = Questions(self.resources, self.sessions, self._outbox, self._location)
        self._recovery = Recovery(
            self.resources,
            self.sessions,
            self._outbox,
            self._launcher,
            self._failures,
            self._compilation,
            self._questions,
            self.quarantine,
            self.leases,
        )
        self.worker_lost = self._recovery.worker_lost
        self.worker_ended = self._recovery.worker_ended
        self.island_given_up = self._recovery.island_given_up
        self._moves = Moves(
            self.resources,
            self._compilation,
            self._questions,
            self._launcher,
            self._outbox,
            self._lower,
            self._release_program,
        )
        self._compilation.name_of = self._moves.name_of
        self._compilation.is_for_move = self._moves.compiled
        self._recovery.on_lost = self._moves.island_lost
        self._operators = Operators(
            self.sessions, self.resources, self.slices, self._moves, self._launcher, self._outbox
        )
        self._recovery.on_given_up = self._operators.island_given_up
        self._slice_requests = SliceRequests(self.resources, self.slices, self.memory.free, self._outbox)
        self._device_memory = settings.device_memory
        self._next_session = 1
        self._next_plan = 1
        self._plans: dict[int, tuple[int, Plan]] = {}  # that hosts have, also of programs released while launches wait

    def take_outbox(self) -> list[tuple[Destination, Any]]:
        """What is to be sent, in order; see `outbox` for destinations."""
        self._moves.proceed()
        self._launcher.pump()
        return self._outbox.take()

    def tick(self, now: float) -> None:
        """Once a second: looks for what is silent, hangs, or waits in vain."""
        self._recovery.tick(now)
        self._moves.tick(now)
        self._operators.tick(now)
        self._failures.tick(now)

    # ---- workers

    def worker_joined(self, ready: m.WorkerReady, pid: int) -> Host:
        """A host is there. With the last of an island that was restarted, all sessions are told to go on."""
        again = self.resources.islands[ready.island].state == "restarting"
        added = self.resources.islands[ready.island].state == "starting" and self.resources.is_complete
        host = self.resources.join(ready, pid)
        for info in ready.devices:
            self.memory.declare((host.number, info.ordinal), self._device_memory or info.memory_bytes)
        for session in self.sessions.values():
            self._outbox.to_host(host.number, m.OpenStore(session.number, session.secret))
        for number, (place, plan) in self._plans.items():
            if place == host.number:
                self._outbox.to_host(host.number, m.RegisterPlan(number, plan))
        if again and self.resources.islands[ready.island].state == "ready":
            self._recovery.island_back(ready.island)
            self._operators.island_is_up(ready.island)
        if added and self.resources.islands[ready.island].state == "ready":
            self._operators.island_ready(ready.island)
        return host

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
            case m.FeedsArrived(session=number, feeds=feeds):
                self._arrived(host, number, feeds)
            case m.Compiled():
                self._compilation.compiled(host, message)
            case m.WorkerAnswer():
                self._questions.answered(message)
            case _:
                raise invalid(f"a worker does not send {type(message).__name__}")

    def from_operator(self, operator: int, message: Any) -> None:
        """An operator asks for something that takes a while; see `operators`."""
        self._operators.hear(operator, message)

    def island_ended(self, island: int) -> None:
        """The engine has ended an island's workers, as it was told to."""
        self._operators.island_ended(island)
        for host in self.resources.hosts_of(island):
            self.leases.forget(host)

    def _arrived(self, host: int, number: int, feeds: tuple[int, ...]) -> None:
        session = self.sessions.get(number)
        if session is None:
            return
        for feed in feeds:
            if self._compilation.source_arrived(number, host, feed):
                continue
            if session.feeds.claim_unwanted((host, feed)):
                self._outbox.to_host(host, m.DropFeed(number, feed))
            elif not self._launcher.feed_arrived(session, host, feed):
                session.feeds.early.add((host, feed))
        if len(session.feeds.early) > MAX_EARLY_FEEDS:
            text = f"this session has {MAX_EARLY_FEEDS} buffers uploaded that it does not use"
            self._outbox.to_session(number, m.Closing(Status(Code.RESOURCE_EXHAUSTED, text)))
            self.close_session(number)

    # ---- sessions

    def open_session(self, pid: int, label: str) -> Session:
        devices = self.slices.open(self._next_session, *self.resources.virtual_devices())
        session = Session(self._next_session, pid, label, os.urandom(16).hex(), devices)
        self._next_session += 1
        self.sessions[session.number] = session
        for host in self.resources.hosts:
            self._outbox.to_host(host, m.OpenStore(session.number, session.secret))
        first = self.resources.hosts[min(self.resources.hosts)]
        self._outbox.to_session(
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
        for host in self.resources.hosts:
            self._outbox.to_host(host, m.CloseStore(number))
        for program in session.programs.values():
            if isinstance(program, RegisteredProgram):
                self._release_program(program)
        self._compilation.session_closed(session)

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
                    self._outbox.to_session(number, m.Awaited(wait, status))
            case m.RegisterProgram():
                self._register_program(session, message)
            case m.ReleaseProgram(program=program):
                session.bodies.pop(program, None)
                known = session.programs.pop(program, None)
                if isinstance(known, RegisteredProgram):
                    self._release_program(known)
            case m.RegisterFunction():
                self._compilation.register(session, message)
            case m.CompileAgain():
                self._compilation.again(session, message)
            case m.ReleaseFunction(function=function):
                self._compilation.release(session, function)
            case m.LossAcknowledged(hosts=hosts):
                for island in {self.resources.hosts[host].island for host in hosts if host in self.resources.hosts}:
                    session.unseen.pop(island, None)
            case m.MakeError(handles=handles, status=status):
                session.directory.check_new(handles)
                session.has_errors = True
                for handle in handles:
                    session.directory.add(handle, Entry((), 0, ready=True, error=status))
            case m.Query():
                self._questions.ask(session, message)
            case m.AddSlice():
                self._slice_requests.add(session, message)
            case m.ReleaseSlice(slice=number_of_slice):
                self._slice_requests.release(session, number_of_slice)
            case m.Quiesced(move=move):
                self._moves.at_rest(session, move)
            case _:
                raise invalid(f"a proxy does not send {type(message).__name__}")

    # ---- programs

    def _register_program(self, session: Session, message: m.RegisterProgram) -> None:
        session.bodies[message.program] = message.body
        try:
            session.devices.use(message.body.name, device_groups(message.body))
            session.programs[message.program] = self._lower(message.body, session.devices.locations, session.functions)
        except StatusError as error:
            session.programs[message.program] = error.status

    def _lower(self, body: Program, locations: Placement, functions: Mapping[int, str]) -> RegisteredProgram:
        program = register(body, locations, functions, self._keep_plan, self.functions.scratch_of)
        for name in program.functions:
            self.functions.acquire(name)
        return program

    def _keep_plan(self, host: int, plan: Plan) -> int:
        number = self._next_plan
        self._next_plan += 1
        self._plans[number] = (host, plan)
        self._outbox.to_host(host, m.RegisterPlan(number, plan))
        return number

    def _release_program(self, program: RegisteredProgram) -> None:
        """Its session needs the program no more; it goes with the last gang of it that has yet to start."""
        program.released = True
        if program.waiting:
            return
        for plan in program.plans.values():
            del self._plans[plan.number]
            self._outbox.to_host(plan.host, m.DropPlan(plan.number))
        for name in program.functions:
            self._compilation.drop_reference(name)

    def _location(self, session: Session, device: int) -> DeviceLocation:
        location = session.devices.locations.get(device)
        if location is None:
            raise invalid(f"device {device} does not exist")
        return location
