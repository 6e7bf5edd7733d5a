"""Computations of a given length on real devices, and processes that run them.

A computation is a loop over a small vector on each device, then an AllReduce. On a machine with fewer cores than
devices the devices share them, which its length includes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import NamedSharding, P
from jax.sharding import Mesh

from atoll.cluster.tenant_settings import TenantSettings
from atoll.operate.operator_requests import request_report
from atoll.wire.address import parse_address
from benchmarks.harness.benchmark import Round
from benchmarks.harness.child import read_line
from benchmarks.harness.statistics import Progress, rate_in_common_window
from benchmarks.micro.order import ELEMENTS, MILLISECOND_LOOPS

# Computations begun at a time: up to twice as many are in flight, and what is begun in a second ends in about one.
BATCH = 16
_DEADLINE = 120.0


def computation(
    milliseconds: float, devices: Sequence[jax.Device]
) -> tuple[Callable[[jax.Array], jax.Array], jax.Array]:
    """Return a function on these devices that takes about so many milliseconds here, and its first argument."""
    mesh = Mesh(np.array(devices), ("d",))
    share = max(1.0, mesh.size / len(os.sched_getaffinity(0)))
    loops = max(1, round(milliseconds / share * MILLISECOND_LOOPS))

    def body(x: jax.Array) -> jax.Array:
        x = jax.lax.fori_loop(0, loops, lambda _, v: jnp.sin(v) + 1.0, x)
        return x + 0.0 * jax.lax.psum(x[0], "d")

    sharding, size = NamedSharding(mesh, P("d")), mesh.size * ELEMENTS
    zero = jax.make_array_from_callback((size,), sharding, lambda index: np.zeros(size, np.float32)[index])
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d"))), zero


class Loop:
    """x = f(x) again and again."""

    def __init__(self, milliseconds: float) -> None:
        self._step, self._x = computation(milliseconds, jax.devices())
        self.count(8)

    def steps(self, count: int) -> None:
        """Returns when so many are begun, and what was begun before has ended."""
        before = self._x
        for _ in range(count):
            self._x = self._step(self._x)
        before.block_until_ready()

    def wait(self) -> None:
        self._x.block_until_ready()

    def count(self, steps: int) -> float:
        """Seconds for so many."""
        started = time.perf_counter()
        self.steps(steps)
        self.wait()
        return time.perf_counter() - started

    def rounds(self, steps: int) -> Round:
        """Rounds of so many: their rate, and how long each takes."""

        def measure() -> dict[str, float]:
            seconds = self.count(steps)
            return {"rate": steps / seconds, "milliseconds": 1e3 * seconds / steps}

        return measure

    def start(self, batch: int = BATCH) -> Run:
        return Run(self, batch)

    def run_for(self, seconds: float, batch: int = BATCH) -> Progress:
        """Over about so many seconds."""
        run = self.start(batch)
        while time.monotonic() < run.started + seconds:
            run.go_on()
        return run.end()

    def now_and_then(self, calls: int, pause: float) -> Progress:
        """Each so many seconds after the one before has ended."""
        progress = [(time.monotonic(), 0.0)]
        for number in range(calls):
            time.sleep(pause)
            self.count(1)
            progress.append((time.monotonic(), number + 1.0))
        return progress


class Run:
    """A loop at work, and how far it came when: by the monotonic clock, which all processes of a machine share."""

    def __init__(self, loop: Loop, batch: int) -> None:
        self._loop = loop
        self._batch = batch
        self._begun = 0
        self.started = time.monotonic()
        self._progress = [(self.started, 0.0)]

    def go_on(self) -> None:
        """Start a batch. Return when the previous one has ended."""
        self._loop.steps(self._batch)
        self._progress.append((time.monotonic(), float(self._begun)))
        self._begun += self._batch

    def end(self) -> Progress:
        """Returns when all has ended."""
        self._loop.wait()
        return [*self._progress, (time.monotonic(), float(self._begun))]


class Task(msgspec.Struct, frozen=True, omit_defaults=True):
    """Task of a client: computations for this long, and with a `pause` for as long again after it."""

    seconds: float = 0.0
    batch: int = BATCH
    calls: int = 0
    pause: float = 0.0


class Clients:
    """So many processes with a loop each, on the devices of one cluster."""

    def __init__(
        self,
        count: int,
        milliseconds: float | Sequence[float],
        islands: str,
        tenants: tuple[TenantSettings, ...] = (),
        tokens: Sequence[str] = (),
        batch: int = BATCH,
    ) -> None:
        """Computations take so long, those of each client if several times are given; as the tenants of `tokens`.

        For a rate, each client begins so many at a time.
        """
        from benchmarks.paper.cluster import Cluster

        self._cluster = Cluster(islands, "cpu", tenants=tenants)
        self.address = self._cluster.address
        self._batch = batch
        times = [milliseconds] * count if isinstance(milliseconds, float) else milliseconds
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.paper.workload", str(time)],
                env={
                    **os.environ,
                    "JAX_PLATFORMS": "atoll",
                    "ATOLL_ADDRESS": self.address,
                    "ATOLL_TOKEN": tokens[number] if tokens else "",
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
            )
            for number, time in enumerate(times)
        ]
        for process in self._processes:
            _answer(process)  # it has compiled

    def ask(self, tasks: Sequence[Task]) -> list[Progress]:
        """Has each client do its task, all at the same time; how far each came when."""
        for process, task in zip(self._processes, tasks, strict=True):
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(task) + b"\n")
        return [json.loads(_answer(process)) for process in self._processes]

    def rate(self, seconds: float) -> float:
        """Computations a second of all together, while all of them are at work."""
        return rate_in_common_window(self.ask([Task(seconds, self._batch)] * len(self._processes)))

    def sessions(self) -> list[int]:
        """Return the numbers of the sessions, in the order of the clients."""
        report = json.loads(request_report(parse_address(self.address), ""))
        known = {each["pid"]: each["id"] for each in report["sessions"]}
        return [known[process.pid] for process in self._processes]


def _answer(process: subprocess.Popen[bytes]) -> bytes:
    """Return a client's next line. Raise EOFError if none arrives by the deadline."""
    line = read_line(process, time.monotonic() + _DEADLINE)
    if not line:
        raise EOFError(f"a client ended, or sent nothing for {_DEADLINE:.0f} s")
    return line


def _done(loop: Loop, task: Task) -> Progress:
    if task.calls:
        return loop.now_and_then(task.calls, task.pause)
    progress = loop.run_for(task.seconds, task.batch)
    if task.pause:
        time.sleep(task.pause)
        progress = [*progress, *loop.run_for(task.seconds, task.batch)]
    return progress


def main() -> None:
    loop = Loop(float(sys.argv[1]))
    print("ready", flush=True)
    for line in sys.stdin:
        task = msgspec.json.decode(line, type=Task)
        done = _done(loop, task)
        print(json.dumps(done), flush=True)


if __name__ == "__main__":
    main()
