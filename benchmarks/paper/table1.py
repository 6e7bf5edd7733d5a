"""Table 1: T5 trained as one SPMD program; tokens a second, and the losses, which must not differ by a bit.

The paper trains on 32 to 512 TPU cores; here it is TINY on eight devices of this machine, cut over the batch
and, in each layer, over attention heads and the feed-forward's width, with Adafactor as T5 was trained.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax import NamedSharding, P
from jax.sharding import Mesh

from benchmarks.harness.benchmark import Round, Settings
from benchmarks.paper import t5

SEED = 0
FIRST_TOKEN = 2  # 0 begins and fills up, 1 ends a sequence
LEARNING_RATE = 0.01  # T5's, for the first ten thousand steps


@dataclass(frozen=True)
class Work:
    """Work of a round."""

    config: t5.Config
    steps: int
    batch: int = 32  # sequences
    inputs: int = 64  # tokens a sequence, as are targets
    targets: int = 32

    @property
    def tokens(self) -> int:
        """The encoder's and the decoder's, in all steps."""
        return self.steps * self.batch * (self.inputs + self.targets)


FULL = Work(t5.TINY, steps=20)
QUICK = Work(replace(t5.TINY, layers=1), steps=4, batch=8, inputs=16, targets=8)


class State(NamedTuple):
    weights: t5.Weights
    statistics: Any  # Adafactor's


class Batch(NamedTuple):
    inputs: Any  # int32[batch, inputs], of NumPy or JAX
    targets: Any  # int32[batch, targets]


Step = Callable[[State, Batch], tuple[State, jax.Array]]  # (state, batch) -> (next state, loss)

# Megatron's way: what fans out is cut by columns and what comes together again by rows, so that each part of a
# layer needs one all-reduce forward, and no activation is gathered. What is not named here lies whole everywhere.
PARTITION = {
    "query": P(None, "model", None),
    "key": P(None, "model", None),
    "value": P(None, "model", None),
    "output": P("model", None, None),
    "expand": P(None, "model"),
    "contract": P("model", None),
    "relative_bias": P(None, "model"),
}


def make_mesh() -> Mesh:
    """Eight devices: four parts of the batch, and each layer over two."""
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


def partition(path: tuple[Any, ...], leaf: Any) -> P:
    """How a weight, or what Adafactor knows of it, lies on the mesh, by the weight's name, which ends its path.

    What Adafactor keeps of a large weight are sums over one of its axes: they have fewer axes than the weight,
    and are small enough to lie whole everywhere.
    """
    spec = PARTITION.get(getattr(path[-1], "name", ""), P())
    return spec if len(spec) == leaf.ndim else P()


def make_training(config: t5.Config, mesh: Mesh) -> tuple[Callable[[], State], Step, NamedSharding]:
    """A function that makes the first state on the devices, always the same; the step, which donates the
    state; a batch's sharding. All are jitted."""
    optimizer = optax.adafactor(LEARNING_RATE)

    def first_state() -> State:
        weights = t5.first_weights(config, SEED)
        return State(weights, optimizer.init(weights))

    def step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        loss, gradients = jax.value_and_grad(t5.loss)(state.weights, *batch)
        updates, statistics = optimizer.update(gradients, state.statistics, state.weights)
        return State(optax.apply_updates(state.weights, updates), statistics), loss

    shardings = jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, partition(path, leaf)), jax.eval_shape(first_state)
    )
    batch_sharding, whole = NamedSharding(mesh, P("data", None)), NamedSharding(mesh, P())
    jitted = jax.jit(step, in_shardings=(shardings, batch_sharding), out_shardings=(shardings, whole), donate_argnums=0)
    return jax.jit(first_state, out_shardings=shardings), jitted, batch_sharding


def make_batches(work: Work) -> list[Batch]:
    """One a step, always the same: random tokens, and as targets the last of them backwards."""
    generator = np.random.default_rng(SEED)
    shape, end = (work.batch, work.inputs), work.config.vocabulary
    drawn = [generator.integers(FIRST_TOKEN, end, shape, dtype=np.int32) for _ in range(work.steps)]
    return [Batch(inputs, np.ascontiguousarray(inputs[:, : -work.targets - 1 : -1])) for inputs in drawn]


def prepare(settings: Settings) -> Round:
    """Every round trains the same steps from the same first state: its losses are equal in all rounds, and of
    all contestants. `loss_sum` and `last_loss` are exact: compare them with ==."""
    work = QUICK if settings.quick else FULL
    first_state, step, batch_sharding = make_training(work.config, make_mesh())
    batches = make_batches(work)

    def train(state: State, batches: list[Batch]) -> list[jax.Array]:
        """Reads nothing: the losses come back as arrays, when all steps are done."""
        losses = []
        for batch in batches:
            state, loss = step(state, jax.device_put(batch, batch_sharding))
            losses.append(loss)
        jax.block_until_ready((state, losses))
        return losses

    train(first_state(), batches[:3])

    def measure() -> dict[str, float]:
        state = jax.block_until_ready(first_state())
        started = time.perf_counter()
        arrays = train(state, batches)
        seconds = time.perf_counter() - started
        losses = [float(loss) for loss in jax.device_get(arrays)]
        # A loss that is not a number fails this too.
        if not losses[-1] < losses[0]:
            raise ArithmeticError(f"nothing was learnt: the losses were {losses}")
        return {
            "tokens": work.tokens / seconds,
            "step": 1000 * seconds / work.steps,
            "loss_sum": sum(losses),
            "last_loss": losses[-1],
        }

    return measure
