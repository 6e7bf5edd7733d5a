"""Which process takes how much processor time for a computation of (b) or (j): where a rate goes on a small machine.

    python -m atoll.bench.micro.processor_time > bench/results/processor-time.json

Rates of a machine that does other things say little; processor time says more.
"""

import json
import os
import subprocess
import sys
import time

import psutil

from atoll.bench.harness.backends import environment_of
from atoll.bench.harness.benchmark import Settings

ROUNDS = 4
CASES = {
    "b": ("atoll.bench.micro.dispatch", "allreduce_op_by_op", 5000),
    "j": ("atoll.bench.micro.programs", "chained", 40 * 128),
}


def measure(backend: str, key: str) -> dict[str, object]:
    """Microseconds of processor time for a computation, by process."""
    module, function, computations = CASES[key]
    prepare = getattr(__import__(module, fromlist=[function]), function)
    run = prepare(Settings(backend=backend))
    run()
    before, started = _processor_seconds(), time.perf_counter()
    for _ in range(ROUNDS):
        run()
    seconds = time.perf_counter() - started
    after = _processor_seconds()
    total = ROUNDS * computations
    each = {name: round(1e6 * (after[name] - before.get(name, 0.0)) / total, 1) for name in after}
    return {
        "backend": backend,
        "benchmark": key,
        "microseconds": each,
        "all": round(sum(each.values()), 1),
        "rate": round(total / seconds),
        "cores_busy": round(sum(each.values()) / 1e6 * total / seconds, 2),
    }


def _processor_seconds() -> dict[str, float]:
    found: dict[str, float] = {}
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        modules = [part for part in process.cmdline() if part.startswith("atoll.")]
        name = modules[0].split(".")[1] if modules else "script"
        times = process.cpu_times()
        found[name] = found.get(name, 0.0) + times.user + times.system
    return found


def main() -> None:
    if len(sys.argv) == 3:
        print(json.dumps(measure(*sys.argv[1:])))
        return
    results = []
    for backend, key in (("atoll", "b"), ("atoll", "j"), ("stock", "b")):
        command = [sys.executable, "-m", "atoll.bench.micro.processor_time", backend, key]
        environment = environment_of(Settings(backend))
        ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
        results.append(json.loads(ended.stdout.splitlines()[-1]))
    print(json.dumps({"load_before": os.getloadavg()[0], "results": results}, indent=1))


if __name__ == "__main__":
    main()
