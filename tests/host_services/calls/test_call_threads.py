"""Tests of calls into clients' Python: all of them run in the client, and hosts limit them per session."""

from __future__ import annotations

import threading
import time

import pytest

from atoll.host_services.calls.call_threads import SessionThreads, Threads
from tests.waiting import until

SECONDS = 10.0


def test_calls_that_wait_for_each_other_all_run():
    threads = Threads(idle=0.05)
    together = threading.Barrier(20)
    done = threading.Semaphore(0)

    def call() -> None:
        together.wait(SECONDS)
        done.release()

    for _ in range(20):
        threads.run(call)
    for _ in range(20):
        assert done.acquire(timeout=SECONDS)


def test_a_thread_that_has_ended_its_call_takes_the_next():
    threads = Threads(idle=0.5)
    used: list[str] = []
    done = threading.Event()
    for _ in range(3):
        done.clear()
        threads.run(lambda: (used.append(threading.current_thread().name), done.set()))
        assert done.wait(SECONDS)
        while not threads.idle:
            pass
    assert len(set(used)) == 1


def refuse_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each start of a thread fail, as in an exit handler."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)


def test_a_prepared_thread_takes_calls_after_any_time_when_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = Threads(idle=0.01)
    threads.prepare()
    threads.prepare()
    until(lambda: threads.idle == 1)
    refuse_threads(monkeypatch)
    go_on, done = threading.Event(), threading.Semaphore(0)
    for _ in range(2):
        time.sleep(0.05)
        threads.run(done.release)
        assert done.acquire(timeout=SECONDS)
        until(lambda: threads.idle == 1)
    threads.run(lambda: done.release() if go_on.wait(SECONDS) else None)
    with pytest.raises(RuntimeError, match="shutdown"):
        threads.run(done.release)
    go_on.set()
    assert done.acquire(timeout=SECONDS)
    until(lambda: threads.idle == 1)
    threads.release()


def test_calls_that_may_wait_run_in_order_on_the_prepared_thread_when_no_thread_can_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = Threads(idle=0.01)
    threads.prepare()
    refuse_threads(monkeypatch)
    go_on, done = threading.Event(), threading.Semaphore(0)
    order: list[int] = []
    threads.run_or_wait(lambda: done.release() if go_on.wait(SECONDS) else None)
    for number in range(3):
        threads.run_or_wait(lambda number=number: (order.append(number), done.release()))  # type: ignore[misc]
    with pytest.raises(RuntimeError, match="shutdown"):
        threads.run(done.release)
    go_on.set()
    for _ in range(4):
        assert done.acquire(timeout=SECONDS)
    assert order == [0, 1, 2]
    until(lambda: threads.idle == 1)
    threads.release()
    until(lambda: threads.idle == 0)
    with pytest.raises(RuntimeError, match="shutdown"):
        threads.run_or_wait(done.release)


def test_a_session_that_waits_holds_up_its_own_work_beyond_the_bound_and_no_other_sessions() -> None:
    threads = SessionThreads("test", limit=2)
    go_on, done = threading.Event(), threading.Semaphore(0)
    began: list[int] = []

    def wait(number: int) -> None:
        began.append(number)
        done.release()
        go_on.wait(SECONDS)

    for number in range(4):
        threads.submit(1, lambda number=number: wait(number))  # type: ignore[misc]
    threads.submit(2, lambda: wait(9))
    for _ in range(3):
        assert done.acquire(timeout=SECONDS)
    assert sorted(began) == [0, 1, 9]
    go_on.set()
    for _ in range(2):
        assert done.acquire(timeout=SECONDS)
    assert sorted(began[3:]) == [2, 3]


def test_nothing_is_kept_of_a_session_whose_work_is_done() -> None:
    threads = SessionThreads("test", limit=1)
    done = threading.Semaphore(0)
    for _ in range(3):
        threads.submit(1, done.release)
    for _ in range(3):
        assert done.acquire(timeout=SECONDS)
    for thread in threading.enumerate():
        if thread.name == "test":
            thread.join(SECONDS)
    assert not threads.sessions


def test_work_that_finds_no_thread_does_not_count_for_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = SessionThreads("test", limit=1)
    with monkeypatch.context() as patched:
        refuse_threads(patched)
        with pytest.raises(RuntimeError, match="can't create new thread"):
            threads.submit(1, lambda: None)
    assert threads.sessions == set()
    done = threading.Event()
    threads.submit(1, done.set)
    assert done.wait(SECONDS)
