"""Tests of colocated Python on devices of several islands, also if one of them fails."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import colocated_python
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.end_to_end.remote_python import RemotePython, StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster

BACK_SECONDS = 120.0
_kept: dict[str, Any] = {}


# The tests of failures have islands of one host.
@pytest.fixture(scope="module", params=[pytest.param("2x1x2", marks=pytest.mark.thorough), "2x2x1"])
def python(request: pytest.FixtureRequest, start_python: StartPython) -> RemotePython:
    """Return a child with two islands of two devices, of one host and of two."""
    return start_python(request.param)


def over(*devices: int) -> NamedSharding:
    chosen = jax.devices() if not devices else [jax.devices()[each] for each in devices]
    return NamedSharding(Mesh(np.array(chosen), ("x",)), PartitionSpec("x"))


def filled(like: jax.Array, value: int) -> jax.Array:
    """Return an array of this sharding whose local shards have this value."""
    shards = [jax.device_put(np.full(each.data.shape, value), each.device) for each in like.addressable_shards]
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, shards)


# ---- functions called in the children


def numbers_on_all_devices() -> tuple[list[int], list[int]]:
    @colocated_python.colocated_python
    def numbers(x: jax.Array) -> jax.Array:
        return filled(x, 10 * jax.process_count() + jax.process_index())

    together = jax.device_get(numbers(jax.device_put(np.zeros(4, np.int64), over())))
    last = jax.device_get(numbers(jax.device_put(np.zeros(2, np.int64), over(2, 3))))
    return together.tolist(), last.tolist()


def sum_of_all_devices() -> list[float]:
    @colocated_python.colocated_python
    def centered(x: jax.Array) -> jax.Array:
        return jax.jit(lambda x: x - jnp.mean(x))(x)

    return [float(each) for each in jax.device_get(centered(jax.device_put(np.arange(8.0), over())))]


def results_of_other_shardings() -> list[Any]:
    """Specialize a function of a replicated and a sharded array, one of which is on one island."""
    everywhere = NamedSharding(over().mesh, PartitionSpec())
    last = over(2, 3)

    def parts(x: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
        at_last = [each for each in last._device_assignment if each.process_index == jax.process_index()]
        shards = [jax.device_put(np.array([7]), each) for each in at_last]
        return {
            "swapped": y,
            "last": jax.make_array_from_single_device_arrays((2,), last, shards, dtype=y.dtype),
        }

    x = jax.device_put(np.arange(4), over())
    y = jax.device_put(np.arange(3), everywhere)
    specs = {
        "swapped": jax.ShapeDtypeStruct(y.shape, y.dtype, sharding=y.sharding),
        "last": jax.ShapeDtypeStruct((2,), y.dtype, sharding=last),
    }
    function = colocated_python.colocated_python(parts).specialize(
        devices=jax.devices(), out_specs_fn=lambda x, y: specs
    )
    found = function(x, y)
    return [found["swapped"].sharding == everywhere, *(jax.device_get(found[each]).tolist() for each in specs)]


def count_with_an_object() -> list[list[int]]:
    @colocated_python.colocated_python_class
    class Counter:
        def __init__(self, start: int) -> None:
            self._count = start

        def add(self, x: jax.Array) -> jax.Array:
            self._count += 1 + jax.process_index()
            return filled(x, self._count)

    counter, x = Counter(100), jax.device_put(np.zeros(4, np.int64), over())
    return [jax.device_get(counter.add(x)).tolist() for _ in range(3)]


def pass_to_computations() -> list[float]:
    """Pass an array through Python and computations across the islands, which use different clients on the hosts."""

    @colocated_python.colocated_python
    def same(x: jax.Array) -> jax.Array:
        return x

    step = jax.jit(lambda x: x + jnp.sum(x) * 0 + 1)
    x = jax.device_put(np.arange(4.0), over())
    for _ in range(3):
        x = step(same(x))
    return [float(each) for each in np.asarray(x)]


def an_exception() -> str:
    @colocated_python.colocated_python
    def fail_on_the_last(x: jax.Array) -> jax.Array:
        if jax.process_index() == jax.process_count() - 1:
            raise ValueError("the last host fails")
        return x

    try:
        jax.block_until_ready(fail_on_the_last(jax.device_put(np.arange(4), over())))
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return ""


def test_the_hosts_of_all_islands_run_one_jax_program(python: RemotePython) -> None:
    together, last = python.call(numbers_on_all_devices)
    islands_of_two_hosts = {(40, 41, 42, 43): [20, 21]}
    assert last == islands_of_two_hosts.get(tuple(together), [10, 10])
    assert together in ([40, 41, 42, 43], [20, 20, 21, 21])


def test_the_hosts_compute_together(python: RemotePython) -> None:
    assert python.call(sum_of_all_devices) == [each - 3.5 for each in range(8)]


def test_results_have_their_own_shardings(python: RemotePython) -> None:
    assert python.call(results_of_other_shardings) == [True, [0, 1, 2], [7, 7]]


def test_an_object_has_a_state_on_each_host(python: RemotePython) -> None:
    first, _, third = python.call(count_with_an_object)
    assert first in ([101, 101, 102, 102], [101, 102, 103, 104])
    assert [each - 100 for each in third] == [3 * (each - 100) for each in first]


def test_arrays_pass_between_python_and_computations(python: RemotePython) -> None:
    assert python.call(pass_to_computations) == [3.0, 4.0, 5.0, 6.0]


def test_an_exception_on_one_island_fails_the_call(python: RemotePython) -> None:
    assert "ValueError: the last host fails" in python.call(an_exception)
    assert python.call(sum_of_all_devices) == [each - 3.5 for each in range(8)]


# ---- failures of islands


@pytest.fixture(scope="module")
def cluster(start_cluster: StartCluster) -> StandingCluster:
    # The methods of a lost object also raise its error while Python deletes the object, and Python prints it.
    return start_cluster(islands="3x1x1", has_bugs=True)


@pytest.fixture(scope="module")
def user(cluster: StandingCluster, start_python: StartPython) -> RemotePython:
    user = start_python(ATOLL_ADDRESS=cluster.address)
    user.call(prepare)
    return user


def prepare() -> None:
    """Make one object on all islands, one on the first two, and one on the first."""

    @colocated_python.colocated_python_class
    class Counter:
        def __init__(self) -> None:
            self._count = 0

        def add(self, x: jax.Array) -> jax.Array:
            self._count += 1
            return filled(x, self._count)

    @colocated_python.colocated_python
    def wait(x: jax.Array) -> jax.Array:
        Path(_begun()).touch()
        time.sleep(1000)
        return x

    _kept.update(wait=wait.specialize(out_specs_fn=lambda x: x), new=Counter)
    for islands in ((0, 1, 2), (0, 1), (0,)):
        _kept[islands] = jax.device_put(np.zeros(len(islands), np.int64), over(*islands)), Counter()
        count(islands)


def _begun() -> str:
    return str(Path("begun").absolute())


def count(islands: tuple[int, ...]) -> list[int] | str:
    x, counter = _kept[islands]
    try:
        return [int(each) for each in jax.device_get(counter.add(x))]
    except jax.errors.JaxRuntimeError as error:
        return str(error)


def count_again(islands: tuple[int, ...]) -> list[int] | str:
    """Count with a new object and a new array."""
    _kept[islands] = jax.device_put(np.zeros(len(islands), np.int64), over(*islands)), _kept["new"]()
    return count(islands)


def count_with_the_old_object(islands: tuple[int, ...]) -> list[int] | str:
    """Count with the object that was made before the failure, and a new array."""
    _kept[islands] = jax.device_put(np.zeros(len(islands), np.int64), over(*islands)), _kept[islands][1]
    return count(islands)


def wait_for_long() -> tuple[float, str]:
    """Call a function on all islands that does not return. Return the time of its failure, and the error."""
    try:
        jax.block_until_ready(_kept["wait"](_kept[0, 1, 2][0]))
    except jax.errors.JaxRuntimeError as error:
        return time.time(), str(error)
    return time.time(), ""


@pytest.mark.parametrize("lost", [2, 0])
def test_a_lost_island_ends_the_calls_that_include_it_and_their_processes(
    cluster: StandingCluster, user: RemotePython, lost: int
) -> None:
    others = (0, 1) if lost == 2 else (0,)
    before = user.call(count, others)
    user.begin(wait_for_long)
    until(lambda: Path(user.directory, "begun").exists())
    workers = {host: cluster.worker(host).pid for host in range(3) if host != lost}
    cluster.worker(lost).send_signal(signal.SIGKILL)
    ended = time.time()
    failed, error = user.finish()
    assert failed - ended < 10.0
    assert "DATA_LOSS" in error
    assert f"host {lost} of island {lost} is gone" in error
    if lost == 2:  # other islands continue, with their processes and objects
        assert user.call(count, others) == [each + 1 for each in before]
    cluster.until(lambda report: all(each["state"] == "ready" for each in report["islands"]), BACK_SECONDS)
    if lost == 2:
        assert user.call(count, others) == [each + 2 for each in before]
        assert "the object was lost when its process on host" in user.call(count_with_the_old_object, (0, 1, 2))
    for islands in ((0, 1, 2), (0, 1), (0,)):
        assert user.call(count_again, islands) == [1] * len(islands)
    assert {host: cluster.worker(host).pid for host in workers} == workers
    Path(user.directory, "begun").unlink()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BACK_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
