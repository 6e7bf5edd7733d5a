"""Tests of the environment of host agents on Ray, and of the watch that kills an agent that hangs."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from atoll.engines.ray.actors import AgentWatch, agent_environment, engine_environment
from tests.cluster_process import eventually

WAITS = "import time\nwhile True: print(end='.', flush=True); time.sleep(0.25)"  # like an agent that checks its lease
COMPUTES = "print(end='.', flush=True)\nwhile True: pass"  # like an agent that is importing modules
Start = Callable[[str], subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def start(code: str) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        process.stdout.read(1)  # it is running
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_process_that_is_stopped_is_killed_and_it_is_said_why(start: Start) -> None:
    process = start(WAITS)
    watch = AgentWatch(process, 1.0)
    process.send_signal(signal.SIGSTOP)
    assert eventually(lambda: process.poll() is not None)
    assert process.returncode == -signal.SIGKILL
    assert watch.silence == "it did not run for 1 s, and was killed"


@pytest.mark.parametrize("code", [WAITS, COMPUTES])
@pytest.mark.slow
def test_a_process_that_runs_is_left_alone_whether_it_waits_or_computes(start: Start, code: str) -> None:
    process = start(code)
    watch = AgentWatch(process, 2.0)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(3.5)
    assert watch.silence == ""


SETTINGS = {"ATOLL_CACHE_DIR": "off", "XLA_FLAGS": "--xla", "OMP_NUM_THREADS": "4"}
SAID = SETTINGS | {
    "ATOLL_TOKEN": "of clients",
    "ATOLL_HOST_TOKEN": "of hosts",
    "ATOLL_AUTHORITY": "key",
    "ATOLL_JOIN": "join",
    "ATOLL_INSECURE": "1",
    "ATOLL_ADDRESS": "there",
    "ATOLL_RAY_ADDRESS": "auto",
    "HOME": "/home",
    "JAX_PLATFORMS": "atoll",
}


def test_hosts_get_what_is_for_all_of_the_cluster_and_of_its_secrets_what_they_join_by() -> None:
    assert agent_environment(True, SAID) == SETTINGS | {"ATOLL_JOIN": "join"}


def test_without_tls_hosts_get_the_tokens() -> None:
    tokens = {"ATOLL_TOKEN": "of clients", "ATOLL_HOST_TOKEN": "of hosts"}
    assert agent_environment(False, SAID) == SETTINGS | tokens


def test_the_engine_gets_what_its_cluster_is_made_with_and_no_join_string_of_another() -> None:
    made_with = {"ATOLL_TOKEN": "of clients", "ATOLL_HOST_TOKEN": "of hosts", "ATOLL_AUTHORITY": "key"}
    assert engine_environment(SAID) == SETTINGS | made_with
