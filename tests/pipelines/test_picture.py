"""Tests of relating spans to the entries of a schedule."""

from __future__ import annotations

import pytest

from atoll.errors import PipelineError
from atoll.pipelines.picture import bars, idle
from atoll.pipelines.schedules import schedule
from atoll.protocol.spans import Span

MS = 1_000_000


def span(island: int, function: str, started: int, ended: int, host: int = 0, kind: str = "call") -> Span:
    return Span(island, host, 1, "step", kind, started, started * MS, ended * MS, function=function)


def run_of(*spans: Span, stages: int = 2, microbatches: int = 2) -> list[tuple[int, str, int, int]]:
    found = bars(schedule("1f1b", stages, microbatches).rows, spans)
    return [(bar.stage, " ".join(map(str, bar.entries)), bar.start // MS, bar.end // MS) for bar in found]


STEP = (
    span(4, "", 0, 1, kind="put"),
    span(4, "jit_part_0_forward", 1, 2),
    span(4, "jit_part_0_forward", 2, 3),
    span(7, "jit_part_1_forward_backward", 2, 5),
    span(7, "jit_part_1_forward_backward", 5, 8),
    span(4, "jit_part_0_backward", 6, 8),
    span(4, "jit_part_0_backward", 8, 10),
    span(4, "jit_update", 10, 11),
)


def test_spans_are_entries_in_the_order_of_the_table():
    assert run_of(*reversed(STEP)) == [
        (0, "0F0", 1, 2),
        (0, "0F1", 2, 3),
        (1, "1F0 1B0", 2, 5),
        (1, "1F1 1B1", 5, 8),
        (0, "0B0", 6, 8),
        (0, "0B1", 8, 10),
    ]


def test_nodes_that_were_dispatched_together_are_one_bar():
    found = run_of(span(0, "jit_part_0_forward x2, jit_part_0_backward", 0, 4), span(1, "jit_part_1_backward", 4, 5))
    assert found == [(0, "0F0 0F1 0B0", 0, 4), (1, "1B0", 4, 5)]


def test_of_replicas_and_of_several_hosts_the_first_is_shown():
    others = [span(each.island + 1, each.function, each.started // MS, each.ended // MS) for each in STEP]
    others += [span(each.island, each.function, each.started // MS, each.ended // MS, host=1) for each in STEP]
    assert run_of(*STEP, *others) == run_of(*STEP)


def test_stages_are_idle_for_what_their_bars_leave():
    assert idle(bars(schedule("1f1b", 2, 2).rows, STEP)) == pytest.approx(1 - 12 / 18)


def test_spans_of_something_else_are_refused():
    with pytest.raises(PipelineError, match="contain no step of a pipeline"):
        run_of(span(0, "jit_train_step", 0, 1))
