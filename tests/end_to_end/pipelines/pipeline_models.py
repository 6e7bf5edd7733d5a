"""The same small transformer in Flax NNX, Flax Linen and Equinox. Children import this module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

VOCABULARY, WIDTH, HEADS, LENGTH, ROWS = 17, 16, 2, 8, 8

Loss = Callable[[Any, Any], jax.Array]


def batches(count: int) -> list[dict[str, np.ndarray[Any, Any]]]:
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, VOCABULARY, (ROWS, LENGTH + 1)).astype(np.int32) for _ in range(count)]
    return [{"tokens": each[:, :-1], "targets": each[:, 1:]} for each in tokens]


def cross_entropy(logits: jax.Array, batch: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def nnx_model(layers: int) -> tuple[Any, Loss]:
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
            self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
            self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
            self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            mask = nnx.make_causal_mask(x[..., 0])
            x = x + self.attention(self.norms[0](x), mask=mask)
            return x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))

    class Transformer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embedding = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(layers)])
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x)
            return self.embedding.attend(self.norm(x))

    def loss(model: Any, batch: Any) -> jax.Array:
        return cross_entropy(model(batch["tokens"]), batch)

    return nnx.jit(lambda: Transformer(nnx.Rngs(0)))(), loss


def linen_model(layers: int) -> tuple[Any, Loss]:
    from flax import linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            mask = nn.make_causal_mask(x[..., 0])
            x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x), mask=mask)
            return x + nn.Dense(WIDTH)(jax.nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))

    class Transformer(nn.Module):
        @nn.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            embedding = nn.Embed(VOCABULARY, WIDTH)
            x = embedding(tokens)
            for _ in range(layers):
                x = Block()(x)
            return embedding.attend(nn.LayerNorm()(x))

    model = Transformer()

    def loss(params: Any, batch: Any) -> jax.Array:
        return cross_entropy(model.apply(params, batch["tokens"]), batch)

    return jax.jit(model.init)(jax.random.key(0), batches(1)[0]["tokens"]), loss


def equinox_model(layers: int) -> tuple[Any, Loss]:
    import equinox as eqx

    class Block(eqx.Module):
        norms: list[eqx.nn.LayerNorm]
        attention: eqx.nn.MultiheadAttention
        feed_forward: eqx.nn.MLP

        def __init__(self, key: jax.Array) -> None:
            first, second = jax.random.split(key)
            self.norms = [eqx.nn.LayerNorm(WIDTH) for _ in range(2)]
            self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=first)
            self.feed_forward = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=second)

        def __call__(self, x: jax.Array) -> jax.Array:
            normed = jax.vmap(self.norms[0])(x)
            x = x + self.attention(normed, normed, normed, mask=jnp.tril(jnp.ones((LENGTH, LENGTH), bool)))
            return x + jax.vmap(self.feed_forward)(jax.vmap(self.norms[1])(x))

    class Transformer(eqx.Module):
        embedding: eqx.nn.Embedding
        blocks: list[Block]
        norm: eqx.nn.LayerNorm

        def __init__(self, key: jax.Array) -> None:
            keys = jax.random.split(key, layers + 1)
            self.embedding = eqx.nn.Embedding(VOCABULARY, WIDTH, key=keys[0])
            self.blocks = [Block(each) for each in keys[1:]]
            self.norm = eqx.nn.LayerNorm(WIDTH)

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = jax.vmap(self.embedding)(tokens)
            for block in self.blocks:
                x = block(x)
            return jax.vmap(self.norm)(x) @ self.embedding.weight.T

    def loss(model: Any, batch: Any) -> jax.Array:
        return cross_entropy(jax.vmap(model)(batch["tokens"]), batch)

    return eqx.filter_jit(Transformer)(jax.random.key(0)), loss


def plain_model(layers: int) -> tuple[Any, Loss]:
    """Return the smallest model that can be divided. It uses the embedding at both ends."""

    def loss(params: Any, batch: Any) -> jax.Array:
        x = params["embedding"][batch["tokens"]]
        for each in params["layers"]:
            x = x + jax.nn.gelu(x @ each)
        return cross_entropy(x @ params["embedding"].T, batch)

    rng = np.random.default_rng(1)
    layers = [rng.standard_normal((WIDTH, WIDTH), np.float32) / 4 for _ in range(layers)]
    return {"embedding": rng.standard_normal((VOCABULARY, WIDTH), np.float32) / 4, "layers": layers}, loss


LIBRARIES = {"nnx": nnx_model, "linen": linen_model, "equinox": equinox_model}
MODELS = LIBRARIES | {"plain": plain_model}


def optimizer() -> optax.GradientTransformation:
    """Return an optimizer whose clipping depends on the gradients of all stages."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def plain_losses(kind: str, layers: int, steps: int) -> list[float]:
    """Return the losses of plain JAX on one device and whole batches, trained as each library's documentation does."""
    from atoll.pipelines.stage_arrays import is_array

    params, loss = MODELS[kind](layers)
    leaves, tree = jax.tree.flatten(params)
    trained = [is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]
    adam = optimizer()

    def joined(some: list[Any]) -> Any:
        left = iter(some)
        return tree.unflatten([next(left) if each else leaf for each, leaf in zip(trained, leaves, strict=True)])

    @jax.jit
    def step(some: list[Any], state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(lambda some: loss(joined(some), batch))(some)
        updates, state = adam.update(gradients, state, some)
        return optax.apply_updates(some, updates), state, value

    here = jax.devices()[0]
    some = jax.device_put([leaf for each, leaf in zip(trained, leaves, strict=True) if each], here)
    state = adam.init(some)
    losses = []
    for batch in batches(steps):
        some, state, value = step(some, state, jax.device_put(batch, here))
        losses.append(float(value))
    return losses
