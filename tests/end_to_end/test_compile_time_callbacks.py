"""Tests of the user's Python that XLA calls during compilation: results are those of stock JAX, on one host
and on two.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import atoll
from tests.end_to_end.remote_python import RemoteError, RemotePython

# ---- functions of users


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))


def sharded(shape: tuple[int, ...] = (4, 8)) -> jax.Array:
    return jax.device_put(
        np.arange(np.prod(shape), dtype=np.float32).reshape(shape), NamedSharding(mesh(), P("x", "y"))
    )


def inspected() -> list[Any]:
    """Return the shardings that a program inspects, with the threads on which it calls back."""
    shown: list[Any] = []

    def show(name: str) -> Any:
        return lambda sharding: shown.append((name, tuple(sharding.spec), threading.current_thread().name))

    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        jax.debug.inspect_array_sharding(x, callback=show("argument"))
        product = x @ x.T
        jax.debug.inspect_array_sharding(product, callback=show("product"))

        def body(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            jax.debug.inspect_array_sharding(carry, callback=show("carry"))
            return carry * 2, None

        return jax.lax.scan(body, product, None, length=3)[0]

    for _ in range(2):
        step(sharded()).block_until_ready()
    return sorted(shown)


class Doubled:
    """Custom partitioning that records its calls."""

    def __init__(self, fails: str = "") -> None:
        self.asked: list[str] = []
        self.fails = fails
        self.function = custom_partitioning(lambda x: x * 2)
        self.function.def_partition(
            self.partition,
            infer_sharding_from_operands=self.infer,
            propagate_user_sharding=self.propagate,
            sharding_rule="i j -> i j",
        )

    def note(self, what: str) -> None:
        self.asked.append(what)
        if what == self.fails:
            raise ValueError(f"no {what} today")

    def partition(self, mesh: Any, arguments: Any, result: Any) -> Any:
        """Scale by two on each device, and add the index of the device's part: the parts differ, but not their code."""
        self.note("partition")
        sharding = NamedSharding(mesh, P(arguments[0].sharding.spec[0], None))

        def part(x: jax.Array) -> jax.Array:
            return jax.jit(lambda x: x + x + jnp.float32(jax.lax.axis_index("x")))(x)

        return mesh, part, sharding, (sharding,)

    def infer(self, mesh: Any, arguments: Any, result: Any) -> Any:
        self.note("infer")
        return arguments[0].sharding

    def propagate(self, mesh: Any, user: Any) -> Any:
        self.note("propagate")
        return user.sharding

    def run(self, with_shardy: bool) -> np.ndarray[Any, Any]:
        before = jax.config.jax_use_shardy_partitioner
        jax.config.update("jax_use_shardy_partitioner", with_shardy)
        try:
            with jax.set_mesh(mesh()):
                return np.asarray(jax.jit(lambda x: self.function(x).T)(sharded()))
        finally:
            jax.config.update("jax_use_shardy_partitioner", before)


def partitioned(with_shardy: bool) -> tuple[np.ndarray[Any, Any], list[str]]:
    doubled = Doubled()
    result = doubled.run(with_shardy)
    return result, doubled.asked


def fails_to(what: str, with_shardy: bool) -> None:
    Doubled(what).run(with_shardy)


