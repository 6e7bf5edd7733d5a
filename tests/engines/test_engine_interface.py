"""Tests of the available engines and platforms, and of the errors of wrong names."""

from __future__ import annotations

import importlib.metadata
from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest

from atoll.cluster.settings import ClusterSettings
from atoll.devices.device_kinds import KNOWN_PLATFORMS, check_platform
from atoll.engines import local
from atoll.engines.engine_interface import ENGINES, HostStart, check_engine, make_engine
from atoll.engines.engine_options import EngineOptions
from atoll.engines.local import LocalEngine
from atoll.engines.start_engine import EngineProcess
from atoll.errors import ClusterError, SettingsError
from atoll.worker.worker_options import WorkerOptions


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_can_be_made_by_its_name(name: str, tmp_path: Path) -> None:
    engine = make_engine(EngineOptions(ClusterSettings(engine=name), str(tmp_path), listen="127.0.0.1:7000"))
    assert callable(engine.start_host)


def test_an_unknown_engine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SettingsError, match=r"there is no engine 'dask'; the known ones are: .*local"):
        check_engine("dask")


@pytest.mark.parametrize("name", [*KNOWN_PLATFORMS, "cuda,cpu"])
def test_known_platforms_pass(name: str) -> None:
    check_platform(name)


@pytest.mark.parametrize("name", ["foo", "", "atoll", "cpu,foo"])
def test_an_unknown_platform_is_refused_with_the_known_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PJRT_NAMES_AND_LIBRARY_PATHS", raising=False)
    with pytest.raises(SettingsError, match="known ones are: cpu, cuda, gpu, oneapi, rocm, tpu, null"):
        check_platform(name)


def test_any_platform_passes_where_a_plug_in_for_other_hardware_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = importlib.metadata.EntryPoint("libneuronxla", "libneuronxla", "jax_plugins")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry])
    check_platform("neuron")


@pytest.mark.parametrize(
    "settings", [ClusterSettings(engine="dask"), ClusterSettings(platform="foo"), ClusterSettings(islands="8")]
)
def test_settings_that_no_cluster_can_have_are_refused_before_a_process_is_started(
    settings: ClusterSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.Popen", None)
    with pytest.raises(SettingsError):
        EngineProcess(EngineOptions(settings, str(tmp_path)))


def test_each_start_of_an_island_meets_at_an_address_of_its_own(tmp_path: Path) -> None:
    engine = LocalEngine(EngineOptions(ClusterSettings("1x2x1"), str(tmp_path)))
    first, second = (engine.command(HostStart(0, 1, 1, 2, 1, incarnation)) for incarnation in (1, 2))
    assert "island-0-1.sock" in first[-1]
    assert "island-0-2.sock" in second[-1]


@pytest.mark.parametrize("platform", ["cpu", "null"])
def test_hosts_wait_for_the_controller_for_as_long_as_the_cluster_may_start(platform: str, tmp_path: Path) -> None:
    settings = ClusterSettings("1x1x1", platform=platform, wait_seconds=330.0)
    start = HostStart(0, 0, 0, 1, 1, 1, platform)
    given = msgspec.json.decode(LocalEngine(EngineOptions(settings, str(tmp_path))).command(start)[-1])
    assert given["connect_seconds"] == 330.0


@pytest.mark.parametrize(("client_directories", "has_one_client"), [((), False), (("/run/of-a-client",), True)])
def test_only_the_workers_of_an_embedded_cluster_know_that_they_have_one_client(
    client_directories: tuple[str, ...], has_one_client: bool, tmp_path: Path
) -> None:
    options = EngineOptions(ClusterSettings("1x1x1"), str(tmp_path), client_directories=client_directories)
    worker = msgspec.json.decode(LocalEngine(options).command(HostStart(0, 0, 0, 1, 1, 1))[-1], type=WorkerOptions)
    assert worker.has_one_client == has_one_client


@pytest.mark.parametrize(
    ("islands", "platform", "expected"),
    [
        ("40x1x1", "cpu", "the workers of 40 hosts need at least 2.4 GiB of memory, and this machine has 2.0 GiB"),
        ("1x1x20000", "cpu", "the workers of 1 host need at least 5.6 GiB of memory"),
        ("40x1x1", "null", ""),
        ("20x1x1", "cpu", ""),
    ],
)
def test_workers_that_do_not_fit_into_the_memory_are_refused_before_one_starts(
    islands: str, platform: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "machine_memory", lambda: 2 << 30)
    options = EngineOptions(ClusterSettings(islands, platform=platform), str(tmp_path))
    with pytest.raises(ClusterError, match=expected) if expected else nullcontext():
        LocalEngine(options)
