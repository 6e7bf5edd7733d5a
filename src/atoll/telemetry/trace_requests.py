"""Traces as they are asked for: what ran, and what proxies record meanwhile, for whoever may see it.

What ran is always kept (`telemetry.trace`). What clients ask of their proxies is recorded by these, from when somebody
begins a recording until it is fetched, and costs nothing else. A recording of an operator is of all sessions, that of a
user of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from atoll.protocol import messages as m
from atoll.protocol.spans import SessionCalls, SessionName, Span, TraceRecord
from atoll.scheduling.session import Session
from atoll.scheduling.tenants import Tenant
from atoll.telemetry.clocks import Clock, offsets
from atoll.telemetry.trace import Trace

# A recording that nobody fetches ends after so long.
MOST_SECONDS = 600.0
# Of one tenant, and of all operators together: the oldest ends for one more.
MOST_RECORDINGS = 16
# Spans of one answer for a live view.
MOST_WATCHED = 2000
# For proxies to send what they have recorded.
ANSWER_SECONDS = 2.0
# Sessions that have ended of which the names are known.
_MOST_NAMES = 10_000


class Out(Protocol):
    """Of the controller's outbox, what is needed here."""

    def send(self, connection: int, message: Any) -> None: ...
    def to_session(self, session: int, message: Any) -> None: ...


@dataclass
class _Recording:
    """By `viewer`, or by an operator where that is None."""

    viewer: Tenant | None
    began: float
    ends: float
    told: set[int] = field(default_factory=set)  # sessions that record for it


@dataclass
class _Answer:
    """To a request for a trace that waits for proxies."""

    connection: int
    request: m.TraceRequest
    viewer: Tenant | None
    until: float
    awaited: set[int]  # sessions
    seconds: float = 0.0  # of the recording
    calls: dict[int, SessionCalls] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


