"""Tests of Google's client with `atoll proxy`: the requests that `pathwaysutils` sends."""

from __future__ import annotations

import signal
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster_process import User, finish, first_line
from tests.end_to_end.ffi_kernels import COMPILER, MISSING, build

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


CLIENT = {
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "JAX_PLATFORMS": "proxy",
    "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS": "true",
}


@pytest.fixture(scope="module")
def short_directory(tmp_path_factory: Any) -> Iterator[Path]:
    import shutil
    import tempfile

    path = Path(tempfile.mkdtemp(prefix="at-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def served(short_directory: Path, program_cache: Path) -> Iterator[tuple[User, dict[str, str]]]:
    """Return a user whose proxy serves two islands, and the environment of the user's scripts."""
    with User(short_directory, program_cache) as user:
        process = user.start_atoll("proxy", "--port", "0", "--islands", "2x1x2")
        yield user, CLIENT | {"JAX_BACKEND_TARGET": first_line(process)}
        process.send_signal(signal.SIGINT)
        finish(process).check()


def printed(served: tuple[User, dict[str, str]], code: str, **more: str) -> list[str]:
    user, environment = served
    return user.script(START + code, **environment, **more).check().stdout.splitlines()


@pytest.mark.thorough
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


def test_a_later_client_never_uses_its_arrays_in_place_of_those_of_a_former_client(served: Any) -> None:
    assert printed(
        served,
        """
    import jax.extend

    held = [jax.numpy.arange(4.0) * i for i in range(8)]
    jax.extend.backend.clear_backends()
    others = jax.block_until_ready([jax.numpy.full(4, 100.0 + i) for i in range(200)])
    texts = set()
    for each in (array, *held):
        try:
            texts.add(str((each + 1).tolist()))
        except RuntimeError as error:
            texts.add("deleted" if "deleted" in str(error) or "terminated" in str(error) else str(error))
    print(texts, (others[0] + 1).tolist())
    """,
    ) == ["{'deleted'} [101.0, 101.0, 101.0, 101.0]"]


def test_elastic_finds_the_islands_that_work(served: Any) -> None:
    assert printed(
        served,
        """
    from pathwaysutils.elastic import elastic

    print(sorted(elastic.get_active_slice_indices()), sorted(elastic.wait_for_slices(2, poll_interval=0.1)))
    """,
    ) == ["[0, 1] [0, 1]"]


def test_its_persistence_programs_write_and_read_on_the_hosts(served: Any, tmp_path: Path) -> None:
    assert printed(
        served,
        """
    import datetime, os
    from pathwaysutils import plugin_executable
    from pathwaysutils.persistence import helper

    directory, minute = os.environ["DIRECTORY"], datetime.timedelta(minutes=1)
    rows, columns = NamedSharding(last, P("z")), NamedSharding(last, P(None, "z"))
    there = jax.device_put(np.arange(16.0, dtype=np.float32).reshape(4, 4), rows)
    helper.write_arrays(directory, ["a", "b"], [there, there + 1], minute).result()
    one = plugin_executable.PluginExecutable(helper.get_write_request(directory, "c", there + 2, minute))
    one.call([there + 2])[1].result()
    (a, b, c), read = helper.read_arrays(
        directory, ["a", "b", "c"], [np.dtype(np.float32)] * 3, [(4, 4)] * 3, [columns] * 3, last.devices, minute
    )
    read.result()
    print(a.sharding == columns, *(np.array_equal(x, there + i) for i, x in enumerate((a, b, c))))
    _, read = helper.read_arrays(directory, ["d"], [a.dtype], [(4, 4)], [rows], last.devices, minute)
    try:
        read.result()
    except Exception as error:
        print(str(error).partition(directory)[0])
    """,
        DIRECTORY=str(tmp_path),
    ) == ["True True True True", "NOT_FOUND: cannot read 'd' at "]


def test_orbax_keeps_checkpoints_by_its_persistence(served: Any, tmp_path: Path) -> None:
    assert printed(
        served,
        """
    import os
    import orbax.checkpoint as ocp

    first = Mesh(devices[:2], ("z",))
    state = {
        "here": jax.device_put(np.arange(16.0, dtype=np.float32).reshape(4, 4), NamedSharding(first, P("z"))),
        "there": jax.device_put(np.arange(4, dtype=np.int32), NamedSharding(last, P())),
        "key": jax.device_put(jax.random.key(7), NamedSharding(last, P())),
    }
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    other = {
        "here": NamedSharding(last, P(None, "z")),
        "there": NamedSharding(first, P("z")),
        "key": NamedSharding(last, P()),
    }
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    with ocp.CheckpointManager(os.environ["DIRECTORY"], item_handlers=handler) as manager:
        manager.save(5, args=ocp.args.PyTreeSave(state))
        state["here"] = step(state["here"])
        manager.wait_until_finished()
        wanted = jax.tree.map(lambda s: ocp.ArrayRestoreArgs(sharding=s), other)
        found = manager.restore(5, args=ocp.args.PyTreeRestore(restore_args=wanted))
    print(np.array_equal(found["here"] + 1, state["here"]), np.array_equal(found["there"], state["there"]))
    print(jax.random.uniform(found["key"]) == jax.random.uniform(state["key"]))
    print(sorted(os.listdir(os.environ["DIRECTORY"] + "/5/default/here")))
    """,
        DIRECTORY=str(tmp_path),
        ENABLE_PATHWAYS_PERSISTENCE="1",
    ) == ["True True", "True", "['.zarray', '0.0', '1.0']"]


def test_the_elastic_manager_goes_on_when_a_lost_island_is_back(served: tuple[User, dict[str, str]]) -> None:
    user, environment = served
    code = """
    import time
    from pathwaysutils.elastic.manager import Manager

    manager, attempts = Manager(), []
    step = jax.jit(lambda x: x + 1)

    @manager.elastic_retry(minimum_slice_count=2, poll_interval=0.2, timeout=60)
    def train():
        attempts.append(sorted(manager.active_slice_indices))
        x = jax.device_put(np.arange(4.0), devices[-1])
        while len(attempts) == 1:
            x = step(x)
            x.block_until_ready()
            print("running", flush=True)
            time.sleep(0.1)
        return float(x.sum())

    print(train(), attempts)
    """
    process = user.start(sys.executable, "-c", textwrap.dedent(START + code), **environment)
    assert first_line(process) == "running"
    (worker,) = (each for each in user.processes() if '"island":1' in " ".join(each.cmdline()))
    worker.kill()
    assert finish(process).check().stdout.splitlines()[-1] == "6.0 [[0, 1], [0, 1]]"


def test_the_elastic_manager_goes_on_with_the_islands_that_are_left_and_takes_one_that_is_back(
    short_directory: Path, program_cache: Path
) -> None:
    runtime = short_directory / "fails"
    runtime.mkdir()
    # A forked worker would restart before the manager checks.
    with User(runtime, program_cache, ATOLL_TEST_EXECUTED="worker_main") as user:
        proxy = user.start_atoll("proxy", "--port", "0", "--islands", "2x1x1", "--fail-on-loss")
        environment = CLIENT | {"JAX_BACKEND_TARGET": first_line(proxy)}
        code = """
        import logging
        import time
        import jax
        import numpy as np
        import pathwaysutils

        pathwaysutils.initialize()
        from pathwaysutils.elastic.manager import Manager, ScaleUpSignalError

        logging.disable()  # its monitor logs what it finds at each look, more than a pipe takes

        devices, manager = jax.devices(), Manager()
        compute = jax.jit(lambda x: x + 1)

        @manager.elastic_retry(minimum_slice_count=1, poll_interval=0.1, timeout=60)
        def train():
            active = sorted(manager.active_slice_indices)
            print(active, flush=True)
            x = jax.device_put(np.arange(4.0), devices[active[-1]])
            for step in range(1000):
                x = compute(x)
                x.block_until_ready()
                if manager.available_inactive_slices:
                    raise ScaleUpSignalError
                time.sleep(0.02)

        train()
        """
        process = user.start(sys.executable, "-c", textwrap.dedent(code), ATOLL_TEST_EXECUTED="", **environment)
        assert first_line(process) == "[0, 1]"
        (worker,) = (each for each in user.processes() if '"island":1' in " ".join(each.cmdline()))
        worker.kill()
        assert first_line(process) == "[0]"
        assert first_line(process) == "[0, 1]"
        process.kill()
        process.communicate()
        proxy.send_signal(signal.SIGINT)
        finish(proxy).check()


@pytest.mark.skipif(COMPILER is None, reason=MISSING)
def test_ffi_kernels_of_the_script_run_on_both_islands(served: Any, tmp_path: Path) -> None:
    assert (
        printed(
            served,
            """
    import ctypes
    import os

    library = ctypes.CDLL(os.environ["KERNELS"])
    jax.ffi.register_ffi_target("scale", jax.ffi.pycapsule(library.Scale))
    results = jax.ShapeDtypeStruct((2, 3), np.float32), jax.ShapeDtypeStruct((2,), np.float32)
    call = jax.jit(lambda x: jax.ffi.ffi_call("scale", results)(x, scale=np.float32(2), sign="minus"))
    for device in (devices[0], devices[3]):
        _, sums = call(jax.device_put(np.ones((2, 3), np.float32), device))
        print(np.asarray(sums).tolist())
    """,
            KERNELS=build(tmp_path),
        )
        == ["[-6.0, -6.0]"] * 2
    )


@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_the_simple_model_of_pathwaysutils_trains_on_two_slices(short_directory: Path, program_cache: Path) -> None:
    pytest.importorskip("pathwaysutils.extras.simple_model")
    with User(short_directory, program_cache) as user:
        program = "pathwaysutils.extras.simple_model.simple_model"
        command = [sys.executable, "-m", program, "--devices_per_slice=4"]
        process = user.start_atoll("proxy", "--islands", "2x1x4", "--", *command)
        _, errors = process.communicate(timeout=1100)
        assert process.returncode == 0, errors[-4000:]
