"""Tests of pipeline steps on stock JAX's devices, where the program is called directly, with several devices
per stage.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from atoll.pipelines.boundary import stage_boundary
from atoll.pipelines.pipeline import Pipeline, pipeline
from atoll.pipelines.schedule import Schedule
from tests.end_to_end.remote_python import RemotePython
from tests.pipelines import models

pytestmark = pytest.mark.slow

ROWS = PartitionSpec("data")


@functools.cache
def devices() -> np.ndarray[Any, Any]:
    """Return four devices, each of which represents an island or a part of one."""
    return np.array(jax.devices()[:4])


def losses_of(pipe: Pipeline, params: Any, batches: Sequence[Any]) -> tuple[list[float], Any]:
    state, losses = pipe.init(params, batches[0]), []
    for batch in batches:
        state, value = pipe.step(state, batch)
        losses.append(float(value))
    return losses, pipe.params(state)


def plain(loss: Any, optimizer: Any, params: Any, batches: Sequence[Any]) -> tuple[list[float], Any]:
    """Return the results on one device with the whole batch."""

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses = optimizer.init(params), []
    for batch in batches:
        params, state, value = step(params, state, batch)
        losses.append(float(value))
    return losses, params


def check_same(loss: Any, params: Any, batches: Sequence[Any], stages: int, schedule: str | Schedule) -> None:
    adam = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))
    microbatches = 4 if isinstance(schedule, str) else schedule.microbatches
    losses, after = losses_of(pipeline(loss, list(devices()[:stages]), microbatches, adam, schedule), params, batches)
    wanted, wanted_after = plain(loss, adam, params, batches)
    assert losses == pytest.approx(wanted, rel=1e-5)
    for one, other in zip(jax.tree.leaves(after), jax.tree.leaves(wanted_after), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [
        ("1f1b", 1),
        pytest.param("interleaved", 2, marks=pytest.mark.thorough),  # the suite tests these two across islands
        pytest.param("zb-h1", 4, marks=pytest.mark.thorough),
        pytest.param("gpipe", 2, marks=pytest.mark.thorough),
        pytest.param("1f1b", 4, marks=pytest.mark.thorough),
    ],
)
def test_losses_and_parameters_are_those_of_plain_jax(schedule: str, stages: int) -> None:
    layers = 1 if stages == 1 else models.LAYERS
    check_same(models.loss, models.first_params(layers), [models.first_batch(8)] * 3, stages, schedule)


def one_stage_and_plain_jax() -> None:
    adam = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    params, batches = models.first_params(2), [models.first_batch(8)] * 3
    losses, after = losses_of(pipeline(models.loss, list(devices()[:1]), 1, adam), params, batches)
    wanted, wanted_after = plain(models.loss, adam, params, batches)
    assert losses == wanted
    for one, other in zip(jax.tree.leaves(after), jax.tree.leaves(wanted_after), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.thorough  # the suite tests this with a model of Flax NNX on Atoll
def test_one_stage_and_one_microbatch_are_plain_jax_bit_for_bit(tmp_path: Path) -> None:
    # Two programs, compiled as for users: they have the same bits only without the options for quick tests. The number
    # of modules that LLVM compiles does not change the code.
    python = RemotePython(os.environ | {"XLA_FLAGS": "--xla_cpu_parallel_codegen_split_count=1"}, tmp_path)
    try:
        python.call(one_stage_and_plain_jax)
    finally:
        python.close()


def test_gradients_of_one_stage_are_summed_as_in_plain_jax_with_jit_functions_in_the_model() -> None:
    """A jit function uses a value twice, and its caller uses it once more: (a + b) + c differs from a + (b + c)."""

    @jax.jit
    def plain_jit(x: Any, layer: Any) -> Any:
        return jnp.tanh(x @ layer) * x + jnp.sin(x) * 0.3

    @jax.jit
    def marked(x: Any, layer: Any) -> Any:
        return stage_boundary(jnp.tanh(x @ layer) * x) + jnp.sin(x)

    def loss(params: Any, batch: Any, inner: Any) -> Any:
        x = batch @ params[0]
        return jnp.mean((inner(x, params[1]) + 0.7 * jnp.cos(x)) ** 2)

    rng = np.random.default_rng(0)
    params = [rng.standard_normal((16, 16), np.float32) for _ in range(2)]
    batches = [rng.standard_normal((16, 16), np.float32) for _ in range(5)]
    for inner, tolerance in ((plain_jit, 0.0), (marked, 1e-5)):
        some = functools.partial(loss, inner=inner)
        _, after = losses_of(pipeline(some, list(devices()[:1]), 1, optax.sgd(1e-1)), params, batches)
        _, wanted = plain(some, optax.sgd(1e-1), params, batches)
        for one, other in zip(after, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def test_a_table_of_the_users_own_runs() -> None:
    v_shaped = Schedule.of("0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1\n1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1")
    check_same(models.loss_of_rows, models.first_params(4)["layers"], [models.first_rows(8)] * 2, 2, v_shaped)


@pytest.mark.thorough
def test_values_that_skip_stages_and_penalties_on_weights_have_their_gradients() -> None:
    def loss(params: Any, batch: Any) -> Any:
        x = first = jnp.tanh(batch @ params[0])
        for each in params[1:]:
            x, first = stage_boundary((jnp.tanh(x @ each), first))
        return jnp.mean((x + first) ** 2) + 1e-2 * sum(jnp.sum(each**2) for each in params)

    rng = np.random.default_rng(0)
    params = [rng.standard_normal((8, 8), np.float32) for _ in range(4)]
    check_same(loss, params, [rng.standard_normal((8, 8), np.float32)] * 2, 4, "1f1b")


@pytest.mark.thorough
def test_parameters_that_nothing_uses_and_integers_are_as_in_plain_jax() -> None:
    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean(jnp.tanh(stage_boundary(batch @ params["first"]) @ params["second"]) * params["count"])

    rng = np.random.default_rng(0)
    params = {name: rng.standard_normal((8, 8), np.float32) for name in ("first", "second", "unused")}
    pipe = pipeline(loss, list(devices()[:2]), 2, optax.adamw(1e-1))
    _, after = losses_of(pipe, params | {"count": np.int32(3)}, [np.ones((4, 8), np.float32)])
    assert after["count"] == 3
    np.testing.assert_allclose(after["unused"], params["unused"] * (1 - 1e-1 * 1e-4), rtol=1e-6)  # weights decay


@pytest.mark.thorough
def test_leaves_that_are_no_arrays_stay_as_they_are() -> None:
    """A model of Equinox has its activation functions as leaves."""
    equinox = pytest.importorskip("equinox")
    layers = [equinox.nn.MLP(8, 8, 8, 1, jnp.tanh, key=jax.random.key(number)) for number in range(2)]

    def loss(model: Any, batch: Any) -> Any:
        return jnp.mean(jax.vmap(model[1])(stage_boundary(jax.vmap(model[0])(batch))) ** 2)

    pipe = pipeline(loss, list(devices()[:2]), 2, optax.sgd(1e-1))
    losses, after = losses_of(pipe, layers, [np.ones((4, 8), np.float32)] * 2)
    assert losses[0] == pytest.approx(float(loss(layers, np.ones((4, 8), np.float32))), rel=1e-5)
    assert losses[1] < losses[0]
    assert [each.activation for each in after] == [each.activation for each in layers]


def test_stages_of_several_devices_shard_as_the_model_and_its_parameters_say() -> None:
    rng = np.random.default_rng(0)
    meshes = [Mesh(devices()[:2], ("data",)), Mesh(devices()[2:], ("data",))]
    layers = [rng.standard_normal((8, 8), np.float32) for _ in range(2)]
    batch = rng.standard_normal((8, 8), np.float32)

    def loss(params: Any, batch: Any, constrained: bool = True) -> Any:
        x = batch
        for each in params:
            x = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))(each, x)
            if constrained:
                x = jax.lax.with_sharding_constraint(x, NamedSharding(meshes[0], ROWS))
        return jnp.mean(x**2)

    adam = optax.adam(1e-2)
    sharded = [jax.device_put(each, NamedSharding(meshes[0], ROWS)) for each in layers]
    pipe = pipeline(loss, meshes, 2, adam)
    state = pipe.init(sharded, batch)

    @jax.jit
    def plain_step(params: Any, moments: Any) -> Any:
        value, gradients = jax.value_and_grad(lambda params: loss(params, batch, False))(params)
        updates, moments = adam.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, value

    params, moments = layers, adam.init(layers)
    for _ in range(2):
        state, value = pipe.step(state, batch)
        params, moments, wanted = plain_step(params, moments)
        assert float(value) == pytest.approx(float(wanted), rel=1e-6)
    for stage, (one, other) in enumerate(zip(pipe.params(state), params, strict=True)):
        np.testing.assert_allclose(one, other, rtol=1e-5)
        assert one.sharding.mesh.devices.tolist() == meshes[stage].devices.tolist()
        assert one.sharding.spec[0] == "data"
    assert [each.sharding.spec for each in state.optimizer[0][1:]] == [PartitionSpec("data", None)] * 2
    assert jax.tree.structure(pipe.optimizer_state(state)) == jax.tree.structure(moments)
    assert not any(each.is_deleted() for each in sharded)  # the user's own arrays are not donated


@pytest.mark.thorough
def test_stages_of_two_axes_shard_rows_over_one_and_layers_over_the_other() -> None:
    """Use data and tensor parallelism inside each stage: its first layer is sharded by columns, and its
    second by rows.
    """
    meshes = [Mesh(np.array(jax.devices()[i : i + 4]).reshape(2, 2), ("data", "tensor")) for i in (0, 4)]
    columns, rows = PartitionSpec(None, "tensor"), PartitionSpec("tensor", None)

    def loss(params: Any, batch: Any) -> Any:
        x = stage_boundary(batch + jnp.tanh(batch @ params[0][0]) @ params[0][1])
        return jnp.mean((x + jnp.tanh(x @ params[1][0]) @ params[1][1]) ** 2)

    rng = np.random.default_rng(0)
    params = [[rng.standard_normal(shape, np.float32) for shape in ((8, 16), (16, 8))] for _ in range(2)]
    batches = [rng.standard_normal((8, 8), np.float32) for _ in range(2)]
    specs = [[columns, rows]] * 2
    pipe = pipeline(loss, meshes, 2, optax.adam(1e-2), param_specs=specs)
    losses, after = losses_of(pipe, params, batches)
    wanted, wanted_after = plain(loss, optax.adam(1e-2), params, batches)
    assert losses == pytest.approx(wanted, rel=1e-5)
    for stage, (layers, expected) in enumerate(zip(after, wanted_after, strict=True)):
        for one, other, spec in zip(layers, expected, specs[stage], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
            assert one.sharding.is_equivalent_to(NamedSharding(meshes[stage], spec), 2)
