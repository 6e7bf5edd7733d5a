"""Train a small GPT on the sources of Python's standard library, on all devices that JAX shows.

This is an ordinary JAX script: Flax NNX modules, optax's AdamW, one jitted step over a mesh.

    python examples/gpt.py                                # the devices of this machine
    JAX_PLATFORMS=atoll python examples/gpt.py            # devices in other processes, with Atoll
    JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/gpt.py

The same seed gives the same batches and the same first weights for any number of devices.
"""

import hashlib
import json
import re
import sysconfig
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from flax import nnx
from jax import NamedSharding, P
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

BYTE_VALUES = 256  # the vocabulary: a token is a byte of source
CORPUS_BYTES = 4 * 2**20
LAG = 8  # steps between a step's dispatch and the reading of its loss: so many are in flight at most


class Sharding(StrEnum):  # what is cut over the devices: the batch, the weights, or each over its own axis
    DATA, TENSOR, BOTH = "data", "tensor", "both"


@dataclass(frozen=True)
class Config:
    width: int = 64
    layers: int = 2
    heads: int = 8
    seq: int = 64
    batch: int = 16
    steps: int = 300
    seed: int = 0


class Block(nnx.Module):
    """Causal self-attention and an MLP, each behind a layer norm and beside a residual."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        width, self.heads = config.width, config.heads
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.query = linear(width, width)
        self.key = linear(width, width)
        self.value = linear(width, width)
        self.project = linear(width, width)
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
        self.expand = linear(width, 4 * width)
        self.contract = linear(4 * width, width)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.attention_norm(x)
        by_head = (*y.shape[:-1], self.heads, -1)
        heads = (linear(y).reshape(by_head) for linear in (self.query, self.key, self.value))
        attended = jax.nn.dot_product_attention(*heads, is_causal=True)
        x = x + self.project(attended.reshape(y.shape))
        return x + self.contract(jax.nn.gelu(self.expand(self.mlp_norm(x))))


class GPT(nnx.Module):
    """Bytes [batch, seq] -> logits of the next byte [batch, seq, 256]."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(BYTE_VALUES, config.width, rngs=rngs)
        self.positions = nnx.Embed(config.seq, config.width, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.LayerNorm(config.width, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[-1]))
        for block in self.blocks:
            x = block(x)
        return self.tokens.attend(self.norm(x))


