"""Tests of the code that all of Atoll's processes share."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys

import pytest

from atoll.cluster.processes.process_runtime import StopEvent, starting


def test_while_a_process_starts_the_collector_does_not_look_and_then_it_does_again_but_not_at_what_was_made() -> None:
    frozen = gc.get_freeze_count()
    with starting():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + len(made)


def test_a_process_whose_start_fails_has_its_collector_again() -> None:
    with pytest.raises(RuntimeError), starting():
        raise RuntimeError
    assert gc.isenabled()


MAIN_MODULES = (
    "atoll.controller_process.controller_main",
    "atoll.engines.engine_main",
    "atoll.engines.null_hosts.null_hosts_main",
    "atoll.engines.null_hosts.null_islands_main",
    "atoll.ifrt.proxy_main",
    "atoll.worker.worker_main",
)


@pytest.mark.parametrize("module", MAIN_MODULES)
def test_a_process_imports_its_modules_without_a_garbage_collection(module: str) -> None:
    code = (
        "import atexit, gc, runpy, sys\n"
        "collected = []\n"
        "gc.callbacks.append(lambda *_: 'msgspec' in sys.modules and collected.append(len(sys.modules)))\n"
        "atexit.register(lambda: print(collected, gc.isenabled()))\n"
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, "not JSON"], capture_output=True, text=True, timeout=300)
    assert "msgspec.DecodeError" in ended.stderr  # the options of the process, which `main` reads first
    assert ended.stdout == "[] False\n"


def test_the_loop_of_a_process_runs_with_the_garbage_collector_and_without_earlier_objects() -> None:
    code = (
        "import gc\n"
        "from atoll.cluster.processes.process_runtime import run_loop\n"
        "gc.disable()\n"
        "async def body(stop):\n"
        "    print(gc.isenabled(), gc.get_freeze_count() > 10_000)\n"
        "run_loop(body)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert ended.stdout == "True True\n"


def test_a_process_that_gets_sigusr1_says_where_its_threads_are_and_goes_on() -> None:
    code = (
        "import os, signal\n"
        "from atoll.cluster.processes.process_logging import start_logging\n"
        "def where_it_is():\n"
        "    os.kill(os.getpid(), signal.SIGUSR1)\n"
        "start_logging('worker')\n"
        "where_it_is()\n"
        "print('on')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert ended.stdout == "on\n"
    assert "in where_it_is" in ended.stderr


@pytest.mark.parametrize("closed", [(0, 1), (1, 2), (0, 1, 2)])
def test_closed_standard_streams_are_opened_so_that_a_pipe_cannot_take_their_numbers(closed: tuple[int, ...]) -> None:
    code = (
        "import os, sys\n"
        "from atoll.cluster.processes.process_runtime import open_standard_streams\n"
        f"for each in {closed}:\n"
        "    os.close(each)\n"
        "open_standard_streams()\n"
        "assert min(os.pipe()) > 2\n"
        "assert all(map(os.get_inheritable, range(3)))\n"
        "os._exit(7)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30).returncode == 7


def test_work_is_canceled_when_the_process_is_asked_to_end() -> None:
    async def work(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "done"

    async def fails() -> None:
        raise ValueError("mine")

    async def main() -> None:
        stop = StopEvent()
        assert await stop.wait_with(work(0)) == "done"
        with pytest.raises(ValueError, match="mine"):
            await stop.wait_with(fails())
        asyncio.get_running_loop().call_soon(stop.set_by, signal.SIGTERM)
        assert await stop.wait_with(work(600)) is None

    asyncio.run(asyncio.wait_for(main(), 30))
