"""IFRT IR programs on several meshes, as Shardy's `mpmd.jit` compiles them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests import mpmd_programs
from tests.end_to_end.remote_python import RemotePython, StartPython

RNG = np.random.default_rng(0)
W, V, X = (RNG.standard_normal(shape).astype(np.float32) for shape in ((8, 8), (8, 2), (4, 8)))


@pytest.fixture(scope="module")
def python(start_python: StartPython) -> RemotePython:
    return start_python("2x1x1")


# ---- what the child does


def mesh(*numbers: int) -> Mesh:
    return Mesh(np.array([jax.devices()[number] for number in numbers]), ("x",))


def replicated(*numbers: int) -> NamedSharding:
    return NamedSharding(mesh(*numbers), P())


def two_stages(**options: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the compiled program of two stages, and its arguments."""
    shardings = replicated(0), replicated(1)
    avals = jax.core.ShapedArray((4, 2), np.float32), jax.core.ShapedArray((4, 8), np.float32)
    module = mpmd_programs.parsed(mpmd_programs.two_stages(**options))
    compiled = mpmd_programs.compiled(module, jax.devices(), avals, (shardings[1], shardings[0]))
    return compiled, (jax.device_put(W, shardings[0]), jax.device_put(V, shardings[1]), jax.device_put(X, shardings[0]))


def results() -> list[Any]:
    compiled, arguments = two_stages()
    return [np.asarray(each) for _ in range(3) for each in compiled.execute(arguments)]


# ---- tests


def test_two_stages_give_the_bits_of_plain_jax(python: RemotePython) -> None:
    h = jax.jit(lambda w, x: jnp.tanh(x @ w))(W, X)
    expected = [np.asarray(jax.jit(lambda v, h: h @ v)(V, h)), np.asarray(h)] * 3
    for got, want in zip(python.call(results), expected, strict=True):
        np.testing.assert_array_equal(got, want)
