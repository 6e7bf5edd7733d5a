"""Messages are handled in order, by the submitting thread if they are short and the executor's thread is idle."""

from __future__ import annotations

import queue
from collections.abc import Callable

import pytest

from atoll.worker.submissions import Submissions


class Executor:
    """Messages are texts, and those that begin with "short" are short. The test calls `next` in place of a thread."""

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.handled: list[str] = []
        self.reports = 0
        self.meanwhile: Callable[[], None] = lambda: None  # happens while the next message is handled
        self._submissions = Submissions(
            self.messages, self._handle, lambda message: message.startswith("short"), self._on_handled
        )
        self.submit = self._submissions.add
        self.try_run = self._submissions.try_run

    def _handle(self, message: str) -> None:
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        self.handled.append(message)

    def _on_handled(self) -> None:
        self.reports += 1

    def next(self, is_submitted: bool = True) -> None:
        self._submissions.handle(self.messages.get_nowait(), is_submitted)


def test_a_short_message_is_handled_at_once_while_the_thread_is_idle():
    executor = Executor()
    executor.submit("short 1")
    executor.submit("short 2")
    assert executor.handled == ["short 1", "short 2"]
    assert executor.reports == 2
    assert executor.messages.empty()


def test_a_function_is_called_only_between_messages():
    executor, called = Executor(), []

    def try_it() -> None:
        called.append(executor.try_run(lambda: True))

    executor.submit("long")
    try_it()
    executor.meanwhile = try_it
    executor.next()
    try_it()
    assert called == [True, False, True]
    assert not executor.try_run(lambda: False)


def test_other_messages_are_queued():
    executor = Executor()
    executor.submit("long")
    assert executor.handled == []
    executor.next()
    assert executor.handled == ["long"]
    assert executor.reports == 0


def test_a_short_message_does_not_overtake_a_queued_one():
    executor = Executor()
    executor.submit("long")
    executor.submit("short 1")
    executor.next()
    executor.submit("short 2")
    assert executor.handled == ["long"]
    executor.next()
    executor.next()
    executor.submit("short 3")
    assert executor.handled == ["long", "short 1", "short 2", "short 3"]


def test_a_short_message_does_not_overtake_one_that_was_taken_from_the_queue():
    executor = Executor()
    executor.submit("long")
    executor.meanwhile = lambda: executor.submit("short")
    executor.next()
    assert executor.handled == ["long"]
    executor.next()
    assert executor.handled == ["long", "short"]


def test_short_messages_are_handled_at_once_after_a_message_has_failed():
    executor = Executor()

    def fail() -> None:
        raise OSError("gone")

    executor.submit("long")
    executor.meanwhile = fail
    with pytest.raises(OSError, match="gone"):
        executor.next()
    executor.submit("short")
    assert executor.handled == ["short"]


def test_a_short_message_waits_while_the_thread_handles_a_message_from_elsewhere():
    executor = Executor()
    executor.messages.put("outcome")
    executor.meanwhile = lambda: executor.submit("short 1")
    executor.next(is_submitted=False)
    assert executor.handled == ["outcome"]
    executor.next()
    executor.submit("short 2")
    assert executor.handled == ["outcome", "short 1", "short 2"]
