"""How fast arrays go from a publisher to a subscriber on another island, beside `jax.device_put` on the same path.

Each round does all in turn, on one embedded cluster. The rates are of the same bytes: `device_put` moves the tree
between the two islands, and the other one publishes the tree and subscribes to it on the other island. The values are
compared after each transfer.
"""

from __future__ import annotations

import statistics
import time
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.harness.machine import describe
from benchmarks.harness.statistics import quartiles

_MIB = 1 << 20
_ARRAYS = 8
_STEPS = 20
_STEP_SECONDS = 0.1


def named_arrays(
    mib: Annotated[int, typer.Option(min=_ARRAYS, help="Size of the tree.")] = 256,
    small: Annotated[int, typer.Option(min=1, help="Number of arrays of 1 kB.")] = 10_000,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
) -> None:
    """Publish trees and subscribe to them on another island, beside device_put between the islands."""
    import atoll

    samples: dict[str, list[float]] = {}
    with atoll.connect(islands="2x1x2"):
        bench = _Bench(mib * _MIB, small)
        bench.round()  # compiles
        for _ in range(rounds):
            for name, value in bench.round().items():
                samples.setdefault(name, []).append(value)
    machine = describe()
    print(f"{machine.cpu}, {machine.cores} cores, commit {machine.commit}; {rounds} rounds, medians and quartiles")
    for name, values in samples.items():
        low, median, high = quartiles(values)
        print(f"{name:44} {median:9.2f} ({low:.2f}-{high:.2f})")


class _Bench:
    def __init__(self, nbytes: int, small: int) -> None:
        import jax
        import jax.numpy as jnp
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        devices = jax.devices()
        self._source, self._target = (
            NamedSharding(Mesh(np.array(devices[first : first + 2]), ("d",)), PartitionSpec("d")) for first in (0, 2)
        )
        each = nbytes // _ARRAYS
        make = jax.jit(lambda k: jnp.full(each // 4, k, jnp.float32), out_shardings=self._source)
        self._tree = {f"w{i}": make(i) for i in range(_ARRAYS)}
        self._small = [jax.device_put(np.full(256, i, np.float32), self._source) for i in range(small)]
        self._mib = nbytes / _MIB
        self._update = jax.jit(lambda tree: {k: x + 1 for k, x in tree.items()})
        self._donating = jax.jit(lambda tree: {k: x + 1 for k, x in tree.items()}, donate_argnums=0)
        self._version = 0
        jax.block_until_ready([self._tree, self._small])

    def round(self) -> dict[str, float]:
        import jax

        _settle()
        started = time.perf_counter()
        moved = jax.block_until_ready(jax.device_put(self._tree, self._target))
        put = time.perf_counter() - started
        self._compare(moved)
        del moved
        through, called = self._through(self._tree)
        verified, _ = self._through(self._tree, verify=True)
        small, small_called = self._through(self._small)
        return {
            "device_put between islands, MiB/s": self._mib / put,
            "publish and subscribe, MiB/s": self._mib / through,
            "publish and subscribe over device_put": put / through,
            "both with checksums that are verified, MiB/s": self._mib / verified,
            "call of publish, ms": called * 1e3,
            f"{len(self._small)} arrays of 1 kB: device_put, ms": self._put_small() * 1e3,
            f"{len(self._small)} arrays of 1 kB: both, ms": small * 1e3,
            f"{len(self._small)} arrays of 1 kB: call of publish, ms": small_called * 1e3,
            "steps of 100 ms that donate: with publish over without": self._stall(self._donating),
            "steps of 100 ms: with publish over without": self._stall(self._update),
        }

    def _put_small(self) -> float:
        import jax

        _settle()
        started = time.perf_counter()
        jax.block_until_ready(jax.device_put(self._small, self._target))
        return time.perf_counter() - started

    def _through(self, tree: Any, verify: bool = False) -> tuple[float, float]:
        """Return the seconds of a publication with its subscription, and those of the call of publish."""
        import atoll

        _settle()
        started = time.perf_counter()
        number = atoll.publish("bench", tree, keep=1, checksums=verify)
        called = time.perf_counter() - started
        version = atoll.subscribe("bench", self._target, version=number, verify=verify)
        seconds = time.perf_counter() - started
        if tree is self._tree:
            self._compare(version.tree)
        return seconds, called

    def _compare(self, tree: Any) -> None:
        for i in range(_ARRAYS):
            assert float(tree[f"w{i}"][-1]) == i, "the arrays are not what they were"

    def _stall(self, update: Any) -> float:
        """Return the time of steps that publish their parameters, over that of steps that do not."""
        return self._steps(update, publishes=True) / self._steps(update, publishes=False)

    def _steps(self, update: Any, publishes: bool) -> float:
        import jax

        import atoll

        params = {key: jax.block_until_ready(value + 0) for key, value in self._tree.items()}
        seconds = []
        for _ in range(_STEPS):
            started = time.perf_counter()
            time.sleep(_STEP_SECONDS)  # other work of the step, which does not use the devices
            params = jax.block_until_ready(update(params))
            if publishes:
                atoll.publish("steps", params, keep=1)
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds)


def _settle() -> None:
    """Wait until freed memory can be used again, so that no measurement pays for fresh memory."""
    time.sleep(0.3)
