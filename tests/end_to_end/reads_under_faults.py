"""Random reads, writes, donations and deletions by several threads, for a child process whose workers are killed."""

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

from atoll.errors import AtollError

DRAIN_SECONDS = 60.0  # for reads that nobody waits for, and for unused memory
SIZES = (1, 1000, 70_000, 700_000, 3_000_000)


class _Allocations(ctypes.Structure):
    """glibc's `struct mallinfo2`, in bytes."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


def _resources() -> tuple[int, ...]:
    """Return descriptors, shared segments, MiB that C and NumPy use, thousands of Python's blocks, and MiB resident.

    Resident memory also has what glibc's arenas keep for later, some of which `malloc_trim` leaves. Large arrays of
    several threads leave up to a few hundred MiB there, which depends on the number of cores.
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
    from atoll.client.jax_patches.host_callbacks import TABLE

    return len(TABLE.reads) + len(TABLE.writes)


class Worker:
    """One thread of random work. Each array holds its own number, so that a wrong read is noticed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.number = seed << 16
        self.done = 0
        self.lost = 0
        self.wrong: list[str] = []
        self.held: list[tuple[int, Any]] = []
        self.add = jax.jit(lambda x: x + 1)
        self.add_in_place = jax.jit(lambda x: x + 1, donate_argnums=0)

    def run(self, until: float) -> None:
        while time.monotonic() < until:
            try:
                self.rng.choice(self.operations)(self)
                self.done += 1
            except (jax.errors.JaxRuntimeError, AtollError):  # a worker was killed
                self.lost += 1
                self.held.clear()
                time.sleep(0.05)

    def put(self) -> None:
        self.number += 1
        values = np.full(self.rng.choice(SIZES), self.number, np.int32)
        self.held.append((self.number, jax.device_put(values, self.rng.choice(jax.devices()))))
        del self.held[:-4]

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

    def start(self) -> None:
        if self.held:
            self.rng.choice(self.held)[1].copy_to_host_async()

    def read(self) -> None:
        if self.held:
            number, array = self.rng.choice(self.held)
            values = np.asarray(array)
            if values.min() != number or values.max() != number:
                self.wrong.append(f"{number} was read as {values.min()} to {values.max()}")

    def delete(self) -> None:
        if self.held:
            _, array = self.held.pop(0)
            if self.rng.random() < 0.5:
                array.copy_to_host_async()
            array.delete()

    operations: tuple[Callable[[Worker], None], ...] = (put, compute, compute, donate, start, read, read, delete)


def prepare() -> None:
    """Connect and compile, before any worker is killed. Compiled functions do not count as growth."""
    first = Worker(0)
    for size in SIZES:
        array = jnp.zeros(size, np.int32)
        np.asarray(first.add(array)), np.asarray(first.add_in_place(array))


def stress(threads: int, seconds: float, seed: int, growth: tuple[int, ...]) -> dict[str, Any]:
    """Run random work. Return counts, the wrong results, and the resources before and after.

    Resources may exceed those before by `growth` at first: pools free their blocks when they are not used.
    """
    workers = [Worker(seed + 1 + i) for i in range(threads)]

    def run_all(seconds: float) -> None:
        until = time.monotonic() + seconds
        running = [threading.Thread(target=each.run, args=(until,), daemon=True) for each in workers]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(seconds + 120)
        for each in workers:
            each.held.clear()
            each.wrong += ["a thread hangs"] * sum(thread.is_alive() for thread in running)

    run_all(min(3.0, seconds / 4))
    before = _resources()
    run_all(seconds)
    # A read whose array's island was restarting when the last worker was killed may still be on the way.
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
