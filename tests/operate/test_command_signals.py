"""Tests that commands that run until a signal end at the first one, whatever code Python is running."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

# The signal arrives while a `__del__` is running, in which Python drops exceptions of signal handlers.
SCRIPT = """
import asyncio, os, sys
from atoll.operate.command.watch_commands import _run


class Interrupted:
    def __del__(self):
        os.kill(os.getpid(), int(sys.argv[1]))


async def work():
    Interrupted()
    await asyncio.sleep(600)


_run(work())
print("ended")
"""


IGNORING = """
import asyncio, signal
from atoll.operate.command.watch_commands import _run

signal.signal(signal.SIGHUP, signal.SIG_IGN)


async def work():
    signal.raise_signal(signal.SIGHUP)
    await asyncio.sleep(0.1)
    print("continued")
    signal.raise_signal(signal.SIGTERM)
    await asyncio.sleep(600)


_run(work())
print("ended")
"""


def test_a_signal_that_the_caller_ignores_does_not_end_the_command() -> None:
    ended = subprocess.run([sys.executable, "-c", IGNORING], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "continued\nended\n"), ended.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_a_finalizer_ends_the_command(number: signal.Signals) -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT, str(int(number))], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "ended\n"), ended.stderr
