"""(ab): a call and a read at rest, and while two other processes compute all the time.

The other processes are in separate sessions, like the programs of other terminals, or in the session of the script.
Linux shares CPUs between sessions first (autogroups), so the two cases differ.
"""

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
    """Measure the median time of operations in ms at rest, under load (`_loaded`), and their quotient (`_times`).

    `_crowded` is the time if the load is in the session of the script.
    """
    performed = waits.operations()
    numbers = itertools.count(random.randrange(*waits.FIRST))
    count = settings.size(full=100, quick=20)

    def milliseconds(name: str) -> float:
        return 1e3 * waits.measured(performed[name], list(itertools.islice(numbers, count)))[0]

    def measure() -> dict[str, float]:
        found = {name: milliseconds(name) for name in OPERATIONS}
        for load, is_apart in (("loaded", True), ("crowded", False)):
            with busy_processes(BUSY, is_apart):
                found |= {f"{name}_{load}": milliseconds(name) for name in OPERATIONS}
        return found | {f"{name}_times": found[f"{name}_loaded"] / found[name] for name in OPERATIONS}

    measure()
    return measure


@contextlib.contextmanager
def busy_processes(count: int, is_apart: bool) -> Iterator[None]:
    """Run processes that compute until the end of the block. If `is_apart`, each has a separate session."""
    command = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=is_apart) for _ in range(count)]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()  # it computes from now on
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()
