"""(e): from the start of a process to its first result (embedded cluster and all), and to its end."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping

from benchmarks.harness.backends import environment_of
from benchmarks.harness.benchmark import Round, Settings
from benchmarks.harness.child import ContestantError, end_group, read_line

SCRIPT = "import jax; print(jax.jit(lambda x: x + 1)(1))"
DEADLINE = 60.0  # seconds, for one process


def first_result(settings: Settings) -> Round:
    """Start two processes per round: one with an empty compile cache, and one with that of the first one."""

    def measure() -> dict[str, float]:
        with tempfile.TemporaryDirectory(prefix="bench-startup-") as directory:
            environment = environment_of(settings) | cache_everything_in(directory)
            cold, _ = run_once(environment)
            warm, end = run_once(environment)
        return {"cold": cold, "warm": warm, "end": end}

    measure()  # from here on, the kernel has every file in memory
    return measure


def cache_everything_in(directory: str) -> dict[str, str]:
    """JAX's persistent compile cache, and whatever else caches by convention, in this directory only."""
    return {
        "JAX_COMPILATION_CACHE_DIR": f"{directory}/jax",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "XDG_CACHE_HOME": f"{directory}/xdg",
    }


def run_once(environment: Mapping[str, str]) -> tuple[float, float]:
    """Seconds from start to result, and from result to end. Raises ContestantError."""
    with tempfile.TemporaryFile() as log:
        started = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            bufsize=0,
            start_new_session=True,
        )
        try:
            line = read_line(process, started + DEADLINE)
            result_at = time.monotonic()
            status = process.wait(timeout=max(0.0, started + DEADLINE - result_at))
            ended = time.monotonic()
        except subprocess.TimeoutExpired:
            raise ContestantError(f"a process had not ended {DEADLINE:.0f} s after its start: {SCRIPT}") from None
        finally:
            end_group(process)
            if process.stdout:
                process.stdout.close()
        if line.strip() != b"2" or status != 0:
            log.seek(0)
            tail = log.read()[-3000:].decode(errors="replace")
            raise ContestantError(
                f"a process printed {line!r} instead of 2, then ended with status {status}; its log:\n{tail}"
            )
    return result_at - started, ended - result_at
