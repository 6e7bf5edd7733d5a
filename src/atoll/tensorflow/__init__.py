"""TensorFlow as a front end: a `tf.function` or a Keras model, compiled by XLA, on JAX's devices::

    import tensorflow as tf
    from atoll import tensorflow as atf

    step = atf.function(train_step, mesh=mesh)  # forward, tape.gradient and optimizer.apply_gradients in one
    for x, y in dataset:  # a tf.data.Dataset, or whatever else gives batches
        loss = step(x, y)  # a jax.Array, at once
    step.variables.write_back()  # the tf.Variables have the trained values

    trainer = atf.Trainer(model, mesh=mesh)  # a compiled Keras model, with Keras' own fit
    trainer.fit(dataset, epochs=3)

A function's variables live on the mesh as sharded arrays: a call takes their values and gives new ones, as a
functional program does, and the old ones' memory is donated. The devices are JAX's, on Atoll and on stock JAX alike.

The package needs the extra `[tensorflow]`. Inside it `import tensorflow` is TensorFlow's own package.
"""

from __future__ import annotations

try:
    import tensorflow  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"atoll.tensorflow needs TensorFlow: pip install 'atoll[tensorflow]' ({error})", name=error.name
    ) from error

from atoll.tensorflow.function import Function, Functional, function
from atoll.tensorflow.tensorflow_shardings import Rule
from atoll.tensorflow.trainer import Trainer
from atoll.tensorflow.variables import Variables

__all__ = ["Function", "Functional", "Rule", "Trainer", "Variables", "function"]
