"""Tests of the peers in figure 5: they count correctly, which each of their rounds checks, and leave nothing behind."""

import contextlib
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from benchmarks.harness import child
from benchmarks.harness.backends import environment_of
from benchmarks.harness.benchmark import Benchmark, Settings
from benchmarks.harness.child import Child, ContestantError
from tests.conftest import gone
from tests.quick_xla import quick

pytestmark = pytest.mark.slow

# importorskip would import them here, and this process must not have Ray's threads, or TensorFlow beside JAX.
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
needs_tensorflow = pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is not installed")


PEERS = "benchmarks.paper.peers"


@pytest.fixture(autouse=True)
def _compiles_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "environment_of", lambda settings: quick(environment_of(settings)))


def peer(prepare: str, backend: str, hosts: int = 2, devices: int = 1) -> Child:
    benchmark = Benchmark("peer", "a peer", prepare, metrics=())
    return Child(benchmark, Settings(backend, quick=True, point={"hosts": hosts, "devices": devices}))


def assert_counted(rates: Mapping[str, float], modes: int) -> None:
    assert len(rates) == modes
    assert min(rates.values()) > 0


def alive(processes: list[psutil.Process]) -> list[str]:
    return [str(each) for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def ray_directory(short_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory for Ray's session, whose sockets need a short path."""
    monkeypatch.setenv("TMPDIR", str(short_directory))
    return short_directory


def started(recursive: bool = False) -> list[psutil.Process]:
    """Return this process's children, except the guardian and the fork servers of the whole run.

    The children of a fork server belong to other tests, which may still be ending.
    """
    of_the_run = ("guardian.py", "fork_server.py")
    found = []
    for each in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended, and may be a zombie
            if not any(word.endswith(of_the_run) for word in each.cmdline()):
                found += [each, *(each.children(recursive=True) if recursive else ())]
    return found


@pytest.mark.parametrize("backend", ["JAX, op by op", "JAX, fused"])
def test_controllers_count_over_two_hosts(backend: str):
    with peer("tests.benchmarks.peer_modes:controllers", backend) as measured:
        rates = [measured.measure()["rate"] for _ in range(2)]
        processes = started(recursive=True)
    assert min(rates) > 0
    assert len(processes) == 2
    assert not gone(lambda: alive(processes))


def test_a_host_alone_counts_without_others():
    with peer("tests.benchmarks.peer_modes:controllers", "JAX, op by op", hosts=1, devices=2) as measured:
        assert measured.measure()["rate"] > 0


@pytest.mark.slow
@pytest.mark.thorough
def test_a_controller_that_died_fails_the_round():
    with peer(f"{PEERS}.multi_controller:prepare", "JAX, op by op") as measured:
        (first,) = started()
        (other,) = first.children()
        other.kill()
        with pytest.raises(ContestantError):
            measured.measure()


@pytest.mark.thorough
@needs_ray
@pytest.mark.slow
def test_actors_count_over_two_hosts_in_all_modes_and_a_killed_client_leaves_nothing(ray_directory: Path):
    with peer("tests.benchmarks.peer_modes:ray", "Ray, op by op") as measured:
        assert_counted(measured.measure(), 3)
        (client,) = started()
        processes = started(recursive=True)
        assert list(ray_directory.iterdir())
        client.kill()
        assert not gone(lambda: [*alive(processes), *map(str, ray_directory.iterdir())])


@needs_ray
@pytest.mark.slow
@pytest.mark.thorough  # the suite kills the client, and the same process ends what is left
def test_a_client_of_ray_that_ends_leaves_nothing(ray_directory: Path):
    with peer(f"{PEERS}.ray_actors:prepare", "Ray, chained") as measured:
        assert measured.measure()["rate"] > 0
        processes = started(recursive=True)
    assert not gone(lambda: [*alive(processes), *map(str, ray_directory.iterdir())])


@pytest.mark.thorough
@needs_tensorflow
def test_tensorflow_counts_on_its_logical_devices_in_all_modes():
    with peer("tests.benchmarks.peer_modes:tensorflow", "TensorFlow, op by op") as measured:
        assert_counted(measured.measure(), 2)
