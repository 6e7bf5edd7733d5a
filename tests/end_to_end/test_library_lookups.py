"""Devices as libraries look them up.

Functions named without `test_` run in a child, on two islands of two hosts.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import jax
import pytest

from tests.end_to_end.remote_python import RemotePython, StartPython


@pytest.fixture(scope="module")
def python(start_python: StartPython) -> RemotePython:
    return start_python("2x2x1")


def hosts() -> Any:
    """Return the devices' hosts, as Orbax, MaxText and Tunix find them."""
    devices = jax.devices()
    return (
        [(each.virtual_task_index, each.slice_index) for each in devices],
        Counter(each.task_id for each in devices),
        [(int(re.search(r"[,(]logical_task=(\d+)", repr(each))[1]), each.slice_index) for each in devices],  # type: ignore[index]
    )


def test_each_host_has_a_key(python: RemotePython) -> None:
    keys, tasks, named = python.call(hosts)
    assert keys == named == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert tasks == {0: 1, 1: 1, 2: 1, 3: 1}


def limits() -> list[int]:
    return [device.memory_stats()["bytes_limit"] for device in jax.devices()]


def test_the_memory_of_every_device_has_a_limit(python: RemotePython) -> None:
    found = python.call(limits)
    assert len(found) == 4
    assert min(found) > 1 << 20
