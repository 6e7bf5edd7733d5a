"""Tests on a cluster: variables on an island's hosts, input read by the hosts, and Keras' fit, without 64-bit types in
JAX.
"""

from __future__ import annotations

import os

import pytest

from tests.scripts import RunScript

pytest.importorskip("tensorflow", reason="the extra tensorflow is not installed")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not os.environ.get("ATOLL_TEST_TENSORFLOW"), reason="this takes a while: `make tensorflow`"),
]

SCRIPT = """
    import os
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    import jax, keras, numpy as np, tensorflow as tf
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from atoll import tensorflow as atf
    from atoll.data import Batches

    X = np.random.default_rng(0).normal(size=(48, 8)).astype("f4")
    Y = (X.sum(1) > 0).astype("f4")[:, None]

    def make():
        keras.utils.set_random_seed(0)
        dense = keras.layers.Dense
        model = keras.Sequential([keras.Input((8,)), dense(16, "gelu"), keras.layers.BatchNormalization(), dense(1)])
        model.compile(keras.optimizers.Adam(1e-2), "mse")
        return model

    def step_of(model):
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            weights = model.trainable_variables
            model.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
            return loss
        return step

    def dataset(shard):
        import numpy as np, tensorflow as tf
        X = np.random.default_rng(0).normal(size=(48, 8)).astype("f4")
        Y = (X.sum(1) > 0).astype("f4")[:, None]
        rows = tf.data.Dataset.from_tensor_slices((X.reshape(3, 2, 8, 8), Y.reshape(3, 2, 8, 1)))
        return rows.map(lambda x, y: (x[shard.index], y[shard.index]))

    ours, theirs = make(), make()
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))  # a row is a host
    step = atf.function(step_of(ours), mesh=mesh, shardings={r"dense\\w*/kernel": P("data")})
    losses = [float(step(*batch)) for batch in Batches(dataset, NamedSharding(mesh, P("data")))]
    step.write_back()
    in_tensorflow = tf.function(step_of(theirs))
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)
    np.testing.assert_allclose(losses, [float(in_tensorflow(*batch)) for batch in batches], rtol=1e-5)
    assert int(ours.optimizer.iterations) == 3 and step.variables[ours.optimizer.iterations].dtype == np.int64
    for our, their in zip(ours.variables, theirs.variables, strict=True):
        np.testing.assert_allclose(our, their, rtol=1e-3, atol=1e-5)

    fitted = atf.Trainer(ours, mesh=mesh).fit(batches, shuffle=False, epochs=2, verbose=0).history
    expected = theirs.fit(batches, shuffle=False, epochs=2, verbose=0).history
    np.testing.assert_allclose(fitted["loss"], expected["loss"], rtol=1e-3)
    print("equal")
"""


def test_training_on_the_hosts_of_an_island_is_that_of_tensorflow(run_script: RunScript):
    result = run_script(SCRIPT, islands="1x2x2", timeout=280.0).check()
    assert result.stdout.endswith("equal\n")


DLPACK = """
    import os
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    import jax, jax.numpy as jnp, numpy as np, tensorflow as tf
    there = tf.experimental.dlpack.from_dlpack(jnp.arange(6, dtype=jnp.float32).reshape(2, 3).__dlpack__())
    assert there.numpy().tolist() == [[0, 1, 2], [3, 4, 5]]
    back = jnp.from_dlpack(there + 1)
    assert back.devices() == {jax.devices()[0]} and back.tolist() == [[1, 2, 3], [4, 5, 6]]
    print("equal")
"""


def test_arrays_go_to_tensorflow_and_back_by_dlpack(run_script: RunScript):
    assert run_script(DLPACK, islands="1x1x1", timeout=280.0).check().stdout.endswith("equal\n")
