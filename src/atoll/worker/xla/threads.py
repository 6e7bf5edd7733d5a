"""How the system schedules the threads of XLA's CPU devices.

They are the devices there, several for each, and one computation wakes most of them, for a few microseconds each. By
default whoever has been woken takes the processor from whoever runs: from the next device, from the thread that
enqueues, from the controller. As batch threads they wait until a processor is free, and there are fewer switches.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def threads_that_wait_their_turn() -> Iterator[None]:
    """Threads that start within preempt nobody when they are woken, where they are the devices and Linux runs them."""
    if jax.config.jax_platforms != "cpu" or not hasattr(os, "SCHED_BATCH"):
        yield
        return
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # of this thread: those that it starts inherit it
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameters)
