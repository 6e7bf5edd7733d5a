"""Tests that random programs read on Atoll what they read on stock JAX: see `seeded_programs`.

The suite runs a few programs, always the same. `make thorough` runs many more.
"""

from __future__ import annotations

import pytest

from tests.end_to_end.remote_python import RemotePython, StartPython
from tests.end_to_end.same import assert_same
from tests.end_to_end.seeded_programs import run
from tests.thoroughness import TIMES, longer

PROGRAMS, STEPS = 2 * TIMES, 60
SECONDS = 300.0


@pytest.fixture(scope="module")
def python(start_python: StartPython, request: pytest.FixtureRequest) -> RemotePython:
    return start_python(islands=request.param)


# The suite runs each program on one of the clusters.
@longer
@pytest.mark.slow
@pytest.mark.parametrize(
    ("python", "seed"),
    [
        pytest.param(islands, seed, marks=pytest.mark.thorough if TIMES == 1 and seed % 2 != number else ())
        for number, islands in enumerate(("2x1x2", "1x2x2"))
        for seed in range(PROGRAMS)
    ],
    indirect=["python"],
)
def test_a_program_reads_what_it_reads_on_stock_jax(python: RemotePython, seed: int) -> None:
    expected = run(seed, STEPS, fails=False)
    assert_same(python.call(run, seed, STEPS, True, seconds=SECONDS), expected)
