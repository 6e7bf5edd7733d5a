"""Train a transformer with a mixture of experts on several islands, with one program per step.

    python examples/moe.py                       # starts a cluster of four islands, and ends it
    python examples/moe.py --dense               # the same model as one function, with every expert on every token
    python examples/moe.py --capacity-factor 1   # capacity for an even load: experts drop the excess

Each expert is on a separate island. Each block's router sends a token to two of four experts (GShard, Lepikhin et al.,
2020) with `atoll.route`, and `atoll.unroute` returns the experts' outputs. Attention, router and head are data-parallel
over the devices of the first island.
"""

import itertools
import json
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console

import atoll

BYTE_VALUES = 256  # the vocabulary: a token is a byte of source
EXPERTS, CHOICES = 4, 2

Params = dict[str, Any]


@dataclass(frozen=True)
class Config:
    width: int = 64
    layers: int = 2
    heads: int = 4
    seq: int = 32
    batch: int = 16
    capacity_factor: float = EXPERTS / CHOICES  # capacity for every possible load: nothing is dropped
    balance: float = 0.01  # the weight of the loss that keeps the experts' loads even
    rate: float = 3e-3
    seed: int = 0

    @property
    def capacity(self) -> int:
        """How many tokens of a batch an expert takes."""
        return int(self.capacity_factor * self.batch * self.seq * CHOICES / EXPERTS)


# ---- the model, as pure functions


def first_params(config: Config) -> tuple[Params, list[Params]]:
    """The weights of all but the experts, and of each expert: those of all layers."""
    rng = np.random.default_rng(config.seed)
    width = config.width

    def weight(*shape: int) -> np.ndarray[Any, Any]:
        return (rng.standard_normal(shape) * shape[0] ** -0.5).astype(np.float32)

    blocks = [
        {"qkv": weight(width, 3 * width), "project": weight(width, width), "router": weight(width, EXPERTS)}
        for _ in range(config.layers)
    ]
    experts = [
        {"expand": [weight(width, 4 * width) for _ in blocks], "contract": [weight(4 * width, width) for _ in blocks]}
        for _ in range(EXPERTS)
    ]
    trunk = {
        "tokens": weight(BYTE_VALUES, width),
        "positions": weight(config.seq, width),
        "blocks": blocks,
        "head": weight(width, BYTE_VALUES),
    }
    return trunk, experts


