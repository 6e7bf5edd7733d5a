"""How fast a tree of arrays goes from one process to another, in Atoll's way and in the ways of others.

A tree is on two devices of the first process or island, and is needed on two devices of the other. Each round has each
way once. A way leaves the caches of the CPUs to the next one, so the orders of the rounds are balanced: in ten rounds,
each way follows each other way equally often. All ways end when the arrays are on the devices of the receiver and are
complete. The values are compared after the clock.

| way | what it does |
|---|---|
| Atoll | `publish` and `subscribe` between two islands |
| device_put | `device_put` between the two islands, in one script |
| Orbax | a checkpoint in a directory in memory: the first script saves it, and the second one restores it |
| Ray | `ray.put` of the arrays as NumPy arrays, `ray.get` in an actor, `device_put` there |
| sockets | a Unix socket: the arrays as NumPy arrays, `recv_into` fresh memory, `device_put` there |

The receivers of Orbax, Ray and sockets are processes of their own, which run stock JAX and have started before. For
these ways, the sender has the arrays on a CPU device of stock JAX, so reading them copies nothing.
"""

from __future__ import annotations

import importlib.util
import multiprocessing as mp
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

RESULT = ROOT / "benchmarks" / "results" / "exchange.json"
PAGE = ROOT / "docs" / "design" / "named-arrays.md"
BEGIN, END = "<!-- exchange: begin (written by benchmarks.exchange) -->", "<!-- exchange: end -->"
_SECONDS = 120.0
_MIB = 1 << 20
Tree = dict[str, Any]


class Exchange(msgspec.Struct, frozen=True):
    """The seconds of each round of one way, for one tree."""

    way: str
    tree: str
    nbytes: int
    arrays: int
    seconds: list[float]


class Exchanges(msgspec.Struct, frozen=True):
    started: str
    machine: Machine
    rounds: int
    load: float  # processes that wanted to run before the first round
    exchanges: list[Exchange]


