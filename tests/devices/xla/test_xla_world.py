"""Tests of worlds that are closed while hosts join them. XLA ends a process that fails to join one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = 60.0

# Joins a world whose second host never joins. The world is closed before or while this host waits for that one.
JOIN = """
import sys, threading, time
import jax
from atoll.devices.xla.xla_world import XlaWorlds
from atoll.errors import StatusError

address, is_early = sys.argv[1], sys.argv[2] == "early"
worlds = XlaWorlds(None, tuple(jax.devices("cpu")))
worlds.serve(7, address, 2)
if is_early:
    worlds.close(7)
else:
    threading.Timer(1.0, worlds.close, [7]).start()
began = time.monotonic()
try:
    worlds.join(7, address, 0, 2, "127.0.0.1")
except StatusError as error:
    print(error.status.message, time.monotonic() - began < 30.0, flush=True)
time.sleep(1.0)
"""


@pytest.mark.parametrize("when", ["early", "while it joins"])
def test_a_host_survives_the_close_of_a_world_that_it_joins(tmp_path: Path, when: str) -> None:
    command = [sys.executable, "-c", JOIN, f"unix:{tmp_path}/service", when]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("the world was closed before all hosts had joined it")
    assert done.stdout.endswith(" True\n")
