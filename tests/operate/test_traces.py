"""Tests of traces in the format of Chrome's trace events."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from atoll.operate.traces import chrome_trace, read_calls
from atoll.protocol.spans import ClientCall, ClockError, SessionCalls, SessionName, Span, TraceRecord


def test_a_span_is_an_event_in_its_hosts_row_and_times_begin_with_the_first():
    spans = [
        Span(0, 0, 1, "step", "call", 7, 5_000, 9_000),
        Span(1, 3, 2, "copy", "receive", 8, 6_000, 6_500),
    ]
    events = json.loads(chrome_trace(TraceRecord(spans)))["traceEvents"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {(0, 0): "host 0", (1, 0): "island 1", (1, 3 << 12): "host 3"}
    first, second = [event for event in events if event["ph"] == "X"]
    assert (first["name"], first["pid"], first["tid"], first["ts"], first["dur"]) == ("step", 0, 0, 0.0, 4.0)
    assert first["args"] == {"session": 1, "sequence": 7, "nodes": 1, "devices": []}
    assert (second["name"], second["ts"], second["dur"]) == ("copy (receive)", 1.0, 0.5)


def test_a_span_has_the_name_of_the_function_that_it_runs():
    (event,) = (
        each
        for each in json.loads(chrome_trace(TraceRecord([Span(0, 0, 1, "step", "call", 7, 5, 9, function="jit_f")])))[
            "traceEvents"
        ]
        if each["ph"] == "X"
    )
    assert (event["name"], event["args"]["program"]) == ("jit_f", "step")


def test_a_trace_of_nothing_is_still_one():
    assert json.loads(chrome_trace(TraceRecord()))["traceEvents"] == []


def test_the_devices_of_a_host_have_a_row_each():
    spans = [
        Span(0, 0, 1, "f", "call", sequence, started, ended, 1, devices)
        for sequence, started, ended, devices in [(1, 0, 9_000, (0, 1)), (2, 0, 4_000, (2,)), (3, 9_000, 12_000, (1,))]
    ]
    events = json.loads(chrome_trace(TraceRecord(spans)))["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    rows = {
        event["args"]["sequence"]: (names[event["tid"]], event["ts"], event["dur"])
        for event in events
        if event["ph"] == "X"
    }
    assert rows == {
        1: ("host 0, device 0", 0.0, 9.0),
        2: ("host 0, device 2", 0.0, 4.0),
        3: ("host 0, device 1", 9.0, 3.0),
    }


WAITED = Span(
    *(0, 0, 3, "step", "call", 7, 90_000, 100_000, 1, (0,)),
    enqueued=80_000,
    launched=10_000,
    waits=(("own", 20_000), ("memory", 30_000), ("order", 10_000), ("memory", 5_000)),
)


def events_of(record: TraceRecord) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(chrome_trace(record))["traceEvents"]
    return events


def test_a_bar_says_whose_it_is_and_how_long_it_waited_for_what():
    (bar,) = [
        each for each in events_of(TraceRecord([WAITED], (), (SessionName(3, "train.py", "ops"),))) if each["ph"] == "X"
    ]
    assert (bar["args"]["client"], bar["args"]["tenant"]) == ("train.py", "ops")
    assert bar["args"]["waited_ms"] == {"own": 0.02, "memory": 0.035, "order": 0.01}
    assert bar["args"]["device_queue_ms"] == 0.01


def test_waits_are_drawn_one_after_another_but_for_what_the_session_itself_is_before():
    other_host = msgspec.structs.replace(WAITED, host=1)  # for the same gang, which waited once
    events = [
        each
        for each in events_of(TraceRecord([WAITED, other_host]))
        if each["cat" if "cat" in each else "ph"] == "wait"
    ]
    first = 30.0  # when its session's earlier work was complete, so that nothing is drawn before
    assert [(each["name"], each["ph"], each["ts"] + first) for each in events] == [
        ("waits: memory", "b", 30.0),
        ("waits: memory", "e", 60.0),
        ("waits: order", "b", 60.0),
        ("waits: order", "e", 70.0),
        ("waits: memory", "b", 70.0),
        ("waits: memory", "e", 75.0),
    ]


def test_an_arrow_leads_from_what_sends_to_what_receives():
    spans = [
        Span(0, 0, 1, "copy", "send", 7, 5_000, 9_000, nbytes=4096, node=5),
        Span(1, 3, 1, "copy", "receive", 8, 8_000, 9_500, nbytes=4096, node=5),
        Span(1, 3, 1, "copy", "receive", 9, 9_500, 9_900, nbytes=8, node=6),
    ]
    events = events_of(TraceRecord(spans))
    (start,), (finish,) = ([each for each in events if each["ph"] == ph] for ph in ("s", "f"))
    assert start["id"] == finish["id"]
    assert ((start["pid"], start["ts"]), (finish["pid"], finish["ts"])) == ((0, 0.0), (1, 4.5))
    assert [each["args"]["bytes"] for each in events if each["ph"] == "X"] == [4096, 4096, 8]


def recorded(*calls: ClientCall, offset: int = 0) -> TraceRecord:
    return TraceRecord(
        calls=(SessionCalls(3, msgspec.msgpack.encode(list(calls)), ((0, offset), (10_000, offset)), 500),)
    )


def test_what_a_client_asked_is_drawn_by_the_controllers_clock():
    call = ClientCall("execute", "step", 1_000, 3_000, 8_000, 16)
    events = events_of(recorded(call, ClientCall("check_future", "", 0, 1, 0), offset=5_000))
    request = next(each for each in events if each["name"] == "execute step")
    assert (request["ts"], request["dur"], request["args"]) == (1.0, 2.0, {"bytes": 16})
    begun, ended = [each for each in events if each["name"] == "client: execute"]
    assert (begun["ts"], ended["ts"]) == (1.0, 8.0)
    assert not [each for each in events if each["name"] == "client: check_future"], "it has no answer yet"


def test_offsets_of_a_proxys_clock_change_evenly_from_one_to_the_next():
    call = ClientCall("execute", "", 500, 1_500, 9_000)
    recorded = SessionCalls(3, msgspec.msgpack.encode([call]), ((0, 100), (1_000, 200), (2_000, 200)))
    (read,) = read_calls(recorded)
    assert (read.received, read.handled, read.answered) == (650, 1_700, 9_200)


def test_that_a_client_was_held_back_is_a_bar_of_its_own():
    (bar,) = [each for each in events_of(recorded(ClientCall("window", "", 1_000, 3_000, 3_000))) if each["ph"] == "X"]
    assert (bar["name"], bar["dur"]) == ("the launch window is full", 2.0)


def test_what_a_proxy_sends_that_is_no_record_is_left_out():
    record = TraceRecord([WAITED], calls=(SessionCalls(3, b"no record"),))
    assert len([each for each in events_of(record) if each["ph"] == "X"]) == 1


def test_the_file_says_how_far_times_may_be_off():
    record = TraceRecord(
        [WAITED],
        (ClockError(0, 25, 1_200_000, 9), ClockError(1, 0, -1, 0)),
        calls=(SessionCalls(3, b"\x90", ((0, -7),), 500),),
    )
    trace = json.loads(chrome_trace(record))
    assert trace["otherData"]["hosts"] == [
        {"host": 0, "offset_ns": 25, "error_ns": 1_200_000, "round_trips": 9},
        {"host": 1, "offset_ns": 0, "error_ns": None, "round_trips": 0},
    ]
    assert trace["otherData"]["sessions"] == [{"session": 3, "offset_ns": -7, "error_ns": 500}]
    assert "host 0 (±1.2 ms)" in [each["args"].get("name") for each in trace["traceEvents"] if each["ph"] == "M"]
