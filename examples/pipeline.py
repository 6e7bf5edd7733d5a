"""Train a decoder-only transformer as a pipeline over islands, with one program per step.

    python examples/pipeline.py --stages 4                # starts a cluster of four islands, and ends it
    python examples/pipeline.py --stages 4 --trace t.json # also writes a timeline, for https://ui.perfetto.dev
    python examples/pipeline.py --stages 1 --spmd         # the same model as one SPMD function, for comparison

The schedule is GPipe (Huang et al., 2019): the batch is divided into micro-batches, which pass through the stages one
after another. Gradients are summed, and the weights of each stage are updated once. A stage keeps the inputs of its
micro-batches, and computes its activations again in the backward pass. The script sends no arrays: the traced program
contains the transfers.
"""

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

import atoll

BYTE_VALUES = 256  # the vocabulary: a token is a byte of source

Params = dict[str, Any]


@dataclass(frozen=True)
class Config:
    width: int = 64
    layers: int = 4
    heads: int = 4
    seq: int = 64
    batch: int = 32
    microbatches: int = 8
    seed: int = 0


# ---- the model, as pure functions


def first_params(config: Config) -> Params:
    """Weights of the whole model."""
    keys = iter(jax.random.split(jax.random.key(config.seed), 3 + 4 * config.layers))
    width = config.width

    def weight(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * shape[0] ** -0.5

    blocks = [
        {
            "qkv": weight(width, 3 * width),
            "project": weight(width, width),
            "expand": weight(width, 4 * width),
            "contract": weight(4 * width, width),
        }
        for _ in range(config.layers)
    ]
    return {
        "tokens": weight(BYTE_VALUES, width),
        "positions": weight(config.seq, width),
        "blocks": blocks,
        "head": weight(width, BYTE_VALUES),
    }


def normalized(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def block(params: Params, x: jax.Array, heads: int) -> jax.Array:
    """Causal self-attention and an MLP, each behind a norm and beside a residual."""
    q, k, v = jnp.split(normalized(x) @ params["qkv"], 3, -1)
    by_head = (*x.shape[:-1], heads, -1)
    attended = jax.nn.dot_product_attention(*(y.reshape(by_head) for y in (q, k, v)), is_causal=True)
    x = x + attended.reshape(x.shape) @ params["project"]
    return x + jax.nn.gelu(normalized(x) @ params["expand"]) @ params["contract"]


def run_layers(heads: int, params: Params, x: jax.Array) -> jax.Array:
    """A stage: bytes [batch, seq] or activations [batch, seq, width] -> activations, as far as its weights go."""
    if "tokens" in params:
        x = params["tokens"][x] + params["positions"]
    for each in params["blocks"]:
        x = block(each, x, heads)
    return x


def loss_of(heads: int, params: Params, x: jax.Array, targets: jax.Array) -> jax.Array:
    """The last stage, and what the whole is trained for."""
    logits = normalized(run_layers(heads, params, x)) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def cut(params: Params, stages: int) -> list[Params]:
    """The weights of each stage."""
    layers = len(params["blocks"])
    parts: list[Params] = [
        {"blocks": params["blocks"][s * layers // stages : (s + 1) * layers // stages]} for s in range(stages)
    ]
    parts[0] |= {"tokens": params["tokens"], "positions": params["positions"]}
    parts[-1] |= {"head": params["head"]}
    return parts


# ---- the pipeline


class Stage:
    """A stage's compiled functions, data-parallel over the devices of its mesh."""

    def __init__(self, mesh: Mesh, heads: int, optimizer: optax.GradientTransformation, microbatches: int) -> None:
        self.whole = NamedSharding(mesh, PartitionSpec())
        self.rows = NamedSharding(mesh, PartitionSpec("data"))
        run, loss = partial(run_layers, heads), partial(loss_of, heads)
        whole, rows = self.whole, self.rows

        def backward(params: Params, x: jax.Array, dy: jax.Array) -> Any:
            _, pull = jax.vjp(run, params, x)
            return pull(dy)

        def first_backward(params: Params, x: jax.Array, dy: jax.Array) -> Any:
            _, pull = jax.vjp(lambda params: run(params, x), params)
            return pull(dy)[0]

        def update(state: Any, gradients: Params) -> Any:
            params, moments = state
            mean = jax.tree.map(lambda g: g / microbatches, gradients)
            updates, moments = optimizer.update(mean, moments, params)
            return optax.apply_updates(params, updates), moments

        jit = partial(jax.jit, out_shardings=whole)
        self.forward = jax.jit(run, in_shardings=(whole, rows), out_shardings=rows)
        self.backward = jax.jit(backward, in_shardings=(whole, rows, rows), out_shardings=(whole, rows))
        self.first_backward = jit(first_backward, in_shardings=(whole, rows, rows))
        self.last = jax.jit(
            jax.value_and_grad(loss, argnums=(0, 1)),
            in_shardings=(whole, rows, rows),
            out_shardings=(whole, (whole, rows)),
        )
        self.only = jit(jax.value_and_grad(loss), in_shardings=(whole, rows, rows))
        self.add = jit(lambda a, b: jax.tree.map(jnp.add, a, b), in_shardings=(whole, whole), donate_argnums=0)
        self.update = jit(update, in_shardings=(whole, whole), donate_argnums=0)
        self.init = jit(optimizer.init, in_shardings=(whole,))


def make_step(stages: Sequence[Stage]) -> Any:
    """One step of training as one program: (states, tokens, targets), the latter by micro-batch -> states, losses."""

    def pipeline_step(states: list[Any], tokens: list[Any], targets: list[Any]) -> tuple[list[Any], list[Any]]:
        params = [state[0] for state in states]
        *inner, last = range(len(stages))
        inputs: list[list[Any]] = []
        gradients: list[Any] = [None for _ in stages]

        def add(s: int, more: Any) -> None:
            gradients[s] = more if gradients[s] is None else stages[s].add(gradients[s], more)

        losses, cotangents = [], []
        for x, wanted in zip(tokens, targets, strict=True):
            inputs.append([])
            for s in inner:
                inputs[-1].append(x)
                x = stages[s].forward(params[s], x)
            if inner:
                loss, (more, dx) = stages[last].last(params[last], x, wanted)
                cotangents.append(dx)
            else:
                loss, more = stages[last].only(params[last], x, wanted)
            losses.append(loss)
            add(last, more)
        for xs, dy in zip(inputs, cotangents, strict=False):
            for s in reversed(inner):
                if s:
                    more, dy = stages[s].backward(params[s], xs[s], dy)
                else:
                    more = stages[0].first_backward(params[0], xs[0], dy)
                add(s, more)
        return [stages[s].update(states[s], gradients[s]) for s in range(len(stages))], losses

    return atoll.program(pipeline_step, donate_argnums=0)


def make_spmd_step(stage: Stage, config: Config, optimizer: optax.GradientTransformation) -> Any:
    """The same step as one function over one mesh."""

    def step(state: Any, tokens: jax.Array, targets: jax.Array) -> Any:
        params, moments = state
        loss, gradients = jax.value_and_grad(partial(loss_of, config.heads))(params, tokens, targets)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    return jax.jit(step, in_shardings=(stage.whole, stage.rows, stage.rows), out_shardings=stage.whole)


# ---- the script


def batches(config: Config, steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Windows of a Python module's source, and the same one byte later."""
    corpus = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8).astype(np.int32)
    rng = np.random.default_rng(config.seed)
    found = []
    for _ in range(steps):
        starts = rng.integers(0, len(corpus) - config.seq - 1, config.batch)
        rows = np.stack([corpus[start : start + config.seq + 1] for start in starts])
        found.append((rows[:, :-1], rows[:, 1:]))
    return found


def islands() -> list[list[Any]]:
    found: dict[int, list[Any]] = {}
    for device in jax.devices():
        found.setdefault(getattr(device, "slice_index", 0), []).append(device)
    return list(found.values())


def show_overlap(console: Console, spans: Sequence[Any]) -> None:
    """How long each island computed, and how many did at a time."""
    calls = [span for span in spans if span.kind == "call"]
    busy: dict[int, int] = {}
    for span in calls:
        busy[span.island] = busy.get(span.island, 0) + span.ended - span.started
    edges = sorted({edge for span in calls for edge in (span.started, span.ended)})
    several = covered = 0
    for start, stop in itertools.pairwise(edges):
        count = len({span.island for span in calls if span.started <= start and span.ended >= stop})
        covered += (stop - start) * (count > 0)
        several += (stop - start) * (count > 1)
    table = Table("island", "computed, ms", title="the last step")
    for island, nanoseconds in sorted(busy.items()):
        table.add_row(str(island), f"{nanoseconds / 1e6:.1f}")
    console.print(table)
    console.print(
        f"{sum(busy.values()) / covered:.2f} stages computed at a time; "
        f"for {100 * several / covered:.0f}% of the time more than one"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small transformer as a pipeline over islands.")
    parser.add_argument(
        "--stages", type=int, default=4, help="number of stages, each on a separate island (default: 4)"
    )
    parser.add_argument("--microbatches", type=int, default=8, help="of a batch (default: 8)")
    parser.add_argument("--steps", type=int, default=20, help="of training (default: 20)")
    parser.add_argument("--spmd", action="store_true", help="one function over one island, for comparison")
    parser.add_argument("--trace", type=Path, help="where to write the last step's trace")
    parser.add_argument("--losses-out", type=Path, help="where to write the losses, as JSON")
    options = parser.parse_args()
    config = Config(microbatches=options.microbatches)
    if config.layers % options.stages or config.batch % config.microbatches:
        parser.error(f"{config.layers} layers and a batch of {config.batch} cannot be cut so")
    with atoll.connect(islands=f"{options.stages}x1x2"):  # or the cluster of ATOLL_ADDRESS
        if len(islands()) < options.stages:
            parser.error(f"{options.stages} stages need as many islands, of which there are {len(islands())}")
        losses = train(config, options)
    if options.losses_out is not None:
        options.losses_out.write_text(json.dumps(losses))


def train(config: Config, options: argparse.Namespace) -> list[float]:
    """The losses of all steps."""
    console = Console()
    optimizer = optax.adam(3e-3)
    stages = [
        Stage(Mesh(np.array(devices), ("data",)), config.heads, optimizer, config.microbatches)
        for devices in islands()[: options.stages]
    ]
    states = [
        (params, stage.init(params))
        for stage, part in zip(stages, cut(first_params(config), options.stages), strict=True)
        for params in [jax.device_put(part, stage.whole)]
    ]
    data = batches(config, options.steps)
    losses: list[float] = []
    spans: list[Any] = []
    started = time.perf_counter()
    if options.spmd:
        (state,) = states
        spmd_step = make_spmd_step(stages[0], config, optimizer)
        for tokens, targets in data:
            state, loss = spmd_step(state, tokens, targets)
            losses.append(float(loss))
    else:
        step = make_step(stages)
        for i, (tokens, targets) in enumerate(data):
            parts = [list(np.split(each, config.microbatches)) for each in (tokens, targets)]
            if i == options.steps - 1:
                jax.block_until_ready(states)
                with atoll.trace(options.trace) as spans:
                    states, each = step(states, *parts)
                    jax.block_until_ready((states, each))
            else:
                states, each = step(states, *parts)
            losses.append(float(np.mean([np.asarray(loss) for loss in each])))
    seconds = time.perf_counter() - started
    if spans:
        show_overlap(console, spans)
    console.print(
        f"{options.steps} steps, {options.stages} stages, {config.microbatches} micro-batches: loss {losses[0]:.4f} -> "
        f"{losses[-1]:.4f} in {seconds:.1f} s"
    )
    return losses


if __name__ == "__main__":
    main()