def normalized(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


@jax.jit
def embedded(trunk: Params, tokens: jax.Array) -> jax.Array:
    return trunk["tokens"][tokens] + trunk["positions"]


@partial(jax.jit, static_argnums=0)
def attended(heads: int, block: Params, x: jax.Array) -> tuple[jax.Array, ...]:
    """Causal self-attention beside a residual; and, one row for each token: what experts get, which of them, with
    which weights, and how uneven the load is.
    """
    q, k, v = jnp.split(normalized(x) @ block["qkv"], 3, -1)
    by_head = (*x.shape[:-1], heads, -1)
    found = jax.nn.dot_product_attention(*(y.reshape(by_head) for y in (q, k, v)), is_causal=True)
    x = x + found.reshape(x.shape) @ block["project"]
    rows = normalized(x).reshape(-1, x.shape[-1])
    shares = jax.nn.softmax(rows @ block["router"])
    weights, chosen = jax.lax.top_k(shares, CHOICES)
    first = jax.nn.one_hot(chosen[:, 0], EXPERTS)
    uneven = EXPERTS * (first.mean(0) * shares.mean(0)).sum()
    return x, rows, chosen, weights / weights.sum(1, keepdims=True), uneven


@jax.jit
def expert(expand: jax.Array, contract: jax.Array, rows: jax.Array) -> jax.Array:
    return jax.nn.gelu(rows @ expand) @ contract


@jax.jit
def added(x: jax.Array, rows: jax.Array) -> jax.Array:
    return x + rows.reshape(x.shape)


@jax.jit
def loss_of(trunk: Params, x: jax.Array, targets: jax.Array) -> jax.Array:
    logits = normalized(x) @ trunk["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


# ---- where the experts are


def over_islands(config: Config, meshes: list[Mesh]) -> Any:
    """Rows go to the experts that are chosen, and come back."""

    def experts(params: list[Params], layer: int, rows: Any, chosen: Any, weights: Any) -> Any:
        blocks, routing = atoll.route(rows, chosen, to=meshes, capacity=config.capacity)
        made = [expert(p["expand"][layer], p["contract"][layer], b) for p, b in zip(params, blocks, strict=True)]
        return atoll.unroute(made, routing, weights)

    return experts


def dense(params: list[Params], layer: int, rows: Any, chosen: Any, weights: Any) -> Any:
    """Every expert sees all rows."""
    total = jnp.zeros_like(rows)
    for number, each in enumerate(params):
        share = jnp.where(chosen == number, weights, 0).sum(1, keepdims=True)
        total += share * expert(each["expand"][layer], each["contract"][layer], rows)
    return total


def make_step(config: Config, experts: Any) -> Any:
    """(trunk, experts, their optimizers' states, tokens, targets) -> the next ones, and the loss."""
    optimizer = optax.adam(config.rate)

    def loss(params: tuple[Params, list[Params]], tokens: Any, targets: Any) -> Any:
        trunk, of_experts = params
        x = embedded(trunk, tokens)
        uneven = []
        for layer, block in enumerate(trunk["blocks"]):
            x, rows, chosen, weights, each = attended(config.heads, block, x)
            x = added(x, experts(of_experts, layer, rows, chosen, weights))
            uneven.append(each)
        found = loss_of(trunk, x, targets)
        return found + config.balance * sum(uneven), found

    @jax.jit
    def updated(params: Params, state: Any, gradients: Params) -> Any:
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state

    def step(params: Any, states: Any, tokens: Any, targets: Any) -> Any:
        gradients, found = jax.grad(loss, has_aux=True)(params, tokens, targets)
        (trunk, of_experts), (slopes, slopes_of_experts) = params, gradients
        parts = zip((trunk, *of_experts), states, (slopes, *slopes_of_experts), strict=True)
        (trunk, state), *others = [updated(*each) for each in parts]
        return (trunk, [p for p, _ in others]), [state, *(s for _, s in others)], found

    return step


def batches(config: Config, steps: int) -> list[tuple[np.ndarray[Any, Any], ...]]:
    """Bytes of this file, and what follows each of them."""
    text = np.frombuffer(Path(__file__).read_bytes(), np.uint8).astype(np.int32)
    rng = np.random.default_rng(config.seed)
    starts = rng.integers(0, len(text) - config.seq - 1, (steps, config.batch, 1))
    rows = text[starts + np.arange(config.seq + 1)]
    return [(each[:, :-1], each[:, 1:]) for each in rows]


def train(config: Config, steps: int, is_dense: bool = False, console: Console | None = None) -> list[float]:
    """The losses, on the islands of this process's cluster; with `is_dense`, on the devices of the first one. Returns
    when all is done.
    """
    islands = [list(each) for _, each in itertools.groupby(jax.devices(), lambda device: device.slice_index)]
    home = Mesh(np.array(islands[0]), ("data",))
    meshes = [home if is_dense else Mesh(np.array(islands[i % len(islands)]), ("data",)) for i in range(EXPERTS)]
    whole = [NamedSharding(mesh, PartitionSpec()) for mesh in (home, *meshes)]
    first, of_each = first_params(config)
    trunk, *of_experts = [jax.device_put(p, place) for p, place in zip((first, *of_each), whole, strict=True)]
    init = optax.adam(config.rate).init
    states = [jax.jit(init, out_shardings=s)(p) for p, s in zip((trunk, *of_experts), whole, strict=True)]
    step = make_step(config, dense if is_dense else over_islands(config, meshes))
    step = jax.jit(step) if is_dense else atoll.program(step)
    params, losses, rows = (trunk, of_experts), [], NamedSharding(home, PartitionSpec("data"))
    for number, (tokens, targets) in enumerate(batches(config, steps)):
        began = time.perf_counter()
        params, states, loss = step(params, states, jax.device_put(tokens, rows), jax.device_put(targets, rows))
        losses.append(float(loss))
        if console is not None:
            console.print(f"step {number}: loss {losses[-1]:.4f}, {time.perf_counter() - began:.3f} s")
    jax.block_until_ready(params)
    return losses


def main(
    steps: Annotated[int, typer.Option(help="How many.")] = 50,
    dense: Annotated[bool, typer.Option("--dense", help="Every expert on every token, as one function.")] = False,
    capacity_factor: Annotated[float, typer.Option(help="Room of an expert, in even shares of the tokens.")] = 2.0,
    islands: Annotated[str, typer.Option(help="Of the cluster that is started; an address joins one.")] = "4x1x2",
    losses_out: Annotated[Path | None, typer.Option(help="A file for the losses, in JSON.")] = None,
) -> None:
    config = replace(Config(), capacity_factor=capacity_factor)
    with atoll.connect(islands=islands):
        losses = train(config, steps, dense, Console())
    if losses_out is not None:
        losses_out.write_text(json.dumps(losses))


if __name__ == "__main__":
    typer.run(main)
