"""T5, the encoder and decoder that the paper's table 1 trains, in plain JAX: pytrees of arrays, and functions.

The model is the original one of Raffel et al. 2019 (arXiv 1910.10683, section 2.1, and their Mesh TensorFlow
code): layer norms that only scale, no biases, attention scores that are not divided by sqrt(d_kv), position as
a learnt bias of the scores, ReLU, and one embedding for the inputs, the targets and the logits. It has no
dropout, so that seed and batches determine a run; all arithmetic is float32.

Shapes are written as [batch, length, ...]; `inputs` and `targets` are tokens of the encoder and the decoder.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

START = 0  # what the decoder sees before its first token; T5's padding has the same number
BUCKETS = 32  # of relative positions
FAR = 128  # positions apart from which on all share the last bucket
EPSILON = 1e-6  # of a layer norm
HIDDEN = float(np.finfo(np.float32).min)  # the bias of a score that must not count


@dataclass(frozen=True)
class Config:
    d_model: int
    d_ff: int
    d_kv: int  # of one head
    heads: int
    layers: int  # of the encoder, and as many of the decoder
    vocabulary: int = 32128  # the published 32,000 and 100 sentinels, filled up to a multiple of 128


# Raffel et al., section 3.7. The comments give the sizes under which the models are known.
SMALL = Config(d_model=512, d_ff=2048, d_kv=64, heads=8, layers=6)  # 60M
BASE = Config(d_model=768, d_ff=3072, d_kv=64, heads=12, layers=12)  # 220M; Pathways' table 1 says 270M
LARGE = Config(d_model=1024, d_ff=4096, d_kv=64, heads=16, layers=24)  # 770M
T5_3B = Config(d_model=1024, d_ff=16384, d_kv=128, heads=32, layers=24)
T5_11B = Config(d_model=1024, d_ff=65536, d_kv=128, heads=128, layers=24)

# Small's proportions, for a step of some 100 ms on eight devices that share two cores.
TINY = Config(d_model=128, d_ff=512, d_kv=16, heads=8, layers=2, vocabulary=1024)


class Attention(NamedTuple):
    query: jax.Array  # [d_model, heads, d_kv], and so are key and value
    key: jax.Array
    value: jax.Array
    output: jax.Array  # [heads, d_kv, d_model]


class FeedForward(NamedTuple):
    expand: jax.Array  # [d_model, d_ff]
    contract: jax.Array  # [d_ff, d_model]


class EncoderLayer(NamedTuple):
    attention_norm: jax.Array  # [d_model], and so are all norms
    attention: Attention
    feed_forward_norm: jax.Array
    feed_forward: FeedForward


class DecoderLayer(NamedTuple):
    attention_norm: jax.Array
    attention: Attention
    cross_norm: jax.Array
    cross: Attention
    feed_forward_norm: jax.Array
    feed_forward: FeedForward


class Encoder(NamedTuple):
    relative_bias: jax.Array  # [BUCKETS, heads], one for all layers of a stack
    layers: tuple[EncoderLayer, ...]
    norm: jax.Array


class Decoder(NamedTuple):
    relative_bias: jax.Array
    layers: tuple[DecoderLayer, ...]
    norm: jax.Array


class Weights(NamedTuple):
    embedding: jax.Array  # [vocabulary, d_model]
    encoder: Encoder
    decoder: Decoder


def first_weights(config: Config, seed: int) -> Weights:
    """The weights before training, float32: Mesh TensorFlow's distributions; the seed determines them."""
    key = jax.random.key(seed)
    made = 0

    def normal(deviation: float, *shape: int) -> jax.Array:
        nonlocal made
        made += 1
        return deviation * jax.random.normal(jax.random.fold_in(key, made), shape, jnp.float32)

    d_model, d_ff, d_kv, heads = config.d_model, config.d_ff, config.d_kv, config.heads

    def norm() -> jax.Array:
        return jnp.ones(d_model, jnp.float32)

    def attention() -> Attention:
        # Scores are not divided by sqrt(d_kv), so the queries begin that much smaller.
        return Attention(
            query=normal((d_model * d_kv) ** -0.5, d_model, heads, d_kv),
            key=normal(d_model**-0.5, d_model, heads, d_kv),
            value=normal(d_model**-0.5, d_model, heads, d_kv),
            output=normal((heads * d_kv) ** -0.5, heads, d_kv, d_model),
        )

    def feed_forward() -> FeedForward:
        return FeedForward(normal(d_model**-0.5, d_model, d_ff), normal(d_ff**-0.5, d_ff, d_model))

    def encoder_layer() -> EncoderLayer:
        return EncoderLayer(norm(), attention(), norm(), feed_forward())

    def decoder_layer() -> DecoderLayer:
        return DecoderLayer(norm(), attention(), norm(), attention(), norm(), feed_forward())

    def relative_bias() -> jax.Array:
        return normal(d_model**-0.5, BUCKETS, heads)

    return Weights(
        embedding=normal(1.0, config.vocabulary, d_model),
        encoder=Encoder(relative_bias(), tuple(encoder_layer() for _ in range(config.layers)), norm()),
        decoder=Decoder(relative_bias(), tuple(decoder_layer() for _ in range(config.layers)), norm()),
    )


