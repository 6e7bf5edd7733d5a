"""Compile functions for sessions: requests, the transfer of sources to the hosts, and answers.

The proxy sends the source to each host as a feed. The controller asks a host to compile when the source has arrived
there.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Protocol

import msgspec

from atoll.decodable import decodable
from atoll.errors import OK, Code, Details, Status, StatusError, failure, invalid
from atoll.launch.compile_charges import CompileCharges
from atoll.launch.compile_watch import MAX_REQUESTS, CompileWatch, Lost, Stuck
from atoll.launch.failures import Failures
from atoll.launch.function_releases import FunctionReleases
from atoll.launch.launch_checks import check_unwanted, island_problem
from atoll.launch.recompilations import Recompilations
from atoll.launch.scheduler import Scheduler
from atoll.launch.shared_state import SharedState
from atoll.launch.worlds import Worlds
from atoll.protocol import messages as m
from atoll.state.compiled_functions import (
    DeviceAssignment,
    FunctionRegistry,
    FunctionReport,
    Registration,
    function_name,
    hosts_of,
    islands_of,
    output_sizes,
)
from atoll.state.session import GangRun, Session
from atoll.state.tenants import Tenant
from atoll.state.usage import Meter

# Limit for the pending compilations of one function and session on one host.
MAX_RECOMPILES = 64
# Platforms whose islands can run one function together. Null devices compute nothing, so each island runs its part.
_JOINT_PLATFORMS = ("cpu", "null")
_APART = "use a mesh of one island (jax.Device.slice_index is its number), or atoll.program with a node per island"


class FunctionSubscriber(Protocol):
    """Learns which functions were compiled, to lower programs that call them."""

    def function_reported(self, function: str) -> None:
        """Note that the first host has compiled the function."""

    def function_failed(self, session: int, function: str, failure: Status) -> None:
        """Note that the session's function cannot be compiled."""


