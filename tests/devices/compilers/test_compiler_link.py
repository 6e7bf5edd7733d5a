"""Tests of the time limit of the connection to a compiler process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from atoll.devices.compilers import compiler_messages
from atoll.devices.compilers.compiler_messages import Begun, CompilerLink, TimeLimit

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
