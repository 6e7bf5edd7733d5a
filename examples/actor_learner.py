"""Train an actor and a learner on two slices.

    python examples/actor_learner.py             # starts a cluster of two islands, and ends it

Each step is one program. The actor balances poles on carts with its current weights. Meanwhile the learner learns from
the games of the previous step, with an actor-critic whose probability ratios are clipped as in IMPALA (Espeholt et al.,
2018). Then its new weights are sent to the actor. The script waits for nothing.
"""

import time
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console

import atoll

LENGTH = 32  # moves of each pole in a step
DISCOUNT = 0.98
Params = list[dict[str, jax.Array]]


# ---- the world: poles on carts (Barto, Sutton and Anderson, 1983), each [position, velocity, angle, angular velocity]


def moved(state: jax.Array, action: jax.Array) -> jax.Array:
    """A fiftieth of a second later, pushed to the left or to the right."""
    x, speed, angle, spin = state.T
    force = jnp.where(action == 1, 10.0, -10.0)
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    push = (force + 0.05 * spin**2 * sine) / 1.1
    turn = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
    pull = push - 0.05 * turn * cosine / 1.1
    return jnp.stack([x + 0.02 * speed, speed + 0.02 * pull, angle + 0.02 * spin, spin + 0.02 * turn], 1)


def is_down(state: jax.Array) -> jax.Array:
    return (jnp.abs(state[:, 0]) > 2.4) | (jnp.abs(state[:, 2]) > 0.21)


# ---- what plays and learns


class Played(NamedTuple):
    """Of each move: what was seen before it [moves, poles, 4], what was done, how likely that was, whether it fell."""

    seen: jax.Array
    done: jax.Array
    likely: jax.Array
    fell: jax.Array
    last: jax.Array  # what is seen in the end


def first_params(seed: int, width: int = 32) -> Params:
    rng = np.random.default_rng(seed)
    sizes = [(4, width), (width, width), (width, 3)]
    return [
        {"w": (rng.standard_normal(size) * size[0] ** -0.5).astype(np.float32), "b": np.zeros(size[1], np.float32)}
        for size in sizes
    ]


def judged(params: Params, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The logarithms of both actions' probabilities, and what is to be expected."""
    for layer in params[:-1]:
        seen = jnp.tanh(seen @ layer["w"] + layer["b"])
    found = seen @ params[-1]["w"] + params[-1]["b"]
    return jax.nn.log_softmax(found[..., :2]), found[..., 2]


def played(params: Params, poles: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array, Played]:
    def move(carry: tuple[jax.Array, jax.Array], _: None) -> Any:
        poles, key = carry
        key, choice, fresh = jax.random.split(key, 3)
        logs, _ = judged(params, poles)
        action = jax.random.categorical(choice, logs)
        likely = jnp.take_along_axis(logs, action[:, None], 1)[:, 0]
        then = moved(poles, action)
        fell = is_down(then)
        again = jax.random.uniform(fresh, poles.shape, minval=-0.05, maxval=0.05)
        return (jnp.where(fell[:, None], again, then), key), (poles, action, likely, fell)

    (poles, key), moves = jax.lax.scan(move, (poles, key), None, length=LENGTH)
    return poles, key, Played(*moves, poles)


def loss_of(params: Params, game: Played) -> jax.Array:
    logs, worth = judged(params, game.seen)
    log = jnp.take_along_axis(logs, game.done[..., None], 2)[..., 0]
    ratio = jax.lax.stop_gradient(jnp.minimum(1.0, jnp.exp(log - game.likely)))
    _, end = judged(params, game.last)

    def back(later: jax.Array, fell: jax.Array) -> Any:
        now = jnp.where(fell, 0.0, 1.0 + DISCOUNT * later)
        return now, now

    _, returns = jax.lax.scan(back, jax.lax.stop_gradient(end), game.fell, reverse=True)
    gain = returns - worth
    entropy = -(jnp.exp(logs) * logs).sum(-1).mean()
    return (0.5 * gain**2 - ratio * jax.lax.stop_gradient(gain) * log).mean() - 0.01 * entropy


def make_step(actor: Mesh, learner: Mesh, rate: float) -> tuple[Any, Any]:
    """One step, as a program; and the optimizer."""
    optimizer = optax.chain(optax.clip_by_global_norm(10.0), optax.adam(rate))
    everywhere = {mesh: NamedSharding(mesh, PartitionSpec()) for mesh in (actor, learner)}
    by_pole = {mesh: NamedSharding(mesh, PartitionSpec(None, "poles")) for mesh in (actor, learner)}

    @partial(jax.jit, donate_argnums=1)
    def learn(params: Params, state: Any, game: Played) -> Any:
        updates, state = optimizer.update(jax.grad(loss_of)(params, game), state)
        return optax.apply_updates(params, updates), state, game.fell.mean()

    play = jax.jit(played)

    @atoll.program
    def step(params: Params, state: Any, weights: Params, poles: jax.Array, key: jax.Array, game: Played) -> Any:
        poles, key, next_game = play(weights, poles, key)
        there = jax.device_put(game[:-1], by_pole[learner])
        last = jax.device_put(game.last, NamedSharding(learner, PartitionSpec("poles")))
        params, state, falls = learn(params, state, Played(*there, last))
        return params, state, jax.device_put(params, everywhere[actor]), poles, key, next_game, falls

    return step, optimizer


def train(steps: int, poles: int = 64, rate: float = 5e-3, console: Console | None = None) -> list[float]:
    """For each step, how many moves a pole stood on average. On two slices of this process's cluster."""
    devices = atoll.make_virtual_device_set()
    with devices.add_slice(devices=1) as first, devices.add_slice(devices=1, other_island_than=first) as second:
        actor, learner = first.mesh("poles"), second.mesh("poles")
        step, optimizer = make_step(actor, learner, rate)
        here, there = NamedSharding(actor, PartitionSpec()), NamedSharding(learner, PartitionSpec())
        params = jax.device_put(first_params(0), there)
        state = jax.jit(optimizer.init, out_shardings=there)(params)
        weights = jax.device_put(params, here)
        state_of_poles, key = jax.device_put((np.zeros((poles, 4), np.float32), jax.random.key(0)), here)
        state_of_poles, key, game = jax.jit(played)(weights, state_of_poles, key)
        falls, began = [], time.perf_counter()
        for number in range(steps):
            params, state, weights, state_of_poles, key, game, fell = step(
                params, state, weights, state_of_poles, key, game
            )
            falls.append(fell)  # the loop runs ahead of what is played
            if console is not None and number % 50 == 49:
                stood = 1 / max(float(np.mean(falls[-50:])), 1e-3)
                console.print(f"step {number + 1}: a pole stands {stood:.0f} moves")
        found = [1 / max(float(each), 1e-3) for each in falls]
        if console is not None:
            console.print(f"{steps} steps in {time.perf_counter() - began:.1f} s")
    return found


def main(
    steps: Annotated[int, typer.Option(help="How many.")] = 400,
    islands: Annotated[str, typer.Option(help="Of the cluster that is started.")] = "2x1x1",
) -> None:
    with atoll.connect(islands=islands):
        train(steps, console=Console())


if __name__ == "__main__":
    typer.run(main)
