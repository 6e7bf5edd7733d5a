"""Tests of trainings that continue after an island fails, and of copies that survive the failure."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.end_to_end.remote_python import RemoteError, RemotePython, StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster

LEASE_SECONDS = 3.0
BACK_SECONDS = 300.0
WIDTH, ROWS = 32, 12


@pytest.fixture(scope="module")
def standing(start_cluster: StartCluster) -> StandingCluster:
    """Start a cluster of three islands with one device each."""
    return start_cluster(islands="3x1x1", lease_seconds=LEASE_SECONDS)


@pytest.fixture(scope="module")
def user(start_python: StartPython, standing: StandingCluster) -> RemotePython:
    return start_python(ATOLL_ADDRESS=standing.address, JAX_ENABLE_X64="0")


@pytest.fixture
def lose(standing: StandingCluster) -> Callable[..., None]:
    """End the worker of an island, after all islands work."""

    def inject(*islands: int, signal_: int = signal.SIGKILL) -> None:
        are_ready(standing)
        for island in islands:
            standing.worker(island).send_signal(signal_)

    return inject


def lose_one(standing: StandingCluster) -> None:
    """End the worker of island 1, and wait until the controller knows."""
    are_ready(standing)
    before = standing.report()["islands"][1]["restarts"]
    standing.worker(1).kill()
    standing.until(lambda report: report["islands"][1]["restarts"] > before, BACK_SECONDS)


def are_ready(standing: StandingCluster) -> None:
    standing.until(lambda report: all(each["state"] == "ready" for each in report["islands"]), BACK_SECONDS)


# ---- functions that run in the user's process

state: dict[str, Any] = {}


def gradients(weights: Any, rows: Any) -> Any:
    import jax
    import jax.numpy as jnp

    loss, gradient = jax.value_and_grad(lambda weights: jnp.mean(jnp.tanh(rows @ weights) ** 2))(weights)
    return gradient, loss


def update(weights: Any, gradient: Any) -> Any:
    return weights - 0.1 * gradient


def batch(step: int) -> Any:
    return np.random.default_rng(step).normal(size=(ROWS, WIDTH)).astype(np.float32)


def first() -> Any:
    return np.random.default_rng(99).normal(size=(WIDTH, WIDTH)).astype(np.float32)


def begin(every: int, steps: int = 1 << 30, compile_ahead: int = 8, min_islands: int = 1) -> None:
    import atoll

    training = atoll.elastic.data_parallel(gradients, update)
    run = atoll.elastic.run(
        training, first(), batch, steps=steps, every=every, compile_ahead=compile_ahead, min_islands=min_islands
    )
    state.update(run=run, steps=iter(run), losses=[])


def begin_pipeline(every: int, min_islands: int) -> None:
    """Begin a run of a pipeline of three stages, with Adam's state."""
    import jax.numpy as jnp
    import optax

    import atoll

    def loss_fn(layers: Any, rows: Any) -> Any:
        for layer in layers:
            rows = atoll.stage_boundary(jnp.tanh(rows @ layer))
        return jnp.mean(rows**2)

    training = atoll.elastic.pipeline(loss_fn, batch(0), stages=3, microbatches=2, optimizer=optax.adam(1e-2))
    run = atoll.elastic.run(training, [first() / 9] * 3, batch, steps=1 << 30, every=every, min_islands=min_islands)
    state.update(run=run, steps=iter(run), losses=[])


def until_compiled_ahead(count: int) -> list[tuple[int, ...]]:
    """Step until the run has compiled for so many sets of islands, and return them."""
    step_until(lambda run: len(run.compiled_ahead) >= count)
    return state["run"].compiled_ahead


def count_compilations() -> None:
    """Count the functions that this process traces and compiles from now on."""
    from jax import monitoring

    state["compilations"] = found = []

    def count(event: str, seconds: float, **labels: Any) -> None:
        if event in ("/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/backend_compile_duration"):
            found.append((event.rpartition("/")[2], labels.get("fun_name")))

    monitoring.register_event_duration_secs_listener(count)


def compilations() -> list[Any]:
    return list(state["compilations"])


def step_until(holds: Callable[[Any], bool], seconds: float = BACK_SECONDS) -> int:
    """Run steps until the run has the expected state. Return its steps so far, each of which came once and in order."""
    deadline = time.monotonic() + seconds
    while not holds(state["run"]):
        number, loss = next(state["steps"])
        assert number == len(state["losses"])
        state["losses"].append(float(loss))
        assert time.monotonic() < deadline, (state["run"].changes, state["run"].islands)
    return len(state["losses"])


def steps(count: int) -> int:
    wanted = len(state["losses"]) + count
    return step_until(lambda run: len(state["losses"]) >= wanted)


def until_on(*islands: int) -> int:
    return step_until(lambda run: run.islands == islands)


def losses() -> list[float]:
    return list(state["losses"])


def changes() -> list[tuple[str, tuple[int, ...], int, float]]:
    return [(each.reason, each.islands, each.repeated, each.seconds) for each in state["run"].changes]


def undisturbed(count: int) -> list[float]:
    """Return the losses of stock JAX on one device."""
    import jax

    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        compute, weights, found = jax.jit(gradients), first(), []
        for step in range(count):
            gradient, loss = compute(weights, batch(step))
            weights = update(weights, gradient)
            found.append(float(loss))
    return found