def relative_buckets(queries: int, keys: int, both_ways: bool) -> np.ndarray:
    """Which bucket of relative positions each pair of a query and a key is in: int32[queries, keys].

    Half of the buckets hold one distance each, the others ever wider ranges, in logarithmic steps up to FAR.
    Where a query looks both ways, the keys behind it have the first half of the buckets and those before it
    the second; where not, the keys to come share bucket 0 (and are masked).
    """
    ahead = np.arange(keys)[None, :] - np.arange(queries)[:, None]
    buckets = BUCKETS // 2 if both_ways else BUCKETS
    first = np.where(ahead > 0, buckets, 0) if both_ways else np.zeros_like(ahead)
    distance = np.abs(ahead) if both_ways else np.maximum(-ahead, 0)
    exact = buckets // 2
    # A range begins where the logarithm is a whole number: the epsilon keeps rounding from one below it.
    steps = np.log(np.maximum(distance, 1) / exact + np.finfo(np.float32).eps) / np.log(FAR / exact)
    wide = np.minimum(exact + (steps * (buckets - exact)).astype(np.int32), buckets - 1)
    return np.asarray(first + np.where(distance < exact, distance, wide), np.int32)


def position_bias(relative_bias: jax.Array, length: int, both_ways: bool) -> jax.Array:
    """Return the bias of self-attention's scores: [heads, length, length].

    If it is one-way, this includes the causal mask.
    """
    # A matrix product, for the gradient of an indexed read would be length * length rows added one by one.
    chosen = jax.nn.one_hot(relative_buckets(length, length, both_ways), BUCKETS, dtype=jnp.float32)
    bias = jnp.einsum("qsb,bh->hqs", chosen, relative_bias)
    return bias if both_ways else jnp.where(np.tri(length, dtype=bool), bias, HIDDEN)


def normalize(scale: jax.Array, x: jax.Array) -> jax.Array:
    """Root mean square layer norm: no mean is taken off and no bias added."""
    return scale * x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + EPSILON)


def attend(weights: Attention, x: jax.Array, source: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Return what each of x [batch, queries, d_model] reads in `source` [batch, keys, d_model], in the shape of x."""
    query = jnp.einsum("bqd,dhk->bqhk", x, weights.query)
    key = jnp.einsum("bsd,dhk->bshk", source, weights.key)
    value = jnp.einsum("bsd,dhk->bshk", source, weights.value)
    scores = jnp.einsum("bqhk,bshk->bhqs", query, key)
    shares = jax.nn.softmax(scores if bias is None else scores + bias)
    return jnp.einsum("bqhk,hkd->bqd", jnp.einsum("bhqs,bshk->bqhk", shares, value), weights.output)


def feed_forward(weights: FeedForward, x: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ weights.expand) @ weights.contract


def encode(weights: Weights, inputs: jax.Array) -> jax.Array:
    """Tokens [batch, inputs] to what the decoder reads, [batch, inputs, d_model]."""
    encoder = weights.encoder
    x = weights.embedding[inputs]
    bias = position_bias(encoder.relative_bias, inputs.shape[1], both_ways=True)
    for layer in encoder.layers:
        y = normalize(layer.attention_norm, x)
        x = x + attend(layer.attention, y, y, bias)
        x = x + feed_forward(layer.feed_forward, normalize(layer.feed_forward_norm, x))
    return normalize(encoder.norm, x)


def decode(weights: Weights, encoded: jax.Array, previous: jax.Array) -> jax.Array:
    """Return the logits [batch, targets, vocabulary] of the tokens after those of `previous` [batch, targets]."""
    decoder = weights.decoder
    x = weights.embedding[previous]
    bias = position_bias(decoder.relative_bias, previous.shape[1], both_ways=False)
    for layer in decoder.layers:
        y = normalize(layer.attention_norm, x)
        x = x + attend(layer.attention, y, y, bias)
        x = x + attend(layer.cross, normalize(layer.cross_norm, x), encoded)
        x = x + feed_forward(layer.feed_forward, normalize(layer.feed_forward_norm, x))
    # The embedding's rows are as long as sqrt(d_model), and logits are to begin near 1.
    x = normalize(decoder.norm, x) * x.shape[-1] ** -0.5
    return jnp.einsum("btd,vd->btv", x, weights.embedding)


def logits(weights: Weights, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Teacher forcing: the logits of each target, given the inputs and the targets before it."""
    previous = jnp.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=START)
    return decode(weights, encode(weights, inputs), previous)


def loss(weights: Weights, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross entropy of the targets, in nats a token: float32."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits(weights, inputs, targets), targets))


def parameters(config: Config) -> int:
    """Return the number of parameters. This traces the model and allocates no memory."""
    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(lambda: first_weights(config, seed=0))))


def step_flops(config: Config, batch: int, inputs: int, targets: int) -> float:
    """Floating-point operations of one training step on sequences of these lengths, in tokens.

    Matrix products only: two operations for each parameter and token forward, and twice as many backward.
    Masked scores count, for they are computed; reading the embedding and the optimizer do not.
    """
    inner = config.heads * config.d_kv
    projection = config.d_model * inner  # parameters of one of an attention's four
    feed_forward = 2 * config.d_model * config.d_ff
    encoder = inputs * (4 * projection + feed_forward)
    # The decoder's cross-attention takes its keys and values from the encoder's tokens.
    decoder = targets * (6 * projection + feed_forward) + inputs * 2 * projection
    # Scores, and the values that they weigh: each query with each key, d_kv a head.
    encoder += 2 * inner * inputs * inputs
    decoder += 2 * inner * (targets * targets + targets * inputs)
    products = config.layers * (encoder + decoder) + targets * config.d_model * config.vocabulary
    return 6.0 * batch * products
