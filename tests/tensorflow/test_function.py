"""Tests of functions' variables, arguments and results, on stock JAX's CPU devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

tf = pytest.importorskip("tensorflow", reason="the extra tensorflow is not installed")

from atoll import tensorflow as atf  # noqa: E402


def ramp(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=dtype).reshape(shape)


def test_variables_are_read_and_assigned_and_the_tf_variables_change_when_they_are_written_back(mesh: Mesh):
    weights, calls = tf.Variable(ramp(4, 2), name="weights"), tf.Variable(0, dtype=tf.int64, name="calls")

    @atf.function(mesh=mesh)
    def step(x):
        calls.assign_add(1)
        weights.assign_sub(0.5 * weights)
        return x @ weights

    first, second = step(ramp(8, 4)), step(ramp(8, 4))
    np.testing.assert_allclose(first, ramp(8, 4) @ (ramp(4, 2) / 2))
    np.testing.assert_allclose(second, ramp(8, 4) @ (ramp(4, 2) / 4))
    np.testing.assert_array_equal(weights, ramp(4, 2))
    step.write_back()
    np.testing.assert_allclose(weights, ramp(4, 2) / 4)
    assert int(calls) == 2
    assert step.variables[calls].dtype == np.int64


def test_a_variable_that_is_only_read_is_kept_and_not_donated(mesh: Mesh):
    scale = tf.Variable(ramp(4), name="scale")
    times = atf.function(lambda x: x * scale, mesh=mesh)
    times(ramp(4))
    before = times.variables["scale"]
    times(ramp(4))
    assert times.variables["scale"] is before


def test_the_memory_of_values_that_are_replaced_is_donated_unless_the_function_keeps_it(mesh: Mesh):
    for donate in (True, False):
        total = tf.Variable(ramp(8), name="total")

        @atf.function(mesh=mesh, donate=donate)
        def add(x, total=total):
            total.assign_add(x)

        add(ramp(8))
        before = add.variables["total"]
        add(ramp(8))
        assert before.is_deleted() == donate


def test_a_learning_rate_that_the_program_sets_counts_from_the_next_call_on(mesh: Mesh):
    weights, rate = tf.Variable(ramp(4)), tf.Variable(1.0)

    @atf.function(mesh=mesh)
    def step():
        weights.assign_sub(rate * tf.ones(4))
        return weights + 0.0

    np.testing.assert_allclose(step(), ramp(4) - 1)
    rate.assign(0.25)
    np.testing.assert_allclose(step(), ramp(4) - 1.25)


def test_load_takes_what_the_program_assigned_to_a_tf_variable(mesh: Mesh):
    weights, others = tf.Variable(ramp(4)), tf.Variable(ramp(4))

    @atf.function(mesh=mesh)
    def step():
        weights.assign_add(tf.ones(4))
        others.assign_add(tf.ones(4))
        return weights + 0.0, others + 0.0

    step()
    weights.assign(tf.zeros(4))
    step.variables.load([weights])
    first, second = step()
    np.testing.assert_allclose(first, np.ones(4))
    np.testing.assert_allclose(second, ramp(4) + 2)


def test_functions_share_variables(mesh: Mesh):
    weights = tf.Variable(ramp(4))
    add = atf.function(lambda x: weights.assign_add(x), mesh=mesh)
    read = atf.function(lambda: weights * 1.0, variables=add.variables)
    add(np.ones(4, np.float32))
    np.testing.assert_allclose(read(), ramp(4) + 1)
    with pytest.raises(ValueError, match="variables= has its own mesh and shardings"):
        atf.function(lambda: weights, variables=add.variables, mesh=mesh)


def test_variables_that_the_first_call_creates_begin_with_their_initial_values(mesh: Mesh):
    made: list[Any] = []

    @atf.function(mesh=mesh)
    def step(x):
        if not made:
            made.append(tf.Variable(ramp(4), name="late"))
        return made[0].assign_add(x)

    np.testing.assert_allclose(step(np.ones(4, np.float32)), ramp(4) + 1)
    assert list(step.variables) == ["late"]


def test_results_have_the_structure_and_dtypes_that_tensorflow_gives_them(mesh: Mesh):
    @tf.function
    def many(x):
        return {"a": (x, None), "b": [tf.constant(3), tf.cast(x, tf.float64), tf.cast(x, tf.bfloat16)]}, x > 1

    ours, theirs = atf.function(many, mesh=mesh)(ramp(4)), many(ramp(4))
    tf.nest.assert_same_structure(ours, theirs)
    for our, their in zip(tf.nest.flatten(ours), tf.nest.flatten(theirs), strict=True):
        if their is not None:
            assert our.dtype == their.dtype.as_numpy_dtype
            np.testing.assert_array_equal(our, their)


def test_shapes_and_python_values_choose_the_compiled_function_as_in_tf_function(mesh: Mesh):
    traced = []

    @atf.function(mesh=mesh)
    def scaled(x, by=2, *, training=False):
        traced.append((x.shape[0], by, training))
        return x * by if training else x

    np.testing.assert_allclose(scaled(ramp(4), training=True), ramp(4) * 2)
    np.testing.assert_allclose(scaled(ramp(4), 3, training=True), ramp(4) * 3)
    np.testing.assert_allclose(scaled(ramp(8)), ramp(8))
    seen = len(traced)
    scaled(ramp(8))
    assert (len(traced), set(traced)) == (seen, {(4, 2, True), (4, 3, True), (8, 2, False)})


def test_variables_and_objects_are_arguments_by_their_identity_and_functions_are_methods(mesh: Mesh):
    class Counter:
        def __init__(self, start: float) -> None:
            self.total = tf.Variable(start)

        @atf.function(mesh=mesh)
        def add(self, x, other):
            other.assign_add(1.0)
            return self.total.assign_add(x)

    first, second, calls = Counter(0.0), Counter(10.0), tf.Variable(0.0, name="calls")
    one = np.float32(1)
    assert [float(first.add(one, calls)), float(second.add(one, calls)), float(first.add(one, calls))] == [1, 11, 2]
    assert float(Counter.add.variables[calls]) == 3


def test_a_loaded_saved_model_is_a_function(mesh: Mesh, tmp_path: Path):
    module = tf.Module()
    module.weights = tf.Variable(ramp(4, 2))
    spec = tf.TensorSpec([None, 4], tf.float32)
    module.serve = tf.function(lambda x: {"y": x @ module.weights}, input_signature=[spec])
    tf.saved_model.save(module, str(tmp_path), signatures=module.serve)
    loaded = tf.saved_model.load(str(tmp_path))
    serve = atf.function(loaded.signatures["serving_default"], mesh=mesh)
    np.testing.assert_allclose(serve(x=ramp(8, 4))["y"], ramp(8, 4) @ ramp(4, 2))


def test_a_captured_tensor_may_be_a_shape_or_a_large_constant(mesh: Mesh):
    shape, table = tf.constant([2, 2]), tf.constant(ramp(30, 10))
    taken = atf.function(lambda x: (tf.reshape(x, shape), tf.gather(table, [29])), mesh=mesh)(ramp(4))
    np.testing.assert_array_equal(taken[0], ramp(2, 2))
    np.testing.assert_array_equal(taken[1], ramp(30, 10)[29:])


def test_control_flow_is_compiled(mesh: Mesh):
    @tf.function
    def grow(x):
        count = 0
        while tf.reduce_sum(x) < 100.0:
            x, count = x * 2.0, count + 1
        return x, count

    for ours, theirs in zip(atf.function(grow, mesh=mesh)(ramp(4)), grow(ramp(4)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_random_numbers_are_those_of_tensorflow_with_xla_and_generators_go_on(mesh: Mesh):
    ours, theirs = (tf.random.Generator.from_seed(3, alg="philox") for _ in range(2))

    def draw(generator):
        return generator.normal([4]), tf.random.stateless_uniform([4], [1, 2], alg="philox")

    on_mesh = atf.function(lambda: draw(ours), mesh=mesh)
    in_tensorflow = tf.function(lambda: draw(theirs), jit_compile=True)
    for _ in range(2):
        for our, their in zip(on_mesh(), in_tensorflow(), strict=True):
            np.testing.assert_allclose(our, their, rtol=1e-6)
    on_mesh.write_back()
    np.testing.assert_array_equal(ours.state, theirs.state)


def test_rows_are_over_the_first_axis_of_the_mesh_where_they_divide_evenly(mesh: Mesh):
    same = atf.function(lambda x: x, mesh=mesh)
    assert [each.spec for each in same.functional(ramp(8, 3)).shardings] == [P("data")]
    assert [each.spec for each in same.functional(ramp(6, 3)).shardings] == [P()]
    np.testing.assert_array_equal(same(ramp(6, 3)), ramp(6, 3))


def test_arguments_are_cut_as_batch_says(square: Mesh):
    @atf.function(mesh=square, batch=({"x": P("data", "model"), "y": None}, P()))
    def weighted(batch, weights):
        return batch["x"] * weights + batch["y"][:, None]

    functional = weighted.functional({"x": ramp(4, 2), "y": ramp(4)}, ramp(4, 2))
    assert [each.spec for each in functional.shardings] == [P("data", "model"), P("data"), P()]
    with pytest.raises(ValueError, match=r"axis 0 cannot be cut into 2 equal parts"):
        weighted({"x": ramp(3, 2), "y": ramp(3)}, ramp(3, 2))


def test_a_dataset_and_arrays_of_jax_are_input(mesh: Mesh):
    total = atf.function(lambda batch: tf.reduce_sum(batch), mesh=mesh)
    dataset = tf.data.Dataset.from_tensor_slices(ramp(16)).batch(8)
    assert [float(total(batch)) for batch in dataset] == [28.0, 92.0]
    assert float(total(jax.device_put(ramp(8), NamedSharding(mesh, P())))) == 28.0


def test_without_its_state_it_is_a_function_of_all_values_and_the_arguments(mesh: Mesh):
    weights, scale = tf.Variable(ramp(4), name="weights"), tf.Variable(2 * np.ones(4, np.float32), name="scale")

    def step(x):
        weights.assign_add(x * scale)
        return {"sum": tf.reduce_sum(weights)}

    on_mesh = atf.function(step, mesh=mesh, donate=False)
    functional = on_mesh.functional(ramp(4))
    state = dict(on_mesh.variables)
    assert (functional.assigned, functional.kept) == (("weights",), ("scale",))
    result, new = jax.jit(functional)(state, ramp(4))
    assert float(result["sum"]) == 18.0
    np.testing.assert_allclose(new["weights"], 3 * ramp(4))
    np.testing.assert_allclose(on_mesh.variables["weights"], ramp(4))
    on_mesh.variables.update(new)
    on_mesh.write_back()
    np.testing.assert_allclose(weights, 3 * ramp(4))
    assert "func.func @main" in functional.as_text()


def test_a_function_runs_on_another_replica_of_its_variables_and_is_traced_once(mesh: Mesh):
    other = Mesh(np.array(jax.devices()[4:6]), ("data",))
    weights, traces = tf.Variable(ramp(4), name="weights"), []

    def add(x):
        traces.append(x)
        return weights.assign_add(x)

    first = atf.function(add, mesh=mesh)
    first(ramp(4))
    seen = len(traces)
    second = first.on(atf.Variables(other))
    np.testing.assert_allclose(second(ramp(4)), 2 * ramp(4))
    np.testing.assert_allclose(second(ramp(4)), 3 * ramp(4))
    np.testing.assert_allclose(first.variables["weights"], 2 * ramp(4))
    assert (len(traces), second.variables["weights"].sharding.mesh) == (seen, other)


def test_load_begins_again_where_the_arrays_are_lost(mesh: Mesh):
    weights = tf.Variable(ramp(4), name="weights")
    add = atf.function(lambda x: weights.assign_add(x), mesh=mesh)
    add(ramp(4))
    add.write_back()
    add.variables["weights"].delete()
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        add(ramp(4))
    add.variables.load()
    np.testing.assert_allclose(add(ramp(4)), 3 * ramp(4))


def test_what_is_no_function_no_tensor_or_called_inside_a_tf_function_is_refused(mesh: Mesh):
    with pytest.raises(TypeError, match=r"expected a tf.function, a Keras model or a Python function"):
        atf.function(3)
    same = atf.function(lambda x: x, mesh=mesh)
    with pytest.raises(TypeError, match="must be a tensor or hashable"):
        same({1, 2})
    with pytest.raises(tf.errors.FailedPreconditionError, match="call it eagerly"):
        tf.function(lambda: same(tf.ones(4)))()
    with pytest.raises(KeyError, match="no function here has used the variable 'other:0'"):
        same.variables[tf.Variable(1.0, name="other")]
