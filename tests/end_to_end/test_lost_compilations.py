"""Test that a compilation request that a worker loses is sent again, without the user's help."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import faults
from tests.end_to_end.remote_python import StartPython
from tests.end_to_end.standing_cluster import StartCluster
from tests.quick_xla import quick

# Detection takes long by design: the controller needs two reports of the worker, 10 s apart.
pytestmark = pytest.mark.thorough
SECONDS = 120.0

PLACES = {
    "request": "atoll.worker.host_functions:HostFunctions.compile",
    "outcome": "atoll.worker.host_functions:HostFunctions.end",
}


def compute(power: int) -> float:
    import functools

    import jax

    return float(jax.jit(functools.partial(jax.lax.integer_pow, y=power))(2.0))


@pytest.mark.parametrize("place", PLACES)
def test_a_lost_compilation_is_requested_again(
    place: str, start_cluster: StartCluster, start_python: StartPython, module_directory: Path
) -> None:
    lost = module_directory / place
    injected = {PLACES[place]: f"ignored_if_file:{lost}"}
    cluster = start_cluster(faults.environment(injected, quick({})), islands="1x1x1")
    python = start_python(ATOLL_ADDRESS=cluster.address)
    assert python.call(compute, 3, seconds=SECONDS) == 8.0
    lost.touch()
    assert python.call(compute, 4, seconds=SECONDS) == 16.0
    assert not lost.exists()
