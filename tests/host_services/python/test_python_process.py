"""Tests of the messages that a Python process may send to its worker."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest

from atoll.cluster.processes.child import how_it_ended
from atoll.cluster.sandbox.grants import Sandbox, View
from atoll.errors import FrameError
from atoll.host_services.python import python_process as module
from atoll.host_services.python.python_process import PythonProcess
from atoll.host_services.python.rendezvous import Rendezvous, nowhere

SECONDS = 10.0


class Sleeping(PythonProcess):
    """Process that does nothing. `started` is set when it exists."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.started = threading.Event()

    def _start(self, theirs: socket.socket, coordinator_address: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-S", "-c", "import time; time.sleep(1000)"]
        self.started.set()  # with the lock that `kill` acquires
        return subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=(theirs.fileno(),), start_new_session=True)


class Reaped(PythonProcess):
    """Process that has ended, and for which something else in the worker has waited."""

    def _start(self, theirs: socket.socket, coordinator_address: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-S", "-c", ""], stdout=subprocess.PIPE, start_new_session=True)
        os.waitpid(process.pid, 0)
        return process


class Printing(PythonProcess):
    """Process that prints a line with control characters, and one like those of Atoll's own log."""

    def _start(self, theirs: socket.socket, coordinator_address: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-S", "-c", f"print({PRINTED!r})"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)


PRINTED = "\x1b[31mred\x1b[0m\n2026-01-01 00:00:00,000 atoll engine[1] ERROR x: all is lost"


def _ignore(_: Any) -> None:
    pass


Made = TypeVar("Made", bound=PythonProcess)


def _process(
    kind: type[Made], rendezvous: Rendezvous = nowhere, view: View = View.USER
) -> tuple[Made, queue.SimpleQueue[str]]:
    """Return a process that has not started, and a queue of why it has ended and when it is gone."""
    ends: queue.SimpleQueue[str] = queue.SimpleQueue()
    options: Any = SimpleNamespace(sandbox=Sandbox(view))
    return kind("a session", options, rendezvous, _ignore, ends.put, lambda: ends.put("gone"), lambda: 0), ends


def test_results_that_are_awaited_may_be_of_any_size_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_INBOX_BYTES", 1000)
    process = _process_that_returns(10_000)
    process._keep(1, np.zeros(10_000, np.uint8))
    process._keep(2, np.zeros(400, np.uint8))
    with pytest.raises(FrameError, match="belong to no result"):
        process._keep(3, np.zeros(100, np.uint8))


def test_results_without_bytes_are_bounded_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_INBOX_BYTES", 10_000)
    process = _process_that_returns(0)

    def keep_many() -> None:
        for feed in range(1000):
            process._keep(feed, np.zeros(0, np.uint8))

    with pytest.raises(FrameError, match="belong to no result"):
        keep_many()
    with pytest.raises(FrameError, match="the contents 0 have arrived twice"):
        process._keep(0, np.zeros(0, np.uint8))


def _process_that_returns(nbytes: int) -> PythonProcess:
    options: Any = None
    return PythonProcess("a session", options, nowhere, _ignore, _ignore, lambda: None, lambda: nbytes)


def test_a_process_that_is_killed_is_over_before_it_has_freed_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    freed = threading.Event()

    def reaped(process: subprocess.Popen[bytes], *arguments: Any) -> str:
        assert freed.wait(SECONDS)
        return how_it_ended(process, *arguments)

    monkeypatch.setattr(module, "_ends_soon", lambda process: False)
    monkeypatch.setattr(module, "how_it_ended", reaped)
    process, ends = _process(Sleeping)
    process.start()
    assert process.started.wait(SECONDS)
    process.kill()
    assert ends.get(timeout=SECONDS) == "the Python process of a session was killed"
    assert ends.empty()
    freed.set()
    assert ends.get(timeout=SECONDS) == "gone"


def test_a_process_that_was_reaped_elsewhere_has_ended() -> None:
    process, ends = _process(Reaped)
    process.start()
    assert "cannot be started" not in ends.get(timeout=SECONDS)
    assert ends.get(timeout=SECONDS) == "gone"
    assert process._process is not None
    output = process._process.stdout
    assert output is not None
    assert output.closed


def test_a_process_that_waits_for_other_hosts_ends_at_once_if_it_gives_up() -> None:
    may_go = threading.Event()

    def rendezvous() -> str:
        assert may_go.wait(SECONDS)
        return ""

    process, ends = _process(Sleeping, rendezvous)
    process.start()
    process.give_up("did not start")
    assert ends.get(timeout=SECONDS) == "the Python process of a session did not start"
    may_go.set()
    assert ends.get(timeout=SECONDS) == "gone"
    assert not process.started.is_set()


def test_a_process_can_be_killed_at_once() -> None:
    process, ends = _process(Sleeping)
    process.start()
    assert process.started.wait(SECONDS)
    process.kill_at_once()
    assert "signal 9" in ends.get(timeout=SECONDS)
    assert ends.get(timeout=SECONDS) == "gone"


@pytest.mark.parametrize("view", list(View))
def test_only_the_output_of_tenants_is_escaped_and_attributed(
    view: View, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    process, ends = _process(Printing, view=view)
    process.start()
    assert "exited with 0; its last lines:\n" + PRINTED in ends.get(timeout=SECONDS)
    assert ends.get(timeout=SECONDS) == "gone"
    if view is View.GRANTED:
        lines = (r"\x1b[31mred\x1b[0m", PRINTED.splitlines()[1])
        expected = "".join(f"  a session: {line}\n" for line in lines)
    else:
        expected = PRINTED + "\n"
    assert capfdbinary.readouterr().err.decode() == expected
