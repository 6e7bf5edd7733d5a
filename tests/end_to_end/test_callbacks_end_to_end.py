"""Tests of programs that call the user's Python: they have the results of stock JAX on all kinds of devices."""

from __future__ import annotations

import contextvars
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import config, dispatch
from jax.experimental import checkify, io_callback
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from atoll.launch.dependency_tracker import MAX_PER_SESSION
from tests.end_to_end.remote_python import RemoteError, RemotePython

SECONDS = 30.0


def mesh(count: int = 4) -> Mesh:
    return Mesh(np.array(jax.devices()[:count]), ("x",))


def same_type(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def doubled(x: Any) -> Any:
    """Return twice `x`, computed by a callback."""
    return jax.pure_callback(lambda x: np.asarray(x) * 2, same_type(x), x, vmap_method="expand_dims")


# ---- values and orders


def results_of_transformations(*names: str) -> dict[str, Any]:
    """Return the results of these transformations, or of all."""
    x = jnp.arange(4, dtype=jnp.float32)

    @jax.custom_jvp
    def square(x: Any) -> Any:
        return jax.pure_callback(lambda x: np.asarray(x) ** 2, same_type(x), x, vmap_method="expand_dims")

    square.defjvp(lambda primals, tangents: (square(*primals), 2 * primals[0] * tangents[0]))
    sharded = jax.device_put(x, NamedSharding(mesh(), P("x")))
    transformed: dict[str, tuple[Callable[[Any], Any], Any]] = {
        "jit": (jax.jit(doubled), x),
        "eager": (doubled, x),
        "vmap": (jax.jit(jax.vmap(doubled)), x.reshape(2, 2)),
        "grad": (jax.jit(jax.grad(lambda x: square(x).sum())), x),
        "scan": (jax.jit(lambda x: jax.lax.scan(lambda c, y: (doubled(c) + y, c), jnp.float32(1), x)[1]), x),
        "while": (jax.jit(lambda x: jax.lax.while_loop(lambda x: x.sum() < 100, doubled, x)), x),
        "shard_map": (jax.jit(jax.shard_map(doubled, mesh=mesh(), in_specs=P("x"), out_specs=P("x"))), sharded),
        "automatically sharded": (jax.jit(doubled), sharded),
        "pmap": (jax.pmap(doubled), x),
    }
    chosen = {name: transformed[name] for name in names or transformed}
    return {name: np.asarray(function(given)) for name, (function, given) in chosen.items()}


def test_callbacks_have_their_values_under_all_transformations(atoll_python: RemotePython) -> None:
    results = atoll_python.call(results_of_transformations)
    x = np.arange(4, dtype=np.float32)
    for name in ("jit", "eager", "grad", "shard_map", "automatically sharded", "pmap"):
        np.testing.assert_array_equal(results[name], 2 * x, err_msg=name)
    np.testing.assert_array_equal(results["vmap"], 2 * x.reshape(2, 2))
    np.testing.assert_array_equal(results["scan"], [1, 2, 5, 12])
    np.testing.assert_array_equal(results["while"], 32 * x)


def returned_arrays() -> list[Any]:
    given = [
        np.zeros((0, 3), np.float32),
        np.arange(6, dtype=np.int8).reshape(2, 3),
        np.array([True, False]),
        np.array(2 + 1j, np.complex64),
        np.asarray(jnp.ones(3, jnp.bfloat16)),
        np.arange(300_000, dtype=np.int32),
    ]

    def swap(*xs: Any) -> Any:
        return tuple(np.asarray(x)[..., ::-1] if x.ndim else np.asarray(x) for x in xs)

    got = jax.jit(lambda *xs: jax.pure_callback(swap, tuple(map(same_type, xs)), *xs))(*given)
    wanted = swap(*given)
    return [(a.dtype == b.dtype, np.array_equal(a, b)) for a, b in zip(got, wanted, strict=True)]


def test_arrays_of_any_type_and_size_come_and_go(atoll_python: RemotePython) -> None:
    assert atoll_python.call(returned_arrays) == [(True, True)] * 6


def ordered_calls(count: int) -> list[int]:
    seen: list[int] = []

    @jax.jit
    def note(i: Any) -> None:
        io_callback(lambda i: seen.append(int(i)), None, i, ordered=True)

    for i in range(count):
        note(i)
    jax.effects_barrier()
    return seen


def ordered_calls_on_several_devices() -> list[int]:
    seen: list[int] = []
    count = 4

    @jax.jit
    def note(x: Any) -> Any:
        io_callback(lambda total: seen.append(int(total)), None, x.sum(), ordered=True)
        return x + 1

    x = jax.device_put(jnp.zeros(count, jnp.int32), NamedSharding(mesh(count), P("x")))
    for _ in range(3):
        x = note(x)
    jax.effects_barrier()
    return [total // count for total in seen]


def test_ordered_callbacks_of_a_sharded_computation_keep_their_order(atoll_python: RemotePython) -> None:
    assert atoll_python.call(ordered_calls_on_several_devices) == [0, 1, 2]


def test_300_ordered_callbacks_in_flight_keep_their_order(atoll_python: RemotePython) -> None:
    assert atoll_python.call(ordered_calls, 300) == list(range(300))


def printed() -> list[str]:
    lines: list[str] = []

    @jax.jit
    def step(x: Any) -> Any:
        jax.debug.callback(lambda x: lines.append(f"x={float(x)}"), x)
        return x + 1

    x = jnp.float32(0)
    for _ in range(5):
        x = step(x)
    jax.effects_barrier()
    return lines


def test_unordered_callbacks_of_runs_that_follow_one_another_keep_their_order(atoll_python: RemotePython) -> None:
    assert atoll_python.call(printed) == [f"x={i}.0" for i in range(5)]


def checked() -> str:
    def divide(x: Any) -> Any:
        checkify.check(x > 0, "not positive: {x}", x=x)
        return 1 / x

    jax.config.update("jax_experimental_unsafe_xla_runtime_errors", True)
    try:
        jax.jit(divide)(jnp.float32(-1)).block_until_ready()
        jax.effects_barrier()
    except Exception as error:
        return str(error)
    finally:
        jax.config.update("jax_experimental_unsafe_xla_runtime_errors", False)
    return ""


def test_checks_at_run_time_raise(atoll_python: RemotePython) -> None:
    assert "not positive: -1.0" in atoll_python.call(checked)


def traced_program() -> list[list[float]]:
    """Trace two functions that differ only in their callables."""
    import atoll

    doubles = jax.jit(lambda x: jax.pure_callback(lambda x: np.asarray(x) * 2, same_type(x), x) + 1)
    trebles = jax.jit(lambda x: jax.pure_callback(lambda x: np.asarray(x) * 3, same_type(x), x) + 1)
    both = atoll.program(lambda x: (trebles(doubles(x)), doubles(trebles(x))))
    return [[float(y) for y in both(jnp.float32(i))] for i in range(2)]


def test_functions_of_a_traced_program_have_pure_callbacks(atoll_python: RemotePython) -> None:
    assert atoll_python.call(traced_program) == [[4.0, 3.0], [10.0, 9.0]]


# ---- exceptions


def raises() -> None:
    def stumble(x: Any) -> Any:
        raise KeyError("my own key")

    jax.jit(lambda x: jax.pure_callback(stumble, same_type(x), x))(jnp.ones(3)).block_until_ready()


def raises_in_one_shard() -> None:
    def stumble(x: Any) -> Any:
        if x[0] == 2:
            raise ValueError("the third shard")
        return np.asarray(x)

    sharded = jax.device_put(jnp.arange(4.0), NamedSharding(mesh(), P("x")))
    call = jax.shard_map(
        lambda x: jax.pure_callback(stumble, same_type(x), x), mesh=mesh(), in_specs=P("x"), out_specs=P("x")
    )
    jax.jit(call)(sharded).block_until_ready()


def test_an_exception_arrives_with_its_own_traceback_and_no_other(atoll_python: RemotePython) -> None:
    with pytest.raises(RemoteError, match="INTERNAL: CpuCallback error calling callback") as caught:
        atoll_python.call(raises)
    assert "stumble" in caught.value.text
    assert "KeyError: 'my own key'" in caught.value.text
    assert "client_callbacks" not in caught.value.text


def forget_failed_runs() -> None:
    """Forget failed runs, because JAX's barrier raises the errors of earlier runs, also on stock JAX."""
    dispatch.runtime_tokens.clear()


def test_an_exception_in_one_shard_fails_the_run_and_nothing_else(atoll_python: RemotePython) -> None:
    with pytest.raises(RemoteError, match="ValueError: the third shard"):
        atoll_python.call(raises_in_one_shard)
    atoll_python.call(forget_failed_runs)
    assert atoll_python.call(ordered_calls, 3) == [0, 1, 2]


# ---- callbacks that use the cluster, and their dependents


def uses_the_cluster() -> list[float]:
    inner = jax.device_put(jnp.arange(3.0), jax.devices()[0])

    def compute(x: Any) -> Any:
        with jax.default_device(jax.devices()[0]):
            there = jax.device_put(np.asarray(x), jax.devices()[0])
            return np.asarray(jax.jit(lambda a, b: a + b)(there, inner))

    outer = jax.jit(lambda x: jax.pure_callback(compute, same_type(x), x))
    y = outer(jax.device_put(jnp.ones(3), jax.devices()[0]))
    return [float(z) for z in y + 1]


def test_a_callback_may_compute_on_the_device_that_waits_for_it(atoll_python: RemotePython) -> None:
    assert atoll_python.call(uses_the_cluster) == [2.0, 3.0, 4.0]


def results_of_callbacks_that_start_others_which_wait_for_one_another() -> int:
    count = 12  # more than a test host has CPUs
    barrier = threading.Barrier(count)

    def meet(x: Any) -> Any:
        barrier.wait(SECONDS)
        return np.asarray(x) + 1

    def start(x: Any) -> Any:
        functions = [jax.jit(lambda x: io_callback(meet, same_type(x), x)) for _ in range(count)]
        with ThreadPoolExecutor(count) as threads:
            return sum(int(each) for each in threads.map(lambda function: function(jnp.int32(x)), functions))

    outer = jax.jit(lambda x: io_callback(lambda x: np.int32(start(int(x))), same_type(x), x))
    return int(outer(jnp.int32(1)))


def test_callbacks_may_start_functions_with_callbacks_that_wait_for_one_another(atoll_python: RemotePython) -> None:
    assert atoll_python.call(results_of_callbacks_that_start_others_which_wait_for_one_another) == 24


def sum_of_callbacks_that_wait_for_one_another(count: int) -> int:
    barrier = threading.Barrier(count)

    def meet(x: Any) -> Any:
        if x > 0:
            barrier.wait(SECONDS)
        return np.asarray(x)

    function = jax.jit(lambda x: io_callback(meet, same_type(x), x))
    function(jnp.int32(0)).block_until_ready()  # compiled before the threads need it
    with ThreadPoolExecutor(count) as threads:
        return sum(int(each) for each in threads.map(function, [jnp.int32(1)] * count))


def test_as_many_callbacks_as_the_limit_may_wait_for_one_another(atoll_python: RemotePython) -> None:
    assert atoll_python.call(sum_of_callbacks_that_wait_for_one_another, MAX_PER_SESSION) == MAX_PER_SESSION


def uses_the_cluster_in_many_runs(count: int) -> list[list[float]]:
    """Launch more runs of callbacks that use two devices than may be in flight, with dependents of their results."""
    devices = jax.devices()[:2]
    mesh = jax.make_mesh((2,), ("x",), devices=devices)
    sharding = jax.sharding.NamedSharding(mesh, jax.P("x"))
    inner = jax.jit(lambda a: a * 2)

    def compute(x: Any) -> Any:
        return np.asarray(inner(jax.device_put(np.asarray(x), devices[0])))

    outer = jax.jit(
        jax.shard_map(
            lambda x: jax.pure_callback(compute, same_type(x), x), mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x")
        )
    )
    add = jax.jit(lambda x, y: x + y, donate_argnums=1)
    made = []
    for i in range(count):
        x = jax.device_put(np.full(2, i, np.float32), sharding)
        made.append(add(outer(x), x))
    return [np.asarray(x).tolist() for x in made]


def test_callbacks_of_many_runs_may_compute_on_the_devices_that_wait_for_them(atoll_python: RemotePython) -> None:
    assert atoll_python.call(uses_the_cluster_in_many_runs, 12) == [[3.0 * i] * 2 for i in range(12)]


def others_while_one_waits() -> tuple[bool, list[float]]:
    """Return whether a callback was still running when other work was complete."""
    go_on = threading.Event()

    def wait(x: Any) -> Any:
        go_on.wait(SECONDS)
        return np.asarray(x)

    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    there = jax.device_put(np.ones(2), jax.sharding.NamedSharding(mesh, jax.P("x")))
    spread = jax.shard_map(
        lambda x: jax.pure_callback(wait, same_type(x), x), mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x")
    )
    slow = jax.jit(spread)(there)
    later = slow + 1  # is queued behind it
    quick = jax.jit(lambda x: x * 2)
    results = [float(quick(jnp.float32(i))) for i in range(20)]
    still = not go_on.is_set()
    go_on.set()
    later.block_until_ready()
    return still, results


def test_other_work_of_the_device_goes_on_while_a_callback_waits(atoll_python: RemotePython) -> None:
    still_waiting, results = atoll_python.call(others_while_one_waits)
    assert still_waiting
    assert results == [2.0 * i for i in range(20)]


def settings_in_callbacks() -> list[str]:
    seen = []

    def look(x: Any) -> Any:
        seen.append(jax.config.jax_numpy_dtype_promotion)
        return np.asarray(x)

    function = jax.jit(lambda x: io_callback(look, same_type(x), x))
    for setting in ("strict", "standard", "strict"):
        with jax.numpy_dtype_promotion(setting):
            function(jnp.float32(1))
    function(jnp.float32(1))
    return seen


def test_callbacks_on_one_device_have_the_settings_of_the_thread_that_calls(atoll_python: RemotePython) -> None:
    assert atoll_python.call(settings_in_callbacks) == ["strict", "standard", "strict", "standard"]


def called_with_a_guard_of_threads() -> float:
    with config.thread_guard(True):
        return float(jax.jit(doubled)(jnp.float32(1)))


def test_a_guard_of_threads_does_not_forbid_callbacks(atoll_python: RemotePython) -> None:
    assert atoll_python.call(called_with_a_guard_of_threads) == 2


def contexts_in_callbacks() -> tuple[list[str], bool]:
    variable: contextvars.ContextVar[Any] = contextvars.ContextVar("variable", default="default")
    seen = []

    class Value:
        pass

    def look(x: Any) -> Any:
        seen.append(f"{type(variable.get()).__name__} {np.geterr()['divide']}")
        return np.asarray(x)

    function = jax.jit(lambda x: io_callback(look, same_type(x), x))
    token = variable.set(Value())
    value = weakref.ref(variable.get())
    with np.errstate(divide="raise"):
        function(jnp.float32(1))
    variable.reset(token)
    del token
    gone = value() is None
    function(jnp.float32(1))
    return seen, gone


def test_callbacks_on_one_device_have_the_context_of_the_thread_that_calls(atoll_python: RemotePython) -> None:
    seen, gone = atoll_python.call(contexts_in_callbacks)
    assert seen == ["Value raise", "str warn"]
    assert gone


def callables_that_are_left() -> int:
    from atoll.client.jax_patches import host_callbacks

    def run(i: int) -> None:
        jax.jit(lambda x: jax.debug.callback(lambda x: time.sleep(0.01), x))(jnp.float32(i))

    before = len(host_callbacks.CLIENT_CHANNEL)
    for i in range(5):
        run(i)
    jax.effects_barrier()
    jax.clear_caches()
    deadline = time.monotonic() + SECONDS
    while len(host_callbacks.CLIENT_CHANNEL) > before and time.monotonic() < deadline:
        jax.jit(lambda x: x)(1.0).block_until_ready()
        time.sleep(0.05)
    return len(host_callbacks.CLIENT_CHANNEL) - before


def test_callables_are_forgotten_with_their_functions(atoll_python: RemotePython) -> None:
    assert atoll_python.call(callables_that_are_left) <= 0


# ---- other clusters


def test_callbacks_work_on_an_island_of_two_hosts(two_hosts_python: RemotePython) -> None:
    results = two_hosts_python.call(results_of_transformations, "shard_map", "automatically sharded")
    np.testing.assert_array_equal(results["shard_map"], [0, 2, 4, 6])
    np.testing.assert_array_equal(results["automatically sharded"], [0, 2, 4, 6])


def test_callbacks_work_beside_a_local_cpu_platform_on_an_island_of_one_device(start_python: Any) -> None:
    python = start_python("1x1x1", JAX_PLATFORMS="atoll,cpu")
    assert python.call(ordered_calls, 3) == [0, 1, 2]
    assert python.call(uses_the_cluster) == [2.0, 3.0, 4.0]
