"""The cost of a program that depends on data for those that do not: their rate beside a loop of 1,000 choices.

python -m benchmarks.micro.choices > benchmarks/results/choices.json

On null devices: two islands of two hosts. A chain of choices, each a computation and a transfer of either island, runs
on the first host of both. A chain of computations of 2 ms that depends on none of it runs on the second ones, of the
same session and of another one: by itself, beside the same chain with its branch known ahead, and beside the choices.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable

import msgspec

from atoll.devices.null.null_program import NullProgram
from atoll.ir.program import Node, Switch
from atoll.ir.types import ArraySpec, Sharding
from atoll.session.bare import BareClient, call, program, sharded, transfer
from benchmarks.harness.machine import describe
from benchmarks.paper.cluster import NullCluster
from benchmarks.paper.null_steps import Steps

ROUNDS = 3
CHOICES = 1000
STEP_SECONDS = 0.002
BRANCH_SECONDS = 0.001
AHEAD = 4  # choices that are launched before the first of them is made: more would fill the session's window
_BYTES = ("uint8", (4,))


class Choices:
    """x = choose(x): a number is computed of x, and chooses between two ways over both islands."""

    def __init__(self, client: BareClient, first: int, known: int, chosen: int) -> None:
        self._client = client
        self._first = first
        self.known, self.chosen = known, chosen

    @classmethod
    async def prepare(cls, client: BareClient, here: list[int], there: list[int]) -> Choices:
        near, far = sharded(here), sharded(there)
        number = ArraySpec("int32", (), Sharding(tuple(here)))
        make = await client.compile(NullProgram("make", 0.0, (), (_BYTES,)), here)
        decide = await client.compile(NullProgram("decide", 0.0, (_BYTES,), (("int32", ()),)), here)
        step = [
            await client.compile(NullProgram("step", BRANCH_SECONDS, (_BYTES,), (_BYTES,)), devices)
            for devices in (here, there)
        ]

        def nodes(x: int, first: int) -> list[Node]:
            return [
                call(step[0], (x,), (near,), here),
                transfer(first, far),
                call(step[1], (first + 1,), (far,), there),
                transfer(first + 2, near),
            ]

        branch = program("branch", (near,), nodes(0, 1), (4,))
        decided = call(decide, (0,), (number,), here)
        return cls(
            client,
            client.register(program("first", (), [call(make, (), (near,), here)], (0,))),
            client.register(program("known", (near,), [decided, *nodes(0, 2)], (1, 5))),
            client.register(program("chosen", (near,), [decided, Switch((1, 0), (near,), (branch, branch))], (1, 2))),
        )

    async def run(self, number: int, count: int) -> float:
        """Run so many calls, each with the result of the previous one. Return the seconds per call."""
        client = self._client
        (x,) = await client.launch(self._first, (), 1)
        await client.wait((x,))
        ready: deque[Awaitable[float]] = deque()
        began = time.perf_counter()
        for _ in range(count):
            index, y = await client.launch(number, (x,), 2)
            client.release((x, index))
            x = y
            ready.append(client.when_ready((x,)))
            if len(ready) > AHEAD:
                await ready.popleft()
        for each in ready:
            await each
        client.release((x,))
        return (time.perf_counter() - began) / count


async def _beside(work: Callable[[], Awaitable[float]], steps: list[Steps], calls: int) -> tuple[float, list[float]]:
    """Milliseconds of each choice, and the rates of the others meanwhile."""
    each, *seconds = await asyncio.gather(work(), *(other.run(calls) for other in steps))
    return 1e3 * each, [calls / took for took in seconds]


async def _nothing() -> float:
    return 0.0


def main(rounds: int, count: int) -> None:
    cluster = NullCluster("2x2x1")
    own, other = cluster.client("chooses"), cluster.client("another session")
    devices = [island[1:] for island in own.islands]

    async def prepare() -> tuple[Choices, list[Steps]]:
        choices = await Choices.prepare(own, own.islands[0][:1], own.islands[1][:1])
        return choices, [
            await Steps.prepare(own, STEP_SECONDS, devices=devices[0]),
            await Steps.prepare(other, STEP_SECONDS, devices=devices[1]),
        ]

    choices, steps = cluster.run(prepare())
    calls = int(count * 4 * BRANCH_SECONDS / STEP_SECONDS)
    kinds = {
        "alone": _nothing,
        "beside what is known": lambda: choices.run(choices.known, count),
        "beside choices": lambda: choices.run(choices.chosen, count),
    }
    rates: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    milliseconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    controller: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(rounds + 1):
        for kind, work in kinds.items():
            before = cluster.cpu_seconds()["controller"]
            each, found = cluster.run(_beside(work, steps, calls))
            took = cluster.cpu_seconds()["controller"] - before
            if number:  # the first is to warm up
                milliseconds[kind].append(each)
                rates[kind].append(found)
                controller[kind].append(took)
    result = {
        "machine": msgspec.to_builtins(describe()),
        "choices": count,
        "rounds": rounds,
        "milliseconds_each": {kind: statistics.median(found) for kind, found in milliseconds.items()},
        "controller_seconds": {kind: statistics.median(found) for kind, found in controller.items()},
        "steps_per_second": {
            kind: {
                who: {"median": statistics.median(some), "rounds": some}
                for who, some in zip(("same session", "another session"), zip(*found, strict=True), strict=True)
            }
            for kind, found in rates.items()
        },
    }
    json.dump(result, sys.stdout, indent=1)


if __name__ == "__main__":
    quick = "--quick" in sys.argv
    main(1 if quick else ROUNDS, 50 if quick else CHOICES)
