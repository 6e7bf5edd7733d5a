"""Tests of the gangs in the controller's trace, which hosts report in any order."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.ir.program import Call, single
from atoll.protocol import messages as m
from atoll.telemetry import telemetry_dumps
from atoll.telemetry.trace import MAX_ANSWERED, Trace
from tests.controller.play import Play, on


def record(
    trace: Trace, sequence: int, started: int, ended: int, *devices: int, host: int = 0, kind: str = "call"
) -> None:
    """Record the end of a gang on one host. The trace needs no more data than this."""
    launch: Any = SimpleNamespace(session=1, program=SimpleNamespace(name="f"), seconds=0.0)
    spec: Any = SimpleNamespace(
        kind=kind, segments=1, devices={host: devices}, islands=(), title="jit_f" * (kind == "call")
    )
    node: Any = SimpleNamespace(number=sequence)
    run = SimpleNamespace(launch=launch, spec=spec, waited=(), moved=lambda hosts: 0)
    gang: Any = SimpleNamespace(island=0, sequence=sequence, run=run, node=node)
    trace.record_gang(gang, (host,), (started, ended))


def times(trace: Trace) -> dict[int, tuple[int, int]]:
    return {each.sequence: (each.started, each.ended) for each in trace.spans()}


def test_a_span_begins_when_the_one_before_it_on_the_device_has_ended():
    trace = Trace()
    record(trace, 1, 0, 10, 0)
    record(trace, 2, 0, 15, 0)
    record(trace, 3, 20, 25, 0)
    assert times(trace) == {1: (0, 10), 2: (10, 15), 3: (20, 25)}


def test_of_gangs_that_end_at_once_the_one_that_was_enqueued_first_has_had_the_device():
    trace = Trace()
    record(trace, 1, 2, 10, 0)  # launched before the other and enqueued after it, and no time passes in it
    record(trace, 2, 1, 10, 0)
    assert times(trace) == {2: (1, 10), 1: (10, 10)}


def test_gangs_on_other_devices_and_hosts_run_at_once():
    trace = Trace()
    record(trace, 1, 0, 10, 0)
    record(trace, 2, 2, 5, 1)
    record(trace, 3, 1, 6, 0, host=1)
    assert times(trace) == {1: (0, 10), 2: (2, 5), 3: (1, 6)}


def test_a_gang_on_several_devices_begins_when_all_are_free():
    trace = Trace()
    record(trace, 1, 0, 10, 0)
    record(trace, 2, 0, 3, 1)
    record(trace, 3, 0, 12, 0, 1)
    assert times(trace) == {1: (0, 10), 2: (0, 3), 3: (10, 12)}


def test_only_what_ended_since_then_is_given():
    trace = Trace()
    for sequence in range(4):
        record(trace, sequence, 0, sequence * 10 + 5, 0)
    assert [(each.sequence, each.started) for each in trace.spans(since=25)] == [(2, 15), (3, 25)]


@given(
    st.lists(
        st.tuples(
            *(st.integers(0, 50), st.integers(0, 50), st.integers(0, 1), st.sets(st.integers(0, 3))),
            st.sampled_from(("call", "put")),
        ),
        max_size=30,
    ),
    st.randoms(),
)
def test_in_whatever_order_ends_are_reported_no_span_is_negative_and_none_overlap_on_a_device(given_spans, random):
    trace = Trace()
    ends = list(enumerate(given_spans))
    random.shuffle(ends)
    for sequence, (a, b, host, devices, kind) in ends:
        record(trace, sequence, min(a, b), max(a, b), *sorted(devices), host=host, kind=kind)
    found = trace.spans()
    assert {each.sequence: each.ended for each in found} == {number: max(a, b) for number, (a, b, *_) in ends}
    assert all(each.started <= each.ended for each in found)
    for host in range(2):
        for device in range(4):
            there = [each for each in found if each.host == host and device in (each.devices or (0,))]
            there = [each for each in there if each.started < each.ended]  # a transfer beside what computes has no time
            assert all(first.ended <= second.started for first, second in pairwise(there))


def test_transfers_that_end_while_something_computes_take_nothing_from_it():
    trace = Trace()
    record(trace, 1, 0, 30, 0)
    record(trace, 2, 10, 11, 0, kind="put")
    record(trace, 3, 29, 29, 0, kind="send")
    record(trace, 4, 5, 50, 0, kind="get")
    assert times(trace) == {1: (0, 30), 2: (11, 11), 3: (29, 29), 4: (30, 50)}


def test_what_computes_begins_when_a_transfer_that_was_there_before_it_has_ended():
    trace = Trace()
    record(trace, 1, 0, 30, 0, kind="put")
    record(trace, 2, 1, 40, 0)
    record(trace, 3, 0, 200, 0, kind="put")
    assert times(trace) == {1: (0, 30), 2: (30, 40), 3: (40, 200)}


def test_what_is_new_begins_when_what_was_before_it_on_its_device_has_ended():
    trace = Trace()
    record(trace, 1, 0, 10, 0)
    position = trace.position
    record(trace, 2, 5, 15, 0)
    spans, _ = trace.since_position(position)
    assert [(each.sequence, each.enqueued, each.started, each.ended) for each in spans] == [(2, 5, 10, 15)]


@pytest.mark.parametrize("limit", [1, 7, 100, 1000])
def test_pages_have_few_spans_each_and_together_all_of_them(limit: int):
    trace = Trace()
    for sequence in range(300):
        record(trace, sequence, 10 * sequence, 10 * sequence + 15, 0)
    found, position, sizes = [], 0, []
    while position < trace.position:
        spans, _, position = trace.page(position, limit)
        found += spans
        sizes.append(len(spans))
    assert found == trace.spans()
    assert max(sizes) == min(limit, 300)


def test_a_page_lays_out_few_earlier_spans_however_many_a_gang_has() -> None:
    """Calls are counted: time would depend on the machine."""
    trace, hosts = Trace(), 50
    for sequence in range(300):
        launch: Any = SimpleNamespace(session=1, program=SimpleNamespace(name="f"), seconds=0.0)
        spec: Any = SimpleNamespace(
            kind="call", segments=1, devices=dict.fromkeys(range(hosts), (0,)), title="jit_f", islands=()
        )
        run = SimpleNamespace(launch=launch, spec=spec, waited=(), moved=lambda hosts: 0)
        gang: Any = SimpleNamespace(island=0, sequence=sequence, run=run, node=SimpleNamespace(number=sequence))
        trace.record_gang(gang, tuple(range(hosts)), (10 * sequence, 10 * sequence + 15) * hosts)
    laid_out = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal laid_out
        laid_out += event == "call" and frame.f_code.co_name == "free_for"

    sys.setprofile(count)
    try:
        spans, _, position = trace.page(200)
    finally:
        sys.setprofile(None)
    assert len(spans) == (position - 200) * hosts
    assert [each.started for each in spans[:1]] == [2005], "the gang before it ended then"
    assert laid_out <= 2 * MAX_ANSWERED + 2 * hosts


def test_pages_continue_with_what_is_kept_if_some_is_not_kept_any_more():
    trace = Trace(limit=10)
    for sequence in range(10):
        record(trace, sequence, sequence, sequence + 1, 0)
    _, _, position = trace.page(0, 3)
    for sequence in range(10, 18):
        record(trace, sequence, sequence, sequence + 1, 0)
    spans, _, position = trace.page(position, 3)
    assert [each.sequence for each in spans] == [8, 9, 10]
    assert position == 11


def test_times_are_those_of_the_controller_by_the_clock_that_the_host_had_then():
    trace = Trace()
    trace.clock(0).measure(10.0, 5_000_000_000, 10.0)
    record(trace, 1, 5_000_000_000, 5_001_000_000, 0)
    trace.clock_began(0)  # its machine restarted, and counts from zero
    trace.clock(0).measure(20.0, 1_000_000, 20.0)
    record(trace, 2, 2_000_000, 3_000_000, 0)
    spans, (clock,) = trace.since_position(0)
    off = [abs(each.ended - truly) for each, truly in zip(spans, (10_001_000_000, 20_002_000_000), strict=True)]
    assert max(off) <= clock.error < 100_000
    assert (clock.host, clock.samples) == (0, 1)
    (live,), _ = trace.after(1, 10)
    assert abs(live.ended - spans[1].ended) <= clock.error


def test_a_host_with_one_clock_after_another_keeps_a_few_of_them():
    trace = Trace()
    for number in range(100):
        trace.clock_began(0)
        trace.clock(0).measure(100.0 + number, 0, 100.0 + number)
        record(trace, number, 0, 0, 0)
    ends = {each.sequence: each.ended // 1_000_000_000 for each in trace.spans()}
    assert [ends[number] for number in (97, 98, 99)] == [197, 198, 199]
    assert len(trace._clocks[0].clocks) < 20


def test_a_host_whose_clock_nobody_has_read_says_so():
    trace = Trace()
    record(trace, 1, 5, 10, 0)
    spans, (clock,) = trace.since_position(0)
    assert (spans[0].ended, clock.error) == (10, -1)


def test_ends_that_a_host_reports_out_of_order_make_a_trace_that_runs_forward():
    """Each device of a host reports on its own: a later end may come first."""
    play = Play("1x1x2")
    play.with_function(1, (0,))
    play.with_function(2, (1,))
    for function, device in ((1, 0), (2, 1)):
        call = Call(function, (), (on(device),), (device,))
        play.send(m.RegisterProgram(function, single(f"on {device}", (), call)))
    sequences = [play.send(m.Launch(program, (), (10 + program,), ()))[0].sequence for program in (1, 2)]
    play.report(0, m.Done(((sequences[0], 0, 9_000),)))
    play.report(0, m.Done(((sequences[1], 1_000, 4_000),)))
    spans = {each.sequence: each for each in play.controller.trace.spans()}
    first, second = (spans[sequence] for sequence in sequences)
    assert (first.devices, first.started, first.ended) == ((0,), 0, 9_000)
    assert (second.devices, second.started, second.ended) == ((1,), 1_000, 4_000)


def test_what_is_new_is_found_by_its_position():
    trace = Trace()
    for sequence in range(3):
        record(trace, sequence, 0, 10, 0)
    spans, position = trace.after(0, 10)
    assert ([each.sequence for each in spans], position) == ([0, 1, 2], 3)
    assert trace.after(position, 10) == ([], 3)
    record(trace, 3, 0, 10, 0)
    assert [each.sequence for each in trace.after(position, 10)[0]] == [3]


def test_of_much_that_is_new_the_newest_is_given():
    trace = Trace(limit=4)
    for sequence in range(8):
        record(trace, sequence, 0, 10, 0)
    assert [each.sequence for each in trace.after(0, 2)[0]] == [6, 7]
    assert [each.sequence for each in trace.after(0, 100)[0]] == [4, 5, 6, 7]


def test_a_position_of_another_controller_is_none():
    trace = Trace()
    record(trace, 1, 0, 10, 0)
    (span,), position = trace.after(99, 10)
    assert (span.sequence, position) == (1, 1)


def test_a_snapshot_has_the_last_of_it_and_goes_on_with_all_positions(monkeypatch):
    monkeypatch.setattr(telemetry_dumps, "MAX_SPANS_KEPT", 2)
    trace = Trace(limit=4)
    for sequence in range(3):
        record(trace, sequence, sequence, sequence + 1, 0)
    restored = Trace(limit=4)
    restored._ends, restored._recorded = telemetry_dumps.last_ends(trace._ends), trace._recorded
    telemetry_dumps.count_spans(restored)
    assert list(times(trace)) == [0, 1, 2]
    assert list(times(restored)) == [1, 2]
    position = trace.position
    for each in (trace, restored):
        record(each, 3, 5, 6, 0)
        assert [span.sequence for span in each.since_position(position)[0]] == [3]
    for sequence in range(4, 7):
        record(restored, sequence, sequence + 5, sequence + 6, 0)
    assert list(times(restored)) == [3, 4, 5, 6]