def in_scan_and_with_callbacks() -> tuple[float, list[float]]:
    """Call a function during compilation and at run time."""
    doubled, printed = Doubled().function, []

    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        def body(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            carry = doubled(carry)
            jax.debug.callback(lambda total: printed.append(float(total)), carry.sum(), ordered=False)
            return carry, None

        return jax.lax.scan(body, x, None, length=2)[0]

    with jax.set_mesh(mesh()):
        result = float(step(sharded((2, 2)) * 0 + 1).sum())
    jax.effects_barrier()
    return result, sorted(printed)


def summed_in_a_scan() -> float:
    """Sum rows in a loop. The devices of an axis sum their parts of each row."""
    function = custom_partitioning(lambda rows: jnp.sum(rows))

    def partition(mesh: Any, arguments: Any, result: Any) -> Any:
        def part(rows: jax.Array) -> jax.Array:
            def add(total: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
                return total + jax.lax.psum(row.sum(), axis_name="x"), None

            return jax.lax.scan(add, 0, rows)[0]

        return mesh, part, result.sharding, tuple(each.sharding for each in arguments)

    function.def_partition(
        partition,
        infer_sharding_from_operands=lambda mesh, *_: NamedSharding(mesh, P()),
        propagate_user_sharding=lambda mesh, user: user.sharding,
        sharding_rule="i j -> ",
    )
    with jax.set_mesh(Mesh(np.array(jax.devices()[:4]), ("x",))):
        rows = jax.device_put(jnp.ones((32, 16)), P(None, "x"))
        return float(jax.jit(function, in_shardings=P(None, "x"))(rows))


def uses_the_cluster_while_compiling() -> tuple[float, float]:
    """Compute on the cluster in the callback, and compile a program there that also has a callback."""
    found: list[float] = []

    def look(sharding: Any) -> None:
        inner = jax.jit(lambda x: (jax.debug.inspect_array_sharding(x, callback=lambda _: found.append(1.0)), x + 1)[1])
        found.append(float(inner(sharded()).sum()))

    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        jax.debug.inspect_array_sharding(x, callback=look)
        return x * 2

    return float(step(sharded()).sum()), sum(found)


def raises_while_inspecting() -> None:
    def look(sharding: Any) -> None:
        raise KeyError("nothing of the kind")

    jax.jit(lambda x: (jax.debug.inspect_array_sharding(x, callback=look), x + 1)[1])(sharded())


# ---- the tests

EXPECTED = [("argument", ("x", "y")), ("carry", ("x",)), ("product", ("x",))]


@pytest.mark.parametrize("hosts", ["atoll_python", "two_hosts_python"])
def test_each_sharding_is_shown_once_on_the_thread_that_compiles(hosts: str, request: Any) -> None:
    shown = request.getfixturevalue(hosts).call(inspected)
    assert [(name, spec) for name, spec, _ in shown] == EXPECTED
    assert {thread for _, _, thread in shown} == {"MainThread"}


@pytest.mark.parametrize("hosts", ["atoll_python", "two_hosts_python"])
@pytest.mark.parametrize("with_shardy", [True, False])
def test_a_custom_partitioning_says_what_each_device_computes(hosts: str, with_shardy: bool, request: Any) -> None:
    result, asked = request.getfixturevalue(hosts).call(partitioned, with_shardy)
    rows = np.repeat(np.arange(2, dtype=np.float32), 2)[:, None]
    np.testing.assert_array_equal(result, (2 * np.arange(32, dtype=np.float32).reshape(4, 8) + rows).T)
    assert asked.count("partition") == 1
    assert set(asked) == ({"partition"} if with_shardy else {"partition", "infer", "propagate"})


@pytest.mark.parametrize("hosts", ["atoll_python", "two_hosts_python"])
def test_the_program_of_a_custom_partitioning_may_have_a_mesh_beside_its_functions(hosts: str, request: Any) -> None:
    assert request.getfixturevalue(hosts).call(summed_in_a_scan) == 512


@pytest.mark.parametrize(
    ("what", "with_shardy"), [("partition", True), ("partition", False), ("infer", False), ("propagate", False)]
)
def test_what_a_rule_raises_is_the_error_of_the_compilation(
    atoll_python: RemotePython, what: str, with_shardy: bool
) -> None:
    """Stock JAX ends the process at errors of all rules but `partition`."""
    with pytest.raises(
        RemoteError, match=f"INTERNAL: custom_partitioner: (.|\n)*ValueError: no {what} today"
    ) as caught:
        atoll_python.call(fails_to, what, with_shardy)
    assert os.path.dirname(atoll.__file__) + os.sep not in caught.value.text
    atoll_python.call(partitioned, with_shardy)


def test_what_is_raised_over_a_sharding_is_the_error_of_the_compilation(atoll_python: RemotePython) -> None:
    with pytest.raises(RemoteError, match=r"INTERNAL: Error calling inspect_sharding: (.|\n)*nothing of the kind"):
        atoll_python.call(raises_while_inspecting)


def test_a_function_is_called_while_it_is_compiled_and_while_it_runs(atoll_python: RemotePython) -> None:
    result, printed = atoll_python.call(in_scan_and_with_callbacks)
    assert result == 22.0  # 1, then 2 and 3, then 4 and 7, for each of two columns
    assert printed == [10.0, 22.0]


def test_a_callback_of_a_compilation_uses_the_cluster(two_hosts_python: RemotePython) -> None:
    total = float(np.arange(32).sum())
    assert two_hosts_python.call(uses_the_cluster_while_compiling) == (2 * total, total + 32 + 1)
