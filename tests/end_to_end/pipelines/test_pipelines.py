"""Tests of pipelines across islands: unmodified models have the losses of plain JAX."""

from __future__ import annotations

import functools
import importlib.util
import os

import pytest

from tests.end_to_end.pipelines import pipeline_models, steps
from tests.end_to_end.remote_python import RemotePython, StartPython

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

# Compilation takes nearly all of the time.
SECONDS = 300.0
STEPS = 3
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")
# The libraries' transformers take four times as long to compile as the plain model.
FEW = [
    pytest.param("nnx", 2, 2, "1f1b", marks=pytest.mark.thorough),
    pytest.param("linen", 2, 2, "zb-h1", marks=pytest.mark.thorough),
    pytest.param("equinox", 2, 2, "gpipe", marks=pytest.mark.thorough),
    pytest.param("plain", 8, 4, "interleaved", marks=pytest.mark.thorough),
    ("plain", 4, 2, "interleaved"),
    ("plain", 2, 2, "zb-h1"),
    pytest.param("plain", 4, 4, "zb-h1", marks=pytest.mark.thorough),
]
REPLICAS = [("nnx", 1, 2, "1f1b"), ("linen", 1, 4, "gpipe"), *[("equinox", 2, 2, each) for each in SCHEDULES]]
ALL = [
    (kind, 8, stages, schedule) for kind in pipeline_models.LIBRARIES for stages in (1, 2, 4) for schedule in SCHEDULES
]


@pytest.fixture(scope="module")
def four_islands(start_python: StartPython) -> RemotePython:
    return start_python("4x1x1")


def need(kind: str) -> None:
    if kind == "equinox" and importlib.util.find_spec("equinox") is None:
        pytest.skip("Equinox is not installed: pip install 'atoll[test]'")


@functools.cache
def plain(kind: str, layers: int, count: int) -> list[float]:
    return pipeline_models.plain_losses(kind, layers, count)


@pytest.mark.parametrize(("kind", "layers", "stages", "schedule"), FEW)
def test_losses_are_those_of_plain_jax(
    four_islands: RemotePython, kind: str, layers: int, stages: int, schedule: str
) -> None:
    need(kind)
    losses = four_islands.call(steps.pipeline_losses, kind, layers, stages, 4, schedule, STEPS, seconds=SECONDS)
    assert losses == pytest.approx(plain(kind, layers, STEPS), rel=1e-5)
    assert losses[-1] < losses[0]


@pytest.mark.skipif(not os.environ.get("ATOLL_TEST_PIPELINES"), reason="make pipelines runs all of them")
@pytest.mark.parametrize(("kind", "layers", "stages", "schedule"), ALL)
def test_twenty_losses_are_those_of_plain_jax(
    four_islands: RemotePython, kind: str, layers: int, stages: int, schedule: str
) -> None:
    need(kind)
    losses = four_islands.call(steps.pipeline_losses, kind, layers, stages, 4, schedule, 20, seconds=SECONDS)
    assert losses == pytest.approx(plain(kind, layers, 20), rel=1e-5)


def test_losses_of_replicas_are_those_of_plain_jax(four_islands: RemotePython) -> None:
    # The functions are those of `test_a_step_is_one_program`.
    losses = four_islands.call(steps.pipeline_losses, "plain", 2, 2, 4, "1f1b", STEPS, 2, seconds=SECONDS)
    assert losses == pytest.approx(plain("plain", 2, STEPS), rel=1e-5)


@pytest.mark.skipif(not os.environ.get("ATOLL_TEST_PIPELINES"), reason="make pipelines runs all of them")
@pytest.mark.parametrize(("kind", "stages", "replicas", "schedule"), REPLICAS)
def test_twenty_losses_of_replicas_are_those_of_plain_jax(
    four_islands: RemotePython, kind: str, stages: int, replicas: int, schedule: str
) -> None:
    need(kind)
    losses = four_islands.call(steps.pipeline_losses, kind, 8, stages, 2, schedule, 20, replicas, seconds=SECONDS)
    assert losses == pytest.approx(plain(kind, 8, 20), rel=1e-5)


@pytest.mark.parametrize(
    "kind", ["plain", *(pytest.param(each, marks=pytest.mark.thorough) for each in pipeline_models.LIBRARIES)]
)
def test_one_stage_and_one_microbatch_are_plain_jax_bit_for_bit(four_islands: RemotePython, kind: str) -> None:
    need(kind)
    losses = four_islands.call(steps.pipeline_losses, kind, 1, 1, 1, "1f1b", STEPS, seconds=SECONDS)
    assert losses == four_islands.call(pipeline_models.plain_losses, kind, 1, STEPS, seconds=SECONDS)


@pytest.mark.skipif(not os.environ.get("ATOLL_TEST_PIPELINES"), reason="make pipelines runs all of them")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", pipeline_models.LIBRARIES)
def test_twenty_losses_of_one_stage_and_one_microbatch_are_plain_jax_bit_for_bit(
    four_islands: RemotePython, kind: str, schedule: str
) -> None:
    need(kind)
    losses = four_islands.call(steps.pipeline_losses, kind, 8, 1, 1, schedule, 20, seconds=SECONDS)
    assert losses == four_islands.call(pipeline_models.plain_losses, kind, 8, 20, seconds=SECONDS)


def test_a_step_is_one_program(four_islands: RemotePython) -> None:
    calls = four_islands.call(steps.calls_of_a_step, 2, 4, 2, seconds=SECONDS)
    assert {(program, launched) for _, program, launched, _ in calls} == {("pipeline_step", calls[0][2])}
    assert {island for island, *_ in calls} == {0, 1, 2, 3}


def test_the_spans_of_a_step_are_the_entries_of_its_table(four_islands: RemotePython) -> None:
    table, ran = four_islands.call(steps.entries_that_ran, 2, 4, seconds=SECONDS)
    assert ran == table


def test_a_step_of_one_stage_and_one_microbatch_is_one_compiled_function(four_islands: RemotePython) -> None:
    ((island, program, _, nodes),) = four_islands.call(steps.calls_of_a_step, 1, 1, 1, seconds=SECONDS)
    assert (island, program, nodes) == (0, "pipeline_step", 1)


def test_parameters_come_back_as_the_users_tree_from_where_they_are_used(four_islands: RemotePython) -> None:
    same, changed, used = four_islands.call(steps.parameters_come_back, seconds=SECONDS)
    assert same
    assert changed > 0
    assert used == 2
