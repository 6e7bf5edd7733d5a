"""Which process takes how much CPU time for a computation of (b), (j) or figure 5: where a rate goes.

    python -m benchmarks.micro.cpu_time > benchmarks/results/cpu-time.json

Rates mean little on a machine that also does other things. CPU time means more.
"""

import json
import os
import pkgutil
import subprocess
import sys
import time

import msgspec

from benchmarks.harness.backends import environment_of
from benchmarks.harness.benchmark import BATCH_THREADS, Settings
from benchmarks.harness.cpu import cpu_seconds
from benchmarks.harness.machine import describe
from benchmarks.harness.worker import become_batch

ROUNDS = 4


class Case(msgspec.Struct, frozen=True):
    """A backend in a benchmark, whose rounds have so many computations.

    With BATCH_THREADS in the backend's name, all of its threads are batch threads.
    """

    benchmark: str
    backend: str
    prepare: str
    computations: int
    point: dict[str, int | float | str] = {}


_MULTI_CONTROLLER = "benchmarks.paper.peers.multi_controller:prepare"
_FOUR_HOSTS: dict[str, int | float | str] = {"hosts": 4, "devices": 2}
CASES = (
    Case("b", "atoll", "benchmarks.micro.dispatch:allreduce_op_by_op", 5000),
    Case("j", "atoll", "benchmarks.micro.programs:chained", 40 * 128),
    Case("b", "stock", "benchmarks.micro.dispatch:allreduce_op_by_op", 5000),
    Case("b", f"stock{BATCH_THREADS}", "benchmarks.micro.dispatch:allreduce_op_by_op", 5000),
    Case("fig5", "Atoll, op by op", "benchmarks.paper.fig5:prepare", 2000, _FOUR_HOSTS),
    Case("fig5", "Atoll, chained", "benchmarks.paper.fig5:prepare", 30 * 128, _FOUR_HOSTS),
    Case("fig5", "JAX, op by op", _MULTI_CONTROLLER, 1024, _FOUR_HOSTS),
    Case("fig5", f"JAX, op by op{BATCH_THREADS}", _MULTI_CONTROLLER, 1024, _FOUR_HOSTS),
)


def measure(case: Case) -> dict[str, object]:
    """Microseconds of CPU time for a computation, by process."""
    settings = Settings(backend=case.backend, point=case.point)
    if settings.has_batch_threads:
        become_batch()
    run = pkgutil.resolve_name(case.prepare)(settings)
    run()
    before, started = cpu_seconds(), time.perf_counter()
    for _ in range(ROUNDS):
        run()
    seconds = time.perf_counter() - started
    after = cpu_seconds()
    total = ROUNDS * case.computations
    each = {name: round(1e6 * (after[name] - before.get(name, 0.0)) / total, 1) for name in after}
    return {
        "backend": case.backend,
        "benchmark": case.benchmark,
        "microseconds": each,
        "all": round(sum(each.values()), 1),
        "rate": round(total / seconds),
        "cores_busy": round(sum(each.values()) / 1e6 * total / seconds, 2),
    }


def main() -> None:
    if len(sys.argv) == 2:
        print(json.dumps(measure(CASES[int(sys.argv[1])])), flush=True)
        os._exit(0)  # a peer's processes would wait for one another
    results = []
    for number, case in enumerate(CASES):
        command = [sys.executable, "-m", "benchmarks.micro.cpu_time", str(number)]
        environment = environment_of(Settings(case.backend, point=case.point))
        ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
        results.append(json.loads(next(line for line in ended.stdout.splitlines() if line.startswith("{"))))
    found = {"commit": describe().commit, "load_before": os.getloadavg()[0], "results": results}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
