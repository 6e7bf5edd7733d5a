"""Tests of when the threads of CPU devices are batch threads."""

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace

import pytest

from atoll.devices.xla import batch_threads
from atoll.devices.xla.batch_threads import BatchThreads, ClassChoice, CpuTimes, ThreadClass, start_batch_threads

LINUX_ONLY = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="batch threads are Linux's")
CPUS = 4
HOST, SIBLING = 1, 2
BATCH, NORMAL = ThreadClass.BATCH, ThreadClass.NORMAL


class Machine:
    """A choice of the thread class, with the CPU times that it observes once per second."""

    def __init__(self) -> None:
        self.choice = ClassChoice(CPUS)
        self._now = 0.0
        self._machine = 0.0
        self._cluster = {HOST: 0.0, SIBLING: 0.0}
        self._observe()

    def passes(self, others: float, host: float, sibling: float = 0.0, seconds: int = 1) -> ThreadClass:
        """Let seconds pass in which other processes, the host, and its sibling in the cluster each use this
        many CPUs.
        """
        for _ in range(seconds):
            self._now += 1
            self._machine += others + host + sibling
            self._cluster[HOST] += host
            if SIBLING in self._cluster:
                self._cluster[SIBLING] += sibling
            self._observe()
        return self.choice.state

    def lose_sibling(self) -> None:
        del self._cluster[SIBLING]

    def _observe(self) -> None:
        self.choice.observe(self._now, CpuTimes(self._machine, dict(self._cluster), HOST))


def test_threads_are_normal_while_other_processes_keep_all_cpus_busy():
    machine = Machine()
    assert machine.passes(others=0, host=1) is BATCH
    assert machine.passes(others=3.6, host=0.4) is NORMAL
    assert machine.passes(others=2, host=2, seconds=4) is NORMAL  # the host gets its share
    assert machine.passes(others=0.5, host=3) is BATCH


def test_threads_are_batch_threads_while_a_cpu_is_free():
    assert Machine().passes(others=3.1, host=0.2, seconds=100) is BATCH


def test_other_processes_of_the_cluster_are_none_that_keep_cpus_busy():
    assert Machine().passes(others=0.8, host=0.8, sibling=2.4, seconds=100) is BATCH


def test_the_end_of_a_process_of_the_cluster_is_no_load():
    machine = Machine()
    machine.passes(others=0, host=2, sibling=1.7, seconds=100)
    machine.lose_sibling()
    assert machine.passes(others=0.3, host=3.5) is BATCH


def test_a_host_without_work_changes_nothing():
    assert Machine().passes(others=4, host=0.001, seconds=100) is BATCH


def test_batch_threads_are_tried_again_ever_later():
    machine, trials = Machine(), []
    for second in range(200):
        before = machine.choice.state
        # Batch threads get hardly any CPU time, and normal threads get their share.
        others = 3.6 if before is BATCH else 2
        if machine.passes(others=others, host=CPUS - others) is BATCH and before is NORMAL:
            trials.append(second)
    assert [later - earlier for earlier, later in pairwise(trials)] == [17, 33, 65, 65]


def test_after_a_long_time_as_batch_threads_the_first_trial_is_soon_again():
    machine = Machine()
    for _ in range(200):
        machine.passes(others=3.6, host=0.4)
    machine.passes(others=0, host=1, seconds=100)
    assert machine.passes(others=3.6, host=0.4) is NORMAL
    assert machine.passes(others=2, host=2, seconds=7) is NORMAL
    assert machine.passes(others=2, host=2) is BATCH


def policy_of_a_new_thread() -> int:
    with thread() as number:
        return os.sched_getscheduler(number)


@contextmanager
def thread() -> Iterator[int]:
    """Start a thread that ends with the context, and yield its number."""
    end = threading.Event()
    waiting = threading.Thread(target=end.wait)
    waiting.start()
    try:
        assert waiting.native_id is not None
        yield waiting.native_id
    finally:
        end.set()
        waiting.join()


def set_platform(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_threads, "jax", SimpleNamespace(config=SimpleNamespace(jax_platforms=platform)))


@LINUX_ONLY
def test_threads_of_cpu_devices_are_batch_threads_and_no_others(monkeypatch: pytest.MonkeyPatch):
    set_platform("cpu", monkeypatch)
    before = os.sched_getscheduler(0)
    with start_batch_threads():
        assert policy_of_a_new_thread() == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == policy_of_a_new_thread() == before


@LINUX_ONLY
def test_where_devices_are_no_threads_nothing_changes(monkeypatch: pytest.MonkeyPatch):
    set_platform("cuda", monkeypatch)
    before = os.sched_getscheduler(0)
    with start_batch_threads():
        assert policy_of_a_new_thread() == before


@LINUX_ONLY
def test_the_class_of_batch_threads_changes_and_that_of_others_does_not(monkeypatch: pytest.MonkeyPatch):
    set_platform("cpu", monkeypatch)
    threads = BatchThreads()
    with thread() as other:
        with start_batch_threads():
            first = thread()
            number = first.__enter__()
        try:
            for chosen, policy in ((NORMAL, os.SCHED_OTHER), (BATCH, os.SCHED_BATCH), (NORMAL, os.SCHED_OTHER)):
                threads.apply(chosen)
                assert os.sched_getscheduler(number) == policy
                assert os.sched_getscheduler(other) == os.SCHED_OTHER
        finally:
            first.__exit__(None, None, None)
        threads.apply(BATCH)  # one of the processes has ended


@LINUX_ONLY
def test_a_thread_that_starts_batch_threads_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    set_platform("cpu", monkeypatch)
    threads, before = BatchThreads(), os.sched_getscheduler(0)
    with start_batch_threads():
        threads.apply(NORMAL)
        assert policy_of_a_new_thread() == os.SCHED_BATCH
    for chosen in (NORMAL, BATCH):
        threads.apply(chosen)
        assert os.sched_getscheduler(0) == before


@LINUX_ONLY
def test_without_descriptors_the_threads_stay_as_they_are(monkeypatch: pytest.MonkeyPatch):
    set_platform("cpu", monkeypatch)

    def cpu_times() -> CpuTimes:
        raise OSError(errno.EMFILE, "Too many open files")

    threads = BatchThreads()
    monkeypatch.setattr(batch_threads, "cpu_times", cpu_times)
    with start_batch_threads():
        first = thread()
        number = first.__enter__()
    try:
        threads.decide()
        assert os.sched_getscheduler(number) == os.SCHED_BATCH
    finally:
        first.__exit__(None, None, None)


@LINUX_ONLY
def test_cpu_times_grow_with_the_work_of_this_process():
    before = batch_threads.cpu_times()
    sum(number * number for number in range(1_000_000))
    after = batch_threads.cpu_times()
    assert after.of_host > before.of_host
    assert after.host == os.getpid()
    assert after.machine >= before.machine
