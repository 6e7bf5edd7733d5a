"""How the threads of CPU devices are scheduled."""

from __future__ import annotations

import os
import sys
import threading
from types import SimpleNamespace

import pytest

from atoll.devices.xla import batch_threads

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="batch threads are Linux's")


def policy_of_a_new_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
    thread.start()
    thread.join()
    return found[0]


def on(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_threads, "jax", SimpleNamespace(config=SimpleNamespace(jax_platforms=platform)))


def test_threads_of_cpu_devices_are_batch_threads_and_no_others(monkeypatch: pytest.MonkeyPatch):
    on("cpu", monkeypatch)
    before = os.sched_getscheduler(0)
    with batch_threads.batch_threads():
        assert policy_of_a_new_thread() == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == policy_of_a_new_thread() == before


def test_where_devices_are_no_threads_nothing_changes(monkeypatch: pytest.MonkeyPatch):
    on("cuda", monkeypatch)
    before = os.sched_getscheduler(0)
    with batch_threads.batch_threads():
        assert policy_of_a_new_thread() == before
