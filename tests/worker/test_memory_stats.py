"""The statistics of a device's memory always have a limit."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.cluster.processes.machine_memory import machine_memory
from atoll.devices.null.model import MODELS
from atoll.devices.null.null_backend import Collectives, NullBackend
from atoll.worker.query_answers import memory_stats
from tests.devices.null.test_sim_events import HandClock


@pytest.mark.parametrize(
    ("known", "reported", "limit"),
    [
        ({"bytes_in_use": 8}, {}, None),
        ({"bytes_in_use": 8}, {"bytes_in_use": 16, "bytes_limit": 64}, 64),
        ({"bytes_in_use": 8, "bytes_limit": 32}, {}, 32),
        ({"bytes_in_use": 8, "bytes_limit": 32}, {"bytes_in_use": 16, "bytes_limit": 64}, 32),
    ],
)
def test_the_limit_is_the_clusters_or_the_platforms_or_a_share_of_the_host(
    monkeypatch: pytest.MonkeyPatch, known: dict[str, int], reported: dict[str, int], limit: int | None
) -> None:
    backend: Any = NullBackend(0, 2, MODELS["instant"], HandClock(), Collectives())
    monkeypatch.setattr(NullBackend, "memory_stats", lambda self, ordinal: reported)
    stats = memory_stats(backend, 1, known)
    assert stats["bytes_limit"] == (limit or machine_memory() // len(backend.describe()))
    assert stats["bytes_in_use"] == reported.get("bytes_in_use", 8)
