"""`atoll check`: compare the controller's state with itself, with hosts' stores, and with the arrays that proxies know.

The controller keeps some sums twice, for speed; the check recounts them. A contradiction is a bug in Atoll. The check
changes no state.

A host reports its stores after it has processed all earlier messages, so its report is compared with the state at the
time of the request; arrays in transfer may be present or not. A proxy's answer arrives after all its earlier messages,
so it is compared with the directory at the time of the answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping

import msgspec

from atoll.cluster.locations import HostDevice
from atoll.launch.outbox import Outbox
from atoll.protocol import messages as m
from atoll.protocol.number_ranges import is_client_handle
from atoll.quantities import counted
from atoll.state.buffer_directory import Entry
from atoll.state.memory_ledger import Block, undivided
from atoll.state.queued_nodes import Gang
from atoll.state.session import GangRun, Session
from atoll.telemetry.report import ReportSource

CHECK_SECONDS = 5.0  # for all hosts and proxies to answer
_MAX_NAMED = 20


def contradictions(controller: ReportSource) -> list[str]:
    """Return one sentence per contradiction in the controller's state."""
    launches = controller.launches
    counts = launches.scheduler.count_differences(launches.in_flight.values())
    return [*_memory(controller), *counts, *_sessions(controller)]


def _memory(controller: ReportSource) -> Iterator[str]:
    """Check that the ledger's sums equal the blocks of buffers and gangs."""
    gangs = [*controller.launches.in_flight.values(), *_waiting(controller)]
    entries = [entry for session in controller.sessions.values() for entry in session.directory.entries.values()]
    entries += [entry for gang in gangs for entry in gang.run.launch.entries]
    entries += controller.launches.remains.left(Entry)
    held = [block for entry in entries for block in entry.blocks]
    held += [block for gang in gangs for block in undivided(gang.run.blocks)]
    yield from _differences("the ledger", controller.launches.reservations.ledger.used, held)
    for tenant in controller.tenants.by_name.values():
        if tenant.memory is not None:
            own = [block for block in held if block.owner is tenant.memory]
            yield from _differences(f"the ledger of tenant {tenant.name}", tenant.memory.used, own)


def _differences(whose: str, used: Mapping[HostDevice, int], held: Iterable[Block]) -> Iterator[str]:
    sums = Counter[HostDevice]()
    for block in {id(block): block for block in held}.values():
        for device, nbytes in block.requirement:
            sums[device] += nbytes
    for device in sorted({*used, *sums}):
        if used.get(device, 0) != sums[device]:
            host, ordinal = device
            yield (
                f"{whose} has {used.get(device, 0)} bytes in use on device {ordinal} of host {host}, but buffers and "
                f"gangs hold {sums[device]}"
            )


def _waiting(controller: ReportSource) -> list[Gang[GangRun]]:
    return [gang for node in controller.launches.scheduler.all_nodes() for gang in node.gangs]


def _sessions(controller: ReportSource) -> Iterator[str]:
    open_ones = Counter(session.tenant.name for session in controller.sessions.values() if session.has_client)
    for name, tenant in controller.tenants.by_name.items():
        if tenant.sessions < open_ones[name]:  # more may wait until the cluster is complete
            yield f"tenant {name} counts {counted(tenant.sessions, 'session')}, but has {open_ones[name]}"
    for number, session in controller.sessions.items():
        entries = session.directory.entries
        if session.directory.nbytes != (nbytes := sum(entry.nbytes for entry in entries.values())):
            yield f"session {number} counts {session.directory.nbytes} bytes of arrays, but has {nbytes}"
        yield from _arrays(number, entries)


def _arrays(session: int, entries: Mapping[int, Entry]) -> Iterator[str]:
    for handle, entry in entries.items():
        if entry.released and entry.uses <= 0 and entry.waits is None and entry.ready:
            yield f"session {session} has released array {handle}, and nothing needs it, but it still exists"
        if entry.uses < 0:
            yield f"array {handle} of session {session} is needed by {counted(entry.uses, 'gang')}"


