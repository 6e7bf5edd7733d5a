"""Tests of the event for which the script's thread waits."""

from __future__ import annotations

import random
import signal
import threading
import time

import pytest

from atoll.client.latch import Latch


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_during_a_wait_harms_neither_the_thread_that_sets_nor_later_waits() -> None:
    failed: list[BaseException] = []

    def set_all(latches: list[Latch], gate: threading.Lock) -> None:
        try:
            gate.acquire()
            for latch in latches:
                latch.set()
        except RuntimeError as error:
            failed.append(error)

    drawn = random.Random(1)
    interrupted = 0
    for _ in range(300):
        latches, gate = [Latch() for _ in range(20)], threading.Lock()
        gate.acquire()
        thread = threading.Thread(target=set_all, args=(latches, gate))
        thread.start()
        try:
            signal.setitimer(signal.ITIMER_REAL, drawn.uniform(20e-6, 400e-6))
            gate.release()
            for latch in latches:
                latch.wait()
            signal.setitimer(signal.ITIMER_REAL, 0)
            time.sleep(0)  # where a signal that has arrived is handled
        except KeyboardInterrupt:
            interrupted += 1
            if gate.locked():
                gate.release()
        thread.join()
        assert not failed
        assert all(latch.wait(10) for latch in latches)
    assert interrupted


def test_a_wait_ends_with_its_timeout_and_all_waits_end_once_it_is_set() -> None:
    latch = Latch()
    assert not latch.wait(0.01)
    assert not latch.is_set()
    waited: list[bool] = []
    threads = [threading.Thread(target=lambda: waited.append(latch.wait())) for _ in range(5)]
    for thread in threads:
        thread.start()
    time.sleep(0.01)
    latch.set()
    latch.set()
    for thread in threads:
        thread.join()
    assert waited == [True] * 5
    assert latch.is_set()
    assert latch.wait()
    assert latch.wait(0)
