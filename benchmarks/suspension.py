"""How fast a session is suspended and resumed, beside plain copies and writes of as many bytes by as many processes.

Each round does both in turn: the plain one writes what the session has, from memory, with one process for each host, to
fresh memory or to files that are on the disk when it ends. The session's values are compared after each round.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.harness.machine import describe
from benchmarks.harness.statistics import quartiles

_GIB = 1 << 30
_ARRAY = 256 << 20
_FILE = 128 << 20
_ISLANDS = 2  # of one host with two devices


def suspension(
    gib: Annotated[float, typer.Option(min=0.5, help="What the session holds.")] = 1.0,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
) -> None:
    """Suspend and resume a session on two islands, to memory and to disk, beside plain copies and writes."""
    nbytes = int(gib * _GIB) // (_ISLANDS * _ARRAY) * _ISLANDS * _ARRAY
    with tempfile.TemporaryDirectory(prefix="bench-suspension-") as directory:
        os.environ |= {
            "JAX_PLATFORMS": "atoll,cpu",
            "ATOLL_ISLANDS": f"{_ISLANDS}x1x2",
            "ATOLL_DEVICE_MEMORY": str(nbytes // 4 + (512 << 20)),
            "ATOLL_SUSPEND_DIR": directory,
        }
        session = _Session(nbytes)
        rates: dict[str, list[float]] = {}
        for _ in range(rounds):
            for medium in ("memory", "disk"):
                rates.setdefault(f"{medium}: plain", []).append(nbytes / _GIB / plain(medium, nbytes, directory))
                for what, seconds in session.there_and_back(medium).items():
                    rates.setdefault(f"{medium}: {what}", []).append(nbytes / _GIB / seconds)
        machine = describe()
        print(f"{machine.cpu}, {machine.cores} cores, commit {machine.commit}")
        print(f"{nbytes / _GIB:g} GiB, {rounds} rounds; GiB/s, medians and quartiles")
        for name, samples in rates.items():
            low, median, high = quartiles(samples)
            print(f"{name:16} {median:6.2f} ({low:.2f}-{high:.2f})")


class _Session:
    """Arrays on both islands, owned by this process."""

    def __init__(self, nbytes: int) -> None:
        import jax
        import jax.numpy as jnp
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        from atoll.operate.cluster_queries import find, report_of

        devices = jax.devices()
        self._arrays = []
        for number in range(nbytes // _ARRAY):
            first = 2 * (number % _ISLANDS)
            sharding = NamedSharding(Mesh(np.array(devices[first : first + 2]), ("d",)), PartitionSpec("d"))
            make = jax.jit(lambda k: jax.lax.iota(jnp.uint32, _ARRAY // 4) * k, out_shardings=sharding)
            self._arrays.append(make(jnp.uint32(2 * number + 1)))
        self._sum = jax.jit(lambda a: (a ^ (a >> 7)).sum(dtype=jnp.uint32))
        self._expected = self._values()
        self._target: Any = find("", f"embedded-{os.getpid()}", "")
        (self._number,) = [each["id"] for each in report_of(self._target, "")["sessions"]]

    def _values(self) -> list[int]:
        return [int(self._sum(array)) for array in self._arrays]

    def there_and_back(self, medium: str) -> dict[str, float]:
        """Seconds, as the operator waits."""
        from atoll.operate.cluster_queries import operate
        from atoll.protocol.messages import ResumeRequest, SuspendRequest

        started = time.perf_counter()
        operate(self._target, "", SuspendRequest(self._number, medium == "disk"))
        suspended = time.perf_counter()
        operate(self._target, "", ResumeRequest(self._number))
        resumed = time.perf_counter()
        assert self._values() == self._expected, "the session is not what it was"
        return {"suspend": suspended - started, "resume": resumed - suspended}


def plain(medium: str, nbytes: int, directory: str) -> float:
    """Return the seconds for one process per host to write its part."""
    context = mp.get_context("spawn")
    ready, done = context.Queue(), context.Queue()
    go = context.Event()
    part = nbytes // _ISLANDS
    writers = [context.Process(target=_write, args=(medium, part, directory, ready, go, done)) for _ in range(_ISLANDS)]
    for each in writers:
        each.start()
    for _ in writers:
        ready.get(timeout=60)
    go.set()
    seconds = max(float(done.get(timeout=600)) for _ in writers)
    for each in writers:
        each.join()
    return seconds


def _write(medium: str, nbytes: int, directory: str, ready: Any, go: Any, done: Any) -> None:
    source = np.full(_FILE, 7, np.uint8)
    kept, files = [], []
    ready.put(None)
    go.wait()
    started = time.perf_counter()
    for number in range(nbytes // _FILE):
        if medium == "memory":
            kept.append(source.copy())
            continue
        path = Path(directory) / f"plain-{os.getpid()}-{number}"
        files.append(path)
        with open(path, "wb", buffering=0) as file:
            view = source.data
            while view.nbytes:
                view = view[file.write(view) :]
            os.fdatasync(file.fileno())
    done.put(time.perf_counter() - started)
    for path in files:
        path.unlink()
