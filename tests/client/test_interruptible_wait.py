"""Tests of waits in C code that Ctrl-C ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from atoll.client import interruptible_wait
from atoll.client.interruptible_wait import wait_interruptibly
from atoll.host_services.calls.call_threads import Threads


@pytest.fixture(autouse=True)
def _threads_end_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interruptible_wait, "_threads", Threads(idle=0.1))


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_ends_the_wait_and_not_the_function() -> None:
    may_end, has_ended = threading.Event(), threading.Event()

    def function() -> None:
        may_end.wait()  # as C code: the main thread is not in it
        has_ended.set()

    signal.setitimer(signal.ITIMER_REAL, 0.05)
    with pytest.raises(KeyboardInterrupt):
        wait_interruptibly(function)
    assert not has_ended.is_set()
    wait_interruptibly(lambda: None)  # another wait does not need the thread of the first one
    may_end.set()
    assert has_ended.wait(30)


EXITS = """
import signal, threading, time
from atoll.client.interruptible_wait import wait_interruptibly

def function():
    may_end.wait()
    time.sleep(0.1)
    print("over")

def interrupt(*_):
    may_end.set()
    raise KeyboardInterrupt

may_end = threading.Event()
signal.signal(signal.SIGALRM, interrupt)
signal.setitimer(signal.ITIMER_REAL, 0.1)
wait_interruptibly(function)
"""


def test_the_exit_waits_for_a_function_that_ends_with_the_interrupt() -> None:
    patient = "from atoll.client import interruptible_wait\ninterruptible_wait._EXIT_SECONDS = 60.0\n" + EXITS
    ended = subprocess.run([sys.executable, "-c", patient], capture_output=True, text=True, timeout=300)
    assert ended.stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert ended.stdout == "over\n"


def test_the_exit_does_not_wait_for_long() -> None:
    forever = EXITS.replace("may_end.set()", "pass").replace("time.sleep(0.1)", "pass")
    ended = subprocess.run([sys.executable, "-c", forever], capture_output=True, text=True, timeout=300)
    assert ended.stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert ended.stdout == ""


def test_an_exception_of_the_function_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        wait_interruptibly(lambda: 1 / 0)


def test_other_threads_than_the_main_one_wait_themselves() -> None:
    called: list[threading.Thread] = []

    def wait() -> threading.Thread:
        wait_interruptibly(lambda: called.append(threading.current_thread()))
        return threading.current_thread()

    with ThreadPoolExecutor(1) as pool:
        assert called == [pool.submit(wait).result()]


def test_without_another_thread_the_main_one_waits_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoThreads:
        def run(self, call: Any) -> None:
            raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(interruptible_wait, "_threads", NoThreads())
    called: list[threading.Thread] = []
    wait_interruptibly(lambda: called.append(threading.current_thread()))
    assert called == [threading.main_thread()]
