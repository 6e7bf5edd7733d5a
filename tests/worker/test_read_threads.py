"""A session whose client does not read occupies only its share of the threads that read results."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from atoll.worker.read_threads import ReadThreads

SECONDS = 30.0


def test_a_session_that_waits_does_not_delay_others() -> None:
    threads, ends = ReadThreads(ThreadPoolExecutor(4), limit=2), threading.Event()
    blocked = [threads.submit(1, ends.wait, SECONDS) for _ in range(8)]
    assert [threads.submit(2, lambda: 7).result(SECONDS) for _ in range(4)] == [7] * 4
    assert not any(each.done() for each in blocked)
    assert threads.statistics()[1:] == (2, 6)
    ends.set()
    assert all(each.result(SECONDS) for each in blocked)
    threads.shutdown()


def test_an_error_is_that_of_its_future_and_further_work_runs() -> None:
    threads = ReadThreads(ThreadPoolExecutor(1), limit=1)
    failed, later = threads.submit(1, lambda: 1 // 0), threads.of(1).submit(lambda: 7)
    with pytest.raises(ZeroDivisionError):
        failed.result(SECONDS)
    assert later.result(SECONDS) == 7
    threads.shutdown()


def test_nothing_is_kept_of_sessions_without_work() -> None:
    threads = ReadThreads(ThreadPoolExecutor(2), limit=1)
    for future in [threads.submit(session, lambda: None) for session in (1, 1, 2, 2)]:
        future.result(SECONDS)
    threads.shutdown()
    assert threads.statistics() == (0, 0, 0)


def test_work_that_cannot_wait_is_refused_while_a_session_occupies_its_threads() -> None:
    threads, ends = ReadThreads(ThreadPoolExecutor(4), limit=2), threading.Event()
    blocked = [threads.submit(1, ends.wait, SECONDS) for _ in range(2)]
    done = threading.Event()
    assert not threads.try_submit(1, done.set)
    assert threads.try_submit(2, done.set)
    assert done.wait(SECONDS)
    ends.set()
    assert all(each.result(SECONDS) for each in blocked)
    threads.shutdown()


def test_a_bug_in_work_that_has_no_future_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, found = ReadThreads(ThreadPoolExecutor(1)), queue.SimpleQueue[BaseException | None]()
    monkeypatch.setattr(threading, "excepthook", lambda arguments: found.put(arguments.exc_value))

    def fail() -> None:
        raise KeyError("nobody knows it")

    assert threads.try_submit(1, fail)
    assert isinstance(found.get(timeout=SECONDS), KeyError)
    threads.shutdown()
    assert threads.statistics() == (0, 0, 0)
