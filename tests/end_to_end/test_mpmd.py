"""Tests of IFRT IR programs on several meshes, as compiled by Shardy's `mpmd.jit`."""

from __future__ import annotations

import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests import mpmd_programs
from tests.end_to_end.remote_python import RemoteError, RemotePython, StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster

SECONDS = 120.0
RNG = np.random.default_rng(0)
W, V, X = (RNG.standard_normal(shape).astype(np.float32) for shape in ((8, 8), (8, 2), (4, 8)))


@pytest.fixture(scope="module")
def cluster(start_cluster: StartCluster) -> StandingCluster:
    """Start two islands of one device each that delegate a session's programs to hosts at once."""
    return start_cluster(islands="2x1x1", delegate_after_seconds=0.0)


@pytest.fixture(scope="module")
def python(start_python: StartPython, cluster: StandingCluster) -> RemotePython:
    return start_python(ATOLL_ADDRESS=cluster.address)


# ---- functions of the child

state: dict[str, Any] = {}


def replicated(number: int) -> NamedSharding:
    return NamedSharding(Mesh(np.array([jax.devices()[number]]), ("x",)), P())


def two_stages(calls_itself: bool = False, **options: Any) -> Any:
    """Compile a program of two stages on two devices."""
    text = mpmd_programs.two_stages(**options)
    if calls_itself:
        text = text.replace("stablehlo.dot_general %h, %v, contracting_dims = [1] x [0]", "func.call @main(%v, %h)")
        text = text.replace("(tensor<4x8xf32>, tensor<8x2xf32>)", "(tensor<8x2xf32>, tensor<4x8xf32>)")
    avals = jax.core.ShapedArray((4, 2), np.float32), jax.core.ShapedArray((4, 8), np.float32)
    shardings = replicated(1), replicated(0)
    return mpmd_programs.compiled(mpmd_programs.parsed(text), jax.devices(), avals, shardings)


def arguments() -> tuple[jax.Array, ...]:
    return jax.device_put(W, replicated(0)), jax.device_put(V, replicated(1)), jax.device_put(X, replicated(0))


def results() -> list[Any]:
    compiled, given = two_stages(), arguments()
    return [np.asarray(each) for _ in range(3) for each in compiled.execute(given)]


def deleted_arguments() -> tuple[list[bool], Any, str]:
    """Run a program twice that donates its second argument.

    Return the deleted arrays, a result, and the second error.
    """
    compiled, given = two_stages(mark="{ifrt.donated}", donated="0, 1"), arguments()
    result, _ = compiled.execute(given)
    try:
        compiled.execute(given)
        error = ""
    except Exception as caught:
        error = str(caught)
    return [each.is_deleted() for each in given], np.asarray(result), error


def described() -> tuple[dict[str, int], dict[str, float], list[str]]:
    """Return argument sizes and flops by fragment, and the layouts of the arguments."""
    compiled = two_stages()
    stats, costs = compiled.get_compiled_memory_stats(), compiled.cost_analysis()
    sizes = {name: each.argument_size_in_bytes for name, each in stats.items()}
    return (
        sizes,
        {name: each["flops"] for name, each in costs.items()},
        [str(each) for each in compiled.input_layouts()],
    )


def refused() -> None:
    two_stages(calls_itself=True)


def prepare() -> None:
    state["run"], state["given"] = two_stages(), arguments()
    jax.block_until_ready(state["run"].execute(state["given"]))


def run() -> str:
    try:
        jax.block_until_ready(state["run"].execute(state["given"]))
    except Exception as error:
        return str(error)
    return "no error"


# ---- tests


def expected() -> list[Any]:
    h = jax.jit(lambda w, x: jnp.tanh(x @ w))(W, X)
    return [np.asarray(jax.jit(lambda v, h: h @ v)(V, h)), np.asarray(h)]


def test_two_stages_give_the_bits_of_plain_jax(python: RemotePython) -> None:
    for got, want in zip(python.call(results), expected() * 3, strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_run_deletes_the_arguments_that_the_program_donates(python: RemotePython) -> None:
    deleted, result, error = python.call(deleted_arguments)
    assert deleted == [False, True, False]
    np.testing.assert_array_equal(result, expected()[0])
    assert "deleted" in error


def test_sizes_costs_and_layouts_are_those_of_the_fragments(python: RemotePython) -> None:
    sizes, flops, layouts = python.call(described)
    assert sizes == {"first_mesh_m0": W.nbytes + X.nbytes, "second_mesh_m1": V.nbytes + X.nbytes}
    assert flops["second_mesh_m1"] == 2 * 4 * 8 * 2
    assert len(layouts) == 3


def test_a_fragment_that_ends_its_compiler_costs_only_its_compilation(
    cluster: StandingCluster, python: RemotePython
) -> None:
    before = [cluster.worker(number).pid for number in range(2)]
    with pytest.raises(RemoteError, match=r"fragment second on mesh m1: .*ended by SIGSEGV"):
        python.call(refused)
    assert [cluster.worker(number).pid for number in range(2)] == before
    np.testing.assert_array_equal(python.call(results)[0], expected()[0])


def test_the_error_of_a_run_names_the_fragments_of_the_lost_island(
    cluster: StandingCluster, python: RemotePython
) -> None:
    python.call(prepare)
    worker = cluster.worker(1)
    worker.send_signal(signal.SIGSTOP)
    python.begin(run)
    cluster.until(lambda report: sum(each["in_flight"] for each in report["sessions"]) >= 1, SECONDS)
    worker.kill()
    error = python.finish(SECONDS)
    assert "(second_mesh_m1 may not have ended there)" in error
    assert "first_mesh_m0" not in error
