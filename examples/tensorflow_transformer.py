"""Train a small decoder-only transformer, written in Keras, on islands, and compare it with TensorFlow.

    python examples/tensorflow_transformer.py                 # an embedded cluster of two islands
    python examples/tensorflow_transformer.py --islands 1     # one island: the step is one compiled function
    ATOLL_ADDRESS=... python examples/tensorflow_transformer.py

The model, the loss, the optimizer and the input pipeline are those of TensorFlow. On one island, a training step is one
`tf.function`. On several islands, each has a replica of the variables and a part of the batch. Gradients are computed
on each island, summed on the first and sent back. One traced program is the whole step and one launch.

The runs on Atoll and in TensorFlow start with the same weights and use the same batches. If their losses differ by more
than 1e-4 of the value, the script fails. They differ slightly because several devices add float32 numbers in another
order.
"""

import argparse
import json
import os
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # else TensorFlow says what it found on this machine

import jax
import keras
import numpy as np
import tensorflow as tf
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console

import atoll
from atoll import tensorflow as atf

TOLERANCE = 1e-4  # of the loss, relative
BYTE_VALUES = 256  # the vocabulary: a token is a byte of source


@dataclass(frozen=True)
class Config:
    width: int = 64
    layers: int = 2
    heads: int = 4
    seq: int = 64
    batch: int = 16
    seed: int = 0


# ---- TensorFlow and Keras, without Atoll


class Block(keras.layers.Layer):
    """Causal self-attention and an MLP, each behind a layer norm and beside a residual."""

    def __init__(self, config: Config, **options: Any) -> None:
        super().__init__(**options)
        self.attention_norm = keras.layers.LayerNormalization(name="attention_norm")
        self.attention = keras.layers.MultiHeadAttention(
            config.heads, config.width // config.heads, use_bias=False, name="attention"
        )
        self.mlp_norm = keras.layers.LayerNormalization(name="mlp_norm")
        self.expand = keras.layers.Dense(4 * config.width, activation="gelu", name="expand")
        self.contract = keras.layers.Dense(config.width, name="contract")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        y = self.attention_norm(x)
        x = x + self.attention(y, y, use_causal_mask=True)
        return x + self.contract(self.expand(self.mlp_norm(x)))


def make_model(config: Config) -> keras.Model:
    """Bytes [batch, seq] -> logits of the next byte [batch, seq, 256]; the same weights for the same seed."""
    keras.utils.set_random_seed(config.seed)
    tokens = keras.Input((config.seq,), dtype="int32")
    positions = keras.ops.arange(config.seq)
    x = keras.layers.Embedding(BYTE_VALUES, config.width, name="tokens")(tokens)
    x = x + keras.layers.Embedding(config.seq, config.width, name="positions")(positions)
    for number in range(config.layers):
        x = Block(config, name=f"block_{number}")(x)
    x = keras.layers.LayerNormalization(name="norm")(x)
    return keras.Model(tokens, keras.layers.Dense(BYTE_VALUES, use_bias=False, name="logits")(x))


class Training:
    """A model, its optimizer, and a step of training as TensorFlow has it."""

    def __init__(self, config: Config) -> None:
        self.model = make_model(config)
        self.optimizer = keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(3e-3, 1000), clipnorm=1.0)

    def gradients(self, tokens: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            logits = self.model(tokens[:, :-1], training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tokens[:, 1:], logits)
            loss = tf.reduce_mean(losses)
        found = tape.gradient(loss, self.model.trainable_variables)
        # The embeddings' gradients are tf.IndexedSlices. Dense ones can be summed, and have the norm of the sum.
        return loss, [tf.convert_to_tensor(each) for each in found]

    def apply(self, *gradients: tf.Tensor) -> None:
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))

    def step(self, tokens: tf.Tensor) -> tf.Tensor:
        loss, gradients = self.gradients(tokens)
        self.apply(*gradients)
        return loss


def make_dataset(config: Config, steps: int) -> tf.data.Dataset:
    """Random windows of a Python module's source: int32[batch, seq + 1], the same ones in each run."""
    source = Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_bytes()
    corpus = tf.constant(np.frombuffer(source, np.uint8).astype(np.int32))
    windows = tf.data.Dataset.random(seed=config.seed)
    last = len(source) - config.seq - 1
    windows = windows.map(lambda number: corpus[number % last : number % last + config.seq + 1])
    return windows.batch(config.batch, drop_remainder=True).take(steps).prefetch(2)


def train_in_tensorflow(config: Config, dataset: tf.data.Dataset) -> list[float]:
    step = tf.function(Training(config).step)
    return [float(step(tokens)) for tokens in dataset]


# ---- on a cluster


