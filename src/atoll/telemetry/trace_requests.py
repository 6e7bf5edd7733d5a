"""Requests for traces: the spans of the trace, and the calls that proxies record, for those who may see them.

The trace (`telemetry.trace`) is always on. Proxies record their clients' calls from the beginning of a recording until
it is fetched, and only then. An operator's recording covers all sessions, a user's its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec

from atoll.launch.outbox import Outbox
from atoll.protocol import messages as m
from atoll.protocol.spans import SessionCalls, SessionName, Span, TraceRecord
from atoll.state.session import Session
from atoll.state.tenants import Tenant
from atoll.telemetry.clocks import Clock, offsets
from atoll.telemetry.trace import Trace

# A recording ends after this time if it is not fetched.
MAX_SECONDS = 600.0
# Per tenant, and for all operators together. The oldest ends when one more begins.
MAX_RECORDINGS = 16
MAX_WATCHED = 2000  # spans per answer to a live view
MAX_CALLS_BYTES = 32 << 20  # of the calls of all clients in a reply
ANSWER_SECONDS = 2.0  # for proxies to send their recordings
_MAX_NAMES = 10_000  # of sessions that have ended


class _Recording(msgspec.Struct):
    """A recording for `viewer`, or for an operator if that is None."""

    viewer: Tenant | None
    began: float
    ends: float
    sessions: set[int] = msgspec.field(default_factory=set)  # sessions whose proxies record for it


class _Answer(msgspec.Struct):
    """The answer to a request for a trace, which waits for proxies."""

    connection: int
    request: m.TraceRequest
    viewer: Tenant | None
    until: float
    awaited: set[int]  # sessions
    seconds: float = 0.0  # of the recording
    calls: dict[int, SessionCalls] = msgspec.field(default_factory=dict)
    missing: list[str] = msgspec.field(default_factory=list)


class Tracing:
    """Answers requests for traces. `ping()` makes all hosts read their clocks. Pure."""

    def __init__(
        self, trace: Trace, sessions: Mapping[int, Session], outbox: Outbox, ping: Callable[[float], None]
    ) -> None:
        self._trace = trace
        self._sessions = sessions
        self._outbox = outbox
        self._ping = ping
        self._recordings: dict[int, _Recording] = {}
        self._answers: dict[int, _Answer] = {}
        self._next = 1
        self._clocks: dict[int, Clock] = {}  # of proxies, by session
        self._ended: dict[int, tuple[Tenant, SessionName]] = {}  # sessions, oldest first

    # ---- clocks

    def host_answered(self, host: int, message: m.Pong | m.RelayedPong, now: float) -> None:
        """Record a host's answer to a ping. This process or the host's relay received it at `now`."""
        reading = (self._trace.time(message.seconds), message.clock, self._trace.time(now))
        if message.clock >= 0 and not self._trace.clock(host).measure(*reading):
            self._trace.clock_began(host)
            self._trace.clock(host).measure(*reading)

    def proxy_answered(self, session: int, message: m.Pong | m.CallsRecorded, now: float) -> None:
        reading = (self._trace.time(message.seconds), message.clock, self._trace.time(now))
        if message.clock >= 0 and not self._clocks.setdefault(session, Clock()).measure(*reading):
            self._clocks[session] = Clock()
            self._clocks[session].measure(*reading)

    # ---- requests

    def begin(self, connection: int, request: m.RecordRequest, viewer: Tenant | None, now: float) -> None:
        """Begin a recording: proxies record from now on. The reply has its number and the trace's position."""
        own = [number for number, each in self._recordings.items() if each.viewer is viewer]
        if len(own) >= MAX_RECORDINGS:
            self._stop(own[0])
        number = self._next
        self._next += 1
        seconds = min(request.seconds, MAX_SECONDS) if request.seconds > 0 else MAX_SECONDS
        self._recordings[number] = _Recording(viewer, now, now + seconds)
        self._start_recording(now)
        self._ping(now)
        self._outbox.send(connection, m.RecordReply(number, self._trace.position))

    def answer(self, connection: int, request: m.TraceRequest, viewer: Tenant | None, now: float) -> None:
        """Send one reply, immediately unless the request includes the calls that proxies recorded."""
        if request.limit > 0:  # a live view
            new, position = self._trace.after(max(0, request.after), min(request.limit, MAX_WATCHED))
            self._outbox.send(
                connection, m.TraceReply(msgspec.msgpack.encode(TraceRecord(self._visible(new, viewer))), position)
            )
            return
        recording = self._recordings.get(request.recording)
        if recording is None or recording.viewer is not viewer:  # or it belongs to another tenant
            missing = ["calls of clients: the recording has ended"] if request.recording else []
            self._reply(_Answer(connection, request, viewer, now, set(), missing=missing))
            return
        number = self._next
        self._next += 1
        awaited = {session for session in recording.sessions if session in self._sessions}
        answer = self._answers[number] = _Answer(
            connection, request, viewer, now + ANSWER_SECONDS, awaited, now - recording.began
        )
        for session in sorted(awaited):
            self._outbox.to_session(session, m.SendCalls(number, now))
        self._ping(now)
        self._stop(request.recording)
        self._reply_if_complete(number, answer)

    def calls_recorded(self, session: int, message: m.CallsRecorded, now: float) -> None:
        """Process a proxy's answer to `SendCalls`."""
        self.proxy_answered(session, message, now)
        answer = self._answers.get(message.request)
        if answer is None or session not in answer.awaited:
            return
        answer.awaited.discard(session)
        if len(message.calls) > m.MAX_CALL_BYTES:
            answer.missing.append(f"calls of the client of session {session}: too many bytes")
        elif len(message.calls) + sum(len(each.calls) for each in answer.calls.values()) > MAX_CALLS_BYTES:
            answer.missing.append(
                f"calls of the client of session {session}: those of other sessions fill the reply, which has at "
                f"most {MAX_CALLS_BYTES >> 20} MiB; record for a shorter time"
            )
        else:
            answer.calls[session] = SessionCalls(session, message.calls)
        self._reply_if_complete(message.request, answer)

    def session_closed(self, session: Session) -> None:
        """Keep the session's name for a while, and stop waiting for its proxy."""
        number = session.number
        self._ended[number] = (session.tenant, _name(session))
        if len(self._ended) > _MAX_NAMES:
            del self._ended[next(iter(self._ended))]
        for request, answer in list(self._answers.items()):
            if number in answer.awaited:
                answer.awaited.discard(number)
                self._reply_if_complete(request, answer)
        self._clocks.pop(number, None)

    def tick(self, now: float) -> None:
        """Make new sessions record, and end recordings and requests that exceed their time. Called once a second."""
        for number, recording in list(self._recordings.items()):
            if now > recording.ends:
                self._stop(number)
        if self._recordings:
            self._start_recording(now)
        for number, answer in list(self._answers.items()):
            if now > answer.until:
                for session in sorted(answer.awaited):
                    answer.missing.append(f"calls of the client of session {session}: its proxy did not answer")
                answer.awaited.clear()
                self._reply_if_complete(number, answer)

    # ---- proxies

    def _start_recording(self, now: float) -> None:
        """Start recording in proxies that do not record yet, each until its recording ends."""
        for recording in self._recordings.values():
            for number, session in self._sessions.items():
                is_new = number not in recording.sessions and session.has_client
                if is_new and recording.viewer in (None, session.tenant):
                    recording.sessions.add(number)
                    self._outbox.to_session(number, m.RecordCalls(round(recording.ends - now, 3)))

    def _stop(self, number: int) -> None:
        """End a recording. Proxies that serve no other recording stop recording."""
        recording = self._recordings.pop(number)
        others = {session for each in self._recordings.values() for session in each.sessions}
        for session in sorted(recording.sessions - others):
            self._outbox.to_session(session, m.RecordCalls(0.0))

    # ---- replies

    def _reply_if_complete(self, number: int, answer: _Answer) -> None:
        if not answer.awaited and self._answers.pop(number, None) is not None:
            self._reply(answer)

    def _reply(self, answer: _Answer) -> None:
        request = answer.request
        spans, clocks, position = self._trace.page(max(0, request.after))
        spans = self._visible([span for span in spans if span.ended >= request.since], answer.viewer)
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
        """Add clock offsets. The proxy read its clock when it sent the calls."""
        table, error = offsets(self._clocks.get(calls.session, Clock()), seconds)
        return msgspec.structs.replace(calls, offsets=table, error=error)

    def _names(self, sessions: Iterable[int]) -> Iterable[SessionName]:
        for number in sorted(sessions):
            open_one = self._sessions.get(number)
            if open_one is not None:
                yield _name(open_one)
            elif number in self._ended:
                yield self._ended[number][1]

    def _visible(self, spans: list[Span], viewer: Tenant | None) -> list[Span]:
        """Return the spans that the viewer may see: a tenant's own, including those of sessions that have ended."""
        if viewer is None:
            return spans
        own = {session.number for session in self._sessions.values() if session.tenant is viewer}
        own |= {number for number, (tenant, _) in self._ended.items() if tenant is viewer}
        return [span for span in spans if span.session in own]


def _name(session: Session) -> SessionName:
    return SessionName(session.number, session.label or f"process {session.pid}", session.tenant.name)
