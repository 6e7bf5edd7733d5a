"""Tests that moving an array to another island needs little additional host memory, for all sizes and shardings.

`make thorough` moves 8 GiB on machines that have enough memory.
"""

from __future__ import annotations

import os
import time
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
from tests.forked_process import children

MIB, GIB = 1 << 20, 1 << 30
# In MiB. A copy of one of the array's two shards is larger than BESIDE.
SIZE = 288
# The receiver of many pieces has 160 MiB beside an array of 288 MiB, and 64 MiB beside one of 384 MiB.
SIZE_OF_MANY_PIECES = 384
# In MiB, in addition to those of the suite.
LARGE = [
    pytest.param(1536, marks=pytest.mark.thorough),
    *[int(each) for each in os.environ.get("ATOLL_TEST_MOVE_MIB", "").split()],
]
# The same pieces as in other cases, or fewer.
LONG = pytest.mark.thorough
SECONDS = 300.0
BESIDE = 128 * MIB  # 16 MiB of chunks, 8 MiB of copies at a time, and a worker's usual allocations
COLUMNS = 4096
STATE: dict[str, Any] = {}


def on(first: int, devices: int, *spec: Any) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[first : first + devices]), "x"), P(*spec))


def make(nbytes: int, devices: int, *spec: Any) -> None:
    """Make an array whose numbers increase by row and by column."""
    rows = nbytes // 4 // COLUMNS

    def numbers() -> Any:
        row, column = (jax.lax.broadcasted_iota(jnp.uint32, (rows, COLUMNS), axis) for axis in (0, 1))
        return row * COLUMNS + column

    STATE["array"] = jax.jit(numbers, out_shardings=on(0, devices, *spec))().block_until_ready()


def move(first: int, devices: int, *spec: Any) -> list[tuple[int, int, int, int]]:
    """Move the array. Return the corners of each shard that arrives, without reading anything else."""
    x = STATE["array"]
    target = on(first, devices, *spec)
    y = jax.device_put(x, target).block_until_ready()
    assert y.sharding == target
    assert x._npy_value is None
    return [
        tuple(int(shard.data[row, column]) for row in (0, -1) for column in (0, -1)) for shard in y.addressable_shards
    ]


def corners(nbytes: int, devices: int, *spec: Any) -> list[tuple[int, int, int, int]]:
    """Return the expected result of `move`."""
    shape = (nbytes // 4 // COLUMNS, COLUMNS)
    parts = [devices if axis == "x" else 1 for axis in (*spec, None, None)[:2]]
    sizes = [size // count for size, count in zip(shape, parts, strict=True)]
    found = []
    for device in range(devices):
        at = [device * size if count > 1 else 0 for size, count in zip(sizes, parts, strict=True)]
        rows, columns = ((start, start + size - 1) for start, size in zip(at, sizes, strict=True))
        found.append(tuple(row * COLUMNS + column for row in rows for column in columns))
    return found


def peaks(python: RemotePython) -> dict[int, int]:
    """Return the peak memory of each worker, in bytes."""
    workers = [
        child.pid
        for child in children(python.process.pid, recursive=True)
        if "atoll.worker.worker_main" in child.cmdline()
    ]
    lines = {pid: dict(each.split(":", 1) for each in _status(pid)) for pid in workers}
    return {pid: int(status["VmHWM"].split()[0]) * 1024 for pid, status in lines.items()}


def _status(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/status").read_text().splitlines()


def grown(
    python: RemotePython, nbytes: int, copies: int, source: tuple[Any, ...], target: tuple[Any, ...]
) -> list[int]:
    """Move an array to this many devices with this sharding.

    Return the growth of the workers' peaks, in ascending order.
    """
    needed = (1 + copies) * (nbytes + BESIDE) + GIB
    deadline = time.monotonic() + 20  # the previous test returns as much
    while (is_short := nbytes > GIB and psutil.virtual_memory().available < needed) and time.monotonic() < deadline:
        time.sleep(0.5)
    if is_short:
        pytest.skip(f"an array and what it becomes take {needed >> 30} GiB of memory, which this machine has not free")
    python.call(make, nbytes, *source, seconds=SECONDS)
    before = peaks(python)
    assert len(before) == 2
    assert python.call(move, *target, seconds=SECONDS) == corners(nbytes, *target[1:])
    found = sorted(after - before[pid] for pid, after in peaks(python).items())
    python.close()
    print(f"{nbytes // MIB} MiB: {found[0] / MIB:.0f} MiB at the sender, {found[1] / MIB:.0f} MiB at the receiver")
    return found


@pytest.mark.parametrize("size", [SIZE, *LARGE])
def test_a_move_between_islands_of_one_machine_needs_little_memory(start_python: StartPython, size: int) -> None:
    # Each shard of 1,536 MiB takes more than half a pool of whole pieces. Such a move used to deadlock.
    sender, receiver = grown(start_python("2x1x2"), size * MIB, 1, (2, "x"), (2, 2, "x"))
    assert sender <= BESIDE
    assert receiver <= size * MIB + BESIDE


@pytest.mark.parametrize(
    ("islands", "source", "target", "copies"),
    [
        pytest.param("2x1x2", (2, "x"), (2, 2, None, "x"), 1, id="by columns instead of rows", marks=LONG),
        pytest.param("2x1x2", (2, None, "x"), (2, 2, "x"), 1, id="by rows instead of columns", marks=LONG),
        pytest.param("2x1x2", (2, "x"), (2, 1), 1, id="onto one device", marks=LONG),
        pytest.param("2x1x2", (1,), (2, 2, None, "x"), 1, id="from one device", marks=LONG),
        pytest.param("2x1x2", (2, "x"), (2, 2), 2, id="replicated", marks=LONG),
        # Pieces that are sent whole through shared memory.
        pytest.param("2x1x8", (8, None, "x"), (8, 8, "x"), 1, id="by rows, in many pieces"),
    ],
)
@pytest.mark.parametrize("size", [SIZE, *LARGE])
def test_so_does_one_that_reshards(
    start_python: StartPython,
    size: int,
    islands: str,
    source: tuple[Any, ...],
    target: tuple[Any, ...],
    copies: int,
) -> None:
    size = max(size, SIZE_OF_MANY_PIECES if islands == "2x1x8" else SIZE)
    sender, receiver = grown(start_python(islands), size * MIB, copies, source, target)
    assert sender <= BESIDE
    assert receiver <= copies * size * MIB + BESIDE
