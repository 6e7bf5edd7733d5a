"""Google's client against `atoll proxy`: what `pathwaysutils` asks of its server."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster_process import User, finish, first_line

START = """
    import jax
    import numpy as np
    import pathwaysutils
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

    pathwaysutils.initialize()
    devices = np.array(jax.devices())
    every, last = Mesh(devices.reshape(2, 2), ("x", "y")), Mesh(devices[2:], ("z",))
    array = jax.device_put(np.arange(16.0).reshape(4, 4), NamedSharding(every, P("x", "y")))
"""


@pytest.fixture(scope="module")
def short_folder(tmp_path_factory: Any) -> Iterator[Path]:
    import shutil
    import tempfile

    path = Path(tempfile.mkdtemp(prefix="at-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def served(short_folder: Path, program_cache: Path) -> Iterator[tuple[User, dict[str, str]]]:
    """A user whose proxy serves two islands, and the environment of his scripts."""
    user = User(short_folder, program_cache)
    process = user.start_atoll("proxy", "--port", "0", "--islands", "2x1x2")
    yield (
        user,
        {
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "JAX_PLATFORMS": "proxy",
            "JAX_BACKEND_TARGET": first_line(process),
            "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS": "true",
        },
    )
    process.send_signal(signal.SIGINT)
    finish(process).check()


def printed(served: tuple[User, dict[str, str]], code: str) -> list[str]:
    user, environment = served
    return user.script(START + code, **environment).check().stdout.splitlines()


def test_its_own_resharding_gives_arrays_other_shardings(served: Any) -> None:
    assert printed(
        served,
        """
    from pathwaysutils.experimental import reshard

    columns = NamedSharding(last, P(None, "z"))
    for cached in (False, True, True):
        moved, = reshard.reshard((array,), (columns,), cache_resharding_plans=cached)
    print(moved.sharding == columns, np.array_equal(moved, np.arange(16.0).reshape(4, 4)), array.is_deleted())
    moved = reshard.reshard(array, columns, donate=True)
    print(np.array_equal(moved, np.arange(16.0).reshape(4, 4)), array.is_deleted())
    """,
    ) == ["True True False", "True True"]


def test_arrays_are_split_and_concatenated_along_an_axis_of_the_mesh(served: Any) -> None:
    assert printed(
        served,
        """
    from pathwaysutils.experimental.concatenate_by_mesh_axis import concatenate_by_mesh_axis
    from pathwaysutils.experimental.split_by_mesh_axis import split_by_mesh_axis

    halves = split_by_mesh_axis(array, "x")
    print([np.asarray(half).tolist()[0] for half in halves])
    whole = concatenate_by_mesh_axis(halves, "x")
    print(np.array_equal(whole, np.arange(16.0).reshape(4, 4)))
    """,
    ) == ["[[0.0, 1.0, 2.0, 3.0], [8.0, 9.0, 10.0, 11.0]]", "True"]


def test_elastic_finds_the_islands_that_work(served: Any) -> None:
    assert printed(
        served,
        """
    from pathwaysutils.elastic import elastic

    print(sorted(elastic.get_active_slice_indices()), sorted(elastic.wait_for_slices(2, poll_interval=0.1)))
    """,
    ) == ["[0, 1] [0, 1]"]
