"""How the system schedules the threads of XLA's CPU devices.

These threads are the devices, several for each, and one computation wakes most of them, for a few microseconds each. By
default a thread that wakes preempts one that runs: the next device, the thread that enqueues, the controller. As batch
threads (SCHED_BATCH) they wait until a CPU is free, and there are fewer switches.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def batch_threads() -> Iterator[None]:
    """Threads that start within are batch threads, where threads are the devices and Linux runs them."""
    if jax.config.jax_platforms != "cpu" or not hasattr(os, "SCHED_BATCH"):
        yield
        return
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # of this thread: those that it starts inherit it
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameters)
