"""How fast a session is suspended and resumed, beside plain copies and writes of as many bytes by as many processes.

Each round does both in turn: the plain one writes what the session has, from memory, with one process for each host, to
fresh memory or to files that are on the disk when it ends. The session's values are compared after each round.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer

import atoll
from benchmarks.harness.backends import ROOT
from benchmarks.harness.machine import Machine, describe, load_average
from benchmarks.harness.pages import write_between
from benchmarks.harness.provenance import describe_commit
from benchmarks.harness.statistics import quartiles

RESULT = ROOT / "benchmarks" / "results" / "suspension.json"
PAGE = ROOT / "docs" / "design" / "suspending.md"
BEGIN, END = "<!-- suspension: begin (written by benchmarks.suspension) -->", "<!-- suspension: end -->"
MEDIA, WAYS = ("memory", "disk"), ("plain", "suspend", "resume")
_GIB = 1 << 30
_ARRAY = 256 << 20
_FILE = 128 << 20
_ISLANDS = 2  # of one host with two devices


class Rate(msgspec.Struct, frozen=True):
    """The GiB/s of each round of one way, to or from one medium."""

    medium: str
    way: str
    rounds: list[float]


class Suspensions(msgspec.Struct, frozen=True):
    started: str
    machine: Machine
    nbytes: int
    load: float  # processes that wanted to run before the first round
    rates: list[Rate]


def suspension(
    gib: Annotated[float, typer.Option(min=0.5, help="Size of the arrays of the session, in GiB.")] = 1.0,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    output: Annotated[Path, typer.Option("--json", help="File for the result.")] = RESULT,
) -> None:
    """Suspend and resume a session on two islands, to memory and to disk, beside plain copies and writes."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    load = round(load_average(), 1)
    nbytes = int(gib * _GIB) // (_ISLANDS * _ARRAY) * _ISLANDS * _ARRAY
    samples: dict[tuple[str, str], list[float]] = {(medium, way): [] for medium in MEDIA for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="bench-suspension-") as directory:
        os.environ |= {"ATOLL_DEVICE_MEMORY": str(nbytes // 4 + (512 << 20)), "ATOLL_SUSPEND_DIR": directory}
        with atoll.connect(islands=f"{_ISLANDS}x1x2"):
            session = _Session(nbytes)
            for _ in range(rounds):
                for medium in MEDIA:
                    times = {"plain": plain(medium, nbytes, directory), **session.there_and_back(medium)}
                    for way, seconds in times.items():
                        samples[medium, way].append(round(nbytes / _GIB / seconds, 3))
    rates = [Rate(medium, way, values) for (medium, way), values in samples.items()]
    result = Suspensions(started, describe(), nbytes, load, rates)
    output.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    if output == RESULT:
        write_page()
    print(table(result))


def table(result: Suspensions) -> str:
    """Return the result as a Markdown table, in GiB/s."""
    machine = result.machine
    lines = [
        f"`python -m benchmarks suspension --gib {result.nbytes / _GIB:g} --rounds {len(result.rates[0].rounds)}`, "
        f"{result.started[:10]}, {describe_commit(machine.commit)}, a load of {result.load} from other processes; "
        f"{machine}. Medians, quartiles in brackets, in GiB/s.",
        "",
        f"| | {' | '.join(WAYS)} |",
        f"|---|{'---:|' * len(WAYS)}",
    ]
    for medium in MEDIA:
        rates = {each.way: each.rounds for each in result.rates if each.medium == medium}
        lines.append(f"| {medium} | {' | '.join(_cell(rates[way]) for way in WAYS)} |")
    return "\n".join(lines)


def _cell(rounds: list[float]) -> str:
    low, median, high = (f"{rate:.2f}" if rate < 10 else f"{rate:.0f}" for rate in quartiles(rounds))
    return f"{median} ({low}-{high})"


def write_page(page: Path = PAGE, result: Path = RESULT) -> None:
    """Put the table of a committed result between the markers of a page."""
    write_between(page, BEGIN, END, table(msgspec.json.decode(result.read_bytes(), type=Suspensions)))


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
        """Suspend and resume the session. Return the seconds for which the operator waits."""
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
