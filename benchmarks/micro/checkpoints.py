"""(q): how fast Orbax saves arrays on the devices, and how much memory of the script's process it needs.

On Atoll the hosts' Python processes write, in both of Orbax's ways for Pathways; stock JAX writes from the script, in
the same formats. The arrays are random, made on the devices, and cut over all of them. What was saved is restored once
and compared, outside the clock.
"""

import math
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint._src.multihost.dispatchers import ColocatedPythonDispatcher
from orbax.checkpoint._src.serialization.cloud_pathways_array_handler import CloudPathwaysArrayHandler

from benchmarks.harness.benchmark import Round, Settings

FORMATS = ("ocdbt", "zarr")
ARRAYS = 8
_MB, _GB = 1e6, 1e9


def save(settings: Settings) -> Round:
    """Whole saves, waited for. `growth` is the most that the process held beyond what it held before any save."""
    state = random_state(settings.size(full=1 << 30, quick=64 << 20))
    nbytes = sum(array.nbytes for array in state.values())
    handlers = {form: handler_of(form, settings.system != "stock") for form in FORMATS}

    def saved(form: str, directory: str) -> tuple[float, float]:
        """Seconds until save() returned, and until all was written."""
        with checkpointer(form, handlers[form]) as saver:
            started = time.perf_counter()
            saver.save(directory, args=ocp.args.PyTreeSave(state))
            returned = time.perf_counter() - started
            saver.wait_until_finished()
            return returned, time.perf_counter() - started

    def measure() -> dict[str, float]:
        found = {}
        with tempfile.TemporaryDirectory(prefix="bench-checkpoints-") as directory:
            reset_peak()
            before = memory("VmRSS")
            for form in FORMATS:
                found[f"{form}_returned"], seconds = saved(form, f"{directory}/{form}")
                found[form] = nbytes / _GB / seconds
            found["growth"] = (memory("VmHWM") - before) / _MB
        return found

    with tempfile.TemporaryDirectory(prefix="bench-checkpoints-") as directory:
        for form in FORMATS:
            saved(form, f"{directory}/{form}")
            check(form, handlers[form], f"{directory}/{form}", state)
    return measure


def random_state(nbytes: int) -> dict[str, jax.Array]:
    """float32 arrays of so many bytes together, cut by rows over all devices."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
    columns = 1024
    rows = math.ceil(nbytes / ARRAYS / columns / 4 / len(jax.devices())) * len(jax.devices())
    make = jax.jit(lambda seed: jax.random.normal(jax.random.key(seed), (rows, columns)), out_shardings=sharding)
    state = {f"layer{i}": make(i) for i in range(ARRAYS)}
    jax.block_until_ready(state)
    return state


def handler_of(form: str, on_hosts: bool) -> Any:
    if not on_hosts:
        return ocp.type_handlers.ArrayHandler()
    if form == "zarr":
        return CloudPathwaysArrayHandler()
    return ocp.type_handlers.ArrayHandler(dispatcher=ColocatedPythonDispatcher())


def checkpointer(form: str, handler: Any) -> ocp.AsyncCheckpointer:
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, handler))
    return ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=form == "ocdbt", type_handler_registry=registry))


def check(form: str, handler: Any, directory: str, state: dict[str, jax.Array]) -> None:
    arguments = ocp.checkpoint_utils.construct_restore_args(state)
    with checkpointer(form, handler) as restorer:
        found = restorer.restore(directory, args=ocp.args.PyTreeRestore(restore_args=arguments))
    same = jax.jit(lambda a, b: jnp.array_equal(a, b))
    for name, array in state.items():
        assert bool(same(found[name], array)), f"{name} is not what was saved as {form}"


def reset_peak() -> None:
    """VmHWM counts from here on."""
    Path("/proc/self/clear_refs").write_text("5")


def memory(field: str) -> int:
    """Return a field of this process's status, in bytes."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024