class Compilation:
    """The functions that are being compiled, and that are compiled, on all hosts."""

    def __init__(
        self,
        shared: SharedState,
        *,
        scheduler: Scheduler[GangRun],
        meter: Meter,
        worlds: Worlds,
        failures: Failures,
    ) -> None:
        self.functions = FunctionRegistry()
        self._failures = failures
        self.watch = CompileWatch()
        self._resources = shared.resources
        self._sessions = shared.sessions
        self._outbox = shared.outbox
        self._quarantine = shared.quarantine
        self._offenses = shared.offenses
        self._remains = shared.remains
        self._charges = CompileCharges(shared, self.functions, scheduler, meter)
        self._worlds = worlds
        self._subscribers: list[FunctionSubscriber] = []
        self.recompilations = Recompilations(shared, self.functions, scheduler)
        self.releases = FunctionReleases(shared, self._drop)
        self._awaiting: dict[tuple[int, int, int], m.Compile] = {}  # without a source yet, by (session, host, feed)
        # By (session, host, feed), with the due time: earlier compilations of the tenant crashed, or took long.
        self._delayed: dict[tuple[int, int, int], tuple[float, m.Compile]] = {}

    def subscribe(self, subscriber: FunctionSubscriber) -> None:
        """Notify the subscriber about functions that were compiled, or that cannot be."""
        self._subscribers.append(subscriber)

    # ---- a session's requests

    def register(self, session: Session, message: m.RegisterFunction) -> None:
        try:
            flat = [device for partitions in message.assignment for device in partitions]
            locations = tuple(
                tuple(session.devices.location(d) for d in partitions) for partitions in message.assignment
            )
            islands = islands_of(locations)
            if len(islands) > 1 and not message.runs_apart:
                self._check_islands(islands)
                if not self._resources.compile_first(islands):
                    self._worlds.check(session.tenant.name, islands)
            session.devices.use("a compiled function", [tuple(flat)])
            for island in islands:
                _raise_if(island_problem(session, self._resources.islands[island]))
            name = function_name(message.content, locations, session.tenant.name)
            self._check_quota(session.tenant)
            check_unwanted(session)
            _raise_if(self._offenses.compile_problem(session.tenant, self._outbox.seconds))
            _raise_if(self._quarantine.refused.get(name))
        except StatusError as error:
            self._outbox.to_session(session.number, m.FunctionReady(message.function, error.status, b""))
            return
        session.add_function(message.function, name, islands)
        session.function_requests[message.function] = message
        self.functions.acquire(name)
        self.functions.locations[name] = locations
        self.functions.contents[name] = message.content
        self._compile(session, message.function, name, message.feed)

    def _check_islands(self, islands: tuple[int, ...]) -> None:
        """Raise INVALID_ARGUMENT if no function can run on all of these islands."""
        first_host, hosts = self._resources.topology.first_host, self._resources.hosts
        platforms = {each: hosts[first_host(each)].platform for each in islands}
        if len(set(platforms.values())) > 1:
            named = ", ".join(f"island {island} has {platform}" for island, platform in platforms.items())
            raise invalid(f"the computation's devices are on islands of different platforms ({named}): {_APART}")
        platform = platforms[islands[0]]
        if platform not in _JOINT_PLATFORMS:
            named = ", ".join(map(str, islands))
            raise invalid(
                f"the computation's devices are on the islands {named}, and islands of platform {platform} cannot run "
                f"one computation together: {_APART}"
            )

    def _hosts_per_island(self, islands: tuple[int, ...]) -> tuple[int, ...]:
        """Return the number of hosts of each island, for `Compile.islands`.

        Return () if one of the hosts cannot find out whether a function needs a world. Then all functions get one.
        """
        topology = self._resources.topology
        first = self._resources.compile_first(islands)
        return tuple([len(topology.hosts_of(island)) for island in islands]) if first else ()

    def needs_world(self, host: int, message: m.NeedsWorld) -> None:
        """Have a host load a function in a world, because its islands communicate. Start the world if necessary."""
        name = message.function
        waiting = self.functions.waiting.get((name, host), ())
        session = next((found for each in waiting if (found := self._sessions.get(each.session)) is not None), None)
        islands = islands_of(self.functions.locations.get(name, ()))
        if session is None or len(islands) < 2:  # the function was released, and the host drops it
            return
        report = self.functions.reports.get(name)
        try:
            if report is not None and report.is_apart:
                raise _disagreement(name, host)
            self._worlds.check(session.tenant.name, islands)
        except StatusError as error:
            for each in sorted(hosts_of(self.functions.locations[name])):
                self._settle(name, each, error.status, b"")
            return
        world = self._worlds.use(session.tenant.name, islands, name)
        self._outbox.to_host(host, m.LoadInWorld(name, world.number))

    def _check_quota(self, tenant: Tenant) -> None:
        if tenant.settings.compiles:
            sessions = (number for number, session in self._sessions.items() if session.tenant is tenant)
            own = sum(map(self.functions.compiling, sessions))
            _raise_if(tenant.refused("compiles", 1, own, "these are being compiled"))

    def recompile(self, session: Session, message: m.Recompile) -> None:
        """Compile a function again, because its island was restarted or the session migrates."""
        name = session.migrating.get(message.function) or session.functions.get(message.function)
        if name is not None:  # None if it was released meanwhile
            for host in hosts_of(self.functions.locations[name]):
                waiting = self.functions.waiting.get((name, host), ())
                if sum(each.session == session.number for each in waiting) >= MAX_RECOMPILES:
                    text = f"{MAX_RECOMPILES} compilations of it wait on host {host}"
                    raise invalid(f"Recompile.function is {message.function}: {text}")
            refused = self._quarantine.refused.get(name)
            self._drop_unsent_source(session, message.function, replacement=message.feed)
            if self._is_on_ended_island(name):
                self._drop_source(session, name, message.feed)  # it failed with the island
            elif refused is None:
                self._compile(session, message.function, name, message.feed, recompile=True)
            else:
                self._refuse_again(session, message, name, refused)

    def _refuse_again(self, session: Session, message: m.Recompile, name: str, refused: Status) -> None:
        """Fail a function that was compiled before it crashed a worker, and drop its source."""
        hosts = hosts_of(self.functions.locations[name])
        self._expect(session, message.function, name, hosts, is_repeated=True)
        self._drop_source(session, name, message.feed)
        for host in sorted(hosts):
            self._settle(name, host, refused, b"")

    def _drop_source(self, session: Session, name: str, feed: int) -> None:
        for host in sorted(hosts_of(self.functions.locations[name])):
            if session.feeds.refuse((host, feed)):
                self._outbox.to_host(host, m.DropFeed(session.number, feed))

    def _compile(self, session: Session, function: int, name: str, feed: int, recompile: bool = False) -> None:
        """Have the function's hosts compile the source that arrives, or has arrived, as `feed`."""
        locations = self.functions.locations[name]
        hosts = hosts_of(locations)
        islands = islands_of(locations)
        topology, tenant = self._resources.topology, session.tenant
        request = session.function_requests[function]
        world = 0
        counts: tuple[int, ...] = ()
        if len(islands) > 1 and not request.runs_apart:
            counts = self._hosts_per_island(islands)
            report = self.functions.reports.get(name)
            needs_world = report is not None and not report.is_apart
            # If a function needs no world but there is one, the function's arguments are probably there.
            if not counts or needs_world or self._worlds.has(tenant.name, islands):
                world = self._worlds.use(tenant.name, islands, name).number
        members = [host for island in islands for host in topology.hosts_of(island)]  # by rank
        rank = {host: rank for rank, host in enumerate(members)}
        assignment = tuple(tuple((rank[s.host], s.ordinal) for s in partitions) for partitions in locations)
        self._expect(session, function, name, hosts, is_repeated=recompile)
        compile_ = m.Compile(
            name,
            session.number,
            feed,
            assignment,
            request.content,
            recompile,
            tenant.host_name,
            tenant.settings.share,
            native_code=tenant.has_native_code,
            islands=counts,
        )
        delay = self._charges.delay(tenant)
        for host in sorted(hosts):
            if len(islands) > 1:
                own = topology.hosts_of(topology.island_of(host))
                compile_ = msgspec.structs.replace(compile_, world=world, ranks=(rank[own[0]], len(own)))
            if delay:
                self._delayed[session.number, host, feed] = self._outbox.seconds + delay, compile_
            else:
                self._send(session, host, compile_)

    def _send(self, session: Session, host: int, compile_: m.Compile) -> None:
        """Have a host compile when the source has arrived there."""
        if session.feeds.claim((host, compile_.feed)):
            self._request(session, host, compile_)
        else:
            self._awaiting.setdefault((session.number, host, compile_.feed), compile_)

    def _request(self, session: Session, host: int, compile_: m.Compile) -> None:
        """Have a host compile now. The world or a worker may have been replaced since the session asked for it."""
        name = compile_.function
        islands = islands_of(self.functions.locations.get(name, ()))
        if compile_.islands or compile_.world:
            counts = self._hosts_per_island(islands)
            if (compile_.world or not counts) and name in self.functions.users:
                world = self._worlds.use(session.tenant.name, islands, name).number
                compile_ = msgspec.structs.replace(compile_, world=world, islands=counts)
        self._outbox.to_host(host, compile_)
        self.watch.requested(name, host, session.number, compile_.feed, self._outbox.seconds)

    def questions(self, now: float, hosts: Container[int]) -> dict[int, list[str]]:
        """Return the functions about whose compilations to ask each of these hosts now."""
        return self.watch.questions(now, hosts, self.functions.waiting)

    def reported(self, host: int, reports: Iterable[m.CompileReport]) -> None:
        """Request compilations again that the host has lost, and fail those that make no progress."""
        for report in reports:
            name = report.function
            if (name, host) not in self.functions.waiting:  # it has ended meanwhile
                continue
            match self.watch.reported(host, report, self._outbox.seconds):
                case Lost(watched, request=True):
                    self._outbox.to_host(host, m.DropFeed(watched.session, watched.feed))
                    self._request_source(name, watched.requests)
                case Lost():
                    text = f"{self._title(name)} was lost by the worker of host {host}, which does not know it although"
                    text += f" it was requested {MAX_REQUESTS + 1} times: compile the program again"
                    self._settle(name, host, failure(Code.UNAVAILABLE, text, Details(hosts=(host,))), b"")
                case Stuck(seconds):
                    text = f"{self._title(name)} on host {host} made no progress for {seconds:.0f} s: the "
                    text += "process that compiles it uses no CPU time"
                    self._outbox.to_host(host, m.StopCompiling(name))  # a program may still use the function
                    self._settle(name, host, failure(Code.DEADLINE_EXCEEDED, text, Details(hosts=(host,))), b"")

    def _title(self, name: str) -> str:
        return f"the compilation of program {self.functions.contents.get(name, name)[:12]}"

    def _request_source(self, name: str, requests: int) -> None:
        """Have a session that awaits a function send its source again, as after the restart of an island."""
        hosts = tuple(sorted(hosts_of(self.functions.locations[name])))
        awaiting = {each.session: each for host in hosts for each in self.functions.waiting.get((name, host), ())}
        if awaiting:
            chosen = list(awaiting.values())[requests % len(awaiting)]
            self._outbox.to_session(chosen.session, m.SendSources(((chosen.function, hosts),)))

    def tick(self, now: float) -> None:
        """Once a second: send the delayed compilations that are due, or refuse them if their tenant is suspended."""
        for key, (due, compile_) in list(self._delayed.items()):
            session, host = self._sessions.get(key[0]), key[1]
            if self._delayed.get(key) is None or due > now:  # a refusal in this loop may have ended it
                continue
            del self._delayed[key]
            if session is None or (compile_.function, host) not in self.functions.waiting:
                if session is not None:
                    session.feeds.unwanted.add((host, compile_.feed))
            elif (problem := self._offenses.compile_problem(session.tenant, now)) is not None:
                session.feeds.unwanted.add((host, compile_.feed))
                self._settle(compile_.function, host, problem, b"")
            else:
                self._send(session, host, compile_)

    def _drop(self, session: Session, function: int) -> None:
        """Drop a function of a session, whose release need not wait."""
        self._drop_unsent_source(session, function)
        name = session.remove_function(function)
        session.function_requests.pop(function, None)
        if name is not None:
            self.drop_reference(name)
            self._not_used(session, name)

    def drop_reference(self, name: str) -> None:
        """Drop a reference of a session or program to the function. The hosts drop it with the last reference.

        A host that is compiling it may stop and not answer, so the answers are not awaited any more.
        """
        if self.functions.release(name):
            self._worlds.released(name)
            for session in self._sessions.values():
                session.failed_functions.pop(name, None)
            for host in self._resources.hosts:
                self._outbox.to_host(host, m.DropFunction(name))
            for each in self.functions.abandon(name, self._resources.hosts):
                if each.session in self._sessions:
                    status = Status(Code.CANCELLED, "the function was released before it was compiled")
                    self._outbox.to_session(each.session, m.FunctionReady(each.function, status, b""))

    def is_waiting(self, session: int) -> bool:
        """Return whether a function is being compiled for the session."""
        return self.functions.compiling(session) > 0

    def forget(self, session: Session, name: str) -> None:
        """Stop waiting for the function on behalf of the session."""
        unsent = {**self._awaiting, **{key: each for key, (_, each) in self._delayed.items()}}
        for number, host, feed in [key for key, each in unsent.items() if each.function == name]:
            if number == session.number:
                self._awaiting.pop((number, host, feed), None)
                self._delayed.pop((number, host, feed), None)
                session.feeds.unwanted.add((host, feed))
        self.functions.forget(session.number, name)

    def place_functions(self) -> None:
        """Note the islands of the functions of all sessions, which are not stored."""
        for session in self._sessions.values():
            for name in session.functions.values():
                session.place_function(name, islands_of(self.functions.locations[name]))

    def session_closed(self, session: Session) -> None:
        for island in self._resources.islands.values():
            island.needs_recompile.pop(session.number, None)
        for table in (self._awaiting, self._delayed):
            for key in [key for key in table if key[0] == session.number]:
                del table[key]
        self._remains.release_in_steps(session, session.functions, self.drop_reference)

    # ---- the hosts' answers

    def source_arrived(self, session: int, host: int, feed: int) -> bool:
        """Note that a feed is complete at a host. Return whether it is the source of a function."""
        compile_ = self._awaiting.pop((session, host, feed), None)
        if compile_ is None:
            return False
        if (compile_.function, host) in self.functions.waiting:
            self._request(self._sessions[session], host, compile_)
        else:
            self._outbox.to_host(host, m.DropFeed(session, feed))
        return True

    def compiled(self, host: int, message: m.Compiled) -> None:
        name, status = message.function, message.status
        report = self.functions.reports.get(name)
        # The first report says that the islands do not communicate, and this one that they do. The other way round is
        # no error: a worker that does not compile first has reported first, and such workers do not find that out.
        is_contradiction = report is not None and report.is_apart and not message.is_apart
        if status.ok and is_contradiction:
            self._settle(name, host, _disagreement(name, host).status, b"")
            return
        if status.ok:
            self._note_compiled(host, message)
        elif message.crashed:
            self._charges.crashed(host, message)
        self._settle(name, host, status, message.info)

    def _note_compiled(self, host: int, message: m.Compiled) -> None:
        """Count and charge a compilation, and keep the first report."""
        self.functions.compiled += not message.cached
        self.functions.cached += message.cached
        self.functions.seconds += message.seconds
        self._charges.compiled(host, message)
        reports = self.functions.reports
        # It may have been released meanwhile. All hosts of an island send the same report.
        if message.function in self.functions.users and message.function not in reports:
            reports[message.function] = _report(message, self.functions.locations[message.function])
            for subscriber in self._subscribers:
                subscriber.function_reported(message.function)

    def _settle(self, name: str, host: int, status: Status, info: bytes) -> None:
        """Handle that a host has compiled a function or has failed. Answer the sessions for which it was the last."""
        for done in self.functions.settle(name, host, status, info):
            session = self._sessions.get(done.session)
            if session is not None and session.migrating.get(done.function) == name:
                del session.migrating[done.function]  # its migration continues, or fails, at the next flush
                session.migration_failure = session.migration_failure or done.failure
            elif done.failure is None:
                self._made_ready(session, done)
            else:
                self._failed(session, done, done.failure)

    def _made_ready(self, session: Session | None, done: Registration) -> None:
        """Answer a session, which may have ended, that all hosts have compiled a function."""
        if session is not None and session.functions.get(done.function) == done.name:
            session.failed_functions.pop(done.name, None)
        self._outbox.to_session(done.session, m.FunctionReady(done.function, OK, done.info))
        self.recompilations.ended(done.session, done.name)

    def _failed(self, session: Session | None, done: Registration, why: Status) -> None:
        """Answer a session, which may have ended, that a host could not compile a function. It loses the function.

        It keeps a function that was compiled before.
        """
        has_function = session is not None and session.functions.get(done.function) == done.name
        if session is not None and has_function and done.is_repeated:
            self._failed_again(session, done.name, why)
            self._outbox.to_session(done.session, m.FunctionReady(done.function, why, b""))
            return
        for subscriber in self._subscribers:
            subscriber.function_failed(done.session, done.name, why)
        if session is not None and session.functions.get(done.function) == done.name:
            session.remove_function(done.function)
            session.function_requests.pop(done.function, None)
            self.drop_reference(done.name)
        self._outbox.to_session(done.session, m.FunctionReady(done.function, why, done.info))
        if session is None:
            self.recompilations.ended(done.session, done.name)
        else:
            self._not_used(session, done.name)

    def _failed_again(self, session: Session, name: str, why: Status) -> None:
        """Fail the launches of a function that was compiled before, until it is compiled again.

        The session keeps the function: its proxy sends the source again when an island of the function restarts.
        """
        session.failed_functions[name] = why
        if name not in self.functions.reports:  # the session was persisted by an earlier cluster
            for subscriber in self._subscribers:
                subscriber.function_failed(session.number, name, why)
        self._failures.fail_calls(session.number, name, why)
        self.recompilations.ended(session.number, name)

    # ---- islands that fail

    def under_way(self, host: int) -> set[str]:
        """Return the functions that the host compiles."""
        return {name for name, each in self.functions.waiting if each == host}

    def refuse(self, refused: dict[str, Status]) -> None:
        """Fail the compilation of these functions on all hosts."""
        for name, host in list(self.functions.waiting):
            if name in refused:
                self._settle(name, host, refused[name], b"")

    def fail_on(self, hosts: set[int], status: Status, sessions: Container[int] | None = None) -> None:
        """Fail the compilations on these hosts, which are lost.

        With `sessions`, fail only the compilations for which no other session waits.
        """
        self.watch.forget(hosts)  # the sessions of the others request them again
        for (name, host), registrations in list(self.functions.waiting.items()):
            if host in hosts and (sessions is None or all(each.session in sessions for each in registrations)):
                self._settle(name, host, status, b"")

    # ---- what sessions wait for

    def _is_on_ended_island(self, name: str) -> bool:
        """Return whether one of the function's islands will not restart."""
        return any(self._resources.islands[each].is_over for each in islands_of(self.functions.locations[name]))

    def _drop_unsent_source(self, session: Session, function: int, replacement: int | None = None) -> None:
        """Do not wait for the source of a function that is dropped, or whose source is sent again as `replacement`."""
        name, request = session.functions.get(function), session.function_requests.get(function)
        if name is None or request is None:
            return
        for host in sorted(hosts_of(self.functions.locations[name])):
            if self._awaiting.pop((session.number, host, request.feed), None) is not None:
                session.feeds.unwanted.add((host, request.feed))
        if replacement is not None:
            session.function_requests[function] = msgspec.structs.replace(request, feed=replacement)

    def _expect(self, session: Session, function: int, name: str, hosts: set[int], is_repeated: bool = False) -> None:
        registration = Registration(session.number, function, name, set(hosts), is_repeated=is_repeated)
        self.functions.expect(registration)

    def replaced(self, session: Session, name: str) -> None:
        """Drop a reference of the session to the function, in whose place the session has another one."""
        self.drop_reference(name)
        self._not_used(session, name)

    def _not_used(self, session: Session, name: str) -> None:
        """Do not wait for a function that has lost a number in the session, unless others of its numbers remain."""
        if not session.function_uses[name]:
            self.recompilations.ended(session.number, name)