class Tracing:
    """Answers requests for traces. `ping()` has all hosts read their clocks. Pure, like all of the controller."""

    def __init__(
        self, trace: Trace, sessions: Mapping[int, Session], outbox: Out, ping: Callable[[float], None]
    ) -> None:
        self._trace = trace
        self._sessions = sessions
        self._outbox = outbox
        self._ping = ping
        self._recordings: dict[int, _Recording] = {}
        self._answers: dict[int, _Answer] = {}
        self._next = 1
        self._clocks: dict[int, Clock] = {}  # of proxies, by session
        self._ended: dict[int, tuple[Tenant, SessionName]] = {}  # sessions, the oldest first

    # ---- clocks

    def host_answered(self, host: int, message: m.Pong, now: float) -> None:
        reading = (message.seconds, message.clock, now)
        if message.clock >= 0 and not self._trace.clock(host).measure(*reading):
            self._trace.clock_began(host)
            self._trace.clock(host).measure(*reading)

    def proxy_answered(self, session: int, message: m.Pong | m.CallsRecorded, now: float) -> None:
        reading = (message.seconds, message.clock, now)
        if message.clock >= 0 and not self._clocks.setdefault(session, Clock()).measure(*reading):
            self._clocks[session] = Clock()
            self._clocks[session].measure(*reading)

    # ---- requests

    def begin(self, connection: int, request: m.RecordRequest, viewer: Tenant | None, now: float) -> None:
        """Proxies record from now on. The reply has a number for the recording, and the position of the trace."""
        own = [number for number, each in self._recordings.items() if each.viewer is viewer]
        if len(own) >= MOST_RECORDINGS:
            self._stop(own[0])
        number = self._next
        self._next += 1
        seconds = min(request.seconds, MOST_SECONDS) if request.seconds > 0 else MOST_SECONDS
        self._recordings[number] = _Recording(viewer, now, now + seconds)
        self._tell(now)
        self._ping(now)
        self._outbox.send(connection, m.RecordReply(number, self._trace.position))

    def answer(self, connection: int, request: m.TraceRequest, viewer: Tenant | None, now: float) -> None:
        """One reply: at once, unless what proxies have recorded is asked for."""
        if request.most > 0:  # of a live view
            new, position = self._trace.after(max(0, request.after), min(request.most, MOST_WATCHED))
            self._outbox.send(
                connection, m.TraceReply(msgspec.msgpack.encode(TraceRecord(self._own(new, viewer))), position)
            )
            return
        recording = self._recordings.get(request.recording)
        if recording is None or recording.viewer is not viewer:  # also of another tenant's
            missing = ["what clients did: the recording has ended"] if request.recording else []
            self._reply(_Answer(connection, request, viewer, now, set(), missing=missing))
            return
        number = self._next
        self._next += 1
        awaited = {session for session in recording.told if session in self._sessions}
        answer = self._answers[number] = _Answer(
            connection, request, viewer, now + ANSWER_SECONDS, awaited, now - recording.began
        )
        for session in sorted(awaited):
            self._outbox.to_session(session, m.SendCalls(number, now))
        self._ping(now)
        self._stop(request.recording)
        self._reply_if_complete(number, answer)

    def calls_recorded(self, session: int, message: m.CallsRecorded, now: float) -> None:
        """A proxy answers `SendCalls`."""
        self.proxy_answered(session, message, now)
        answer = self._answers.get(message.request)
        if answer is None or session not in answer.awaited:
            return
        answer.awaited.discard(session)
        if len(message.calls) > m.MOST_CALL_BYTES:
            answer.missing.append(f"what the client of session {session} did: it is too much")
        else:
            answer.calls[session] = SessionCalls(session, message.calls)
        self._reply_if_complete(message.request, answer)

    def session_closed(self, session: Session) -> None:
        """Its name is kept for a while. Nobody waits for it any more."""
        number = session.number
        self._ended[number] = (session.tenant, _name(session))
        if len(self._ended) > _MOST_NAMES:
            del self._ended[next(iter(self._ended))]
        for request, answer in list(self._answers.items()):
            if number in answer.awaited:
                answer.awaited.discard(number)
                self._reply_if_complete(request, answer)
        self._clocks.pop(number, None)

    def tick(self, now: float) -> None:
        """Once a second: sessions that are new record, too; what takes too long ends."""
        for number, recording in list(self._recordings.items()):
            if now > recording.ends:
                self._stop(number)
        if self._recordings:
            self._tell(now)
        for number, answer in list(self._answers.items()):
            if now > answer.until:
                for session in sorted(answer.awaited):
                    answer.missing.append(f"what the client of session {session} did: its proxy did not answer")
                answer.awaited.clear()
                self._reply_if_complete(number, answer)

    # ---- proxies

    def _tell(self, now: float) -> None:
        """Has the proxies record that do not, each until its last recording ends by itself."""
        for recording in self._recordings.values():
            for number, session in self._sessions.items():
                if number not in recording.told and recording.viewer in (None, session.tenant):
                    recording.told.add(number)
                    self._outbox.to_session(number, m.RecordCalls(round(recording.ends - now, 3)))

    def _stop(self, number: int) -> None:
        """The recording ends, and with the last one of a proxy it records no more."""
        recording = self._recordings.pop(number)
        others = {session for each in self._recordings.values() for session in each.told}
        for session in sorted(recording.told - others):
            self._outbox.to_session(session, m.RecordCalls(0.0))

    # ---- replies

    def _reply_if_complete(self, number: int, answer: _Answer) -> None:
        if not answer.awaited and self._answers.pop(number, None) is not None:
            self._reply(answer)

    def _reply(self, answer: _Answer) -> None:
        request = answer.request
        spans, clocks, position = self._trace.page(max(0, request.after))
        spans = self._own([span for span in spans if span.ended >= request.since], answer.viewer)
        hosts = {span.host for span in spans}
        record = TraceRecord(
            spans,
            tuple(each for each in clocks if each.host in hosts),
            tuple(self._names({span.session for span in spans} | set(answer.calls))),
            tuple(self._with_clock(calls, answer.seconds) for _, calls in sorted(answer.calls.items())),
            tuple(answer.missing),
        )
        self._outbox.send(
            answer.connection, m.TraceReply(msgspec.msgpack.encode(record), position, self._trace.position)
        )

    def _with_clock(self, calls: SessionCalls, seconds: float) -> SessionCalls:
        """The proxy has read its clock just now, when it sent them."""
        table, error = offsets(self._clocks.get(calls.session, Clock()), seconds)
        return msgspec.structs.replace(calls, offsets=table, error=error)

    def _names(self, sessions: Iterable[int]) -> Iterable[SessionName]:
        for number in sorted(sessions):
            open_one = self._sessions.get(number)
            if open_one is not None:
                yield _name(open_one)
            elif number in self._ended:
                yield self._ended[number][1]

    def _own(self, spans: list[Span], viewer: Tenant | None) -> list[Span]:
        """Of a viewer that is no operator, its own sessions' alone, also of those that have ended."""
        if viewer is None:
            return spans
        own = {session.number for session in self._sessions.values() if session.tenant is viewer}
        own |= {number for number, (tenant, _) in self._ended.items() if tenant is viewer}
        return [span for span in spans if span.session in own]


def _name(session: Session) -> SessionName:
    return SessionName(session.number, session.label or f"process {session.pid}", session.tenant.name)
