"""An array that moves to another island needs little host memory beside itself, whatever its size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.end_to_end.remote_python import RemotePython, StartPython

MIB = 1 << 20
BESIDE = 128 * MIB  # 16 MiB of chunks, and what a worker allocates anyway
STATE: dict[str, Any] = {}


def on(first: int) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[first : first + 2]), "x"), P("x"))


def make(nbytes: int) -> None:
    make_it = jax.jit(lambda: jnp.arange(nbytes // 4, dtype=jnp.uint32), out_shardings=on(0))
    STATE["array"] = make_it().block_until_ready()


def move() -> list[int]:
    """Some of the numbers that arrive."""
    y = jax.device_put(STATE["array"], on(2)).block_until_ready()
    return [int(shard.data[at]) for shard in y.addressable_shards for at in (0, -1)]


def peaks(python: RemotePython) -> dict[int, int]:
    """The most memory that each worker has had, in bytes."""
    workers = [
        child.pid
        for child in psutil.Process(python.process.pid).children(recursive=True)
        if "atoll.worker.main" in child.cmdline()
    ]
    lines = {pid: dict(each.split(":", 1) for each in _status(pid)) for pid in workers}
    return {pid: int(status["VmHWM"].split()[0]) * 1024 for pid, status in lines.items()}


def _status(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/status").read_text().splitlines()


@pytest.mark.parametrize("size", [512, pytest.param(1536, marks=pytest.mark.thorough)])
def test_a_move_between_islands_of_one_machine_needs_little_memory(start_python: StartPython, size: int) -> None:
    # The shards of 1,536 MiB are more than half a pool of whole pieces each: such a move waited for itself.
    python = start_python("2x1x2")
    count = size * MIB // 4
    python.call(make, size * MIB)
    before = peaks(python)
    assert len(before) == 2
    assert python.call(move) == [0, count // 2 - 1, count // 2, count - 1]
    grown = sorted(after - before[pid] for pid, after in peaks(python).items())
    assert grown[0] <= BESIDE, "the sender's"
    assert grown[1] <= size * MIB + BESIDE, "the receiver's"
    python.close()
