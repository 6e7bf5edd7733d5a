"""Random work with arrays by several threads, for a child process whose workers are killed.

The work is reads, writes, donations, deletions, and moves to other devices and shardings.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from atoll.errors import AtollError

DRAIN_SECONDS = 60.0  # in case nobody waits for a read, and for unused memory
LEAST = 100  # operations that succeed, at the least
SIZES = (1, 1000, 70_000, 700_000, 3_000_000)


class _Allocations(ctypes.Structure):
    """glibc's `struct mallinfo2`, in bytes."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


def _resources() -> tuple[int, ...]:
    """Return the numbers of descriptors and shared segments, MiB that C and NumPy use, thousands of Python's blocks,
    and MiB resident.

    Resident memory includes free memory in glibc's arenas, which `malloc_trim` returns only in part. Large arrays of
    several threads leave up to a few hundred MiB there, depending on the number of cores.
    """
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    libc.mallinfo2.restype = _Allocations
    allocations = libc.mallinfo2()
    segments = Path("/proc/self/maps").read_text().count("/memfd:")
    return (
        len(os.listdir("/proc/self/fd")),
        segments,
        (allocations.uordblks + allocations.hblkhd) >> 20,
        sys.getallocatedblocks() // 1000,
        psutil.Process().memory_info().rss >> 20,
    )


def _arriving() -> int:
    """Return the number of reads and writes that have not ended."""
    from atoll.client.jax_patches.host_callbacks import CLIENT_CHANNEL

    return len(CLIENT_CHANNEL.reads) + len(CLIENT_CHANNEL.writes)


def _places() -> list[Any]:
    """Return the shardings between which arrays move: each device, and each slice, divided and replicated."""
    devices = jax.devices()
    slices: dict[int, list[Any]] = {}
    for device in devices:
        slices.setdefault(device.slice_index, []).append(device)
    meshes = [Mesh(np.array(each), ("x",)) for each in slices.values() if len(each) > 1]
    specs = PartitionSpec("x"), PartitionSpec()
    return [*map(SingleDeviceSharding, devices), *(NamedSharding(mesh, spec) for mesh in meshes for spec in specs)]


def contents(number: int, size: int) -> np.ndarray[Any, Any]:
    """Return the contents of the array with this number. All elements differ, so that misplaced ones are detected."""
    return np.arange(number, number + size, dtype=np.int32)


