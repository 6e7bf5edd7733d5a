"""Tests of forked children: they do no harm, do not hang, and their errors say what to do."""

from __future__ import annotations

import pytest

from tests.end_to_end.script_process import StartScript

BEGIN = """
import os, sys, warnings
warnings.simplefilter("ignore")
import atoll, jax, jax.numpy as jnp, numpy as np

x = jnp.arange(4.0)
double = jax.jit(lambda x: x * 2)
y = double(x)
halves = jax.jit(lambda x: x / 2).lower(x).compile()
halves(x)
mesh = jax.sharding.Mesh(np.array(jax.devices()), "x")
program = atoll.program(lambda x: double(x))
program(x)
whole = jax.device_put(np.arange(8.0), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))

def still_there(child):
    assert os.waitpid(child, 0)[1] == 0
    print((double(x) + y).tolist(), halves(x).tolist(), (x + 1).tolist(), float(whole.sum()))
"""
STILL_THERE = "[0.0, 4.0, 8.0, 12.0] [0.0, 0.5, 1.0, 1.5] [1.0, 2.0, 3.0, 4.0] 28.0"


@pytest.mark.thorough
def test_a_childs_end_leaves_the_parents_functions_and_arrays(start_script: StartScript) -> None:
    script = start_script(
        BEGIN
        + """
child = os.fork()
if not child:
    del x, y, double, halves, whole
    sys.exit()  # with all destructors
still_there(child)
""",
        islands="1x1x4",
    )
    assert script.line() == STILL_THERE
    assert script.process.wait(300) == 0
    assert script.errors() == ""


def test_jax_calls_in_a_child_are_refused_at_once(start_script: StartScript) -> None:
    script = start_script(
        BEGIN
        + """
calls = {
    "jit": lambda: double(x),
    "compiled": lambda: halves(x),
    "eager": lambda: x + 1,
    "new": lambda: jax.jit(lambda x: x - 7)(x),
    "put": lambda: jnp.ones(3),
    "read": lambda: np.asarray(y),
    "read shards": lambda: np.asarray(whole),
    "wait": lambda: jax.block_until_ready(y),
    "copy": lambda: jax.device_put(x, jax.devices()[1]),
    "shards": lambda: [shard.data for shard in whole.addressable_shards],
    "delete": lambda: y.delete(),
    "local": lambda: jax.device_put(np.ones(3), jax.local_devices(backend="cpu")[0]) + 1,
    "costs": lambda: halves.cost_analysis(),
    "memory": lambda: jax.devices()[0].memory_stats(),
    "program": lambda: program(x),
}
child = os.fork()
if not child:
    for name, call in calls.items():
        try:
            call()
            print(name, "was done", flush=True)
        except Exception as error:
            if "use multiprocessing's spawn or forkserver" not in str(error):
                print(name, error, flush=True)
    print("all refused", flush=True)
    sys.exit()
still_there(child)
""",
        islands="1x1x4",
    )
    assert script.line() == "all refused"
    assert script.line() == STILL_THERE


@pytest.mark.thorough
def test_a_loader_with_forked_workers_runs_beside_the_training(start_script: StartScript) -> None:
    script = start_script(
        BEGIN
        + """
import multiprocessing

def load(i):
    return np.full(4, float(i))

with multiprocessing.get_context("fork").Pool(2) as pool:
    total = x * 0
    for batch in pool.imap(load, range(20)):
        total = double(total) * 0.5 + batch
print(total.tolist())
""",
        islands="1x1x4",
    )
    assert script.line() == "[190.0, 190.0, 190.0, 190.0]"
    assert script.process.wait(300) == 0


def test_a_forked_pool_receives_jax_arrays_as_numpy_arrays(start_script: StartScript) -> None:
    script = start_script(
        BEGIN
        + """
import multiprocessing

def use(tree):
    return type(tree["x"]).__module__, (tree["x"] * 2).tolist(), tree["key"]

def compute(x):
    return jnp.sin(x)

with multiprocessing.get_context("fork").Pool(2) as pool:
    tree = {"x": x, "key": jax.random.key_data(jax.random.key(0))[1].item()}
    print(pool.map_async(use, [tree, {"x": whole[:2], "key": 1}, {"x": jnp.bfloat16(3) * y[1:2], "key": 2}]).get(240))
    try:
        pool.map_async(compute, [x]).get(240)
    except Exception as error:
        print(type(error).__name__, "use multiprocessing's spawn or forkserver" in str(error))
    print(pool.map_async(np.sum, [y, y + 1]).get(240))
still_there(os.fork() or os._exit(0))
""",
        islands="1x1x4",
    )
    assert script.line() == ("[('numpy', [0.0, 2.0, 4.0, 6.0], 0), ('numpy', [0.0, 2.0], 1), ('numpy', [12.0], 2)]")
    assert script.line() == "BackendError True"
    assert script.line() == "[np.float32(12.0), np.float32(16.0)]"
    assert script.line() == STILL_THERE
    assert script.process.wait(300) == 0


def test_a_child_that_leaves_a_block_of_connect_leaves_the_parents_cluster_whole(start_script: StartScript) -> None:
    script = start_script(
        """
import os, sys, warnings
warnings.simplefilter("ignore")
import atoll, jax, jax.numpy as jnp, numpy as np

with atoll.connect(islands="1x1x2"):
    x = jnp.arange(4.0)
    seen = []
    show = jax.jit(lambda x: jax.debug.callback(lambda x: seen.append(x.tolist()), x))
    show(x)
    jax.effects_barrier()
    child = os.fork()
    if not child:
        sys.exit()  # by way of the block's end
    assert os.waitpid(child, 0)[1] == 0
    show(x + 1)
    jax.effects_barrier()
    print(seen, float(jax.device_put(np.ones(1 << 18, np.float32)).sum()))
""",
    )
    assert script.line() == "[[0.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]] 262144.0"
    assert script.process.wait(300) == 0
