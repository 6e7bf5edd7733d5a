"""Tests of schedules as tables: their entries, their durations, and which of them cannot run."""

from __future__ import annotations

import pytest

from atoll.errors import PipelineError
from atoll.pipelines.entries import Entry, Kind, Times
from atoll.pipelines.schedule import Schedule
from atoll.pipelines.schedules import SCHEDULES, schedule
from atoll.protocol.spans import Span

SIZES = [(1, 1), (1, 4), (2, 2), (2, 8), (4, 4), (4, 16), (8, 32), (16, 64)]


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_each_schedule_is_complete_and_can_run(name: str, stages: int, microbatches: int) -> None:
    check = schedule(name, stages, microbatches).check()
    forward = [entry for entry in check.spans if entry.kind is Kind.FORWARD]
    assert len(forward) == microbatches * stages * (2 if name == "interleaved" and stages > 1 else 1)


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_gpipe_and_1f1b_wait_for_one_forward_and_backward_of_each_other_stage(
    name: str, stages: int, microbatches: int
) -> None:
    assert schedule(name, stages, microbatches).check().length == 3 * (microbatches + stages - 1)


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
@pytest.mark.parametrize("virtual", [1, 2, 3])
def test_parts_interleaved_divide_the_bubble_of_1f1b(stages: int, microbatches: int, virtual: int) -> None:
    length = schedule("interleaved", stages, microbatches, virtual=virtual).check().length
    assert length == 3 * (microbatches * virtual + stages - 1)


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_zb_h1_has_a_third_of_the_bubble_and_the_memory_of_1f1b(stages: int, microbatches: int) -> None:
    check = schedule("zb-h1", stages, microbatches).check()
    assert check.length == 3 * microbatches + stages - 1
    assert max(check.held) == stages


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_stages_of_1f1b_hold_as_many_activations_as_there_are_stages_from_there_on(
    stages: int, microbatches: int
) -> None:
    assert schedule("1f1b", stages, microbatches).check().held == tuple(range(stages, 0, -1))
    assert schedule("gpipe", stages, microbatches).check().held == (microbatches,) * stages


def test_the_bubble_is_the_time_in_which_stages_do_nothing() -> None:
    assert schedule("gpipe", 4, 8).check().bubble == pytest.approx(3 / 11)
    assert schedule("gpipe", 4, 8).check(Times(forward=5, backward=7)).bubble == pytest.approx(3 / 11)


def test_on_one_stage_the_model_is_one_part_unless_told() -> None:
    assert {entry.part for entry in schedule("interleaved", 1, 4).check().spans} == {0}
    assert {entry.part for entry in schedule("interleaved", 1, 4, virtual=2).check().spans} == {0, 1}


def test_a_transfer_takes_its_time_between_stages_alone() -> None:
    assert schedule("gpipe", 2, 1).check(Times(transfer=0.5)).length == 7
    assert schedule("interleaved", 1, 1, virtual=2).check(Times(transfer=0.5)).length == 6


def test_a_table_of_the_users_own_is_read_from_text_and_from_lists() -> None:
    text = Schedule.of("0F0 0F1 . 0B0 0B1\n. 1F0 1B0 1F1 1B1")
    assert text.rows[1][:2] == (Entry(1, Kind.FORWARD, 0), Entry(1, Kind.BACKWARD, 0))
    assert text == Schedule.of([["0F0", "0F1", None, "0B0", "0B1"], "1F0 1B0 1F1 1B1"])
    assert text.check().held == (2, 1)


def test_parts_may_be_on_stages_in_any_order() -> None:
    v_shaped = Schedule.of("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0")
    assert [v_shaped.stage_of(part) for part in range(4)] == [0, 1, 1, 0]
    assert v_shaped.check().length == 12


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("0F0 0B0 0F0", "0F0 twice"),
        ("0F0 0F1 0B0", "0F1 for part 0 and micro-batch 1"),
        ("0F0 0I0", "0F0 and 0I0"),
        ("0F0 0B0 0W0", "F and B, or F, I and W"),
        ("0F0 0F1 0B0\n0B1", "part 0 on stages 0 and 1"),
        ("1F0 1B0", "nothing for part 0"),
        ("0X0", "invalid schedule entry '0X0'"),
        ("", "is empty"),
    ],
)
def test_what_is_wrong_with_a_table_is_named(table: str, message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        Schedule.of(table).check()


def test_a_schedule_that_cannot_run_says_which_entry_waits_for_which() -> None:
    with pytest.raises(PipelineError) as error:
        Schedule.of("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1", "mine").check()
    assert str(error.value) == (
        "the schedule 'mine' cannot run: 0B0 (stage 0) waits for 1B0 (stage 1), which is scheduled after 1F1; "
        "1F1 (stage 1) waits for 0F1 (stage 0), which is scheduled after 0B0"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2f2b", 2, 2), "unknown schedule '2f2b': use one of gpipe, 1f1b, interleaved, zb-h1"),
        (("gpipe", 0, 2), "0 stages"),
        (("interleaved", 4, 6), "a multiple of 4 micro-batches, .* got 6"),
    ],
)
def test_schedules_that_are_not_there_are_refused(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        schedule(*arguments)


def test_an_option_that_a_schedule_does_not_have_is_refused() -> None:
    with pytest.raises(PipelineError, match="no options \\['virtual'\\]"):
        schedule("gpipe", 2, 2, virtual=2)


def test_a_schedule_prints_as_a_line_a_stage() -> None:
    assert str(schedule("1f1b", 2, 2)).splitlines() == [
        "1f1b: 2 stages, 2 micro-batches, bubble 33.3 %, at most 2 activations held",
        "  0 F0 F1 .  .  B0 =  .  B1 =",
        "  1 .  F0 B0 =  F1 B1 =  .  .",
    ]


def test_a_schedule_is_drawn_with_a_bar_an_entry() -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="pictures need the extra plot")
    pyplot.switch_backend("agg")
    table = schedule("1f1b", 2, 3)
    axes = table.plot()
    assert len(axes.patches) == sum(map(len, table.rows))
    pyplot.close(axes.figure)


def test_a_run_of_it_is_drawn_with_a_bar_a_span() -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="pictures need the extra plot")
    pyplot.switch_backend("agg")
    figure, (above, below) = pyplot.subplots(2)
    table = schedule("1f1b", 2, 2)
    table.plot(ax=above)
    spans = [Span(0, 0, 1, "step", "call", i, i, i + 1, function="jit_part_0_forward") for i in (5_000, 6_000)]
    assert len(table.plot_run(spans, ax=below).patches) == 2
    assert "as it ran" in below.get_title()
    pyplot.close(figure)
