"""How fast arrays go from a publisher to a subscriber, beside `jax.device_put` on the same path.

There are two paths: between two islands of one machine, and between two machines, which are network namespaces joined
by a veth pair (root). Each round does all in turn, on one cluster per path. The rates are of the same bytes:
`device_put` moves a tree between the islands, and a publication with its subscription moves the same tree to the same
devices. The values are compared after each transfer.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer

from benchmarks.harness.backends import ROOT
from benchmarks.harness.machine import Machine, describe, load_average
from benchmarks.harness.pages import write_between
from benchmarks.harness.provenance import describe_commit
from benchmarks.harness.statistics import quartiles

RESULT = ROOT / "benchmarks" / "results" / "named-arrays.json"
PAGE = ROOT / "docs" / "design" / "named-arrays.md"
BEGIN, END = "<!-- rates: begin (written by benchmarks.named_arrays) -->", "<!-- rates: end -->"
_MIB = 1 << 20
_ARRAYS = 8
_STEPS = 20
_STEP_SECONDS = 0.1
_STEP_MIB = 256  # of the arrays of a step, at most
_SETTLE_SECONDS = 0.3

ISLANDS, MACHINES = "two islands of one machine", "two machines"


class Row(msgspec.Struct, frozen=True):
    """A measured quantity, and its lower or upper limit."""

    name: str
    digits: int
    target: str = ""


_PUT = Row("`device_put`, MiB/s", 0)
_BOTH = Row("`publish` and `subscribe`, MiB/s", 0)
_RATIO = Row("`publish` and `subscribe` over `device_put`", 2, "at least 0.9")
_VERIFIED = Row("both, with checksums that are verified, MiB/s", 0)
_HALF = Row("both, as bfloat16, MiB/s of float32", 0)
_AGAIN = Row("both, one of eight arrays is new, with `reuse`, MiB/s of all", 0)
_CALL = Row("call of `publish`, ms", 2)
_SMALL = Row("arrays of 1 kB: both, ms", 1, "at most 50 for 10,000")
_SMALL_PUT = Row("arrays of 1 kB: `device_put`, ms", 1)
_SMALL_CALL = Row("arrays of 1 kB: call of `publish`, ms", 1)
_DONATING = Row("steps of 100 ms that donate 256 MiB, with `publish` over without", 3, "at most 1.05")
_STEPPING = Row("steps of 100 ms with 256 MiB, with `publish` over without", 3, "at most 1.05")
_ROWS = (
    _PUT,
    _BOTH,
    _RATIO,
    _VERIFIED,
    _HALF,
    _AGAIN,
    _CALL,
    _SMALL,
    _SMALL_PUT,
    _SMALL_CALL,
    _DONATING,
    _STEPPING,
)


class PathRates(msgspec.Struct, frozen=True):
    """The samples of each row for one path, by the name of the row."""

    path: str
    samples: dict[str, list[float]]


class Rates(msgspec.Struct, frozen=True):
    started: str
    machine: Machine
    mib: int
    small: int
    rounds: int
    load: float  # processes that wanted to run before the first round
    paths: list[PathRates]


def named_arrays(
    mib: Annotated[int, typer.Option(min=_ARRAYS, help="Size of the tree.")] = 1024,
    small: Annotated[int, typer.Option(min=1, help="Number of arrays of 1 kB.")] = 10_000,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    machines: Annotated[bool, typer.Option(help="Also between two machines, which needs root.")] = True,
    output: Annotated[Path, typer.Option("--json", help="File for the result.")] = RESULT,
) -> None:
    """Publish trees and subscribe to them on another island, beside device_put between the islands."""
    started, load = datetime.now(UTC).isoformat(timespec="seconds"), round(load_average(), 1)
    paths = [_in_process("islands", mib, small, rounds)]
    if machines and not os.geteuid():
        paths.append(_in_process("machines", mib, small, rounds))
    result = Rates(started, describe(), mib, small, rounds, load, paths)
    output.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    print(table(result))
    if output == RESULT:
        write_page()


def table(result: Rates) -> str:
    """Return the result as a Markdown table."""
    machine = result.machine
    lines = [
        f"`python -m benchmarks named-arrays`, {result.started[:10]}, {describe_commit(machine.commit)}: "
        f"{result.mib:,} MiB in {_ARRAYS} arrays, and {result.small:,} arrays of 1 kB; {result.rounds} rounds, a load "
        f"of {result.load} from other processes; {machine}. Medians, quartiles in brackets.",
        "",
        f"| | {' | '.join(path.path for path in result.paths)} | target |",
        f"|---|{'---:|' * len(result.paths)}---|",
    ]
    for row in _ROWS:
        cells = [_cell(row, path.samples.get(row.name, [])) for path in result.paths]
        lines.append(f"| {row.name} | {' | '.join(cells)} | {row.target} |")
    return "\n".join(lines)


def _cell(row: Row, samples: list[float]) -> str:
    if not samples:
        return ""
    low, median, high = (f"{each:,.{row.digits}f}" for each in quartiles(samples))
    return f"{median} ({low}-{high})"


def write_page(page: Path = PAGE, result: Path = RESULT) -> None:
    """Put the table of a committed result between the markers of a page."""
    write_between(page, BEGIN, END, table(msgspec.json.decode(result.read_bytes(), type=Rates)))


# ---- what runs in a process per path


def _in_process(path: str, mib: int, small: int, rounds: int) -> PathRates:
    command = [sys.executable, "-m", "benchmarks.named_arrays", path, str(mib), str(small), str(rounds)]
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return msgspec.json.decode(ran.stdout.splitlines()[-1], type=PathRates)


def _between_islands(mib: int, small: int, rounds: int) -> PathRates:
    import atoll

    with atoll.connect(islands="2x1x2") as devices:
        bench = _Bench(devices[:2], devices[2:], mib * _MIB, small)
        return PathRates(ISLANDS, bench.samples(bench.rates() | bench.small() | bench.steps(), rounds))


def _between_machines(mib: int, small: int, rounds: int) -> PathRates:
    from benchmarks.micro.machines import OtherMachine, start_cluster, until_up

    os.environ["JAX_PLATFORMS"] = "atoll,cpu"
    start_cluster(OtherMachine())
    devices = until_up()
    bench = _Bench(devices[:1], devices[1:2], mib * _MIB, small)
    return PathRates(MACHINES, bench.samples(bench.rates() | bench.small(), rounds))


class _Bench:
    """Trees on the source devices, which are also needed on the target devices."""

    def __init__(self, source: Any, target: Any, nbytes: int, small: int) -> None:
        import jax
        import jax.numpy as jnp
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        self._source, self._target = (
            NamedSharding(Mesh(np.array(devices), ("d",)), PartitionSpec("d")) for devices in (source, target)
        )
        each = nbytes // _ARRAYS
        make = jax.jit(lambda k: jnp.full(each // 4, k, jnp.float32), out_shardings=self._source)
        self._tree = {f"w{i}": make(i) for i in range(_ARRAYS)}
        step = min(each, _STEP_MIB * _MIB // _ARRAYS) // 4
        self._params = {key: value[:step] for key, value in self._tree.items()}
        self._small = [jax.device_put(np.full(256, i, np.float32), self._source) for i in range(small)]
        self._bytes = nbytes
        self._update = jax.jit(lambda tree: {k: x + 1 for k, x in tree.items()})
        self._donating = jax.jit(lambda tree: {k: x + 1 for k, x in tree.items()}, donate_argnums=0)
        jax.block_until_ready([self._tree, self._small])

    def samples(self, measure: dict[Row, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
        """Return the samples of all rounds but the first one, which compiles."""
        found: dict[str, list[float]] = {}
        for number in range(-1, rounds):
            values = {row: each() for row, each in measure.items()}
            if _BOTH in values:
                values[_RATIO] = values[_BOTH] / values[_PUT]
            for row, value in values.items():
                if number >= 0:
                    found.setdefault(row.name, []).append(round(value, 4))
        return found

    def rates(self) -> dict[Row, Callable[[], float]]:
        import jax.numpy as jnp

        return {
            _PUT: lambda: self._rate(self._put),
            _BOTH: lambda: self._rate(self._through),
            _VERIFIED: lambda: self._rate(self._verified),
            _HALF: lambda: self._rate(lambda tree: self._through(tree, jnp.bfloat16)),
            _AGAIN: lambda: self._one_is_new(),
            _CALL: lambda: 1e3 * self._call(self._tree),
        }

    def small(self) -> dict[Row, Callable[[], float]]:
        return {
            _SMALL_PUT: lambda: 1e3 * _seconds(lambda: self._put(self._small)),
            _SMALL: lambda: 1e3 * _seconds(lambda: self._through(self._small)),
            _SMALL_CALL: lambda: 1e3 * self._call(self._small),
        }

    def steps(self) -> dict[Row, Callable[[], float]]:
        return {_DONATING: lambda: self._stall(self._donating), _STEPPING: lambda: self._stall(self._update)}

    def _rate(self, move: Callable[[Any], Any]) -> float:
        """Return MiB/s of the large tree, and compare what has arrived."""
        moved: list[Any] = []
        seconds = _seconds(lambda: moved.append(move(self._tree)))
        for i in range(_ARRAYS):
            assert float(moved[0][f"w{i}"][-1]) == i, "the arrays are not what they were"
        return self._bytes / _MIB / seconds

    def _put(self, tree: Any) -> Any:
        import jax

        return jax.block_until_ready(jax.device_put(tree, self._target))

    def _through(self, tree: Any, dtype: Any = None) -> Any:
        import atoll

        number = atoll.publish("bench", tree, keep=1, dtype=dtype)
        return atoll.subscribe("bench", self._target, version=number).tree

    def _verified(self, tree: Any) -> Any:
        import atoll

        number = atoll.publish("bench", tree, keep=1, checksums=True)
        return atoll.subscribe("bench", self._target, version=number, verify=True).tree

    def _one_is_new(self) -> float:
        """Return MiB/s of the large tree if a subscriber has all arrays but one."""
        import jax

        import atoll

        former = atoll.subscribe("bench", self._target, version=atoll.publish("bench", self._tree, keep=1))
        tree = self._tree | {"w3": jax.block_until_ready(self._update({"w3": self._tree["w3"] - 1}))["w3"]}

        def move() -> None:
            number = atoll.publish("bench", tree, keep=1)
            found = atoll.subscribe("bench", self._target, version=number, reuse=former).tree
            assert found["w2"] is former.tree["w2"], "the array was transferred"
            assert found["w3"] is not former.tree["w3"], "the array was not transferred"

        return self._bytes / _MIB / _seconds(move)

    def _call(self, tree: Any) -> float:
        import atoll

        return _seconds(lambda: atoll.publish("bench", tree, keep=1))

    def _stall(self, update: Any) -> float:
        """Return the time of steps that publish their parameters, over that of steps that do not."""
        return self._step_seconds(update, publishes=True) / self._step_seconds(update, publishes=False)

    def _step_seconds(self, update: Any, publishes: bool) -> float:
        import jax

        import atoll

        params = {key: jax.block_until_ready(value + 0) for key, value in self._params.items()}
        seconds = []
        for _ in range(_STEPS):
            started = time.perf_counter()
            time.sleep(_STEP_SECONDS)  # other work of the step, which does not use the devices
            params = jax.block_until_ready(update(params))
            if publishes:
                atoll.publish("steps", params, keep=1)
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds)


def _seconds(call: Callable[[], Any]) -> float:
    time.sleep(_SETTLE_SECONDS)  # freed memory can be used again, so that no measurement pays for fresh memory
    started = time.perf_counter()
    made = call()
    seconds = time.perf_counter() - started
    del made  # 10,000 arrays take milliseconds, which are not a part of the transfer
    return seconds


if __name__ == "__main__":
    run = {"islands": _between_islands, "machines": _between_machines}[sys.argv[1]]
    rates = run(*map(int, sys.argv[2:]))
    print(msgspec.json.encode(rates).decode(), flush=True)
