"""Traces as Chrome's trace events."""

from __future__ import annotations

import json

from atoll.operate.traces import chrome_trace
from atoll.protocol.spans import Span
from atoll.scheduling.trace import Trace


def test_a_span_is_an_event_in_its_hosts_row_and_times_begin_with_the_first():
    spans = [
        Span(0, 0, 1, "step", "call", 7, 5_000, 9_000),
        Span(1, 3, 2, "copy", "receive", 8, 6_000, 6_500),
    ]
    events = json.loads(chrome_trace(spans))["traceEvents"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {(0, 0): "host 0", (1, 0): "island 1", (1, 3 << 12): "host 3"}
    first, second = [event for event in events if event["ph"] == "X"]
    assert (first["name"], first["pid"], first["tid"], first["ts"], first["dur"]) == ("step", 0, 0, 0.0, 4.0)
    assert first["args"] == {"session": 1, "sequence": 7, "nodes": 1, "devices": []}
    assert (second["name"], second["ts"], second["dur"]) == ("copy (receive)", 1.0, 0.5)


def test_a_trace_of_nothing_is_still_one():
    assert json.loads(chrome_trace([]))["traceEvents"] == []


def test_the_devices_of_a_host_have_a_row_each_in_which_nothing_overlaps():
    """Gangs of one host that ran at once are drawn below one another; times never run backwards."""
    trace = Trace()
    for sequence, started, ended, devices in [(1, 0, 9_000, (0, 1)), (2, 0, 4_000, (2,)), (3, 0, 12_000, (1,))]:
        trace.record(Span(0, 0, 1, "f", "call", sequence, started, ended, 1, devices))
    events = json.loads(chrome_trace(trace.spans()))["traceEvents"]
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
