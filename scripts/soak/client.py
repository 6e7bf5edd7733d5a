"""One user of the soak: random programs over the devices of one or two islands, each result checked against NumPy.

Prints a line for each step. Ends with status 3 at a wrong result, and with 0 when its time is over.
"""

from __future__ import annotations

import faulthandler
import itertools
import random
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import atoll

WRONG, LOST_PROXY = 3, 4
# How a failure of some process reaches a user. Anything else is a defect.
_EXPECTED = ("DATA_LOSS", "DEADLINE_EXCEEDED", "UNAVAILABLE", "RESOURCE_EXHAUSTED")
_SIZES = (8, 1024, 65_536, 1 << 20)
_MAX_ARRAYS = 12


@dataclass
class Held:
    """An array, and what it must contain."""

    array: Any
    expected: np.ndarray[Any, Any]


class User:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.held: list[Held] = []
        self.lost = 0
        devices = jax.devices()
        islands = sorted({device.slice_index for device in devices})
        groups = [[d for d in devices if d.slice_index == island] for island in islands]
        self.shardings = [shardings(group) for group in groups]  # of each island
        over_islands = [a + b for a, b in itertools.combinations(groups, 2)]
        self.all_shardings = self.shardings + [shardings(group) for group in over_islands]
        self.functions = [
            (jax.jit(lambda x: x * 2 + 1), lambda x: x * 2 + 1),
            (jax.jit(lambda x: x - x.sum() / x.size), lambda x: x - x.sum() / x.size),
            (jax.jit(lambda x: x[::-1] + 1), lambda x: x[::-1] + 1),
        ]
        self.programs = [self.program() for _ in range(2)]
        self.homes = [self.rng.choice(each) for each in self.shardings]
        self.experts = [jax.jit(lambda x, factor=factor: x * factor + 1) for factor in range(2, 2 + len(self.homes))]
        self.choose = jax.jit(lambda x: (x % len(self.homes)).astype(int))

    def sharding(self) -> Any:
        return self.rng.choice(self.rng.choice(self.all_shardings))

    def program(self) -> tuple[Any, list[Any]]:
        """A program that computes on three places, one after the other; and what it does on the host."""
        stages = [(self.sharding(), *self.rng.choice(self.functions)) for _ in range(3)]

        @atoll.program
        def through(x: Any) -> Any:
            made = []
            for sharding, on_device, _ in stages:
                x = on_device(jax.device_put(x, sharding))
                made.append(x)
            return made[0], made[-1]

        return through, [on_host for _, _, on_host in stages]

    def step(self) -> str:
        actions = [
            self.put,
            self.compute,
            self.compute,
            self.run_program,
            self.transfer,
            self.route,
            self.check,
            self.drop,
        ]
        action = self.put if not self.held else self.rng.choice(actions)
        try:
            action()
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith(_EXPECTED):
                raise
            if lost_its_proxy(error):
                sys.exit(LOST_PROXY)
            self.lost += 1
            self.forget_what_is_lost()
        return action.__name__

    def put(self) -> None:
        # Small whole numbers: sums and halves of them are exact, in whatever order they are added.
        values = np.array([self.rng.randrange(64) for _ in range(8)], np.float64)
        expected = np.resize(values, self.rng.choice(_SIZES))
        self.keep(jax.device_put(expected, self.sharding()), expected)

    def compute(self) -> None:
        held = self.rng.choice(self.held)
        on_device, on_host = self.rng.choice(self.functions)
        if np.abs(held.expected).max() < 1 << 20:
            self.keep(on_device(held.array), on_host(held.expected))  # type: ignore[no-untyped-call]

    def run_program(self) -> None:
        held = self.rng.choice(self.held)
        through, on_host = self.rng.choice(self.programs)
        if np.abs(held.expected).max() < 1 << 18:
            first, last = through(held.array)
            expected = [held.expected]
            for function in on_host:
                expected.append(function(expected[-1]))
            self.keep(first, expected[1])
            self.keep(last, expected[-1])

    def transfer(self) -> None:
        held = self.rng.choice(self.held)
        self.keep(jax.device_put(held.array, self.sharding()), held.expected)

    def route(self) -> None:
        """Each number goes to the island that it chooses, is changed there, and comes back."""
        held = self.rng.choice(self.held)
        if np.abs(held.expected).max() < 1 << 20 and held.expected.size < 1 << 20:
            chosen, room = self.choose(held.array), held.expected.size
            blocks, routing = atoll.route(held.array, chosen, to=self.homes, capacity=room)
            made = [expert(block) for expert, block in zip(self.experts, blocks, strict=True)]
            factors = 2 + held.expected % len(self.homes) // 1
            self.keep(atoll.unroute(made, routing), held.expected * factors + 1)

    def check(self) -> None:
        held = self.held.pop(self.rng.randrange(len(self.held)))
        if not np.array_equal(np.asarray(held.array), held.expected):
            print(f"WRONG: {held.array.sharding} {np.asarray(held.array)[:8]} for {held.expected[:8]}", flush=True)
            sys.exit(WRONG)

    def drop(self) -> None:
        self.held.pop(self.rng.randrange(len(self.held)))

    def keep(self, array: Any, expected: np.ndarray[Any, Any]) -> None:
        self.held.append(Held(array, expected))
        while len(self.held) > _MAX_ARRAYS:
            self.drop()

    def forget_what_is_lost(self) -> None:
        alive = []
        for held in self.held:
            try:
                held.array.block_until_ready()
            except jax.errors.JaxRuntimeError as error:
                if not str(error).startswith(_EXPECTED):
                    raise
            else:
                alive.append(held)
        self.held = alive


def shardings(devices: list[Any]) -> list[Any]:
    """Return a sharding that divides arrays among the devices, and one that replicates them."""
    mesh = Mesh(np.array(devices), ("x",))
    return [NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())]


def lost_its_proxy(error: Exception) -> bool:
    """Says it, too."""
    is_lost = "Connection to IFRT proxy server was terminated" in str(error)
    if is_lost:
        print("lost its proxy", flush=True)
    return is_lost


def main() -> None:
    faulthandler.register(signal.SIGUSR1)  # of one that hangs
    seed, seconds = int(sys.argv[1]), float(sys.argv[2])
    jax.config.update("jax_enable_x64", True)
    user = User(seed)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        print(user.step(), flush=True)
    while user.held:
        print("check", flush=True)
        try:
            user.check()
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith(_EXPECTED):
                raise
    print(f"lost {user.lost}", flush=True)


if __name__ == "__main__":
    main()
