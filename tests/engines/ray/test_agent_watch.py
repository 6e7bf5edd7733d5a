"""A process that hangs is killed after its time, and one that waits for something else is not."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from atoll.engines.ray.agent_watch import AgentWatch
from tests.cluster_process import eventually

pytestmark = pytest.mark.slow

WAITS = "import time\nwhile True: print(end='.', flush=True); time.sleep(0.25)"  # as an agent looks at its lease
COMPUTES = "print(end='.', flush=True)\nwhile True: pass"  # as one that imports
Start = Callable[[str], subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def start(code: str) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        process.stdout.read(1)  # it runs
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_process_that_is_stopped_is_killed_and_it_is_said_why(start: Start) -> None:
    process = start(WAITS)
    watch = AgentWatch(process, 1.0)
    process.send_signal(signal.SIGSTOP)
    assert eventually(lambda: process.poll() is not None)
    assert process.returncode == -signal.SIGKILL
    assert watch.silence == "it did not run for 1 s, and was killed"


@pytest.mark.parametrize("code", [WAITS, COMPUTES])
def test_a_process_that_runs_is_left_alone_whether_it_waits_or_computes(start: Start, code: str) -> None:
    process = start(code)
    watch = AgentWatch(process, 2.0)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(5.0)
    assert watch.silence == ""
