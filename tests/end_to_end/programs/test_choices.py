"""Tests of `atoll.cond`, `switch` and `while_loop` on two islands: results, dependents and errors.

Functions without `test_` in their names run in the child.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.end_to_end.programs.choices import BY_PYTHON, CHOICES, one_mesh
from tests.end_to_end.programs.functions import host, meshes, on
from tests.end_to_end.remote_python import RemoteError, RemotePython, StartPython
from tests.end_to_end.same import assert_same
from tests.end_to_end.standing_cluster import StartCluster


def chosen(function: Callable[[Any], Any]) -> Any:
    """Return the results in Python, of direct calls, and in a program, called twice."""
    import atoll

    program = atoll.program(lambda: function(atoll))
    return [host(each) for each in (function(BY_PYTHON), function(atoll), program(), program())]


@pytest.mark.parametrize("function", CHOICES, ids=lambda each: each.__name__)
def test_what_data_choose_is_what_python_would_choose(python: RemotePython, function: Any) -> None:
    by_python, *others = python.call(chosen, function)
    for each in others:
        if function is one_mesh:  # one compiled function, in which XLA may round differently
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), each, by_python)
        else:
            assert_same(each, by_python)


def collatz(rounds: int) -> list[int]:
    """Return the Collatz sequence of 27, and how often the other island has multiplied an odd number."""
    import atoll

    first, second = jax.devices()[0], jax.devices()[4]
    odd, half, there = jax.jit(lambda n, _: n % 2 == 1), jax.jit(lambda n: n // 2), jax.jit(lambda n: 3 * n + 1)
    count = jax.jit(lambda k: k + 1)

    def multiplied(n: Any, k: Any) -> Any:
        return jax.device_put(there(jax.device_put(n, second)), first), count(k)

    n, k = (jax.device_put(np.int32(each), first) for each in (27, 0))
    for _ in range(rounds):
        n, k = atoll.cond(odd(n, k), multiplied, lambda n, k: (half(n), k), n, k)
    return [int(n), int(k)]


@pytest.mark.parametrize("rounds", [30, pytest.param(1000, marks=[pytest.mark.thorough, pytest.mark.timeout(400)])])
def test_each_of_many_choices_depends_on_the_one_before(python: RemotePython, rounds: int) -> None:
    n, count = 27, 0
    for _ in range(rounds):
        n, count = (3 * n + 1, count + 1) if n % 2 else (n // 2, count)
    assert python.call(collatz, rounds, seconds=300.0) == [n, count]


def while_a_number_is_not_known() -> list[str]:
    """Return what is ready before a number is known, which is all that does not depend on it."""
    import atoll

    first, second = jax.devices()[0], jax.devices()[4]
    known = threading.Event()
    x = jax.device_put(np.arange(4.0), first)

    def wait(x: Any) -> Any:
        known.wait(30)
        return np.bool_(x > 0)

    late = atoll.program(jax.jit(lambda x: jax.pure_callback(wait, jax.ShapeDtypeStruct((), np.bool_), x[1])))
    far = jax.jit(lambda x: jax.numpy.sin(x))
    y = atoll.cond(late(x), lambda x: x + 1, lambda x: jax.device_put(far(jax.device_put(x, second)), first), x)
    z = y * 2
    independent = [jax.device_put(x + 1, second) * 3 for _ in range(20)]
    jax.block_until_ready(independent)
    seen = [f"{name} is there" for name, each in {"y": y, "z": z}.items() if each.is_ready()]
    assert not known.is_set()
    known.set()
    return [*seen, str(np.asarray(z))]


def test_only_what_depends_on_a_number_waits_for_it(python: RemotePython) -> None:
    assert python.call(while_a_number_is_not_known) == ["[2. 4. 6. 8.]"]


def with_a_number_that_fails(loops: bool) -> str:
    import atoll

    first, second = jax.devices()[0], jax.devices()[4]

    def fail(x: Any) -> Any:
        raise ArithmeticError("no number today")

    broken = atoll.program(jax.jit(lambda x: jax.pure_callback(fail, jax.ShapeDtypeStruct((), np.bool_), x[1])))
    x = jax.device_put(np.arange(4.0), first)
    far = jax.jit(jnp.sin)

    def there(x: Any) -> Any:
        return jax.device_put(far(jax.device_put(x, second)), first)

    pred = broken(x)
    if loops:
        _, y = atoll.while_loop(lambda carry: carry[0], lambda carry: (carry[0], there(carry[1])), (pred, x))
    else:
        y = atoll.cond(pred, there, lambda x: x + 1, x)
    untouched = jax.device_put(x + 1, second)
    with pytest.raises(Exception, match="no number today") as failure:
        (y * 2).block_until_ready()
    np.testing.assert_array_equal(np.asarray(untouched), np.arange(4.0) + 1)
    return str(failure.value)


@pytest.mark.parametrize("loops", [False, True])
def test_a_number_that_fails_fails_what_depends_on_it_and_nothing_else(python: RemotePython, loops: bool) -> None:
    assert "ArithmeticError" in python.call(with_a_number_that_fails, loops)


# ---- refused functions


def refused(case: str) -> None:
    import atoll

    first, second = jax.devices()[0], jax.devices()[4]
    x = jax.device_put(np.arange(4.0, dtype=np.float32), first)
    pred = x.sum() > 0

    def back(x: Any) -> Any:
        return jax.device_put(jnp.sin(jax.device_put(x, second)), first)

    match case:
        case "grad":
            _, mesh = meshes()
            jax.grad(lambda x: atoll.cond(pred, lambda x: jax.device_put(x, on(mesh)), jnp.sin, x).sum())(x)
        case "python":
            callback = jax.jit(lambda x: jax.pure_callback(lambda x: x, jax.typeof(x), x))
            atoll.cond(pred, lambda x: callback(back(x)), back, x).block_until_ready()


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("grad", "those of jax.lax, for functions on one mesh"),
        ("python", "calls Python, which control flow cannot do"),
    ],
)
def test_what_cannot_be_chosen_so_is_refused_with_the_reason(python: RemotePython, case: str, text: str) -> None:
    with pytest.raises(RemoteError) as failure:
        python.call(refused, case)
    assert text in f"{failure.value}{failure.value.__notes__}"


# ---- the end


def loop_without_end() -> None:
    import atoll

    first, second = (jax.devices()[i] for i in (0, 1))
    x = jax.device_put(np.zeros((64, 64), np.float32), first)
    there = jax.jit(lambda x: x + 1)
    globals()["_endless"] = atoll.while_loop(
        lambda x: x[0, 0] >= 0, lambda x: jax.device_put(there(jax.device_put(x, second)), first), x
    )


def some_work() -> float:
    x = jax.device_put(np.arange(100.0), jax.devices()[1])
    for _ in range(50):
        x = x + 1
    return float(jax.device_put(x, jax.devices()[0])[0])


def test_a_loop_without_end_holds_up_nobody_and_ends_with_its_session(
    start_cluster: StartCluster, start_python: StartPython
) -> None:
    cluster = start_cluster(islands="2x1x1")
    client, other = (start_python(ATOLL_ADDRESS=cluster.address) for _ in range(2))
    other.call(some_work)  # with what it compiles, while nothing else runs
    client.call(loop_without_end)
    assert client.call(some_work) == other.call(some_work) == 50.0
    other.close()
    client.process.kill()
    cluster.until(lambda report: not report["sessions"], 30.0)
