"""Tests of the registry of device kinds, and of a worker's reports about its devices."""

from __future__ import annotations

from pkgutil import resolve_name

import pytest

from atoll.devices.device_kinds import KINDS, XLA, kind_of
from atoll.devices.null.model import MODELS
from atoll.devices.null.null_backend import Collectives, NullBackend
from atoll.errors import ClusterError
from atoll.protocol import messages as m
from atoll.worker.worker_main import introduction


class StoppedClock:
    def now(self) -> float:
        return 0.0

    def call_at(self, when: float, call: object) -> None:
        raise AssertionError("nothing runs")


def test_a_platform_that_is_not_registered_is_xlas():
    assert kind_of("cpu") is kind_of("tpu") is XLA
    assert kind_of("null") is KINDS["null"]


@pytest.mark.parametrize("kind", [XLA, *KINDS.values()], ids=["XLA", *KINDS])
def test_what_a_kind_names_is_there(kind):
    assert kind.backend or kind.process != "atoll.worker.worker_main"
    for name in (kind.backend, kind.check, f"{kind.process}:main"):
        if name:
            assert callable(resolve_name(name))


def test_the_null_kind_checks_its_model_before_anything_starts(monkeypatch):
    monkeypatch.setenv("ATOLL_NULL_MODEL", "abacus")
    with pytest.raises(ClusterError, match="abacus"):
        resolve_name(kind_of("null").check)()


def test_a_worker_says_which_host_it_is_and_how_many_runs_its_devices_take():
    clock = StoppedClock()
    backend = NullBackend(0, 2, MODELS["instant"], clock, Collectives())
    backend.max_in_flight = 5
    hello, ready = introduction(3, 7, backend, "unix:/data")
    assert hello.host == 7
    assert isinstance(ready, m.WorkerReady)
    assert (ready.island, ready.host, len(ready.devices), ready.max_in_flight) == (3, 7, 2, 5)
