"""Tests of unmodified Orbax: the devices' hosts write and read checkpoints, in both of Orbax's modes for Pathways."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.experimental import colocated_python
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint._src.multihost.dispatchers import ColocatedPythonDispatcher
from orbax.checkpoint._src.serialization import cloud_pathways_helper
from orbax.checkpoint._src.serialization.cloud_pathways_array_handler import CloudPathwaysArrayHandler

from tests.end_to_end.remote_python import RemoteError, RemotePython, StartPython

WAYS = ("colocated", "persistence")


@pytest.fixture(scope="module", params=["1x2x2", pytest.param("2x1x2", marks=pytest.mark.thorough)])
def two_hosts(request: pytest.FixtureRequest, start_python: StartPython) -> RemotePython:
    """Return a child with two hosts, of one island or of two."""
    return start_python(request.param)


@pytest.fixture(scope="module")
def one_host(start_python: StartPython) -> RemotePython:
    return start_python("1x1x2")


# ---- functions for the children, and for stock JAX here


def state(offset: int = 0, backwards: bool = False) -> dict[str, jax.Array]:
    """Return arrays that are sharded along two axes, along one, or replicated. `backwards` reverses the devices."""
    devices = np.array(jax.devices()[: 2 if jax.device_count() == 2 else 4])
    mesh = Mesh((devices[::-1] if backwards else devices).reshape(2, -1), ("x", "y"))

    def put(array: Any, *spec: Any) -> jax.Array:
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*(spec[::-1] if backwards else spec))))

    return {
        "table": put(offset + np.arange(64, dtype=np.float32).reshape(8, 8), "x", "y"),
        "rows": put((offset + np.arange(32)).reshape(8, 4).astype(jnp.bfloat16), "x", None),
        "bias": put(offset + np.arange(8, dtype=np.int32)),
        "step": put(np.int32(offset)),
    }


def checkpointer(way: str, **options: Any) -> ocp.AsyncCheckpointer:
    if way == "persistence":
        handler: Any = CloudPathwaysArrayHandler(timeout=datetime.timedelta(seconds=30))
        options["use_ocdbt"] = False
    elif way == "colocated":
        handler = ocp.type_handlers.ArrayHandler(dispatcher=ColocatedPythonDispatcher())
    else:
        handler = ocp.type_handlers.ArrayHandler()
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, handler))
    return ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry, **options))


def save(way: str, directory: str, options: dict[str, bool]) -> None:
    with checkpointer(way, **options) as saver:
        saver.save(directory, args=ocp.args.PyTreeSave(state(1)))


def restore(way: str, directory: str, options: dict[str, bool], backwards: bool = False) -> list[str]:
    """Restore with this process's shardings. Return the names of arrays that differ from the saved ones."""
    wanted = state(1, backwards)
    arguments = ocp.checkpoint_utils.construct_restore_args(wanted)
    with checkpointer(way, **options) as restorer:
        found = restorer.restore(directory, args=ocp.args.PyTreeRestore(restore_args=arguments))
    return [
        name
        for name, array in wanted.items()
        if found[name].sharding != array.sharding or not np.array_equal(found[name], array)
    ]


def write_into(directory: str) -> None:
    array = state()["table"]
    cloud_pathways_helper.write_arrays(directory, ["a"], [array], datetime.timedelta(seconds=30)).result()


def call_after_a_write(directory: str) -> tuple[str, int]:
    write_into(directory)

    @colocated_python.colocated_python
    def double(x: jax.Array) -> jax.Array:
        return x * 2

    doubled = double(jax.device_put(np.array([1 << 40]), jax.devices()[0]))
    return doubled.dtype.name, int(doubled[0])


# ---- tests


def test_functions_find_their_settings_in_a_process_that_a_checkpoint_has_started(
    one_host: RemotePython, tmp_path: Path
) -> None:
    assert one_host.call(call_after_a_write, str(tmp_path)) == ("int64", 1 << 41)


@pytest.mark.parametrize("options", [{"use_ocdbt": True}, {"use_zarr3": True}, {"use_ocdbt": True, "use_zarr3": True}])
def test_orbax_saves_by_colocated_python_and_restores_onto_another_sharding(
    two_hosts: RemotePython, tmp_path: Path, options: dict[str, bool]
) -> None:
    options = {"use_ocdbt": False} | options
    directory = str(tmp_path / "checkpoint")
    two_hosts.call(save, "colocated", directory, options)
    if options["use_ocdbt"]:  # each host has written its own part
        assert {"ocdbt.process_0", "ocdbt.process_1"} <= {each.name for each in Path(directory).iterdir()}
    assert two_hosts.call(restore, "colocated", directory, options, True) == []


@pytest.mark.parametrize("way", WAYS)
def test_what_two_hosts_saved_is_restored_by_one_and_by_stock_jax(
    two_hosts: RemotePython, one_host: RemotePython, tmp_path: Path, way: str
) -> None:
    directory, options = str(tmp_path / "checkpoint"), {"use_ocdbt": way == "colocated"}
    two_hosts.call(save, way, directory, options)
    assert one_host.call(restore, way, directory, options) == []
    assert restore("stock", directory, options, True) == []


def test_persistence_restores_onto_another_sharding(two_hosts: RemotePython, tmp_path: Path) -> None:
    directory = str(tmp_path / "checkpoint")
    two_hosts.call(save, "persistence", directory, {})
    assert two_hosts.call(restore, "persistence", directory, {}, True) == []
    assert two_hosts.call(restore, "colocated", directory, {"use_ocdbt": False}, True) == []


def manage(way: str, directory: str) -> tuple[list[int], list[str]]:
    """Save three steps of a training that donates its state. Return the steps that are kept, and the differences."""
    train = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    saver = checkpointer(way)
    with ocp.CheckpointManager(directory, saver, options) as manager:
        trained = state()
        for number in range(3):
            # Orbax's dispatcher keeps no copies on CPU devices.
            manager.save(number, jax.tree.map(jnp.copy, trained) if way == "colocated" else trained)
            trained = train(trained)
        manager.wait_until_finished()
        kept = list(manager.all_steps())
        wanted = state(2)
        found = manager.restore(2, restore_kwargs={"restore_args": ocp.checkpoint_utils.construct_restore_args(wanted)})
    return kept, [name for name, array in wanted.items() if not np.array_equal(found[name], array)]


@pytest.mark.parametrize("way", WAYS)
def test_a_manager_saves_while_the_training_goes_on(two_hosts: RemotePython, tmp_path: Path, way: str) -> None:
    assert two_hosts.call(manage, way, str(tmp_path / "run")) == ([1, 2], [])


def test_a_place_that_cannot_be_written_is_the_error_of_the_save(two_hosts: RemotePython, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RemoteError, match=r"FAILED_PRECONDITION: cannot write 'a' at .*/file"):
        two_hosts.call(write_into, str(tmp_path / "file"))
    two_hosts.call(write_into, str(tmp_path / "directory"))  # the processes continue
