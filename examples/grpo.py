"""Train a policy with GRPO: one script trains, others generate, and they exchange named arrays on one cluster.

    python examples/grpo.py                                        # starts a cluster and all scripts
    JAX_PLATFORMS=atoll ATOLL_ADDRESS=... python examples/grpo.py trainer
    JAX_PLATFORMS=atoll ATOLL_ADDRESS=... python examples/grpo.py worker --number 0

The policy is a small transformer that has to answer a + b modulo 10. A worker reads the newest version of the policy,
answers each problem several times, and publishes its rollouts. The trainer reads the rollouts of all workers, makes one
step, and publishes the next version of the policy. No array goes through a script.

Workers may come and go. If the trainer ends, the same command resumes from the last state that it has published.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import atoll

DIGITS, SYMBOLS, LENGTH = 10, 12, 4  # a problem consists of the symbols a + b =
WIDTH, HIDDEN = 64, 256
SAMPLES = 32  # answers to each problem
CLIP = 0.2
STEPS = 300  # of training
PROBLEMS = np.array([[a, 10, b, 11] for a in range(DIGITS) for b in range(DIGITS)], np.int32)
ANSWERS = (PROBLEMS[:, 0] + PROBLEMS[:, 2]) % DIGITS

# With larger first steps, the policy would give the same answer to all problems, and learn nothing from then on.
optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(optax.linear_schedule(0.0, 2e-3, 50)))
# How much the entropy of the answers counts. The policy first tries all answers, and later gives the best one.
entropy_weight = optax.linear_schedule(0.1, 0.0, STEPS * 4 // 5)
Tree = dict[str, Any]


# ---- the policy


class Policy(nn.Module):
    """A transformer of one layer that computes the logits of the answers to problems of shape (problems, LENGTH)."""

    @nn.compact
    def __call__(self, problems: jax.Array) -> jax.Array:
        x = nn.Embed(SYMBOLS, WIDTH, embedding_init=nn.initializers.normal(1.0))(problems)
        x = x + self.param("place", nn.initializers.normal(1.0), (LENGTH, WIDTH))
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.RMSNorm()(x))
        x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(HIDDEN)(nn.RMSNorm()(x))))
        return nn.Dense(DIGITS, kernel_init=nn.initializers.normal(0.02))(nn.RMSNorm()(x[:, -1]))


def first_params() -> Tree:
    params: Tree = Policy().init(jax.random.key(0), PROBLEMS)["params"]
    return params


def log_probabilities_of(params: Tree) -> jax.Array:
    """Return the log-probabilities of all answers to all problems, of shape (problems, DIGITS)."""
    return jax.nn.log_softmax(Policy().apply({"params": params}, PROBLEMS))


# ---- rollouts


@jax.jit
def generate(params: Tree, key: jax.Array) -> Tree:
    """Answer each problem `SAMPLES` times. Return the answers, their log-probabilities and their rewards."""
    log_probabilities = log_probabilities_of(params)
    answers = jax.random.categorical(key, log_probabilities[:, None, :], shape=(len(PROBLEMS), SAMPLES))
    chosen = jnp.take_along_axis(log_probabilities, answers, axis=1)
    return {"answers": answers, "log": chosen, "rewards": (answers == ANSWERS[:, None]).astype(jnp.float32)}


def work(number: int) -> None:
    """Generate rollouts with the newest policy, until the script is ended."""
    devices = [device for device in jax.devices() if device.slice_index == 1]
    device = jax.sharding.SingleDeviceSharding(devices[number % len(devices)])
    key = jax.device_put(jax.random.key_data(jax.random.key(int(time.time()) + number)), device)
    version = 0
    while True:
        try:
            policy = atoll.subscribe("policy", device, newer_than=version, wait=60.0)
        except atoll.StatusError as error:
            print(f"worker {number}: {error}", flush=True)
            continue
        version = policy.number
        key, now = jax.random.split(jax.random.wrap_key_data(key))
        rollouts = generate(policy.tree, now)
        atoll.publish(f"rollouts-{number}", rollouts | {"version": jnp.int32(version)}, keep=1)
        key = jax.random.key_data(key)


# ---- training


def loss_of(params: Tree, rollouts: Tree, step: jax.Array) -> jax.Array:
    """Return the clipped loss of GRPO, in which a reward counts relative to other answers to the same problem."""
    log_probabilities = log_probabilities_of(params)
    ratio = jnp.exp(jnp.take_along_axis(log_probabilities, rollouts["answers"], axis=1) - rollouts["log"])
    rewards = rollouts["rewards"]
    advantage = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-4)
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage).mean()
    entropy = -(jnp.exp(log_probabilities) * log_probabilities).sum(1).mean()
    return -gain - entropy_weight(step) * entropy


@jax.jit
def learn(state: Tree, rollouts: list[Tree]) -> Tree:
    """Make one step with the rollouts of all workers."""
    together = {
        name: jnp.concatenate([each[name] for each in rollouts], axis=1) for name in ("answers", "log", "rewards")
    }
    gradient = jax.grad(loss_of)(state["params"], together, state["step"])
    updates, moments = optimizer.update(gradient, state["moments"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "moments": moments, "step": state["step"] + 1, "reward": together["rewards"].mean()}


def first_state() -> Tree:
    params = first_params()
    return {"params": params, "moments": optimizer.init(params), "step": jnp.int32(0), "reward": jnp.float32(0)}


def first_island() -> NamedSharding:
    """Return the sharding of the trainer's arrays: each device of the first island has all of each array."""
    mesh = Mesh(np.array([device for device in jax.devices() if device.slice_index == 0]), "d")
    return NamedSharding(mesh, PartitionSpec())


