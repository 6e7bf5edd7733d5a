"""Batch threads: the threads of CPU devices, which Linux schedules so that they preempt no other thread.

XLA's CPU devices consist of several threads each. A computation wakes most of them for a few microseconds. By default,
each thread that wakes preempts a running one: another device, the executor's thread, the controller. Threads with the
policy `SCHED_BATCH` wait until a CPU is free, which causes fewer context switches.

If other processes keep all CPUs busy, a CPU is free only when one of their time slices ends, which takes milliseconds.
A collective consists of several such waits. So in this case, the threads are normal ones (`SCHED_OTHER`). `ClassChoice`
decides, once per second.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import jax

from atoll.cluster.state_machine import StateMachine
from atoll.missing import read_if_exists

_log = logging.getLogger(__name__)

PERIOD_SECONDS = 1.0  # between two decisions
FULL_SHARE = 0.9  # of the machine's CPU time that is used, from which on no CPU is free
# Shares of the CPU time that processes outside the cluster use. From the first on, if the machine is full, the
# threads become normal ones. Below the second, they become batch threads again: the processes may use as much when they
# share the CPUs with the host.
BUSY_SHARE = 0.75
FREE_SHARE = 0.3
MIN_CPUS = 0.01  # that the host uses; a host that uses less has nothing to decide
# If other processes use a share between the two, the threads are batch threads again after this time, for a trial. The
# time doubles with each trial that fails.
FIRST_TRIAL_SECONDS = 8.0
LAST_TRIAL_SECONDS = 64.0

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_NOT_BUSY = (3, 4)  # columns of /proc/stat: idle, and waiting for input and output
_COLUMNS = 8  # the later ones are parts of the first two

# Threads that start batch threads now. They have the policy of batch threads themselves meanwhile.
_starting: set[int] = set()


class ThreadClass(enum.Enum):
    """How Linux schedules the threads of devices."""

    BATCH = enum.auto()
    NORMAL = enum.auto()


class CpuTimes(NamedTuple):
    """Seconds of CPU time since some time in the past."""

    machine: float
    cluster: Mapping[int, float]  # of the processes of the cluster on this machine, by process; includes the host
    host: int  # this process

    @property
    def of_host(self) -> float:
        return self.cluster[self.host]


class ClassChoice(StateMachine[ThreadClass]):
    """Decides how the threads of devices are scheduled. Pure.

    Args:
      cpus: number of CPUs of the machine.
    """

    transitions: ClassVar[Mapping[ThreadClass, frozenset[ThreadClass]]] = MappingProxyType(
        {
            ThreadClass.BATCH: frozenset({ThreadClass.NORMAL}),
            ThreadClass.NORMAL: frozenset({ThreadClass.BATCH}),
        }
    )

    def __init__(self, cpus: int) -> None:
        self.state = ThreadClass.BATCH
        self._cpus = cpus
        self._seen: tuple[float, CpuTimes] | None = None
        self._trial_seconds = FIRST_TRIAL_SECONDS
        self._since = -LAST_TRIAL_SECONDS  # when the state was entered

    def observe(self, now: float, times: CpuTimes) -> ThreadClass:
        """Decide again, from the CPU times at the time `now`, in seconds. Return how threads are to be scheduled."""
        seen, self._seen = self._seen, (now, times)
        if seen is None or now <= seen[0]:
            return self.state
        before, past = seen
        available = self._cpus * (now - before)
        used = (times.machine - past.machine) / available
        spent = (seconds - past.cluster[each] for each, seconds in times.cluster.items() if each in past.cluster)
        others = used - sum(spent) / available
        works = times.of_host - past.of_host >= MIN_CPUS * (now - before)
        in_state = now - self._since
        if self.state is ThreadClass.BATCH and works and used >= FULL_SHARE and others >= BUSY_SHARE:
            has_lasted = in_state > LAST_TRIAL_SECONDS
            self._trial_seconds = (
                FIRST_TRIAL_SECONDS if has_lasted else min(2 * self._trial_seconds, LAST_TRIAL_SECONDS)
            )
            self._change(now, ThreadClass.NORMAL)
        elif self.state is ThreadClass.NORMAL and (others < FREE_SHARE or in_state >= self._trial_seconds):
            self._change(now, ThreadClass.BATCH)
        return self.state

    def _change(self, now: float, state: ThreadClass) -> None:
        self.enter(state)
        self._since = now


class BatchThreads:
    """The batch threads of this process, and the thread that changes their scheduling policy."""

    def __init__(self) -> None:
        self._choice = ClassChoice(os.cpu_count() or 1)
        self._threads: set[int] = set()  # those that are or were batch threads, and have not ended
        self._applied = ThreadClass.BATCH  # the class of all batch threads, except for some that have just started

    def start(self) -> None:
        """Decide once per second from now on, if Linux has what that needs."""
        if has_batch_threads() and Path("/proc/stat").exists():
            threading.Thread(target=self._work, name="atoll-batch-threads", daemon=True).start()

    def _work(self) -> None:
        while True:
            time.sleep(PERIOD_SECONDS)
            self.decide()

    def decide(self) -> None:
        """Choose the class of the threads again. Change nothing if the process has no descriptor left."""
        try:
            chosen = self._choice.observe(time.monotonic(), cpu_times())
            if chosen is ThreadClass.NORMAL or self._applied is ThreadClass.NORMAL:  # threads start as batch threads
                self.apply(chosen)
        except OSError as error:
            _log.debug("cannot decide how threads of devices are scheduled: %s", error)

    def apply(self, chosen: ThreadClass) -> None:
        """Give all batch threads this class. Threads that start later are batch threads until the next call."""
        is_batch, found = chosen is ThreadClass.BATCH, set()
        for name in os.listdir("/proc/self/task"):
            number = int(name)
            if number in _starting:
                continue
            with contextlib.suppress(ProcessLookupError):  # the thread has ended meanwhile
                policy = os.sched_getscheduler(number)
                if policy != os.SCHED_BATCH and number not in self._threads:
                    continue
                found.add(number)
                if is_batch != (policy == os.SCHED_BATCH):
                    os.sched_setscheduler(number, os.SCHED_BATCH if is_batch else os.SCHED_OTHER, os.sched_param(0))
        self._threads, self._applied = found, chosen


def has_batch_threads() -> bool:
    """Return whether this process has CPU devices, on Linux."""
    return jax.config.jax_platforms == "cpu" and hasattr(os, "SCHED_BATCH")


@contextlib.contextmanager
def start_batch_threads() -> Iterator[None]:
    """Make threads that start in this context batch threads, for CPU devices on Linux."""
    if not has_batch_threads():
        yield
        return
    number, policy, parameters = threading.get_native_id(), os.sched_getscheduler(0), os.sched_getparam(0)
    _starting.add(number)
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # new threads inherit this thread's policy
        yield
    finally:
        os.sched_setscheduler(0, policy, parameters)
        _starting.discard(number)


def cpu_times() -> CpuTimes:
    """Return the CPU times until now. Raise OSError if Linux does not tell them.

    The processes of the cluster are those with the same parent as this one, the engine or the agent of the host.
    """
    with open("/proc/stat", "rb") as file:
        columns = file.readline().split()[1 : _COLUMNS + 1]
    machine = sum(int(value) for column, value in enumerate(columns) if column not in _NOT_BUSY)
    parent, cluster = os.getppid(), {os.getpid(): time.process_time()}
    # Some kernels do not list children, and the parent may have ended.
    children = read_if_exists(f"/proc/{parent}/task/{parent}/children") or b""
    for number in map(int, children.split()):
        content = None if number in cluster else read_if_exists(f"/proc/{number}/stat")
        if content is not None:  # otherwise the process has ended meanwhile
            cluster[number] = _process_time(content)
    return CpuTimes(machine / _TICKS_PER_SECOND, cluster, os.getpid())


def _process_time(stat: bytes) -> float:
    """Return a process's CPU time in seconds, from the contents of its file /proc/PID/stat."""
    fields = stat.rsplit(b")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND
