"""`atoll check`: whether what the controller keeps agrees with itself, with what hosts have in their stores, and with
the arrays that proxies know.

A host says what it has when it has done all that it was told before, so what is there is compared with what was to be
there when it was asked. What is on its way may be there or not. A proxy's answer comes after all that it has said
before, so it is compared with the directory as it is then.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from atoll.protocol import messages as m
from atoll.scheduling.session import Session
from atoll.telemetry.consistency import Checked, contradictions

# For all hosts to answer.
CHECK_SECONDS = 5.0
_MOST_NAMED = 20


@dataclass(slots=True)
class _Expected:
    """Of one session on one host: handles that are there, and those that may be."""

    there: set[int] = field(default_factory=set)
    possible: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Check:
    connection: int
    until: float
    expected: dict[int, dict[int, _Expected]]  # by host and session
    proxies: set[int]  # of sessions, that have yet to answer
    arrays: int
    contradictions: list[str]
    differences: list[str] = field(default_factory=list)


class Out(Protocol):
    """The controller's outbox."""

    def flush_frees(self) -> None: ...
    def to_host(self, host: int, message: Any) -> None: ...
    def to_session(self, session: int, message: Any) -> None: ...
    def send(self, connection: int, message: Any) -> None: ...


class Checks:
    """Those that are going on."""

    def __init__(
        self,
        controller: Checked,
        outbox: Out,
        hosts: Mapping[int, int],
        proxies: Mapping[int, int],
        away: Container[int],
    ) -> None:
        self._controller = controller
        self._outbox = outbox
        self._hosts = hosts  # connections, by host
        self._proxies = proxies  # the same by session
        self._away = away  # connections
        self._checks: dict[int, _Check] = {}
        self._next = 1

    def begin(self, connection: int, now: float) -> None:
        """One reply, once all hosts have answered, and all proxies that can be reached."""
        self._outbox.flush_frees()  # what goes is gone when the hosts look
        number, sessions = self._next, self._controller.sessions
        self._next += 1
        expected: dict[int, dict[int, _Expected]] = {host: {} for host in self._hosts}
        for session in sessions.values():
            for host in expected:
                expected[host][session.number] = _Expected()
            _expect(session, expected)
        arrays = sum(len(session.directory.entries) for session in sessions.values())
        until = now + CHECK_SECONDS
        proxies = {
            session for session, proxy in self._proxies.items() if session in sessions and proxy not in self._away
        }
        self._checks[number] = _Check(connection, until, expected, proxies, arrays, contradictions(self._controller))
        for host in expected:
            self._outbox.to_host(host, m.ReportStores(number))
        for session_number in sorted(proxies):
            self._outbox.to_session(session_number, m.ReportHandles(number))
        self._reply_if_complete(number)

    def reported(self, host: int, message: m.StoresReported) -> None:
        check = self._checks.get(message.check)
        if check is None:
            return
        expected = check.expected.pop(host, {})
        for store in message.stores:
            wanted = expected.pop(store.session, None)
            if wanted is None:
                if not store.is_busy:  # else it goes once what is before that has ended
                    check.differences.append(f"host {host} has a store of session {store.session}, which is not open")
                continue
            found = set(store.handles)
            missing = wanted.there - found
            more = set() if store.is_busy else found - wanted.possible
            if missing:
                check.differences.append(f"host {host} lacks {_named(missing)} of session {store.session}")
            if more:
                text = f"host {host} has {_named(more)} of session {store.session} that the controller does not know"
                check.differences.append(text)
        for session in expected:
            check.differences.append(f"host {host} has no store of session {session}, which is open")
        self._reply_if_complete(message.check)

    def held(self, session: Session, message: m.HandlesReported) -> None:
        """What a proxy says that its client has."""
        check = self._checks.get(message.check)
        if check is None or session.number not in check.proxies:
            return
        check.proxies.discard(session.number)
        if message.handles is not None:
            check.differences += _unlike(session, message.handles)
        self._reply_if_complete(message.check)

    def session_closed(self, session: Session) -> None:
        """Its proxy will not answer."""
        for check, each in list(self._checks.items()):
            if session.number in each.proxies:
                each.proxies.discard(session.number)
                self._reply_if_complete(check)

    def tick(self, now: float) -> None:
        for number, check in list(self._checks.items()):
            if now > check.until:
                for host in sorted(check.expected):
                    check.differences.append(f"host {host} has not answered within {CHECK_SECONDS:.0f} s")
                for session in sorted(check.proxies):
                    text = f"the proxy of session {session} has not answered within {CHECK_SECONDS:.0f} s"
                    check.differences.append(text)
                check.expected.clear()
                check.proxies.clear()
                self._reply_if_complete(number)

    def _reply_if_complete(self, number: int) -> None:
        check = self._checks[number]
        if not check.expected and not check.proxies:
            del self._checks[number]
            reply = m.CheckReply(tuple(check.contradictions), tuple(check.differences), check.arrays, len(self._hosts))
            self._outbox.send(check.connection, reply)


def _expect(session: Session, expected: Mapping[int, dict[int, _Expected]]) -> None:
    for handle, entry in session.directory.entries.items():
        is_there = entry.ready and entry.error is None and not entry.consumed and not entry.delete
        for host in entry.hosts:
            if host in expected:
                of_session = expected[host][session.number]
                of_session.possible.add(handle)
                if is_there and not entry.released:
                    of_session.there.add(handle)


def _unlike(session: Session, held: Mapping[int, bool]) -> Iterator[str]:
    """How the arrays that a proxy knows differ from those of the directory that its client has not released."""
    entries = session.directory.entries
    own = range(m.INTERNAL_HANDLES, 2 * m.INTERNAL_HANDLES)
    kept = {handle for handle, entry in entries.items() if not entry.released and handle not in own}
    lacking = {handle for handle, has_failed in held.items() if not has_failed} - kept
    more = kept - held.keys()
    who = f"the proxy of session {session.number}"
    if lacking:
        yield f"{who} has {_named(lacking)} that the controller does not know"
    if more:
        yield f"{who} has nothing of {_named(more)} that it has not released"


def _named(handles: set[int]) -> str:
    some = ", ".join(map(str, sorted(handles)[:_MOST_NAMED]))
    return f"{len(handles)} arrays ({some}{', ...' if len(handles) > _MOST_NAMED else ''})"