def train(place: NamedSharding, steps: int, workers: int, behind: int, curve: Path | None) -> None:
    """Train until `steps`. Use rollouts of policies that are at most `behind` versions old."""
    state = jax.device_put(first_state(), place)
    try:
        state = atoll.subscribe("trainer", place, wait=0.0, like=state).tree
        print(f"resumed at step {int(state['step'])}", flush=True)
    except atoll.StatusError:
        print("started", flush=True)
    version = atoll.publish("policy", state["params"])
    seen = dict.fromkeys(range(workers), 0)
    rewards: list[tuple[int, float]] = []
    first = int(state["step"])
    if curve is not None and first and curve.exists():  # continue the curve of the trainer that was killed
        rewards = [(step, reward) for step, reward in json.loads(curve.read_text()) if step < first - 1]
        rewards.append((first - 1, float(state["reward"])))
    while (step := int(state["step"])) < steps:
        rollouts = new_rollouts(place, seen, version - behind)
        state = learn(state, rollouts)
        version = atoll.publish("policy", state["params"])
        atoll.publish("trainer", state, keep=1)
        rewards.append((step, float(state["reward"])))
        if step % 20 == 0:
            workers_text = f"{len(rollouts)} worker{'s' * (len(rollouts) != 1)}"
            print(f"step {step}: reward {rewards[-1][1]:.3f} of {workers_text}", flush=True)
        if curve is not None:
            write(curve, rewards)
    print(f"reward {rewards[-1][1]:.3f} after {steps} steps", flush=True)


def write(curve: Path, rewards: list[tuple[int, float]]) -> None:
    """Write the rewards in one piece, since the trainer may be killed at any time."""
    file = curve.with_suffix(".new")
    file.write_text(json.dumps(rewards))
    file.replace(curve)


def new_rollouts(place: NamedSharding, seen: dict[int, int], oldest: int) -> list[Tree]:
    """Return the next rollouts of all workers that have some, at least of one worker.

    `seen` are the versions of rollouts that were used, by worker. Rollouts of policies before `oldest` are dropped.
    """
    found: list[Tree] = []
    until = time.monotonic() + 120.0
    while not found:
        for number, last in seen.items():
            try:
                rollouts = atoll.subscribe(f"rollouts-{number}", place, newer_than=last, wait=0.0 if found else 0.5)
            except atoll.StatusError:  # the worker is slower, or does not run
                if time.monotonic() > until:
                    raise
                continue
            seen[number] = rollouts.number
            if int(rollouts.tree["version"]) >= oldest:
                found.append(rollouts.tree)
    return found


# ---- one script


def train_colocated(steps: int) -> list[float]:
    """Train and generate in turn, in this script, and return the rewards. The islands exchange arrays by device_put."""
    place = first_island()
    worker = jax.sharding.SingleDeviceSharding(next(device for device in jax.devices() if device.slice_index == 1))
    state, key, rewards = jax.device_put(first_state(), place), jax.random.key(0), []
    for _ in range(steps):
        key, now = jax.random.split(key)
        rollouts = generate(jax.device_put(state["params"], worker), jax.device_put(now, worker))
        state = learn(state, [jax.device_put(rollouts, place)])
        rewards.append(float(state["reward"]))
    return rewards


def start_all(options: argparse.Namespace) -> None:
    """Start a cluster of two islands, and all scripts on it. End when the trainer ends."""
    cluster = atoll.connect(islands="2x1x4")
    with cluster:
        environment = os.environ | {"JAX_PLATFORMS": "atoll", "ATOLL_ADDRESS": cluster.address}
        script = [sys.executable, __file__]
        trainer = [*script, "trainer", "--steps", str(options.steps), "--workers", str(options.workers)]
        trainer += ["--behind", str(options.behind)] + (["--curve", str(options.curve)] if options.curve else [])
        workers = [
            subprocess.Popen([*script, "worker", "--number", str(number)], env=environment)
            for number in range(options.workers)
        ]
        try:
            subprocess.run(trainer, env=environment, check=True)
        finally:
            for each in workers:
                each.terminate()
                each.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a policy with GRPO.")
    parser.add_argument("part", nargs="?", default="all", choices=["all", "trainer", "worker", "colocated"])
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of training (default: {STEPS})")
    parser.add_argument("--workers", type=int, default=2, help="that the trainer reads from (default: 2)")
    parser.add_argument("--number", type=int, default=0, help="of this worker (default: 0)")
    parser.add_argument("--behind", type=int, default=1, help="versions that rollouts may be behind (default: 1)")
    parser.add_argument("--curve", type=Path, help="where to write the rewards, as JSON")
    options = parser.parse_args()
    if options.part == "all":
        start_all(options)
    elif options.part == "worker":
        work(options.number)
    elif options.part == "trainer":
        train(first_island(), options.steps, options.workers, options.behind, options.curve)
    else:
        with atoll.connect(islands="2x1x4"):
            rewards = train_colocated(options.steps)
        print(f"reward {rewards[-1]:.3f} after {options.steps} steps")
        if options.curve is not None:
            write(options.curve, list(enumerate(rewards)))


if __name__ == "__main__":
    main()
