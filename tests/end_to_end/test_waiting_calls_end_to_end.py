"""Python on several hosts that raises on one of them while the others wait for it in a collective."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import colocated_python
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from atoll.controller.islands.waiting_calls import WAITING_CALL_SECONDS
from tests.end_to_end.remote_python import StartPython
from tests.end_to_end.test_colocated_failures import once_it_is_back

# The time until the processes end is that of a user. `tests/controller/test_waiting_calls.py` has the decisions.
pytestmark = pytest.mark.thorough

_kept: dict[str, Any] = {}


def prepare() -> list[float]:
    """Make the functions, and start the processes."""

    @colocated_python.colocated_python
    def centered(x: jax.Array) -> jax.Array:
        return jax.jit(lambda x: x - jnp.mean(x))(x)

    def fails_on(rank: int) -> Any:
        @colocated_python.colocated_python
        def failing(x: jax.Array) -> jax.Array:
            if jax.process_index() == rank:
                raise ValueError("a host fails")
            return jax.jit(lambda x: x - jnp.mean(x))(x)

        return failing.specialize(out_specs_fn=lambda x: x)

    x = jax.device_put(np.arange(4.0), NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x")))
    _kept.update(x=x, centered=centered.specialize(out_specs_fn=lambda x: x), failing=[fails_on(0), fails_on(1)])
    return compute()


def compute_again() -> list[float]:
    return once_it_is_back(compute)


def compute() -> list[float]:
    return [float(each) for each in np.asarray(_kept["centered"](_kept["x"]))]


def fail(rank: int) -> tuple[str, str]:
    """Return the errors of a call that raises on one host, and of one behind it."""
    failing, behind = _kept["failing"][rank](_kept["x"]), _kept["centered"](_kept["x"])
    texts = []
    for result in (failing, behind):
        try:
            texts.append(str(np.asarray(result)))
        except jax.errors.JaxRuntimeError as error:
            texts.append(str(error))
    return texts[0], texts[1]


@pytest.mark.parametrize("topology", ["1x2x1", "2x1x1"])
def test_hosts_that_wait_for_a_host_where_a_function_raised_end_their_processes(
    start_python: StartPython, topology: str
) -> None:
    user = start_python(topology)
    right = [-1.5, -0.5, 0.5, 1.5]
    assert user.call(prepare) == right
    for rank in (1, 0):
        raised, behind = user.call(fail, rank, seconds=4 * WAITING_CALL_SECONDS)
        assert raised.startswith("INTERNAL: a Python function on the host raised")
        assert "ValueError: a host fails" in raised
        assert behind.startswith("ABORTED: the Python process of session 1 on host")
        assert f"had not returned on hosts [{1 - rank}] " in behind
        assert f"after it had failed on host {rank}: a Python function on the host raised" in behind
        assert "ValueError: a host fails" in behind
        assert user.call(compute_again, seconds=4 * WAITING_CALL_SECONDS) == right, "the next call starts the processes"
