"""Tests that a starting process is killed if, and only if, it sends no heartbeats."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
from collections.abc import Callable

from atoll.cluster.processes.startup_heartbeat import StartingProcess, StartWatch
from tests.file_limits import no_more_files

SECONDS = 0.6
LONG = 3 * SECONDS
BOUND = 30.0

SIGNS = (
    "import time; from atoll.cluster.processes.startup_heartbeat import StartupHeartbeat; "
    "signs = StartupHeartbeat.of_arguments()"
)


def end_of(script: str, when_started: Callable[[StartingProcess], None] = lambda process: None) -> tuple[int, str]:
    """Return how a process ends that runs a script, if it may be silent for this many seconds."""

    async def run() -> tuple[int, str]:
        ended: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
        command = [sys.executable, "-c", textwrap.dedent(script), "options"]
        process = StartingProcess(command, os.environ, lambda *end: ended.set_result(end), SECONDS)
        when_started(process)
        async with asyncio.timeout(BOUND):
            return await ended

    return asyncio.run(run())


def test_who_neither_computes_nor_speaks_is_killed() -> None:
    status, silence = end_of("import time; time.sleep(60)")
    assert status == -signal.SIGKILL
    assert "gave no sign of life for 1 s while it started Python, and was killed" in silence


def test_a_process_whose_cpu_time_cannot_be_read_is_not_killed() -> None:
    async def scene() -> tuple[int, str]:
        ended: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
        command = [sys.executable, "-c", "import time; time.sleep(60)", "options"]
        StartingProcess(command, os.environ, lambda *end: ended.set_result(end), SECONDS)
        with no_more_files():
            await asyncio.sleep(LONG)
        assert not ended.done()
        async with asyncio.timeout(BOUND):
            return await ended  # it hangs, and that can be detected again

    status, silence = asyncio.run(scene())
    assert status == -signal.SIGKILL
    assert "gave no sign of life" in silence


def test_what_it_said_last_is_named() -> None:
    status, silence = end_of(f"{SIGNS}; signs.report('imported JAX'); time.sleep(60)")
    assert status == -signal.SIGKILL
    assert "while it imported JAX" in silence


def test_who_computes_is_left_alone() -> None:
    script = f"import time\nend = time.monotonic() + {LONG}\nwhile time.monotonic() < end: pass"
    assert end_of(script) == (0, "")


def test_who_says_that_it_waits_is_left_alone() -> None:
    script = f"""
        import atoll.cluster.processes.startup_heartbeat as starting
        starting.SIGN_SECONDS = {SECONDS / 4}
        import time
        with starting.StartupHeartbeat.of_arguments().waiting("opened its devices"):
            time.sleep({LONG})
    """
    assert end_of(script) == (0, "")


def test_who_is_ready_may_be_silent() -> None:
    assert end_of(f"{SIGNS}; signs.ready(); time.sleep({LONG})") == (0, "")


def test_the_parent_learns_that_a_process_is_ready_and_not_when_it_only_ends() -> None:
    async def run(script: str) -> tuple[int, bool]:
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        was_ready: list[bool] = []

        def ready() -> None:
            was_ready.append(True)
            process.kill()

        command = [sys.executable, "-c", script, "options"]
        process = StartingProcess(command, os.environ, lambda *end: ended.set_result(end[0]), BOUND, on_ready=ready)
        async with asyncio.timeout(2 * BOUND):
            return await ended, bool(was_ready)

    assert asyncio.run(run(f"{SIGNS}; signs.ready(); time.sleep(600)")) == (-signal.SIGKILL, True)
    assert asyncio.run(run(f"{SIGNS}; signs.report('imported JAX')")) == (0, False)


def test_who_is_stopped_is_killed_whatever_it_was_about_to_say() -> None:
    def stop(process: StartingProcess) -> None:
        asyncio.get_running_loop().call_later(SECONDS / 2, os.kill, process.pid, signal.SIGSTOP)

    status, silence = end_of(f"{SIGNS}\nwith signs.waiting('opened its devices'): time.sleep(60)", stop)
    assert status == -signal.SIGKILL
    assert silence


def test_an_end_of_its_own_is_no_silence() -> None:
    assert end_of("raise SystemExit(3)") == (3, "")


def test_while_the_one_that_watches_did_not_run_nobody_was_silent() -> None:
    watch = StartWatch(2.0)
    assert not watch.is_silent(100.0, 5, has_spoken=False)
    assert not watch.is_silent(100.25, 5, has_spoken=False)
    assert not watch.is_silent(160.0, 5, has_spoken=False), "the machine was suspended"
    looks = [watch.is_silent(160.0 + 0.25 * look, 5, has_spoken=False) for look in range(1, 10)]
    assert looks == [False] * 6 + [True] * 3
