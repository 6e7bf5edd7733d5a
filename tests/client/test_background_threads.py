"""Tests that background work of a training ends before its process does."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any

import jax
import pytest
from jax._src import mesh as _mesh

from atoll.client.background_threads import CompilingThreads
from atoll.client.jax_internals import trace_context
from atoll.client.thread_settings import ThreadSettings

SCRIPT = """
import time

from atoll.client import background_threads


def work():
    time.sleep(0.5)
    print("over")


background_threads.start("work", work)
"""


def test_a_script_that_ends_waits_for_what_is_under_way() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=True)
    assert ended.stdout == "over\n"


INTERRUPTED = """
import threading
import time

from atoll.client import background_threads
from atoll.client.background_threads import CompilingThreads

background_threads._END_SECONDS = 100.0
begun = threading.Barrier(3)


def trace():
    begun.wait()
    while True:
        pass


threads = CompilingThreads(1, "compile")
waiting = [threads.submit(each) for each in (trace, print)]
background_threads.start_compiling("ahead", lambda: [begun.wait(), waiting[1].result()])
begun.wait()
threads.close()
print(time.time(), flush=True)
"""


def test_a_script_that_ends_interrupts_the_threads_that_compile() -> None:
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=300, check=True)
    assert time.time() - float(ended.stdout) < 80
    assert ended.stderr == ""


def test_compiling_threads_are_as_many_as_are_needed() -> None:
    threads = CompilingThreads(2, "compile")
    gate = threading.Event()
    waiting = [threads.submit(gate.wait) for _ in range(3)]
    names = [each.name for each in threading.enumerate()]
    gate.set()
    assert [each.result(300) for each in waiting] == [True] * 3
    assert threads.submit(lambda: 1).result(300) == 1
    assert names.count("compile") == 2
    threads.close()


def test_an_error_of_work_is_raised_where_its_result_is_needed() -> None:
    threads = CompilingThreads(2, "compile")
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 // 0).result(300)
    threads.close()


@pytest.mark.filterwarnings("ignore:.with mesh.*:DeprecationWarning")
def test_a_thread_has_the_settings_of_the_thread_that_starts_it() -> None:
    mesh = jax.sharding.Mesh(jax.devices("cpu")[:1], "x")
    user = jax.make_user_context()
    with (
        jax.default_matmul_precision("highest"),
        jax.enable_x64(True),
        jax.default_device(jax.devices("cpu")[0]),
        jax.transfer_guard("log"),
        mesh,
        jax.set_mesh(jax.sharding.Mesh(jax.devices("cpu")[:1], "y")),
        user(3),
    ):
        threads = CompilingThreads(1, "compile")
        assert threads.submit(_trace_context).result(300) == _trace_context()
        threads.close()


def test_a_thread_has_its_own_settings_after_those_of_another_thread() -> None:
    before = _trace_context()
    with jax.default_matmul_precision("highest"), jax.transfer_guard("disallow"):
        settings = ThreadSettings.current()
    with settings.applied():
        assert _trace_context() != before
    assert _trace_context() == before


def _trace_context() -> tuple[Any, ...]:
    return trace_context(), jax.config.jax_transfer_guard_host_to_device, _mesh.thread_resources.env.physical_mesh