def trees(mib: int) -> dict[str, Tree]:
    """Return the trees to exchange: large arrays, and the arrays of a small model."""
    large = {f"w{i}": np.full((mib * _MIB // 4 // 8,), i, np.float32) for i in range(8)}
    model: Tree = {"embed": np.ones((4096, 256), np.float32)}
    for layer in range(8):
        for name, shape in {"norm": (256,), "attend": (256, 768), "join": (256, 256), "up": (256, 1024)}.items():
            model[f"{name}{layer}"] = np.full(shape, layer, np.float32)
        model[f"down{layer}"] = np.full((1024, 256), layer, np.float32)
    return {f"{mib} MiB": large, "a small model": model}


def exchange(
    mib: Annotated[int, typer.Option(min=8, help="Size of the large tree.")] = 1024,
    rounds: Annotated[int, typer.Option(min=1)] = 10,
    output: Annotated[Path, typer.Option("--json", help="File for the result.")] = RESULT,
) -> None:
    """Exchange trees with publish and subscribe, beside device_put, Orbax, Ray and sockets."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    samples: dict[tuple[str, str], list[float]] = {}
    load = round(load_average(), 1)
    sizes = {name: (sum(x.nbytes for x in tree.values()), len(tree)) for name, tree in trees(mib).items()}
    with _ways(mib) as ways:
        for each in (-1, *range(rounds)):  # the first round compiles, and does not count
            for tree in sizes:
                for way in balanced(list(ways), max(0, each)):
                    time.sleep(0.2)  # freed memory can be used again
                    seconds = ways[way](tree)
                    if each >= 0:
                        samples.setdefault((way, tree), []).append(round(seconds, 5))
    exchanges = [Exchange(way, tree, *sizes[tree], seconds) for (way, tree), seconds in samples.items()]
    result = Exchanges(started, describe(), rounds, load, exchanges)
    output.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    print(table(result))


def balanced(ways: list[str], number: int) -> list[str]:
    """Return the order of the ways in a round.

    In 2 * len(ways) rounds, each way has each place twice, and follows each other way twice (a Williams design).
    """
    count = len(ways)
    zigzag = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(count)]
    order = [ways[(number + each) % count] for each in zigzag]
    return order[::-1] if number // count % 2 else order


def table(result: Exchanges) -> str:
    """Return the result as a Markdown table, with the time of each way over that of Atoll."""
    machine = result.machine
    lines = [
        f"`python -m benchmarks exchange`, {result.started[:10]}, {describe_commit(machine.commit)}, {result.rounds} "
        f"rounds, a load of {result.load} from other processes; {machine}. Medians, quartiles in brackets.",
        "",
        "| tree | way | ms | MiB/s | time over Atoll's |",
        "|---|---|---:|---:|---:|",
    ]
    base = {each.tree: quartiles(each.seconds)[1] for each in result.exchanges if each.way == "Atoll"}
    for tree in base:
        for each in result.exchanges:
            if each.tree == tree:
                low, median, high = quartiles(each.seconds)
                rate = each.nbytes / _MIB / median
                times = f"{1e3 * median:,.1f} ({1e3 * low:,.1f}-{1e3 * high:,.1f})"
                name = f"{tree}, {each.arrays} arrays"
                lines.append(f"| {name} | {each.way} | {times} | {rate:,.0f} | {median / base[tree]:.2f} |")
    return "\n".join(lines)


def write_page(page: Path = PAGE, result: Path = RESULT) -> None:
    """Put the table of a committed result between the markers of a page."""
    write_between(page, BEGIN, END, table(msgspec.json.decode(result.read_bytes(), type=Exchanges)))


# ---- the ways


@contextmanager
def _ways(mib: int) -> Iterator[dict[str, Callable[[str], float]]]:
    """Start all receivers. Each way takes the name of a tree and returns seconds."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # or Ray would keep a token in the home directory
    has_ray = importlib.util.find_spec("ray") is not None
    with _Receiver("orbax", mib) as orbax, _Receiver("sockets", mib) as sockets, _ray(mib) as actor:
        import atoll

        with atoll.connect(islands="2x1x2"):
            bench = _Sender(mib)
            ways: dict[str, Callable[[str], float]] = {"Atoll": bench.publish, "device_put": bench.put}
            ways |= {
                "Orbax": lambda tree: bench.orbax(tree, orbax),
                "sockets": lambda tree: bench.sockets(tree, sockets),
            }
            if has_ray:
                ways["Ray"] = lambda tree: bench.ray(tree, actor)
            yield ways


class _Sender:
    """The script that has the trees, on the devices of island 0."""

    def __init__(self, mib: int) -> None:
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        devices = jax.devices()
        source, self._target = (
            NamedSharding(Mesh(np.array(devices[first : first + 2]), "d"), PartitionSpec("d")) for first in (0, 2)
        )
        self._trees = {name: jax.block_until_ready(jax.device_put(tree, source)) for name, tree in trees(mib).items()}
        self._expected = trees(mib)
        cpu = jax.local_devices(backend="cpu")[0]
        self._local = {name: jax.block_until_ready(jax.device_put(tree, cpu)) for name, tree in trees(mib).items()}

    def _check(self, tree: str, found: Any) -> None:
        for name, array in self._expected[tree].items():
            assert float(found[name].ravel()[-1]) == float(array.ravel()[-1]), f"{name} is not what it was"

    def publish(self, tree: str) -> float:
        import atoll

        # With one name for all trees, a publish would free the version of another tree meanwhile.
        name = tree.replace(" ", "-")
        began = time.perf_counter()
        number = atoll.publish(name, self._trees[tree], keep=1)
        found = atoll.subscribe(name, self._target, version=number)
        seconds = time.perf_counter() - began
        self._check(tree, found.tree)
        return seconds

    def put(self, tree: str) -> float:
        import jax

        began = time.perf_counter()
        found = jax.block_until_ready(jax.device_put(self._trees[tree], self._target))
        seconds = time.perf_counter() - began
        self._check(tree, found)
        return seconds

    def orbax(self, tree: str, receiver: _Receiver) -> float:
        import jax
        import orbax.checkpoint as ocp

        began = time.perf_counter()
        with ocp.StandardCheckpointer() as checkpointer:
            path = receiver.directory / f"step-{time.monotonic_ns()}"
            checkpointer.save(path, jax.device_get(self._local[tree]))
        receiver.receive(tree, path)
        return time.perf_counter() - began

    def sockets(self, tree: str, receiver: _Receiver) -> float:
        began = time.perf_counter()
        receiver.begin(tree, None)
        for array in self._local[tree].values():
            receiver.stream.sendall(np.asarray(array).data.cast("B"))
        receiver.finish()
        return time.perf_counter() - began

    def ray(self, tree: str, actor: Any) -> float:
        import ray

        began = time.perf_counter()
        stored = {name: ray.put(np.asarray(array)) for name, array in self._local[tree].items()}
        ray.get(actor.receive.remote(stored), timeout=_SECONDS)
        return time.perf_counter() - began


class _Receiver:
    """A process that receives trees with stock JAX."""

    def __init__(self, kind: str, mib: int) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="bench-exchange-", dir=_shared_memory()))
        self.stream, theirs = socket.socketpair()
        context = mp.get_context("spawn")
        self._orders, orders = context.Pipe()
        self._process = context.Process(target=_receive, args=(kind, mib, orders, theirs), daemon=True)

    def __enter__(self) -> _Receiver:
        before = os.environ.get("JAX_PLATFORMS")
        os.environ["JAX_PLATFORMS"] = "cpu"
        self._process.start()
        os.environ.pop("JAX_PLATFORMS") if before is None else os.environ.update(JAX_PLATFORMS=before)
        self.finish()  # it has started
        return self

    def __exit__(self, *_: object) -> None:
        self._orders.send(None)
        self._process.join(_SECONDS)
        shutil.rmtree(self.directory, ignore_errors=True)

    def begin(self, tree: str, path: Path | None) -> None:
        self._orders.send((tree, path))

    def finish(self) -> None:
        assert self._orders.poll(_SECONDS), "the receiver did not answer"
        self._orders.recv()

    def receive(self, tree: str, path: Path) -> None:
        self.begin(tree, path)
        self.finish()


def _receive(kind: str, mib: int, orders: Any, stream: socket.socket) -> None:
    import jax
    import orbax.checkpoint as ocp

    jax.devices()
    shapes = {
        name: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), each) for name, each in trees(mib).items()
    }
    orders.send(None)
    while (order := orders.recv()) is not None:
        tree, path = order
        if kind == "orbax":
            with ocp.StandardCheckpointer() as checkpointer:
                found = checkpointer.restore(path, shapes[tree])
            shutil.rmtree(path)
        else:
            found = {}
            for name, shape in shapes[tree].items():
                array = np.empty(shape.shape, shape.dtype)
                view = array.data.cast("B")
                while view.nbytes:
                    view = view[stream.recv_into(view) :]
                found[name] = array
        jax.block_until_ready(jax.device_put(found))
        orders.send(None)


@contextmanager
def _ray(mib: int) -> Iterator[Any]:
    if importlib.util.find_spec("ray") is None:
        yield None
        return
    import ray

    ray.init(
        num_cpus=2,
        object_store_memory=max(3 * mib, 256) * _MIB,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"JAX_PLATFORMS": "cpu"}},
    )

    class Actor:
        def receive(self, stored: Any) -> None:
            import jax

            found = dict(zip(stored, ray.get(list(stored.values())), strict=True))
            jax.block_until_ready(jax.device_put(found))

    actor = ray.remote(Actor).remote()
    ray.get(actor.receive.remote({}), timeout=_SECONDS)
    try:
        yield actor
    finally:
        ray.shutdown()


def _shared_memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
