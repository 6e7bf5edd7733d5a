"""TensorFlow as a front end: run a `tf.function` or a Keras model, compiled by XLA, on JAX's devices::

    import tensorflow as tf
    from atoll import tensorflow as atf

    step = atf.function(train_step, mesh=mesh)  # forward, tape.gradient and optimizer.apply_gradients together
    for x, y in dataset:  # a tf.data.Dataset, or any other iterable of batches
        loss = step(x, y)  # returns a jax.Array without waiting for it
    step.variables.write_back()  # assign the trained values to the tf.Variables

    trainer = atf.Trainer(model, mesh=mesh)  # trains a compiled Keras model with Keras' own fit
    trainer.fit(dataset, epochs=3)

A function's variables are sharded arrays on the mesh. A call computes new values from their values, as a functional
program does, and donates the memory of the old values. The devices are JAX's, with Atoll or with stock JAX.

The package needs the extra `[tensorflow]`. Inside the package, `import tensorflow` imports TensorFlow itself.
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
