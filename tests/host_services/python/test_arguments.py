"""Tests of the arguments of a call in a Python process: each is passed on when it arrives, and failures leave
nothing. Calls behind a failed one wait until that has ended on all hosts.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

import numpy as np
import pytest

from atoll.errors import Code, Status, StatusError
from atoll.host_services.python.program import python_runner
from atoll.host_services.python.program.python_runner import Arguments, Contents, Runner
from atoll.protocol.messages import python_messages as m

FIRST, SECOND = m.Argument(0, "float32", (2,), (10,)), m.Argument(1, "float32", (2,), (11, 12))
BYTES = np.arange(2, dtype=np.float32).view(np.uint8)


def test_an_argument_is_taken_before_the_next_has_come() -> None:
    contents = Contents()
    contents.put(10, BYTES)
    (shard,) = contents.take(1, FIRST)
    assert shard.tolist() == [0.0, 1.0]


def test_one_that_is_yet_to_come_is_awaited() -> None:
    contents = Contents()
    contents.put(11, BYTES)
    found: list[int] = []
    waiting = threading.Thread(target=lambda: found.append(len(contents.take(1, SECOND))))
    waiting.start()
    contents.put(12, BYTES)
    waiting.join(10)
    assert found == [2]


def test_one_that_cannot_be_sent_is_the_error_of_its_call_alone() -> None:
    contents = Contents()
    contents.put(10, BYTES)
    contents.fail(1, Status(int(Code.DATA_LOSS), "it is gone"))
    with pytest.raises(StatusError, match="it is gone"):
        contents.take(1, FIRST)
    assert len(contents.take(2, FIRST)) == 1


def test_nothing_is_kept_of_what_a_call_has_not_taken() -> None:
    contents = Contents()
    contents.put(10, BYTES)
    contents.put(11, BYTES)
    contents.end(1, SECOND.feeds)
    contents.put(12, BYTES)  # in transit when the call ended
    assert list(contents._arrived) == [10]


def test_shards_that_are_asked_for_are_taken_as_they_come() -> None:
    contents, wanted = Contents(), []
    call = m.Call(1, "f", 0, (FIRST, SECOND), (), asks=True)
    arguments = Arguments(call, contents, wanted.append)
    arguments.ask(SECOND, 1)
    assert wanted == [m.Wanted(1, 12)]
    contents.put(12, BYTES)
    assert arguments.take(SECOND, 1).tolist() == [0.0, 1.0]


def test_of_a_call_that_has_asked_only_what_is_on_its_way_is_unwanted() -> None:
    contents = Contents()
    arguments = Arguments(m.Call(1, "f", 0, (FIRST, SECOND), (), asks=True), contents, lambda wanted: None)
    arguments.ask(SECOND, 0)
    arguments.end()
    assert contents._unwanted == {11}


def test_a_stream_that_has_nothing_to_do_says_so_and_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_runner, "_IDLE_SECONDS", 0.01)
    idle: queue.SimpleQueue[str] = queue.SimpleQueue()
    stream = python_runner.Stream(lambda: idle.put("idle"))
    for number in range(2):
        stream.submit(lambda number=number: idle.put(f"call {number}"))  # type: ignore[misc]
        assert [idle.get(timeout=10), idle.get(timeout=10)] == [f"call {number}", "idle"]
        assert not stream.is_busy


class Link:
    """Link of a process, whose messages the test takes."""

    def __init__(self) -> None:
        self.sent: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def send(self, message: Any) -> None:
        self.sent.put(message)

    def send_array(self, feed: int, array: Any) -> None:
        raise AssertionError("the functions return nothing")


class Functions:
    """Functions of a process: one raises, and the others return nothing."""

    def load(self, source: Any, is_again: bool) -> Any:
        def call(call: m.Call, arguments: Arguments) -> list[Any]:
            if source.name == "raises":
                raise ValueError("bad")
            return []

        return call

    def release_memory(self) -> None:
        pass


def test_calls_of_a_stream_wait_behind_one_that_failed_before_it_reached_the_process() -> None:
    link: Any = Link()
    runner = Runner(link, Functions())
    runner._handle(m.Load("f", m.PythonFunction("f", b"")))
    assert isinstance(link.sent.get(timeout=10), m.Loaded)
    for message in (m.Hold(1, 0), m.Call(2, "f", 0, (), (), holds=True), m.Call(3, "f", 1, (), (), holds=True)):
        runner._handle(message)
    assert link.sent.get(timeout=10).number == 3, "another stream"
    assert link.sent.empty()
    runner._handle(m.Resume(1))
    assert link.sent.get(timeout=10).number == 2
    assert runner._held == {}


@pytest.mark.parametrize("holds", [False, True])
def test_calls_of_a_stream_wait_behind_one_that_failed_until_it_has_ended_on_all_hosts(holds: bool) -> None:
    """The other hosts, which may still wait in the failed call, would compute with these calls."""
    link: Any = Link()
    runner = Runner(link, Functions())
    for name in ("raises", "returns"):
        runner._handle(m.Load(name, m.PythonFunction(name, b"")))
        assert isinstance(link.sent.get(timeout=10), m.Loaded)
    for number, stream, name in ((1, 0, "raises"), (2, 0, "returns")):
        runner._handle(m.Call(number, name, stream, (), (), holds=holds))
    assert link.sent.get(timeout=10).number == 1
    if holds:
        runner._handle(m.Call(3, "returns", 1, (), (), holds=holds))
        assert link.sent.get(timeout=10).number == 3, "another stream"
        assert link.sent.empty()
        runner._handle(m.Resume(1))
    assert link.sent.get(timeout=10).number == 2
    assert runner._held == {}
