"""Tests of the connection to a compiler process: its time limit, and the end of the process."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from atoll.devices.compilers import compiler_messages
from atoll.devices.compilers.compiler_messages import Begun, CompileProgram, CompilerLink, Ended, TimeLimit
from atoll.devices.compilers.compiler_process import CompilerLimits
from atoll.devices.compilers.compiler_server import CompilerCrashedError, CompilerProcess, Output

Links = tuple[CompilerLink[Begun], CompilerLink[Begun]]


@pytest.fixture
def links() -> Iterator[Links]:
    one, other = socket.socketpair()
    yield CompilerLink(one, Begun), CompilerLink(other, Begun)
    one.close()
    other.close()


def test_a_process_that_sends_nothing_in_time_is_given_up(links: Links) -> None:
    limit, began = TimeLimit(0.3), time.monotonic()
    with pytest.raises(TimeoutError):
        links[0].receive(limit)
    assert time.monotonic() - began >= 0.3
    assert limit.left <= 0


def test_all_messages_of_a_compilation_share_its_time(links: Links) -> None:
    limit = TimeLimit(0.5)

    def send() -> None:
        for _ in range(40):
            time.sleep(0.05)
            links[1].send(Begun("f", "line"))

    def receive() -> None:
        for _ in range(40):
            links[0].receive(limit)

    sending = threading.Thread(target=send)
    sending.start()
    with pytest.raises(TimeoutError):
        receive()
    sending.join()


def test_the_time_for_which_the_worker_is_stopped_hardly_counts(links: Links, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = 0.0
    now = time.monotonic

    class Clock:
        @staticmethod
        def monotonic() -> float:
            nonlocal stopped
            stopped += 350.0  # between any two readings
            return now() + stopped

    limit = TimeLimit(600.0)
    monkeypatch.setattr(compiler_messages, "time", Clock)
    for _ in range(10):
        links[1].send(Begun("f", "line"))
        links[0].receive(limit)
    assert limit.left == 600.0 - 20 * TimeLimit.STEP_SECONDS


def test_a_process_that_a_signal_without_a_name_has_ended_fails_its_compilation_only(links: Links) -> None:
    readable, writable = os.pipe()
    limits = CompilerLimits(1 << 30, 600, 600)
    process = CompilerProcess(1, links[0], Output(readable), limits, lambda number: None)
    links[1].close()
    process.ended(Ended(1, -40, 0))
    with pytest.raises(CompilerCrashedError) as caught:
        process.compile(CompileProgram(b"", b"", 1, 1, "cpu"), None, "f")
    assert caught.value.status.message == "f cannot be compiled: the compiler process ended by signal 40"
    for descriptor in (readable, writable):
        os.close(descriptor)
