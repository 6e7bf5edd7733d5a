"""Tests of ClusterRegistry with real processes that are not clusters."""

import contextlib
import errno
import os
import select
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from atoll.cluster.held_directories import HeldDirectory
from atoll.cluster.moved_controllers import record_controller
from atoll.errors import ClusterError
from atoll.operate import cluster_registry
from atoll.operate.cluster_registry import ClusterRecord, ClusterRegistry, embedded_clusters, register_embedded
from tests.file_limits import no_more_files


@pytest.fixture
def registry(short_directory: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterRegistry:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_directory))
    return ClusterRegistry()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that leads a session with a child in it, like an engine."""
    process = subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo started; wait"], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def _register(registry: ClusterRegistry, name: str, pid: int) -> None:
    with registry.locked():
        registry.directory(name).mkdir()
        registry.register(name, registry.address(name), "1x1x1", "cpu", pid)


def test_a_live_cluster_is_found_with_all_its_processes(
    registry: ClusterRegistry, sleeper: subprocess.Popen[bytes]
) -> None:
    _register(registry, "one", sleeper.pid)
    (found,) = registry.all()
    assert found.name == "one"
    assert found.is_alive
    assert len(found.pids()) == 2
    assert sleeper.pid in found.pids()
    assert len(found.kill()) == 2
    sleeper.wait()
    assert not found.is_alive
    assert registry.all() == []


def test_what_a_dead_engine_left_behind_is_killed_and_removed(
    registry: ClusterRegistry, sleeper: subprocess.Popen[bytes]
) -> None:
    _register(registry, "one", sleeper.pid)
    (found,) = registry.all()
    (child,) = [pid for pid in found.pids() if pid != sleeper.pid]
    descriptor = os.pidfd_open(child)
    sleeper.kill()
    sleeper.wait()
    assert registry.all() == []
    assert not Path(found.directory).exists()
    assert select.select([descriptor], [], [], 10.0)[0], "the child still runs"
    os.close(descriptor)


def test_a_number_that_another_process_has_now_is_not_taken_for_the_engine(
    registry: ClusterRegistry, sleeper: subprocess.Popen[bytes]
) -> None:
    _register(registry, "one", sleeper.pid)
    (found,) = registry.all()
    earlier = msgspec.structs.replace(found, began=found.began - 1)
    assert not earlier.is_alive
    assert earlier.pids() == []


def test_a_directory_without_a_record_is_removed(registry: ClusterRegistry) -> None:
    (registry.root / "half").mkdir()
    assert registry.all() == []
    assert not (registry.root / "half").exists()


def test_the_directory_of_a_running_engine_stays_without_a_record(registry: ClusterRegistry) -> None:
    directory = registry.root / "one"
    directory.mkdir()
    engine = HeldDirectory(directory)
    assert registry.all() == []
    assert directory.exists()
    with no_more_files(), pytest.raises(ClusterError, match="Too many open files"):
        registry.all()
    engine.release()
    assert registry.all() == []
    assert not directory.exists()


def test_a_running_cluster_whose_record_cannot_be_read_is_reported_and_stays(
    registry: ClusterRegistry, sleeper: subprocess.Popen[bytes]
) -> None:
    _register(registry, "one", sleeper.pid)
    record = registry.directory("one") / "cluster.json"
    kept = record.rename(registry.directory("one") / "kept.json")
    record.symlink_to(record)
    with pytest.raises(ClusterError, match=r"cannot find out whether the cluster in .*one runs.*symbolic links"):
        registry.all()
    record.unlink()
    kept.rename(record)
    (found,) = registry.all()
    assert found.is_alive


def test_a_running_cluster_whose_engine_cannot_be_examined_is_reported_and_stays(
    registry: ClusterRegistry, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    _register(registry, "one", sleeper.pid)
    (found,) = registry.all()
    for look in (lambda: found.is_alive, found.pids, found.terminate, found.kill, registry.all):
        with no_more_files(), pytest.raises(ClusterError, match="Too many open files"):
            look()

    def fail(_: int) -> None:
        raise OSError(errno.ENFILE, "Too many open files in system")

    with monkeypatch.context() as patch:  # as if the record were the last file that could be opened
        patch.setattr(cluster_registry, "began", fail)
        with pytest.raises(ClusterError, match="in system"):
            registry.all()
    assert sleeper.poll() is None
    assert [each.name for each in registry.all()] == ["one"]


@pytest.mark.parametrize("content", [b"{", b'{"name": "one"}'])
def test_a_record_of_another_version_is_reported_and_stays(registry: ClusterRegistry, content: bytes) -> None:
    directory = registry.root / "one"
    directory.mkdir()
    (directory / "cluster.json").write_bytes(content)
    with pytest.raises(ClusterError, match="not the record of a cluster of this version"):
        registry.all()
    assert directory.exists()


def test_an_empty_record_counts_as_none(registry: ClusterRegistry) -> None:
    (registry.root / "half").mkdir()
    (registry.root / "half" / "cluster.json").touch()
    assert registry.all() == []
    assert not (registry.root / "half").exists()


def test_an_embedded_cluster_that_cannot_be_examined_is_reported(
    registry: ClusterRegistry, sleeper: subprocess.Popen[bytes], short_directory: Path
) -> None:
    directory = short_directory / "atoll-client-1"
    directory.mkdir()
    register_embedded(directory, f"unix:{directory}/controller.sock", "1x1x1", "cpu", sleeper.pid, "python")
    assert [each.label for each in embedded_clusters()] == ["python"]
    record = directory / "cluster.json"
    record.unlink()
    record.symlink_to(record)
    with pytest.raises(ClusterError, match="symbolic links"):
        embedded_clusters()


def test_a_controller_address_that_cannot_be_read_is_not_taken_for_that_of_a_controller_that_has_not_moved(
    registry: ClusterRegistry, sleeper: subprocess.Popen[bytes]
) -> None:
    _register(registry, "one", sleeper.pid)
    (found,) = registry.all()
    assert found.continues_at == ""
    record_controller(found.directory, "tls://two:7000")
    with no_more_files(), pytest.raises(ClusterError, match="Too many open files"):
        _ = found.continues_at
    assert found.continues_at == "tls://two:7000"


def test_a_runtime_directory_that_others_can_enter_is_refused(registry: ClusterRegistry) -> None:
    registry.root.chmod(0o755)
    with pytest.raises(ClusterError, match="0700"):
        ClusterRegistry()


def test_the_cluster_of_another_machine_that_shares_the_directory_is_neither_shown_nor_removed(
    registry: ClusterRegistry,
) -> None:
    directory = registry.directory("theirs")
    directory.mkdir()
    record = ClusterRecord("theirs", "10.0.0.9:7000", "1x1x1", "cpu", str(directory), 1, 1, machine="elsewhere")
    (directory / "cluster.json").write_bytes(msgspec.json.encode(record))
    assert registry.all() == []
    assert directory.exists()
    shutil.rmtree(directory)


def test_a_cluster_on_ray_is_up_until_ray_says_that_it_has_ended(
    registry: ClusterRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        registry.directory("far").mkdir()
        with registry.locked():
            record = registry.register("far", address, "1x1x1", "cpu", os.getpid(), ray="auto")
        assert record.pids() == []  # the command that started it is not one of its processes
        started_by_one_that_ended = msgspec.structs.replace(record, began=record.began - 1)
        assert started_by_one_that_ended.is_alive
        assert not started_by_one_that_ended.refuses
    assert started_by_one_that_ended.refuses
    assert started_by_one_that_ended.is_alive
    asked: list[str] = []
    answers = iter((ClusterError("there is no Ray cluster"), False, True))

    def ask(ray_address: str, name: str) -> bool:
        asked.append(f"{ray_address} {name}")
        answer = next(answers)
        if isinstance(answer, ClusterError):
            raise answer
        return answer

    monkeypatch.setattr("atoll.engines.ray.ray_cluster.has_ended", ask)
    (Path(record.directory) / "cluster.json").write_bytes(msgspec.json.encode(started_by_one_that_ended))
    assert [each.name for each in registry.all()] == ["far"], "Ray does not answer"
    assert [each.name for each in registry.all()] == ["far"], "its controller restarts"
    assert registry.all() == []
    assert asked == ["auto far"] * 3
    assert not Path(record.directory).exists()
