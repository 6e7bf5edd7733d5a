"""Tests of traces: why a gang waited, how clocks are compared, and which spans each user sees."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from atoll.cluster.lifecycle import IslandState
from atoll.cluster.tenant_settings import TenantRole, TenantSettings, token_hash
from atoll.operate.operator_requests import merged
from atoll.protocol import events as e
from atoll.protocol import messages as m
from atoll.protocol.spans import ClientCall, Span, TraceRecord
from atoll.telemetry.trace import MAX_ANSWERED, Trace
from atoll.telemetry.trace_requests import ANSWER_SECONDS, MAX_CALLS_BYTES, MAX_RECORDINGS, MAX_SECONDS, MAX_WATCHED
from tests.controller.play import Play, runs
from tests.telemetry.test_trace import record

S = 1_000_000_000


class Traced(Play):
    """Cluster with a settable clock and methods to request traces."""

    def at(self, now: float) -> Traced:
        self.now = now
        return self

    def trace(self, token: str | None = None, **request: Any) -> TraceRecord:
        (reply,) = self.ask(self.connect("operator", token=token), m.TraceRequest(**request))
        return msgspec.msgpack.decode(reply.content, type=TraceRecord)

    def spans(self) -> dict[int, Span]:
        return {span.sequence: span for span in self.trace().spans}

    def record(self, token: str | None = None, seconds: float = 0.0) -> m.RecordReply:
        (reply,) = self.ask(self.connect("operator", token=token), m.RecordRequest(seconds))
        assert isinstance(reply, m.RecordReply)
        return reply

    def to_sessions(self) -> list[tuple[int, Any]]:
        """Return the messages about recordings to proxies since the last call."""
        return [
            (number, message)
            for (kind, number), message in self.sent()
            if kind == "session" and isinstance(message, m.RecordCalls | m.SendCalls)
        ]


# ---- why a gang waited


def waits(span: Span) -> list[tuple[str, float]]:
    return [(reason, nanoseconds / S) for reason, nanoseconds in span.waits]


def test_what_starts_at_once_waited_for_nothing():
    play = Traced()
    play.with_call()
    play.array(10)
    (run,) = play.at(5.0).send(m.Launch(1, (10,), (11,), ()))
    play.done(run.sequence)
    span = play.spans()[run.sequence]
    assert (waits(span), span.launched, span.dispatched) == ([], 5 * S, 5 * S)


def test_bytes_that_come_late_are_waited_for_and_what_is_behind_waits_for_its_own_session():
    play = Traced()
    play.with_call()
    play.array(10)
    play.at(5.0).send(m.Launch(2, (), (20,), (77,)))
    play.at(6.0).send(m.Launch(1, (10,), (11,), ()))
    put, call = runs(play.at(8.0).report(0, m.FeedsArrived(play.session, (77,))))
    play.at(9.0).done(put.sequence, call.sequence)
    spans = play.spans()
    assert waits(spans[put.sequence]) == [("bytes", 3.0)]
    assert waits(spans[call.sequence]) == [("own", 2.0)]
    assert spans[call.sequence].dispatched == 8 * S


def test_memory_is_waited_for_until_it_is_there():
    play = Traced(device_memory=20)
    play.with_call()
    play.array(10)
    (first,) = play.at(1.0).send(m.Launch(1, (10,), (11,), ()))
    play.at(2.0).send(m.Launch(1, (10,), (12,), ()))
    play.at(3.0).done(first.sequence)
    (second,) = runs(play.at(7.0).send(m.Release((11,))))
    play.at(8.0).done(second.sequence)
    assert waits(play.spans()[second.sequence]) == [("memory", 5.0)]


def test_the_quota_of_a_tenant_is_another_reason_than_memory():
    bob = TenantSettings("bob", token_hash("bob"), memory=20)
    root = TenantSettings("root", token_hash("root"), role=TenantRole.OPERATOR)
    play = Traced(device_memory=1000, token="cluster", tenants=(bob, root))
    play.session = play.open(token="bob").number
    play.with_call()
    play.array(10)
    (first,) = play.at(1.0).send(m.Launch(1, (10,), (11,), ()))
    play.at(2.0).send(m.Launch(1, (10,), (12,), ()))
    play.done(first.sequence)
    (second,) = runs(play.at(4.0).send(m.Release((11,))))
    play.done(second.sequence)
    (span,) = [span for span in play.trace("root").spans if span.sequence == second.sequence]
    assert waits(span) == [("quota", 2.0)]


def test_a_turn_is_waited_for_behind_others():
    play = Traced("1x1x1")
    play.with_call()
    play.array(10)
    for number in (1, 2, 3):  # the duration of one gang
        (run,) = play.at(1.0).send(m.Launch(1, (10,), (number + 50,), ()))
        play.report(0, m.Done(((run.sequence, number * 20_000_000, (number + 1) * 20_000_000),)))
    handles = range(100, 103)
    begun = [run for each in handles for run in runs(play.at(10.0).send(m.Launch(1, (10,), (each,), ())))]
    assert len(begun) == 2, "the third launch waits for the window"
    (third,) = runs(play.at(10.5).report(0, m.Done(((begun[0].sequence, 80_000_000, 100_000_000),))))
    play.at(11.0).report(0, m.Done(((third.sequence, 100_000_000, 120_000_000),)))
    assert waits(play.spans()[third.sequence]) == [("order", 0.5)]


def test_an_island_that_is_not_there_is_waited_for():
    play = Traced("1x1x1")
    play.with_call()
    play.array(10)
    play.controller.resources.islands[0].enter(IslandState.RESTARTING)
    play.at(2.0).send(m.Launch(1, (10,), (11,), ()))
    play.at(5.0).tick(5.0)
    play.controller.resources.islands[0].enter(IslandState.READY)
    play.controller.launches.island_restarted(0)
    (run,) = runs(play.outbox())
    play.done(run.sequence)
    assert waits(play.spans()[run.sequence]) == [("island", 3.0)]


# ---- clocks


def test_a_host_that_is_a_day_ahead_is_on_the_controllers_time_line_to_within_the_error():
    """Pings go out and come back after 1 and 3 ms. The host runs a gang 40 ms later."""
    play = Traced("2x1x1")
    play.with_call()
    play.array(10)
    ahead = 86_400
    for second in range(3):
        now = 10.0 + second
        play.tick(now)
        pings = [each for each in play.flush() if isinstance(getattr(each, "message", None), m.Ping)]
        assert {each.message.seconds for each in pings} == {now}
        play.at(now + 0.004).worker(0, m.Pong(now, int((now + 0.001 + ahead) * S)))
    (run,) = play.at(12.04).send(m.Launch(1, (10,), (11,), ()))
    play.at(12.1).report(0, m.Done(((run.sequence, int((12.05 + ahead) * S), int((12.09 + ahead) * S)),)))
    trace = play.trace(after=1)
    (span,) = [span for span in trace.spans if span.sequence == run.sequence]
    (clock,) = trace.clocks
    assert abs(span.started - 12.05 * S) <= clock.error
    assert abs(span.ended - 12.09 * S) <= clock.error
    assert 0.002 * S <= clock.error < 0.0022 * S, "half of a round trip, plus the possible drift"
    assert (clock.samples, round(clock.offset / S)) == (3, -ahead)


def test_a_host_that_was_stopped_is_on_the_time_line_with_what_it_did_before_and_after():
    play = Traced("1x1x1")
    play.with_call()
    play.array(10)
    ended = []
    for now, shown in ((10.0, 10.0), (60.0, 20.0)):  # for 40 seconds
        play.at(now + 0.002).worker(0, m.Pong(now, int((shown + 0.001) * S)))
        (run,) = play.send(m.Launch(1, (10,), (int(now) + 100,), ()))
        play.report(0, m.Done(((run.sequence, int((shown + 0.01) * S), int((shown + 0.02) * S)),)))
        ended.append((run.sequence, now + 0.02))
    spans = play.spans()
    for sequence, truly in ended:
        assert abs(spans[sequence].ended - truly * S) < 0.002 * S


@pytest.mark.parametrize("restarts", [True, False])
def test_what_a_host_does_while_no_controller_runs_is_on_the_time_line_at_its_true_place(restarts: bool):
    """The controller's clock stands still for 30 seconds. The host's clock continues, and so does that of the trace."""
    play = Traced("1x1x1")
    play.with_call()
    play.array(10)
    for now in (10.0, 11.0):
        play.at(now + 0.002).worker(0, m.Pong(now, int((now + 0.001) * S)))
    (run,) = play.send(m.Launch(1, (10,), (101,), ()))
    play.event(e.Restarted(12.0, 2, 30.0) if restarts else e.Tick(12.0, skipped=30.0))
    play.at(12.5).report(0, m.Done(((run.sequence, int(11.01 * S), int(40.0 * S)),)))
    (last,) = play.at(13.0).send(m.Launch(1, (10,), (102,), ()))
    play.at(14.002).worker(0, m.Pong(14.0, int(44.001 * S)))
    play.report(0, m.Done(((last.sequence, int(43.1 * S), int(43.9 * S)),)))
    spans = play.spans()
    for sequence, launched, started, ended in ((run.sequence, 11.002, 11.01, 40.0), (last.sequence, 43.0, 43.1, 43.9)):
        span = spans[sequence]
        assert span.launched == pytest.approx(launched * S)
        assert abs(span.started - started * S) < 0.002 * S
        assert abs(span.ended - ended * S) < 0.002 * S
    (clock,) = play.trace().clocks
    assert (clock.samples, abs(clock.offset) < 0.002 * S) == (3, True), "one clock"


def test_what_waits_while_no_controller_runs_waits_for_all_of_that_time():
    play = Traced()
    play.with_call()
    play.array(10)
    play.at(5.0).send(m.Launch(2, (), (20,), (77,)))
    play.event(e.Restarted(6.0, 2, 100.0))
    (put,) = runs(play.at(8.0).report(0, m.FeedsArrived(play.session, (77,))))
    play.at(9.0).done(put.sequence)
    span = play.spans()[put.sequence]
    assert (waits(span), span.launched, span.dispatched) == ([("bytes", 103.0)], 5 * S, 108 * S)


def test_later_times_stay_later_however_often_the_clock_stood_still():
    trace = Trace()
    for number in range(1, 200):
        trace.skip(float(number), 0.5)
    times = [trace.time(number / 4) for number in range(1000)]
    assert times == sorted(times)
    assert trace.time(500.0) == 500.0 + 199 * 0.5
    assert trace.time(198.0) == 198.0 + 198 * 0.5
    assert len(trace._skips) <= 64


# ---- recordings


TENANTS = (
    TenantSettings("alice", token_hash("alice")),
    TenantSettings("bob", token_hash("bob")),
    TenantSettings("root", token_hash("root"), role=TenantRole.OPERATOR),
)


@pytest.fixture
def shared() -> Traced:
    """Return a play with sessions of alice and bob that share a device and have one array each."""
    play = Traced("1x1x1", token="cluster", tenants=TENANTS)
    for tenant in ("alice", "bob"):
        play.session = play.open(label=f"{tenant}.py", token=tenant).number
        play.array(10)
    play.flush()
    return play


def answer(play: Traced, session: int, request: int, *calls: ClientCall) -> None:
    play.proxy(session, m.CallsRecorded(request, play.now, 5, msgspec.msgpack.encode(list(calls))))


CALL = ClientCall("execute", "step", 1, 2, 3)


def asked(play: Traced, token: str, recording: m.RecordReply) -> tuple[int, dict[int, int]]:
    """Request a recording.

    Return the connection of the request, and the request number for each session that must answer.
    """
    connection = play.connect("operator", token=token)
    play.to_sessions()
    play.receive(connection, m.TraceRequest(after=recording.position, recording=recording.recording))
    return connection, {session: each.request for session, each in play.to_sessions() if isinstance(each, m.SendCalls)}


def replied(play: Traced, connection: int) -> list[TraceRecord]:
    return [
        msgspec.msgpack.decode(action.message.content, type=TraceRecord)
        for action in [*play.actions, *play.flush()]
        if getattr(action, "connection", -1) == connection
        and isinstance(getattr(action, "message", None), m.TraceReply)
    ]


def test_a_users_recording_is_of_its_own_sessions_and_an_operators_of_all(shared: Traced):
    alice, bob = (number for number, each in shared.controller.sessions.items() if each.tenant.name != "default")
    shared.record("alice")
    assert [session for session, _ in shared.to_sessions()] == []
    recording = shared.record("alice")
    _, requests = asked(shared, "alice", recording)
    assert set(requests) == {alice}
    _, requests = asked(shared, "root", shared.record("root"))
    assert set(requests) == set(shared.controller.sessions)
    assert bob in requests


def test_a_user_sees_what_its_own_sessions_did_also_those_that_have_ended(shared: Traced):
    alice, bob = (number for number, each in shared.controller.sessions.items() if each.tenant.name != "default")
    assert {span.session for span in shared.trace("alice").spans} == {alice}
    shared.close(alice)
    mine = shared.trace("alice")
    assert {span.session for span in mine.spans} == {alice}
    assert [(each.number, each.label, each.tenant) for each in mine.sessions] == [(alice, "alice.py", "alice")]
    assert {span.session for span in shared.trace("root").spans} >= {alice, bob}


def test_what_proxies_have_recorded_comes_with_the_trace_and_the_error_of_their_clocks(shared: Traced):
    alice = next(number for number, each in shared.controller.sessions.items() if each.tenant.name == "alice")
    connection, requests = asked(shared, "alice", shared.record("alice"))
    assert replied(shared, connection) == []
    shared.at(shared.now + 0.01)
    answer(shared, alice, requests[alice], CALL)
    (record,) = replied(shared, connection)
    (calls,) = record.calls
    assert (calls.session, msgspec.msgpack.decode(calls.calls, type=list[ClientCall])) == (alice, [CALL])
    assert calls.error >= 0
    assert (record.missing, [each.label for each in record.sessions]) == ((), ["alice.py"])


def test_a_proxy_that_does_not_answer_is_named_and_nobody_waits_for_it(shared: Traced):
    connection, requests = asked(shared, "alice", shared.record("alice"))
    shared.tick(shared.now + ANSWER_SECONDS + 0.1)
    (record,) = replied(shared, connection)
    assert [f"session {number}:" in text for number, text in zip(requests, record.missing, strict=True)] == [True]


def test_a_session_that_ends_is_not_waited_for(shared: Traced):
    connection, requests = asked(shared, "alice", shared.record("alice"))
    shared.close(*requests)
    assert len(replied(shared, connection)) == 1


def test_proxies_record_no_more_when_the_last_recording_was_fetched(shared: Traced):
    first, second = shared.record("root"), shared.record("alice")
    alice = next(number for number, each in shared.controller.sessions.items() if each.tenant.name == "alice")
    shared.to_sessions()
    operator = shared.connect("operator", token="root")
    shared.flush()
    shared.receive(operator, m.TraceRequest(recording=first.recording))
    stopped = {session for session, message in shared.to_sessions() if message == m.RecordCalls(0.0)}
    assert stopped == set(shared.controller.sessions) - {alice}
    user = shared.connect("operator", token="alice")
    shared.receive(user, m.TraceRequest(recording=second.recording))
    assert [session for session, message in shared.to_sessions() if message == m.RecordCalls(0.0)] == [alice]


def test_a_recording_that_nobody_fetches_ends(shared: Traced):
    recording = shared.record("alice", MAX_SECONDS * 10)
    shared.to_sessions()
    shared.tick(shared.now + MAX_SECONDS + 1)
    assert m.RecordCalls(0.0) in [message for _, message in shared.to_sessions()]
    trace = shared.trace("alice", recording=recording.recording)
    assert trace.missing == ("calls of clients: the recording has ended",)


def test_a_session_that_opens_meanwhile_records_too(shared: Traced):
    shared.record("alice")
    number = shared.open(token="alice").number
    shared.to_sessions()
    shared.tick(shared.now + 1)
    assert [session for session, _ in shared.to_sessions()] == [number]


def test_a_tenant_with_many_recordings_loses_its_oldest_and_nobody_else_does(shared: Traced):
    recording = shared.record("bob")
    numbers = [shared.record("alice").recording for _ in range(MAX_RECORDINGS + 1)]
    assert shared.trace("alice", recording=numbers[0]).missing
    _, requests = asked(shared, "alice", m.RecordReply(numbers[-1], 0))
    assert len(requests) == 1
    _, requests = asked(shared, "bob", recording)
    assert len(requests) == 1


def test_one_answer_has_few_spans_however_many_are_kept_and_the_parts_have_all():
    play = Traced(dumps=False)
    for sequence in range(3 * MAX_WATCHED):
        record(play.controller.trace, sequence, sequence, sequence + 1, 0)
    connection = play.connect("operator")
    (live,) = play.ask(connection, m.TraceRequest(limit=1 << 40))
    assert len(spans_of(live)) == MAX_WATCHED
    parts: list[m.TraceReply] = []
    request = m.TraceRequest()
    while not parts or parts[-1].position < parts[0].end:
        parts += play.ask(connection, request)
        request = m.TraceRequest(after=parts[-1].position)
    assert {len(spans_of(each)) for each in parts[:-1]} == {MAX_ANSWERED}
    whole = merged([msgspec.msgpack.decode(each.content, type=TraceRecord) for each in parts])
    assert [span.sequence for span in whole.spans] == list(range(3 * MAX_WATCHED))
    assert len(whole.clocks) == 1


def spans_of(reply: m.TraceReply) -> list[Span]:
    return msgspec.msgpack.decode(reply.content, type=TraceRecord).spans


def test_whatever_numbers_a_request_has_it_is_answered(shared: Traced):
    for request in (
        m.TraceRequest(-(2**63), -(2**63), 2**62, -5),
        m.TraceRequest(2**63, 2**63, -1, 2**63),
        m.TraceRequest(after=-(2**63), limit=1),
    ):
        (reply,) = shared.ask(shared.connect("operator", token="alice"), request)
        assert isinstance(reply, m.TraceReply)
    for seconds in (math.nan, math.inf, -math.inf, -1.0):
        assert shared.record("alice", seconds).recording > 0
    shared.tick(shared.now + MAX_SECONDS + 1)
    assert m.RecordCalls(0.0) in [message for _, message in shared.to_sessions()]


def test_one_tenant_cannot_fetch_anothers_recording(shared: Traced):
    recording = shared.record("alice")
    trace = shared.trace("bob", recording=recording.recording)
    assert (trace.calls, trace.missing) == ((), ("calls of clients: the recording has ended",))
    _, requests = asked(shared, "alice", recording)
    assert requests, "the recording continues"


def test_a_proxy_that_was_not_asked_or_says_too_much_adds_nothing(shared: Traced):
    alice, bob = (number for number, each in shared.controller.sessions.items() if each.tenant.name != "default")
    connection, requests = asked(shared, "alice", shared.record("alice"))
    answer(shared, bob, requests[alice], CALL)
    shared.proxy(alice, m.CallsRecorded(requests[alice], shared.now, 5, bytes(m.MAX_CALL_BYTES + 1)))
    (record,) = replied(shared, connection)
    assert (record.calls, len(record.missing)) == ((), 1)


def test_a_reply_has_the_calls_of_as_many_sessions_as_fit_and_names_the_others(shared: Traced):
    count = MAX_CALLS_BYTES // m.MAX_CALL_BYTES
    for _ in range(count + 1):
        shared.open(token="alice")
    connection, requests = asked(shared, "alice", shared.record("alice"))
    assert len(requests) > count
    content = msgspec.msgpack.encode([bytes(m.MAX_CALL_BYTES - 100)])
    for session, request in requests.items():
        shared.proxy(session, m.CallsRecorded(request, shared.now, 5, content))
    (record,) = replied(shared, connection)
    assert len(record.calls) == count
    assert len(record.missing) == len(requests) - count
    assert "those of other sessions fill the reply, which has at most 32 MiB" in record.missing[0]