def islands() -> list[Mesh]:
    """The devices of each island, as the axis `data`."""
    found: dict[int, list[Any]] = {}
    for device in jax.devices():
        found.setdefault(getattr(device, "slice_index", 0), []).append(device)
    return [Mesh(np.array(devices), ("data",)) for devices in found.values()]


def train_on_one(training: Training, dataset: tf.data.Dataset, mesh: Mesh) -> Iterator[jax.Array]:
    step = atf.function(training.step, mesh=mesh)
    for tokens in dataset:
        yield step(tokens)
    step.write_back()


def train_on_several(training: Training, dataset: tf.data.Dataset, meshes: list[Mesh]) -> Iterator[jax.Array]:
    """Data parallel over islands: a replica on each, and gradients that are added up on the first."""
    replicas = [atf.Variables(mesh) for mesh in meshes]
    rows, length = next(iter(dataset)).shape
    example = tf.TensorSpec((rows // len(meshes), length), tf.int32)
    gradient_step = atf.function(training.gradients, variables=replicas[0])
    gradients = [gradient_step.on(each).functional(example) for each in replicas]
    like = [tf.TensorSpec(each.shape, each.dtype) for each in training.model.trainable_variables]
    whole = PartitionSpec()
    apply_step = atf.function(training.apply, variables=replicas[0], batch=whole)
    updates = [apply_step.on(each).functional(*like) for each in replicas]
    at = [NamedSharding(mesh, whole) for mesh in meshes]

    @jax.jit
    def mean(parts: list[Any]) -> Any:
        return jax.tree.map(lambda *values: sum(values) / len(values), *parts)

    def step(states: list[Any], batches: list[Any]) -> tuple[Any, list[Any]]:
        parts, computed = [], []
        for gradient, state, batch in zip(gradients, states, batches, strict=True):
            result, state = gradient(state, batch)
            parts.append(jax.device_put(result, at[0]))
            computed.append(state)
        loss, total = mean(parts)
        updated = []
        for update, state, sharding in zip(updates, computed, at, strict=True):
            _, state = update(state, *jax.device_put(total, sharding))
            updated.append(state)
        return loss, updated

    program = atoll.program(step, donate_argnums=0)
    by_rows = [NamedSharding(mesh, PartitionSpec("data")) for mesh in meshes]
    states = [dict(each) for each in replicas]
    for tokens in dataset:
        parts = np.split(np.asarray(tokens), len(meshes))
        loss, states = program(states, [jax.device_put(each, to) for each, to in zip(parts, by_rows, strict=True)])
        yield loss
    replicas[0].update(states[0])
    replicas[0].write_back()


def timed(losses: Iterator[jax.Array]) -> tuple[list[float], float]:
    """All of them, and seconds a step after the first, which compiles."""
    first = float(next(losses))
    started = time.perf_counter()
    others = list(losses)  # dispatched, and then read
    found = [first, *map(float, others)]
    return found, (time.perf_counter() - started) / max(1, len(others))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small transformer, written in Keras, on a cluster.")
    parser.add_argument("--islands", type=int, default=2, help="how many, of 2 devices each (default: 2)")
    parser.add_argument("--steps", type=int, default=20, help="of training (default: 20)")
    parser.add_argument("--losses-out", type=Path, help="where to write both runs' losses, as JSON")
    options = parser.parse_args()
    config, console = Config(), Console()
    if options.steps < 1 or config.batch % (2 * max(1, options.islands)):
        parser.error(f"a batch of {config.batch} is not cut into {2 * options.islands} parts")
    dataset = make_dataset(config, options.steps)
    expected = train_in_tensorflow(config, dataset)
    with atoll.connect(islands=f"{options.islands}x1x2"):  # or the cluster of ATOLL_ADDRESS
        meshes = islands()[: options.islands]
        training = Training(config)
        run: Callable[..., Iterator[jax.Array]] = train_on_several if len(meshes) > 1 else train_on_one
        losses, seconds = timed(run(training, dataset, meshes if len(meshes) > 1 else meshes[0]))
    trained = float(tf.reduce_mean([training.gradients(tokens)[0] for tokens in dataset.take(4)]))
    worst = max(abs(ours - theirs) / theirs for ours, theirs in zip(losses, expected, strict=True))
    console.print(f"{len(losses)} steps, islands: {len(meshes)}, loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    console.print(f"{1000 * seconds:.0f} ms a step; the trained weights in TensorFlow again: loss {trained:.4f}")
    console.print(f"TensorFlow's own run: {expected[0]:.4f} -> {expected[-1]:.4f}; apart by {worst:.1e} at most")
    if options.losses_out is not None:
        options.losses_out.write_text(json.dumps({"atoll": losses, "tensorflow": expected}))
    if worst > TOLERANCE:
        raise SystemExit(f"the losses are apart by {worst:.1e}, more than {TOLERANCE:.0e}")


if __name__ == "__main__":
    main()