class Worker:
    """Thread of random work. The contents of each array are its number and the numbers after it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.number = seed << 16
        self.done = 0
        self.lost = 0
        self.wrong: list[str] = []
        self.held: list[tuple[int, Any]] = []
        self.places = _places()
        self.add = jax.jit(lambda x: x + 1)
        self.add_in_place = jax.jit(lambda x: x + 1, donate_argnums=0)

    def run(self, until: float, least: int) -> None:
        """Run random operations until this time, and until `least` of them have succeeded since the start."""
        while time.monotonic() < until or self.done < least:
            try:
                self.rng.choice(self.operations)(self)
                self.done += 1
            except (jax.errors.JaxRuntimeError, AtollError):  # a worker was killed
                self.lost += 1
                self.held.clear()
                time.sleep(0.05)

    def put(self) -> None:
        self.number += 1
        values = contents(self.number, self.rng.choice(SIZES))
        self.held.append((self.number, jax.device_put(values, self.place(values.size))))
        del self.held[:-4]

    def place(self, size: int) -> Any:
        """Return a device, or a sharding that can divide this many elements."""
        return self.rng.choice(self.places if size % 2 == 0 else jax.devices())

    def compute(self) -> None:
        if self.held:
            number, array = self.held.pop()
            self.held.append((number + 1, self.add(array)))

    def donate(self) -> None:
        if self.held:
            number, array = self.held.pop()
            result = self.add_in_place(array)
            if not array.is_deleted():
                self.wrong.append("a donated array is not deleted")
            self.held.append((number + 1, result))

    def reshard(self) -> None:
        if self.held:
            number, array = self.held.pop(self.rng.randrange(len(self.held)))
            self.held.append((number, jax.device_put(array, self.place(array.size))))

    def start(self) -> None:
        if self.held:
            self.rng.choice(self.held)[1].copy_to_host_async()

    def read(self) -> None:
        if self.held:
            number, array = self.rng.choice(self.held)
            self.compare(number, np.asarray(array), contents(number, array.size))

    def read_ready(self) -> None:
        """Read a small array that the script has waited for. Donate it in some cases before the contents arrive."""
        self.number += 1
        number, size = self.number, self.rng.choice((1, 1000))
        array = jax.device_put(contents(number, size), self.place(size)).block_until_ready()
        array = self.add(array).block_until_ready()
        if self.rng.random() < 0.5:
            array.copy_to_host_async()
            number, array = number + 1, self.add_in_place(array)
            self.compare(number + 1, np.asarray(array.block_until_ready()), contents(number + 1, size))
        else:
            self.compare(number + 1, np.asarray(array), contents(number + 1, size))

    def read_shards(self) -> None:
        if self.held:
            number, array = self.rng.choice(self.held)
            expected = contents(number, array.size)
            for shard in array.addressable_shards:
                self.compare(number, np.asarray(shard.data), expected[shard.index])

    def compare(self, number: int, found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
        if not np.array_equal(found, expected):
            places = np.flatnonzero(found != expected)
            at = places[0]
            self.wrong.append(
                f"{number}: {places.size} elements differ, the first at {at}: {found[at]}, {expected[at]}"
            )

    def delete(self) -> None:
        if self.held:
            _, array = self.held.pop(0)
            if self.rng.random() < 0.5:
                array.copy_to_host_async()
            array.delete()

    operations: tuple[Callable[[Worker], None], ...] = (
        *(put, compute, compute, donate, reshard, start, read, read, read_ready, read_shards, delete),
    )


def prepare(in_all_places: bool) -> None:
    """Connect and compile before any worker is killed. Compiled functions do not count as growth."""
    first = Worker(0)
    for size in SIZES:
        for place in first.places if in_all_places and size % 2 == 0 else jax.devices()[:1]:
            array = jax.device_put(jnp.zeros(size, np.int32), place)
            np.asarray(first.add(array)), np.asarray(first.add_in_place(array))


def stress(threads: int, seconds: float, seed: int, growth: tuple[int, ...]) -> dict[str, Any]:
    """Run random work. Return counts, the wrong results, and the resources before and after.

    At the end of the work, resources may exceed the earlier ones by `growth`, because pools free unused blocks later.
    """
    workers = [Worker(seed + 1 + i) for i in range(threads)]

    def run_all(seconds: float, least: int = 0) -> None:
        until = time.monotonic() + seconds
        running = [threading.Thread(target=each.run, args=(until, least), daemon=True) for each in workers]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(seconds + 120)
        for each in workers:
            each.held.clear()
            each.wrong += ["a thread hangs"] * sum(thread.is_alive() for thread in running)

    run_all(min(3.0, seconds / 4))
    before = _resources()
    run_all(seconds, LEAST // threads + 1)
    # The read of an array whose island was restarting when the last worker was killed may be unfinished.
    late = _arriving()
    until = time.monotonic() + DRAIN_SECONDS
    most = tuple(map(sum, zip(before, growth, strict=True)))
    while (after := _resources()) and time.monotonic() < until:
        if not _arriving() and all(here <= limit for here, limit in zip(after, most, strict=True)):
            break
        time.sleep(0.5)
    return {
        "done": sum(each.done for each in workers),
        "lost": sum(each.lost for each in workers),
        "wrong": [text for each in workers for text in each.wrong],
        "before": before,
        "after": after,
        "late": late,
        "arriving": _arriving(),
    }
