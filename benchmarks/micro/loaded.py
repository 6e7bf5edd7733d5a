"""(ab): a call and a read at rest, and while two other processes compute all the time."""

from __future__ import annotations

import contextlib
import itertools
import random
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.harness.benchmark import Round, Settings
from benchmarks.micro import waits

BUSY = 2  # processes beside the measured ones
OPERATIONS = ("read", "call_float")


def loaded(settings: Settings) -> Round:
    """Measure the median time of operations in ms at rest, under load (`_loaded`), and their quotient (`_times`)."""
    performed = waits.operations()
    numbers = itertools.count(random.randrange(*waits.FIRST))
    count = settings.size(full=100, quick=20)

    def milliseconds(name: str) -> float:
        return 1e3 * waits.measured(performed[name], list(itertools.islice(numbers, count)))[0]

    def measure() -> dict[str, float]:
        found = {name: milliseconds(name) for name in OPERATIONS}
        with busy_processes(BUSY):
            found |= {f"{name}_loaded": milliseconds(name) for name in OPERATIONS}
        return found | {f"{name}_times": found[f"{name}_loaded"] / found[name] for name in OPERATIONS}

    measure()
    return measure


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run processes that compute until the end of the block."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