def _raise_if(problem: Status | None) -> None:
    """Raise StatusError if there is a problem."""
    if problem is not None:
        problem.raise_if_error()


def _disagreement(name: str, host: int) -> StatusError:
    text = f"host {host} and others do not agree on whether the islands of function {name} communicate: their workers "
    text += "may be of different versions. Compile the program again when all workers are of the same version"
    return StatusError(Code.FAILED_PRECONDITION, text)


_read_outputs = msgspec.msgpack.Decoder(decodable(m.FunctionOutputs)).decode


def _report(message: m.Compiled, locations: DeviceAssignment) -> FunctionReport:
    """Read a worker's report about a function that runs at these locations. Raises INVALID_ARGUMENT."""
    devices = tuple((each.host, each.ordinal) for partitions in locations for each in partitions)
    of_run = message.name, message.scratch_bytes, message.calls_client
    if not message.info:  # a Python function
        return FunctionReport(devices, *of_run, is_apart=message.is_apart)
    try:
        info = _read_outputs(message.info)
    except msgspec.MsgspecError as error:
        raise invalid(f"invalid Compiled.info: {error}") from None
    outputs = tuple((each.dtype, each.shape) for each in info.outputs)
    sizes = output_sizes(outputs, info.memory_stats.get("output_size_in_bytes", 0))
    return FunctionReport(devices, *of_run, outputs, sizes, frozenset(info.donated), message.is_apart)
