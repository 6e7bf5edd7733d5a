"""Tests that a bug on any thread ends its process after it was reported."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from atoll.cluster.processes.bugs import described
from atoll.cluster.processes.child import describe_exit
from atoll.cluster.processes.leases import FAILED_STATUS

CASES = {
    "a thread": "threading.Thread(target=fail).start()",
    "a pool": "start_in(ThreadPoolExecutor(1), fail)",
    "a loop": """
        loop = asyncio.new_event_loop()
        trap.watch_loop(loop)
        loop.call_soon(fail)
        loop.run_forever()
    """,
    "a task": """
        async def failing():
            fail()

        async def main():
            trap.watch_loop(asyncio.get_running_loop())
            asyncio.create_task(failing())
            await asyncio.sleep(0)
            await asyncio.sleep(30)

        asyncio.run(main())
    """,
}


def run(body: str, tell: str = "lambda text: print('reported', text, flush=True)") -> subprocess.CompletedProcess[str]:
    program = textwrap.dedent(
        f"""
        import asyncio, threading, time
        from concurrent.futures import ThreadPoolExecutor
        from atoll.cluster.processes.bugs import BugTrap, start_in

        def fail():
            raise KeyError("nobody knows it")

        trap = BugTrap("the process", {tell})
        trap.watch_threads()
        """
    )
    program += textwrap.dedent(body) + "\nthreading.Event().wait(30)\n"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("case", CASES)
def test_it_ends_the_process_and_is_reported(case):
    ended = run(CASES[case])
    assert ended.returncode == FAILED_STATUS, ended.stderr
    assert ended.stdout == "reported KeyError: 'nobody knows it'\n"
    assert "in fail\n" in ended.stderr, "the log has the traceback"
    assert "\nKeyError: 'nobody knows it'\n" in ended.stderr


@pytest.mark.parametrize("tell", ["lambda text: threading.Event().wait(30)", "lambda text: 1 / 0"])
def test_a_process_that_cannot_report_it_ends_all_the_same(tell):
    assert run(CASES["a thread"], tell).returncode == FAILED_STATUS


def test_a_lost_connection_is_no_bug():
    body = """
        def lose():
            raise ConnectionResetError("gone")

        async def main():
            trap.watch_loop(asyncio.get_running_loop())
            asyncio.get_running_loop().call_soon(lose)
            await asyncio.sleep(0.1)

        asyncio.run(main())
        print("runs", flush=True)
        import os
        os._exit(0)
    """
    assert run(body).stdout == "runs\n"


def test_the_place_is_the_innermost_in_atoll_and_the_text_is_one_bounded_line():
    try:
        describe_exit("text")  # type: ignore[arg-type]
    except TypeError as error:
        text = described(error)
    assert text.startswith("TypeError: '>=' not supported between instances of 'str' and 'int' ")
    assert "(cluster/processes/child.py:" in text
    assert described(ValueError("a\nb" + 10_000 * "c")).startswith("ValueError: a b" + 300 * "c")
    assert len(described(ValueError("a\nb" + 10_000 * "c"))) < 500
    assert described(KeyError()) == "KeyError"