def replicate_on(island: int) -> None:
    """Run nine steps of two arrays on an island, whose values depend on the step, and copy every third step."""
    import jax

    import atoll

    device = next(each for each in jax.devices() if each.slice_index == island)
    tree = {"a": jax.device_put(np.zeros(100_000, np.float32), device), "b": jax.device_put(np.int32(0), device)}
    replica = atoll.replicate(tree, every=3)
    follow = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    for step in range(1, 10):
        tree = follow(tree)
        assert replica.refresh(tree, step) == (step % 3 == 0)
        replica.wait()
    state.update(replica=replica, tree=tree, follow=follow)


def refresh_on() -> None:
    """Start another copy without waiting for it."""
    state["tree"] = state["follow"](state["tree"])
    state["replica"].refresh(state["tree"], state["replica"].step + 3)


def recovered() -> tuple[int, list[int], list[int]]:
    """Return the recovered step, its values, and their islands."""
    import atoll

    tree, step = atoll.recover(state["replica"])
    values = sorted({int(value) for leaf in tree.values() for value in np.unique(np.asarray(leaf))})
    return step, values, sorted({each.slice_index for leaf in tree.values() for each in leaf.devices()})


def statistics() -> Any:
    return state["replica"].statistics()


# ---- the tests


def test_a_training_loses_an_island_takes_it_again_and_has_the_losses_of_an_undisturbed_one(user, standing, lose):
    user.call(begin, 5)
    before = user.call(steps, 40)
    lose(1)
    user.call(step_until_lost, 1)
    user.call(until_on, 0, 1, 2)
    count = user.call(steps, 10)
    (_, lost, *back) = user.call(changes)
    assert lost[0] == "lost"
    # The worker may have restarted before the test looks.
    assert (lost[1], [each[:3] for each in back]) in [((0, 2), [("back", (0, 1, 2), 0)]), ((0, 1, 2), [])]
    found = user.call(losses)
    np.testing.assert_allclose(found, user.call(undisturbed, count), rtol=1e-5)
    user.call(begin, 5)
    user.call(steps, before)
    assert user.call(losses)[:before] == found[:before], "bit for bit, on the same islands"


@pytest.mark.parametrize("begin_with", [begin, begin_pipeline], ids=["data parallel", "pipeline"])
def test_a_recovery_compiles_nothing_that_was_compiled_ahead(user, standing, lose, begin_with):
    are_ready(standing)
    user.call(partial(begin_with, 5, min_islands=2))  # so it does not compile for the next loss after this one
    assert user.call(until_compiled_ahead, 3) == [(0, 1), (0, 2), (1, 2)]
    are_ready(standing)
    user.call(until_copied)
    user.call(count_compilations)
    lose(1)
    user.call(step_until_lost, 1)
    assert user.call(compilations) == []
    _, *found = user.call(changes)
    kinds = [each[:2] for each in found]
    lost, whole, back = ("lost", (0, 2)), ("lost", (0, 1, 2)), ("back", (0, 1, 2))
    assert kinds in [[lost], [whole], [lost, back]]  # the worker may have restarted before, or during the recovery


def test_two_islands_are_lost_one_after_the_other(user, standing, lose):
    user.call(begin, 5)
    user.call(steps, 20)
    lose(0)
    user.call(step_until_lost, 1)
    user.call(until_copied)
    standing.worker(2).kill()
    user.call(step_until_lost, 2)
    user.call(until_on, 0, 1, 2)
    count = user.call(steps, 5)
    np.testing.assert_allclose(user.call(losses), user.call(undisturbed, count), rtol=1e-5)


def until_copied() -> int:
    """Wait until there is one more copy."""
    completed = state["run"].statistics().completed
    return step_until(lambda run: run.statistics().completed > completed)


def step_until_lost(count: int) -> int:
    return step_until(lambda run: [each.reason for each in run.changes].count("lost") == count)


@pytest.mark.slow
@pytest.mark.thorough
def test_it_goes_on_where_a_worker_hangs(user, standing, lose):
    user.call(begin, 5)
    user.call(steps, 20)
    lose(2, signal_=signal.SIGSTOP)
    injected = time.monotonic()
    user.call(step_until_lost, 1)
    assert time.monotonic() - injected < BACK_SECONDS
    user.call(until_on, 0, 1, 2)


def test_where_all_islands_are_lost_the_error_says_that_no_copy_is_left(user, standing, lose):
    user.call(begin, 5)
    user.call(steps, 20)
    lose(0, 1, 2)
    with pytest.raises(RemoteError, match="RecoveryError: no complete copy is left: each copy"):
        user.call(step_until_lost, 1)
    are_ready(standing)


def test_a_copy_outlives_the_island_of_its_arrays_and_is_of_one_step(user, standing):
    are_ready(standing)
    user.call(replicate_on, 1)
    assert user.call(recovered) == (9, [9], [1])
    nbytes = 2 * 4 * 100_001
    assert user.call(statistics).nbytes == nbytes
    user.call(refresh_on)  # and loses the island during the copy
    lose_one(standing)
    step, values, islands = user.call(recovered)
    assert (step, values) in [(9, [9]), (12, [10])]
    assert islands in ([0], [1])  # it may have restarted before the test looks
    are_ready(standing)
    step, values, islands = user.call(recovered)
    assert (step, values) in [(9, [9]), (12, [10])]
    assert islands == [1], "on the same islands, after the restart"


def test_a_copy_outlives_the_island_that_it_is_on(user, standing):
    user.call(replicate_on, 0)
    lose_one(standing)
    assert user.call(recovered) == (9, [9], [0])


def test_what_is_no_array_on_one_island_is_refused(user):
    with pytest.raises(RemoteError, match="RecoveryError: each leaf of the tree must be an array on one island"):
        user.call(replicate_a_number)


def replicate_a_number() -> None:
    import atoll

    atoll.replicate({"a": 3.0})
