"""Tests that traces show the time that sessions are charged for. Two modules implement this rule independently."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.spans import Span
from atoll.state.device_clocks import DeviceClocks
from atoll.telemetry.layout import laid_out

# For each gang: its end after the previous end, its dispatch before the end, and whether it computes.
ENDS = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 60), st.booleans()), max_size=30)


@given(ENDS)
def test_bars_are_as_long_as_what_is_charged(ends: list[tuple[int, int, bool]]):
    clocks, spans, now, charged = DeviceClocks(), [], 0, 0
    for sequence, (later, earlier, computes) in enumerate(ends):
        now += later
        started = max(0, now - earlier)
        charged += clocks.ended((0,), {0: (0,)}, (started, now), computes)[0]
        kind, function = ("call", "jit_step") if computes else ("put", "")
        spans.append(Span(0, 0, 1, "step", kind, sequence, started, now, devices=(0,), function=function))
    bars = laid_out(spans)
    assert sum(bar.ended - bar.started for bar in bars) == charged
    free = 0
    for bar in (each for each in bars if each.ended > each.started):
        assert bar.started >= free, "none overlap"
        free = bar.ended


def test_a_transfer_that_took_no_time_hides_none_of_another():
    spans = [
        Span(0, 0, 1, "step", "put", sequence, started, ended, devices=(0,))
        for sequence, (started, ended) in enumerate([(16, 16), (10, 17)])
    ]
    assert [(bar.started, bar.ended) for bar in laid_out(spans)] == [(16, 16), (10, 17)]
