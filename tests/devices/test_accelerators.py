"""Tests of how the workers of a machine share its accelerators. The tests only check which devices each worker sees."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from atoll.cluster.settings import ClusterSettings
from atoll.cluster.topology import RankSlot
from atoll.devices.accelerators import DeviceShares, devices, parts, visible
from atoll.engines import local
from atoll.engines.agent.agent_options import AgentOptions, options_of_workers
from atoll.engines.engine_interface import HostEnd, HostStart
from atoll.engines.engine_options import EngineOptions
from atoll.engines.local import LocalEngine
from atoll.engines.worker_command import worker_environment
from atoll.errors import ClusterError, SettingsError
from atoll.wire.address import Address

FOUR = {"cuda": ("0", "1", "2", "3")}


@pytest.fixture
def machine(tmp_path: Path) -> str:
    (tmp_path / "dev" / "dri").mkdir(parents=True)
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "dri/renderD128"):
        (tmp_path / "dev" / name).touch()
    return str(tmp_path)


@pytest.mark.parametrize(
    ("environment", "cuda"),
    [
        ({}, ("0", "1", "2")),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, ("2", "0")),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8932f937, GPU-1"}, ("GPU-8932f937", "GPU-1")),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,0"}, ("1",)),
        ({"CUDA_VISIBLE_DEVICES": ""}, None),
    ],
)
def test_the_devices_are_those_that_the_environment_shows(
    machine: str, environment: dict[str, str], cuda: tuple[str, ...] | None
) -> None:
    found = devices(environment, machine)
    assert (found.get("cuda"), found["rocm"]) == (cuda, ("0",))


def test_a_machine_without_accelerators_lists_none(tmp_path: Path) -> None:
    assert devices({"CUDA_VISIBLE_DEVICES": "0,1"}, str(tmp_path)) == {}


def test_workers_get_equal_parts_of_neighbours() -> None:
    assert parts(FOUR, 2) == [{"cuda": ("0", "1")}, {"cuda": ("2", "3")}]
    assert parts(FOUR, 3) == [{"cuda": ("0",)}, {"cuda": ("1",)}, {"cuda": ("2",)}]
    assert parts({}, 2) == [{}, {}]


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ({"tpu": ("0", "1", "2", "3")}, "one worker must have all 4 TPU chips of this machine"),
        ({"cuda": ("0",)}, "this machine has 1 cuda device, too few for 2 workers"),
    ],
)
def test_what_cannot_be_divided_is_refused(found: dict[str, tuple[str, ...]], text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        parts(found, 2)


def test_a_worker_sees_as_many_as_its_host_has_devices() -> None:
    assert visible(("4", "5", "6"), "cuda", 2) == {"CUDA_VISIBLE_DEVICES": "4,5"}
    assert visible((), "cuda", 2) == visible(("0",), "tpu", 1) == visible((), "cpu", 8) == {}
    assert worker_environment("rocm", ("1", "2"), 2)["HIP_VISIBLE_DEVICES"] == "1,2"


def test_a_users_settings_of_malloc_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "hugetlb" in worker_environment("cpu")["GLIBC_TUNABLES"]
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.perturb=1")
    assert worker_environment("cpu")["GLIBC_TUNABLES"] == "glibc.malloc.perturb=1"


def test_a_worker_has_no_time_limits_of_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = "xla_cpu_collective_call_terminate_timeout_seconds"
    monkeypatch.setenv("XLA_FLAGS", f"--{limit}=1 --xla_llvm_disable_expensive_passes=true")
    flags = worker_environment("cpu")["XLA_FLAGS"].split()
    assert "--xla_llvm_disable_expensive_passes=true" in flags
    assert [flag for flag in flags if limit in flag][-1] == f"--{limit}=2147483647", "the last of equal flags counts"
    assert "xla_gpu_executable_terminate_timeout=" in worker_environment("cuda")["XLA_FLAGS"]
    assert "collective" not in worker_environment("tpu")["XLA_FLAGS"].replace(limit, ""), "unknown names end a process"
    monkeypatch.setenv("XLA_FLAGS", "a-file")
    assert worker_environment("cpu")["XLA_FLAGS"] == "a-file"
    monkeypatch.delenv("XLA_FLAGS")
    assert "XLA_FLAGS" not in worker_environment("tpu")


def test_the_agents_of_a_machine_divide_its_devices_and_its_rank() -> None:
    options = AgentOptions(Address(host="c", port=1), RankSlot(-1, 3), machine="m", devices=FOUR)
    first, second = options_of_workers(options, 2)
    assert [each.machine for each in (first, second)] == ["m/0", "m/1"]
    assert [each.rank_slot for each in (first, second)] == [RankSlot(-1, 6), RankSlot(-1, 7)]
    assert [each.devices["cuda"] for each in (first, second)] == [("0", "1"), ("2", "3")]
    assert {first.group, second.group} == {"m"}
    assert options_of_workers(options, 1) == [options]


def test_devices_that_a_worker_gives_back_are_there_for_the_next() -> None:
    shares = DeviceShares(FOUR)
    first, second = shares.take("cuda", 1), shares.take("cuda", 2)
    assert (first, second) == (("0",), ("1", "2"))
    with pytest.raises(OSError, match="one more host needs 2 cuda devices, but only 1 of the 4"):
        shares.take("cuda", 2)
    shares.give_back("cuda", first)
    assert shares.take("cuda", 2) == ("0", "3")
    assert shares.take("cpu", 100) == ()


class _Process:
    """A child that ends when it is killed."""

    environments: list[str]

    def __init__(self, command: list[str], environment: dict[str, str], on_end: object, seconds: float) -> None:
        self.environments.append(environment["CUDA_VISIBLE_DEVICES"])
        self.on_end = on_end


def test_the_workers_of_a_local_cluster_have_each_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "devices", lambda: FOUR)
    monkeypatch.setattr(local, "StartingProcess", _Process)
    monkeypatch.setattr(_Process, "environments", [], raising=False)
    settings = ClusterSettings("1x2x1+1x1x2", "cuda")
    engine = LocalEngine(EngineOptions(settings, "/nowhere"))
    ends: list[HostEnd] = []
    starts = [
        HostStart(0, 0, 0, 2, 1, 1, "cuda"),
        HostStart(0, 1, 1, 2, 1, 1, "cuda"),
        HostStart(1, 2, 0, 1, 2, 1, "cuda"),
    ]
    processes = [engine.start_host(start, ends.append) for start in starts]
    assert _Process.environments == ["0", "1", "2,3"]
    processes[1].on_end(-9, "")  # type: ignore[attr-defined]
    engine.start_host(starts[1], ends.append)
    assert _Process.environments[-1] == "1"
    with pytest.raises(ClusterError, match="this machine has 4 cuda devices, and the cluster's hosts need 8 in all"):
        LocalEngine(EngineOptions(msgspec.structs.replace(settings, islands="2x2x2"), "/nowhere"))
