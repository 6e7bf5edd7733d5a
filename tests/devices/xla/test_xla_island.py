"""The network on which an island of GPUs computes, and the scheduling of the threads of CPU devices."""

from __future__ import annotations

import os
import sys
import threading
from types import SimpleNamespace

import pytest

from atoll.devices.xla import xla_island

LINUX_ONLY = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has batch threads")


def test_an_interface_is_known_by_its_address() -> None:
    assert xla_island.interface_of("127.0.0.1") == "lo"
    assert xla_island.interface_of("192.0.2.77") == ""  # of documentation: no machine has it
    assert xla_island.interface_of("no such name") == ""


@pytest.mark.parametrize(("said", "used"), [("", "=eth7"), ("eth1", "eth1")])
def test_nccl_uses_the_network_of_the_meeting_unless_the_user_has_chosen_one(
    monkeypatch: pytest.MonkeyPatch, said: str, used: str
) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    if said:
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", said)
    monkeypatch.setattr(xla_island, "interface_of", lambda hostname: "eth7")
    xla_island.use_network("127.0.0.1")
    assert os.environ.get("NCCL_SOCKET_IFNAME", "") == said
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", said) if said else monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    xla_island.use_network("10.0.0.3")
    assert os.environ["NCCL_SOCKET_IFNAME"] == used


def policy_of_a_new_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
    thread.start()
    thread.join()
    return found[0]


def set_platform(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla_island, "jax", SimpleNamespace(config=SimpleNamespace(jax_platforms=platform)))


@LINUX_ONLY
def test_threads_of_cpu_devices_are_batch_threads_and_no_others(monkeypatch: pytest.MonkeyPatch):
    set_platform("cpu", monkeypatch)
    before = os.sched_getscheduler(0)
    with xla_island.sched_batch_threads():
        assert policy_of_a_new_thread() == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == policy_of_a_new_thread() == before


@LINUX_ONLY
def test_where_devices_are_no_threads_nothing_changes(monkeypatch: pytest.MonkeyPatch):
    set_platform("cuda", monkeypatch)
    before = os.sched_getscheduler(0)
    with xla_island.sched_batch_threads():
        assert policy_of_a_new_thread() == before
