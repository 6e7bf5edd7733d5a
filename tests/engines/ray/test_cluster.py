"""A cluster on a Ray cluster of one node. What needs several nodes is in `tests.machines.test_ray`."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster_process import User, finish, first_line, free_port

RAY = [sys.executable, "-c", "from ray.scripts.scripts import main; main()"]


@pytest.fixture
def user(short_directory: Path, program_cache: Path) -> Iterator[User]:
    user = User(short_directory, program_cache, ATOLL_TOKEN="t", ATOLL_INSECURE="1")
    yield user
    for process in user.processes():
        process.kill()


@pytest.fixture
def ray_cluster(user: User) -> Iterator[str]:
    """The address of a Ray cluster of one node with two processors."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'atoll[ray]'")
    folder = tempfile.mkdtemp(prefix="ray-")
    port = free_port()
    own = ("--temp-dir", folder, "--object-store-memory", "80000000", "--disable-usage-stats")
    head = user.start(
        *RAY, "start", "--head", "--port", str(port), "--num-cpus", "2", "--include-dashboard=false", "--block", *own
    )
    try:
        here = ""
        while "Ray runtime started" not in (line := first_line(head)):
            here = line.rpartition("Local node IP: ")[2] if "Local node IP: " in line else here
        yield f"{here}:{port}"
    finally:
        processes = psutil.Process(head.pid).children(recursive=True)
        os.kill(head.pid, signal.SIGTERM)
        finish(head)
        for process in processes:
            if process.is_running():
                process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def has(user: User, address: str) -> str:
    """The actors and placement groups that Ray has."""
    look = f"""
        import ray
        ray.init({address!r}, log_to_driver=False, logging_level="ERROR")
        actors = [each["ActorClassName"] for each in ray._private.state.actors().values() if each["State"] != "DEAD"]
        groups = [each["name"] for each in ray.util.placement_group_table().values() if each["state"] != "REMOVED"]
        print(actors + groups)
    """
    return user.script(look).check().stdout


@pytest.mark.slow
def test_a_cluster_starts_on_ray_runs_a_script_and_leaves_nothing_there(user: User, ray_cluster: str) -> None:
    on_ray = ("up", "--engine", "ray", "--ray-address", ray_cluster, "--islands")
    address = user.atoll(*on_ray, "1x1x2").check().stdout.strip()
    ran = user.script("import jax; print(len(jax.devices()))", JAX_PLATFORMS="atoll", ATOLL_ADDRESS=address)
    assert ran.check().stdout == "2\n"
    user.atoll("down").check()
    assert has(user, ray_cluster) == "[]\n"
    assert [path for path in user.runtime.rglob("*") if path != user.runtime / "atoll"] == []


def test_where_no_ray_cluster_is_the_start_says_so_at_once(user: User) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'atoll[ray]'")
    error = user.atoll("up", "--engine", "ray", "--ray-address", f"127.0.0.1:{free_port()}").error
    assert "there is no Ray cluster at 127.0.0.1:" in error


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("raise ImportError('nothing here')", "the engine ray needs Ray: pip install 'atoll[ray]' (nothing here)"),
        ("__version__ = '2.9.3'", "the engine ray needs Ray 2.60 or newer, and this is 2.9.3"),
    ],
)
def test_without_ray_or_with_an_old_one_the_start_says_what_to_install(
    user: User, tmp_path: Path, module: str, text: str
) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text(module)
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    assert text in user.atoll("up", "--engine", "ray", PYTHONPATH=paths).error


def test_an_embedded_cluster_is_not_on_ray(user: User) -> None:
    ran = user.script("import jax; jax.devices()", JAX_PLATFORMS="atoll", ATOLL_ENGINE="ray")
    assert "start it with `atoll up --engine ray`" in ran.stderr
