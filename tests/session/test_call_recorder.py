"""Tests of the calls of its client that a front end records during a trace."""

from __future__ import annotations

from typing import Any

import msgspec

from atoll.protocol import messages as m
from atoll.protocol.spans import ClientCall
from atoll.session.call_recorder import MAX_CALLS, CallRecorder


class Played:
    """Recorder with a clock that advances by itself, and the messages that it sends."""

    def __init__(self) -> None:
        self.time = 0
        self.sent: list[Any] = []
        self.changes: list[bool] = []
        self.recorder = CallRecorder(self.changes.append, self.tick)

    def tick(self) -> int:
        self.time += 10
        return self.time

    def record(self, seconds: float) -> None:
        self.recorder.handle(m.RecordCalls(seconds), self.sent.append)

    def calls(self) -> list[ClientCall]:
        self.recorder.handle(m.SendCalls(7, 1.5), self.sent.append)
        answer = self.sent[-1]
        assert (answer.request, answer.seconds) == (7, 1.5)
        return msgspec.msgpack.decode(answer.calls, type=list[ClientCall])


def test_a_front_end_learns_when_a_recording_begins_and_ends():
    played = Played()
    played.record(5.0)
    played.record(5.0)
    played.record(0.0)
    assert played.changes == [True, False]


def test_a_recording_that_nobody_ends_is_over_after_its_time():
    played = Played()
    played.record(1e-6)
    assert not played.recorder.is_over()
    played.time += 10_000
    assert played.recorder.is_over()
    assert played.changes == [True, False]


def test_a_call_has_when_it_was_taken_handled_and_answered():
    played = Played()
    played.record(5.0)
    at = played.recorder.taken()
    played.recorder.answered(3)
    played.recorder.handled(3, "execute", "step", at)
    later = played.recorder.taken()
    played.recorder.handled(4, "check_future", "", later, 16)
    played.recorder.answered(4)
    first, second = played.calls()
    assert (first.kind, first.name) == ("execute", "step")
    assert first.received < first.answered < first.handled
    assert (second.kind, second.nbytes) == ("check_future", 16)
    assert second.received < second.handled < second.answered


def test_what_was_asked_before_the_recording_is_not_in_it_when_it_is_answered():
    played = Played()
    played.record(5.0)
    played.recorder.answered(99)
    at = played.recorder.taken()
    played.recorder.handled(1, "execute", "f", at)
    assert [call.answered for call in played.calls()] == [0]


def test_that_the_client_is_held_back_is_a_call_too():
    played = Played()
    played.recorder.held("window")  # before the recording
    played.record(5.0)
    played.recorder.resumed()
    played.recorder.held("window")
    played.recorder.resumed()
    (call,) = played.calls()
    assert call.kind == "window"
    assert call.received < call.handled == call.answered


def test_the_last_calls_are_kept_and_those_of_another_recording_are_not():
    played = Played()
    played.record(1e9)
    for number in range(MAX_CALLS + 2):
        played.recorder.handled(number, "execute", str(number), 1)
    calls = played.calls()
    assert (len(calls), calls[0].name) == (MAX_CALLS, "2")
    played.record(0.0)
    played.record(5.0)
    assert played.calls() == []


def test_a_record_that_is_too_large_to_be_sent_has_the_newest():
    played = Played()
    played.record(1e9)
    for number in range(MAX_CALLS):
        played.recorder.handled(number, "execute", "é" * 200 + str(number), 1)
    calls = played.calls()
    assert 0 < len(calls) < MAX_CALLS
    assert len(played.sent[-1].calls) <= m.MAX_CALL_BYTES
