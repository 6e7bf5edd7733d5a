"""Reports work that is late: for how long it has run or waited, and which process must act next.

A long computation is legitimate, so the watchdog ends nothing. It reports each subject once: as an event, in the log,
and to the session that waits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import msgspec

from atoll.controller.sessions.queries import Queries
from atoll.controller.state import ClusterState
from atoll.launch.compilation import Compilation
from atoll.launch.foremost_gangs import with_foremost
from atoll.launch.launches import Launches
from atoll.launch.queued_work import SessionWait
from atoll.named_arrays.named_arrays import NamedArrays
from atoll.protocol import messages as m
from atoll.quantities import noun_for
from atoll.state.durations import Durations
from atoll.state.gang_states import Reason
from atoll.state.queued_nodes import Gang, HostCallKind
from atoll.state.session import GangRun
from atoll.telemetry.report import Ahead

WATCH_SECONDS = 60.0
# Interval of the checks. Reports may be late by this.
LOOK_SECONDS = 10.0
# Reports per check. Later checks report the remaining subjects.
MAX_REPORTS = 16

# Compilations of a session, and queries, that are watched: the oldest ones.
MAX_WATCHED = 64

# The missing step, by the reason that a launch waits. Other launches that it waits for are watched themselves.
_MISSING: dict[Reason, str] = {
    Reason.BYTES: "its client has not sent the bytes",
    Reason.PLAN: "the workers of the island have not confirmed its plan",
    Reason.PYTHON: "the Python function that makes its arguments has not returned",
    Reason.FUNCTIONS: "the workers of the island have not compiled its functions again",
    Reason.ISLAND: "the engine has not started the island",
    Reason.MEMORY: "the owners of arrays on its devices have not freed memory",
    Reason.QUOTA: "the owners of its tenant's arrays have not freed memory",
}

# By the kind of the Python that a gang calls.
_PYTHON: dict[HostCallKind, str] = {
    HostCallKind.CLIENT: "Python in its client's process",
    HostCallKind.PYTHON: "Python in its session's process on the host",
}


class Subject(msgspec.Struct, frozen=True):
    """Work that is late, or may become so. `text(seconds)` describes it."""

    session: int
    island: int  # or -1
    text: Callable[[float], str]


class Watchdog:
    """Finds work that is late. Call `tick` once per second."""

    def __init__(
        self,
        state: ClusterState,
        launches: Launches,
        compilation: Compilation,
        queries: Queries,
        names: NamedArrays,
    ) -> None:
        self._resources = state.resources
        self._sessions = state.sessions
        self._history = state.history
        self._outbox = state.outbox
        self._in_flight, self._scheduler = launches.in_flight, launches.scheduler
        self._compilation = compilation
        self._queries = queries
        self._names = names
        self._durations: Durations[Hashable] = Durations()
        self._reported: set[Hashable] = set()
        self._next = 0.0

    def tick(self, now: float) -> None:
        """Report what has become late since the last check."""
        if now < self._next:
            return
        self._next = now + LOOK_SECONDS
        subjects = dict(self._subjects())
        self._reported &= subjects.keys()
        reports = 0
        for key, seconds in self._durations.update(now, subjects).items():
            if seconds > WATCH_SECONDS and key not in self._reported and reports < MAX_REPORTS:
                reports += 1
                self._reported.add(key)
                self._report(subjects[key], seconds)

    def owed(self, now: float) -> list[tuple[Subject, float]]:
        """Return all unfinished work for sessions, with the seconds for which the checks have found it."""
        return [(subject, self._durations.of(now, key)) for key, subject in self._subjects()]

    def ahead(self, now: float, waits: Mapping[int, Sequence[SessionWait[GangRun]]]) -> Iterator[Ahead]:
        """Yield the gangs of other sessions that sessions wait for.

        `waits` are the waits for each island. There may be many such gangs, so each text is made when it is taken.
        """
        behind: dict[tuple[int, int], list[Gang[GangRun]]] = {}  # by session and sequence of the gang ahead
        foremost: dict[int, list[Gang[GangRun]]] = {}
        gangs = self._in_flight
        for gang, ahead in self._with_foremost():
            if ahead is None:
                for island in gang.run.islands_left:
                    foremost.setdefault(island, []).append(gang)
            elif gang.node.session != ahead.node.session:
                behind.setdefault((gang.node.session, ahead.sequence), []).append(gang)
        for (session, sequence), some in behind.items():
            yield self._ahead(session, some[0].run.islands_left[0], gangs[sequence], now, some)
        for island, some_waits in waits.items():
            for wait in some_waits:
                for gang in foremost.get(island, ()):
                    if gang.node.session != wait.session:
                        yield self._ahead(wait.session, island, gang, now)

    def _ahead(
        self, session: int, island: int, gang: Gang[GangRun], now: float, behind: Sequence[Gang[GangRun]] = ()
    ) -> Ahead:
        seconds = self._durations.of(now, ("gang", gang.sequence))
        program = behind[0].run.launch.program.name if behind else ""
        texts = _gang_text(gang)(seconds), _gang_text(gang, is_public=True)(seconds)
        return Ahead(session, island, len(behind), program, gang.node.session, *texts)

    def _report(self, subject: Subject, seconds: float) -> None:
        session = self._sessions.get(subject.session)
        text = subject.text(seconds)
        tenant = "" if session is None else session.tenant.name
        self._history.record("late", text, subject.island, subject.session, tenant)
        if session is not None:
            self._outbox.to_session(session.number, m.Late(text))

    # ---- subjects

    def _subjects(self) -> Iterator[tuple[Hashable, Subject]]:
        yield from self._gangs()
        yield from self._waits()
        count: dict[int, int] = {}  # of compilations, by session
        for (name, host), registrations in self._compilation.functions.waiting.items():
            for first in registrations[:1]:
                session = first.session
                before = count.get(session, 0)
                if before < MAX_WATCHED:
                    count[session] = before + 1
                    text = _compile_text(first.function, host, self._compilation.watch.report_of(name, host))
                    yield ("compile", name, host), Subject(session, self._island_of(host), text)
        count = {}  # of queries, by session
        for query, host, session, what in self._queries.pending():
            before = count.get(session, 0)
            if before < MAX_WATCHED:
                count[session] = before + 1
                yield ("query", query), Subject(session, self._island_of(host), _query_text(what, host))
        for wait, missing in self._names.oldest_waits():
            yield ("version", wait.session, wait.request), Subject(wait.session, -1, _version_text(missing))

    def _gangs(self) -> Iterator[tuple[Hashable, Subject]]:
        """Yield the gangs that wait for no other gang on their hosts, since all others wait for these."""
        for gang, ahead in self._with_foremost():
            if ahead is None:
                yield ("gang", gang.sequence), Subject(gang.node.session, gang.island, _gang_text(gang))

    def _with_foremost(self) -> Iterator[tuple[Gang[GangRun], Gang[GangRun] | None]]:
        return with_foremost(self._in_flight.values(), self._resources.topology.shapes)

    def _waits(self) -> Iterator[tuple[Hashable, Subject]]:
        for island, waits in self._scheduler.waits().items():
            for wait in waits:
                missing = _MISSING.get(wait.reason)
                if missing is not None:
                    text = _wait_text(wait.reason, island, missing)
                    yield ("wait", island, wait.session, wait.first.sequence), Subject(wait.session, island, text)

    def _island_of(self, host: int) -> int:
        return self._resources.topology.island_of(host)


def _hosts(hosts: list[int]) -> str:
    return f"{noun_for(len(hosts), 'host')} {', '.join(map(str, hosts))}"


def _gang_text(gang: Gang[GangRun], is_public: bool = False) -> Callable[[float], str]:
    run, hosts = gang.run, sorted(gang.run.hosts_left)
    name, where, call = run.launch.program.name, run.islands_text, run.spec.host_call
    missing = f"the worker of {_hosts(hosts)} has not reported its end"
    if len(hosts) > 1:
        missing = f"the workers of {_hosts(hosts)} have not reported its end"
    if is_public:
        name = "a gang"
    elif call is not None:  # only the hosts know whether the Python runs now
        missing = f"it calls {_PYTHON[call]}, which may not have returned; otherwise {missing}"
    return lambda seconds: f"{name} has run on {_hosts(hosts)} of {where} for {seconds:.0f} s: {missing}"


def _wait_text(reason: Reason, island: int, missing: str) -> Callable[[float], str]:
    return lambda seconds: f"a launch has waited for {reason} on island {island} for {seconds:.0f} s: {missing}"


def _compile_text(function: int, host: int, report: m.CompileReport | None) -> Callable[[float], str]:
    missing = f"the worker of host {host} has not sent the result"
    if report is not None:
        missing += f", and reports that it is {report.stage}"
    return lambda seconds: f"the compilation of function {function} has taken {seconds:.0f} s: {missing}"


def _query_text(what: str, host: int) -> Callable[[float], str]:
    return lambda seconds: (
        f"a query ({what}) has waited for {seconds:.0f} s: the worker of host {host} has not answered"
    )


def _version_text(missing: str) -> Callable[[float], str]:
    # A client repeats its request before that is late, so the seconds of one request say little.
    return lambda seconds: f"a subscription waits for {missing}"
