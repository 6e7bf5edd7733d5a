"""Tests that a script that ends does not wait for compilations in the background."""

from __future__ import annotations

from tests.scripts import RunScript

SCRIPT = """
import atexit
import os
import threading
import time

RUNTIME = os.environ["XDG_RUNTIME_DIR"]
ended = []
atexit.register(lambda: print(time.time() - ended[0]))  # the last handler that runs

import jax
import jax.numpy as jnp
import psutil

import atoll
from atoll.client import background_threads

x = jax.block_until_ready(jnp.arange(4.0) * 2)
commands = {each: " ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])}
workers = [each for each, command in commands.items() if "worker_main" in command and RUNTIME in command]
assert workers
for each in workers:
    each.suspend()


@atoll.program
def program(x):
    return jax.jit(lambda x: x * 3.5 - 1)(x)


background_threads.start_compiling("ahead", lambda: program.compile_ahead(x))
while "atoll-compile" not in [each.name for each in threading.enumerate()]:
    time.sleep(0.01)
time.sleep(1)
ended.append(time.time())
"""


def test_a_script_that_ends_does_not_wait_for_a_compilation(run_script: RunScript) -> None:
    """The worker is stopped, so the compilation never ends."""
    result = run_script(SCRIPT, env={"ATOLL_LEASE": "300"})
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 8
    assert "CANCELLED" not in result.stderr
