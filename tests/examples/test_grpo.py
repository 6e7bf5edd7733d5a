"""Tests of the post-training example: its policy learns, even if the trainer is killed during the run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import atoll
from atoll.errors import Code, StatusError
from examples import grpo
from examples.grpo import first_state, generate, learn
from tests.lines import next_line
from tests.scripts import script_environment, start_process

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "grpo.py"
DEADLINE = 600.0


# `tests/end_to_end/test_arrays_between_scripts.py` has what the example uses of Atoll.
@pytest.mark.thorough
def test_the_policy_learns_on_stock_jax() -> None:
    with jax.enable_x64(False):
        state, key = first_state(), jax.random.key(0)
        rewards = []
        for _ in range(90):
            key, now = jax.random.split(key)
            state = learn(state, [generate(state["params"], now)])
            rewards.append(float(state["reward"]))
    assert rewards[0] == pytest.approx(0.1, abs=0.05)
    assert sum(rewards[-5:]) / 5 > 0.5


@dataclass
class Version:
    number: int
    tree: Any


class Store:
    """Named arrays of one process. A worker that runs has rollouts of the newest policy whenever they are read.

    `changes` has the workers that run from a version of the policy on.
    """

    def __init__(self, changes: dict[int, set[int]]) -> None:
        self.used: list[set[int]] = []  # by version of the policy: the workers whose rollouts were read
        self._changes = changes
        self._running: set[int] = set()

    def publish(self, name: str, tree: Any, keep: int = 2) -> int:
        if name == "policy":
            self.used.append(set())
            self._running = self._changes.get(len(self.used), self._running)
        return len(self.used)

    def subscribe(self, name: str, place: Any, newer_than: int = 0, wait: float = 0.0, like: Any = None) -> Version:
        worker, version = name.removeprefix("rollouts-"), len(self.used)
        if not worker.isdigit() or int(worker) not in self._running or newer_than >= version:
            raise StatusError(Code.NOT_FOUND, f"no version of {name}")
        self.used[-1].add(int(worker))
        return Version(version, {"version": version, "worker": int(worker)})


def test_the_trainer_uses_the_rollouts_of_workers_that_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = {1: {0, 1}, 4: {0}, 6: {0, 2}, 9: {2, 1}}
    store = Store(workers)
    place = NamedSharding(Mesh(np.array(jax.devices()[:1]), "d"), PartitionSpec())
    learned: list[set[int]] = []

    def learn_from(state: Any, rollouts: list[Any]) -> Any:
        learned.append({each["worker"] for each in rollouts})
        return state | {"step": state["step"] + 1}

    monkeypatch.setattr(atoll, "publish", store.publish)
    monkeypatch.setattr(atoll, "subscribe", store.subscribe)
    monkeypatch.setattr(grpo, "first_state", lambda: {"params": 0, "step": 0, "reward": 0.0})
    monkeypatch.setattr(grpo, "learn", learn_from)
    grpo.train(place, 11, workers=3, behind=1, curve=None)
    expected = [workers[max(each for each in workers if each <= version)] for version in range(1, 12)]
    assert learned == expected
    assert store.used == [*expected, set()], "nobody waits for workers that do not run"


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(short_directory: Path, program_cache: Path) -> Iterator[Start]:
    """Start a cluster of two islands. The fixture starts a part of the example on it: `start("worker", ...)`."""
    environment = script_environment(short_directory, program_cache, "2x1x4")
    up = [sys.executable, "-m", "atoll.operate.command", "up", "--islands", "2x1x4", "--foreground"]
    cluster = start_process(up, environment, short_directory)
    started = [cluster]
    try:
        address = re.search(r"unix:\S+", next_line(cluster))
        assert address is not None
        environment |= {"ATOLL_ADDRESS": address[0], "JAX_PLATFORMS": "atoll"}
        environment.pop("ATOLL_ISLANDS", None)

        def start(*arguments: str) -> subprocess.Popen[str]:
            started.append(start_process([sys.executable, str(SCRIPT), *arguments], environment, short_directory))
            return started[-1]

        yield start
    finally:
        for each in reversed(started):
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGTERM if each is cluster else signal.SIGKILL)
                each.communicate()


def until(trainer: subprocess.Popen[str], text: str) -> None:
    while text not in next_line(trainer):
        assert trainer.poll() is None


def kill(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def assert_learned(curve: Path) -> None:
    rewards = [reward for _, reward in json.loads(curve.read_text())]
    assert sum(rewards[-10:]) / 10 > 0.9


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(DEADLINE + 60)
def test_a_trainer_that_is_killed_resumes_and_the_policy_learns(tmp_path: Path, start: Start) -> None:
    for number in ("0", "1"):
        start("worker", "--number", number)
    curve = tmp_path / "curve.json"
    trainer = start("trainer", "--curve", str(curve))
    until(trainer, "step 40:")
    kill(trainer)
    again = start("trainer", "--curve", str(curve))
    output, errors = again.communicate(timeout=DEADLINE)
    assert again.returncode == 0, errors[-4000:]
    resumed = re.match(r"resumed at step (\d+)", output)
    assert resumed is not None, output
    assert int(resumed[1]) > 30
    assert_learned(curve)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(DEADLINE + 60)
def test_rollout_workers_leave_and_others_come_while_the_policy_learns(tmp_path: Path, start: Start) -> None:
    curve = tmp_path / "curve.json"
    start("worker", "--number", "0")
    leaves = start("worker", "--number", "1")
    trainer = start("trainer", "--workers", "3", "--curve", str(curve))
    until(trainer, "of 2 workers")
    kill(leaves)
    until(trainer, "of 1 worker")
    start("worker", "--number", "2")
    until(trainer, "of 2 workers")
    start("worker", "--number", "1")
    _, errors = trainer.communicate(timeout=DEADLINE)
    assert trainer.returncode == 0, errors[-4000:]
    assert_learned(curve)