def make_mesh(sharding: Sharding) -> Mesh:
    """All devices, as (data, model)."""
    count = len(jax.devices())
    model = {Sharding.DATA: 1, Sharding.TENSOR: count, Sharding.BOTH: 2 if count % 2 == 0 else 1}[sharding]
    return Mesh(np.array(jax.devices()).reshape(count // model, model), ("data", "model"))


def partition(path: tuple[Any, ...]) -> P:
    """How a weight, or its AdamW moments, is sharded over the mesh, by the layer's name in its path.

    The layers that fan out are sharded by columns and those that reduce by rows, as in Megatron:
    a block then needs two all-reduces forward, and no activation is gathered.
    """
    names = set(re.findall(r"\w+", jax.tree_util.keystr(path)))
    if names & {"query", "key", "value", "expand"} and "kernel" in names:
        return P(None, "model")
    if names & {"project", "contract"}:
        return P("model", None)
    return P()


State = dict[str, Any]  # "params" and "moments", each a pytree of arrays
Step = Callable[[State, jax.Array], tuple[State, jax.Array]]  # (state, batch) -> (next state, loss)


def make_training(config: Config, mesh: Mesh) -> tuple[State, Step, NamedSharding]:
    """The first state, on the devices; the jitted step, which donates the state; a batch's sharding."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: GPT(config, nnx.Rngs(config.seed))), nnx.Param)
    warmup = min(20, config.steps // 2)
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 5e-3, warmup, config.steps, 5e-4))

    def first_state() -> State:
        params = nnx.state(GPT(config, nnx.Rngs(config.seed)), nnx.Param)
        return {"params": params, "moments": optimizer.init(params)}

    def step(state: State, tokens: jax.Array) -> tuple[State, jax.Array]:
        tokens = tokens.astype(jnp.int32)

        def loss_of(params: Any) -> jax.Array:
            logits = nnx.merge(graph, params)(tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        loss, gradients = jax.value_and_grad(loss_of)(state["params"])
        updates, moments = optimizer.update(gradients, state["moments"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, loss

    shardings = jax.tree_util.tree_map_with_path(
        lambda path, _: NamedSharding(mesh, partition(path)), jax.eval_shape(first_state)
    )
    batch_sharding = NamedSharding(mesh, P("data", None))
    state = jax.jit(first_state, out_shardings=shardings)()
    ins, outs = (shardings, batch_sharding), (shardings, NamedSharding(mesh, P()))
    return state, jax.jit(step, in_shardings=ins, out_shardings=outs, donate_argnums=0), batch_sharding


def read_corpus(limit: int = CORPUS_BYTES) -> np.ndarray:
    """The first `limit` bytes of the standard library's sources, in the order of their names: uint8."""
    root = Path(sysconfig.get_paths()["stdlib"])
    other = {"site-packages", "dist-packages", "test", "tests"}
    corpus = bytearray()
    for name in sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py")):
        if len(corpus) < limit and not other & set(name.split("/")):
            corpus += (root / name).read_bytes()
    return np.frombuffer(bytes(corpus[:limit]), np.uint8)


def batches(corpus: np.ndarray, config: Config) -> Iterator[np.ndarray]:
    """Random windows of the corpus, for ever: uint8[batch, seq + 1]."""
    generator, window = np.random.default_rng(config.seed), np.arange(config.seq + 1)
    while True:
        starts = generator.integers(0, len(corpus) - config.seq, size=(config.batch, 1))
        yield corpus[starts + window]


def train(
    config: Config, mesh: Mesh, corpus: np.ndarray, report: Callable[[int, float, float], None]
) -> tuple[list[float], float]:
    """All losses, and tokens/s after the first step (which compiles). Calls report(step, loss, tokens/s)."""
    (state, step, batch_sharding), data = make_training(config, mesh), batches(corpus, config)
    losses: list[float] = []
    in_flight: deque[jax.Array] = deque()
    started, rate = time.perf_counter(), 0.0

    def read_oldest() -> None:
        nonlocal started, rate
        losses.append(float(in_flight.popleft()))
        now = time.perf_counter()
        rate = (len(losses) - 1) * config.batch * config.seq / (now - started)
        started = now if len(losses) == 1 else started
        report(len(losses), losses[-1], rate)

    for number in range(config.steps):
        state, loss = step(state, jax.device_put(next(data), batch_sharding))
        loss.copy_to_host_async()
        in_flight.append(loss)
        if number == 0 or len(in_flight) > LAG:
            read_oldest()
    while in_flight:
        read_oldest()
    return losses, rate


def table_of_devices() -> Table:
    table = Table("id", "kind", "platform", "slice", "process", title="Devices")
    for d in jax.devices():
        row = (d.id, d.device_kind, d.platform, getattr(d, "slice_index", "-"), d.process_index)
        table.add_row(*map(str, row))
    return table


def main(
    sharding: Annotated[Sharding, typer.Option(help="what is cut over the devices")] = Sharding.DATA,
    steps: Annotated[int, typer.Option(min=1)] = Config.steps,
    batch: Annotated[int, typer.Option(min=1, help="windows of text in a step")] = Config.batch,
    seq: Annotated[int, typer.Option(min=1, help="bytes in a window")] = Config.seq,
    width: Annotated[int, typer.Option(min=8)] = Config.width,
    layers: Annotated[int, typer.Option(min=1)] = Config.layers,
    seed: Annotated[int, typer.Option(min=0)] = Config.seed,
    losses_out: Annotated[Path | None, typer.Option(help="write all losses, exactly, as JSON")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="only the last line")] = False,
) -> None:
    """Train a small GPT on the Python standard library's own sources."""
    config = Config(width=width, layers=layers, seq=seq, batch=batch, steps=steps, seed=seed)
    mesh = make_mesh(sharding)
    data, model = mesh.devices.shape
    if width % config.heads or config.heads % model or batch % data:
        sizes = f"width {width}, {config.heads} heads, batch {batch}"
        raise typer.BadParameter(f"{sizes} do not divide over {data} (data) x {model} (model) devices")
    corpus, console = read_corpus(), Console(quiet=quiet)
    bar = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"), TimeRemainingColumn())
    with Progress(TextColumn("training"), *bar, console=console) as progress:
        task = progress.add_task("training", total=steps, note="compiling")

        def show(done: int, loss: float, rate: float) -> None:
            progress.update(task, completed=done, note=f"loss {loss:.3f}  {rate:,.0f} tokens/s")

        losses, rate = train(config, mesh, corpus, show)
    if losses_out:
        record = {
            "losses": [loss.hex() for loss in losses],
            "settings": asdict(config) | {"mesh": dict(mesh.shape)},
            "corpus": {"bytes": len(corpus), "sha256": hashlib.sha256(corpus.tobytes()).hexdigest()},
            "tokens_per_second": rate,
            "jax": jax.__version__,
        }
        losses_out.write_text(json.dumps(record, indent=1) + "\n")
    console.print(table_of_devices())
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {steps} steps, {rate:,.0f} tokens/s")


if __name__ == "__main__":
    typer.run(main)