class _Expected(msgspec.Struct):
    """The handles of one session on one host: those that must be there, and those that may be."""

    there: set[int] = msgspec.field(default_factory=set)
    possible: set[int] = msgspec.field(default_factory=set)


class _Check(msgspec.Struct):
    connection: int
    until: float
    expected: dict[int, dict[int, _Expected]]  # per host and session
    proxies: set[int]  # sessions whose proxies have not answered
    arrays: int
    contradictions: list[str]
    differences: list[str] = msgspec.field(default_factory=list)


class Checks:
    """The running checks of a controller."""

    def __init__(
        self,
        controller: ReportSource,
        outbox: Outbox,
        hosts: Mapping[int, int],
        proxies: Mapping[int, int],
        away: Container[int],
    ) -> None:
        self._controller = controller
        self._outbox = outbox
        self._hosts = hosts  # connection of each host
        self._proxies = proxies  # connection of each session's proxy
        self._away = away  # connections that are interrupted
        self._checks: dict[int, _Check] = {}
        self._next = 1

    def begin(self, connection: int, now: float) -> None:
        """Start a check. Sends one reply, once all hosts and all reachable proxies have answered."""
        self._outbox.flush_frees()  # before the hosts report
        number, sessions = self._next, self._controller.sessions
        self._next += 1
        expected: dict[int, dict[int, _Expected]] = {host: {} for host in self._hosts}
        for session in sessions.values():
            for host in expected:
                expected[host][session.number] = _Expected()
            _add_expected(session, expected)
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
                if not store.is_busy:  # a busy store is removed after its work ends
                    check.differences.append(f"host {host} has a store of session {store.session}, which is not open")
                continue
            found = set(store.handles)
            missing = wanted.there - found
            more = set() if store.is_busy else found - wanted.possible
            if missing:
                check.differences.append(f"host {host} lacks {_list_handles(missing)} of session {store.session}")
            if more:
                text = f"host {host} has {_list_handles(more)} of session {store.session}, unknown to the controller"
                check.differences.append(text)
        for session in expected:
            check.differences.append(f"host {host} has no store of session {session}, which is open")
        self._reply_if_complete(message.check)

    def held(self, session: Session, message: m.HandlesReported) -> None:
        """Process a proxy's report of the arrays that its client has."""
        check = self._checks.get(message.check)
        if check is None or session.number not in check.proxies:
            return
        check.proxies.discard(session.number)
        if message.handles is not None:
            check.differences += _handle_differences(session, message.handles)
        self._reply_if_complete(message.check)

    def session_closed(self, session: Session) -> None:
        """Stop waiting for the session's proxy."""
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


def _add_expected(session: Session, expected: Mapping[int, dict[int, _Expected]]) -> None:
    for handle, entry in session.directory.entries.items():
        is_there = entry.ready and entry.error is None and not entry.consumed
        for host in entry.hosts:
            if host in expected:
                of_session = expected[host][session.number]
                of_session.possible.add(handle)
                if is_there and not entry.released:
                    of_session.there.add(handle)


def _handle_differences(session: Session, held: Mapping[int, bool]) -> Iterator[str]:
    """Yield how the arrays that a proxy knows differ from the directory's arrays that its client has not released."""
    entries = session.directory.entries
    own = {handle: entry for handle, entry in entries.items() if not (entry.released or entry.is_published)}
    kept = {handle for handle in own if is_client_handle(handle)}
    lacking = {handle for handle, has_failed in held.items() if not has_failed} - kept
    more = kept - held.keys()
    who = f"the proxy of session {session.number}"
    if lacking:
        yield f"{who} has {_list_handles(lacking)} that the controller does not know"
    if more:
        yield f"{who} lacks {_list_handles(more)} that it has not released"


def _list_handles(handles: set[int]) -> str:
    some = ", ".join(map(str, sorted(handles)[:_MAX_NAMED]))
    return f"{counted(len(handles), 'array')} ({some}{', ...' if len(handles) > _MAX_NAMED else ''})"
