"""Train a next-byte model whose input is read on the hosts, and which you can kill and start again.

    JAX_PLATFORMS=atoll python examples/restart.py /tmp/run

The script shows the parts of a long run: batches that do not pass through the script (`read`, `atoll.data`), a step
that reports its progress (`jax.debug.print`), checkpoints of the weights and of the position in the data
(`Checkpoints`, with Orbax), and a profile of one step on all hosts (`jax.profiler.trace`, for TensorBoard). If it is
killed and started again, its losses are those of an uninterrupted run, bit for bit.
"""

import sysconfig
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import typer
from jax import NamedSharding, P
from jax.sharding import Mesh

from atoll.data import Batches, BatchIterator, Shard

BYTE_VALUES = 256
CORPUS_BYTES = 2**20
PROFILED_STEP = 3  # of each run, when all is compiled

State = dict[str, Any]  # "step", "params" and "moments": pytrees of arrays


@dataclass(frozen=True)
class Config:
    seq: int = 32
    width: int = 128
    batch: int = 64
    seed: int = 0


class Windows:
    """The Python standard library's own sources as windows of `seq` + 1 bytes, read from the disk of the host."""

    def __init__(self, seq: int) -> None:
        paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(path.read_bytes() for path in paths)[:CORPUS_BYTES]
        self._windows = np.frombuffer(text[: len(text) // (seq + 1) * (seq + 1)], np.uint8).reshape(-1, seq + 1)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> np.ndarray[Any, Any]:
        return self._windows[index]


def read(config: Config, shard: Shard) -> grain.MapDataset:
    """The batches of one host's shard: runs on that host."""
    windows = grain.MapDataset.source(Windows(config.seq)).seed(config.seed).shuffle()
    return windows[shard.index :: shard.count].repeat().batch(config.batch // shard.count, drop_remainder=True)


def make_training(config: Config) -> tuple[Callable[[], State], Callable[[State, jax.Array], tuple[State, jax.Array]]]:
    """Return a function that creates the first state, and the step: (state, batch) to (next state, loss)."""
    optimizer = optax.adam(2e-3)

    def first() -> State:
        keys = jax.random.split(jax.random.key(config.seed), 3)
        normal = partial(jax.random.normal, dtype=jnp.float32)
        params = {
            "embed": 0.1 * normal(keys[0], (BYTE_VALUES, config.width)),
            "mix": 0.05 * normal(keys[1], (2 * config.width, config.width)),
            "predict": 0.05 * normal(keys[2], (config.width, BYTE_VALUES)),
        }
        return {"step": jnp.int32(0), "params": params, "moments": optimizer.init(params)}

    def loss_of(params: dict[str, jax.Array], windows: jax.Array) -> jax.Array:
        bytes_ = params["embed"][windows[:, :-1].astype(jnp.int32)]
        before = jnp.cumsum(bytes_, axis=1) / jnp.arange(1, bytes_.shape[1] + 1)[:, None]
        hidden = jax.nn.gelu(jnp.concatenate([bytes_, before], axis=-1) @ params["mix"])
        targets = windows[:, 1:].astype(jnp.int32)
        return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["predict"], targets).mean()

    def step(state: State, windows: jax.Array) -> tuple[State, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], windows)
        updates, moments = optimizer.update(gradients, state["moments"])
        number = state["step"] + 1
        jax.lax.cond(
            number % 10 == 0,
            lambda: jax.debug.print(
                "step {}: loss {:.4f}, gradient {:.4f}", number, loss, optax.global_norm(gradients)
            ),
            lambda: None,
        )
        return {"step": number, "params": optax.apply_updates(state["params"], updates), "moments": moments}, loss

    return first, step


class Checkpoints:
    """The state and the iterator's own, together: the next batch is the one after the step that was saved."""

    def __init__(self, directory: Path) -> None:
        self._manager = ocp.CheckpointManager(directory.absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=2))

    def restore(self, state: State, batches: BatchIterator) -> State:
        """Return the last saved state, placed as `state` is, and set the iterator; without one, return `state`."""
        last = self._manager.latest_step()
        if last is None:
            return state
        shapes = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), state)
        wanted = ocp.args.Composite(
            state=ocp.args.StandardRestore(shapes), input=grain.checkpoint.CheckpointRestore(batches)
        )
        restored = self._manager.restore(last, args=wanted)["state"]
        return jax.tree.map(lambda leaf, old: jax.device_put(leaf, old.sharding), restored, state)

    def save(self, state: State, batches: BatchIterator) -> None:
        """Returns when it has the values; they are written while the next steps run."""
        values = jax.device_get(state)
        parts = ocp.args.Composite(state=ocp.args.StandardSave(values), input=grain.checkpoint.CheckpointSave(batches))
        self._manager.save(int(values["step"]), args=parts)

    def close(self) -> None:
        self._manager.close()


def main(
    directory: Annotated[
        Path, typer.Argument(help="for checkpoints, losses and profiles, of this run and of those before")
    ],
    steps: Annotated[int, typer.Option(min=1)] = 200,
    every: Annotated[int, typer.Option(min=1, help="steps from one checkpoint to the next")] = 20,
) -> None:
    """Train to the last step, from the last checkpoint in the directory."""
    config = Config()
    mesh = Mesh(np.array(jax.devices()), ("data",))
    first, step = make_training(config)
    state = jax.jit(first, out_shardings=NamedSharding(mesh, P()))()
    batches = iter(Batches(partial(read, config), NamedSharding(mesh, P("data"))))
    checkpoints = Checkpoints(directory / "checkpoints")
    state = checkpoints.restore(state, batches)
    begin = int(state["step"])
    print(f"from step {begin} on", flush=True)
    jitted = jax.jit(step, donate_argnums=0)
    with open(directory / "losses", "a", buffering=1) as losses:
        for number in range(begin + 1, steps + 1):
            with jax.profiler.trace(directory / "profile") if number == begin + PROFILED_STEP else nullcontext():
                state, loss = jitted(state, next(batches))
                value = float(loss)
            losses.write(f"{number} {value.hex()}\n")
            if number % every == 0:
                checkpoints.save(state, batches)
    checkpoints.close()
    jax.effects_barrier()
    print(f"loss {value:.4f} after {steps} steps" if begin < steps else "nothing is left to do")


if __name__ == "__main__":
    typer.run(main)
