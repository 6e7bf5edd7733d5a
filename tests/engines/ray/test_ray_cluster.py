"""Tests of a cluster on a Ray cluster of one node. Tests that need several nodes are in `tests.machines.test_ray`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.cluster_process import User, finish, first_line, free_port

RAY = [sys.executable, "-c", "from ray.scripts.scripts import main; main()"]


@dataclass(frozen=True)
class OneNode:
    """Ray cluster of one node with two CPUs: its address, and its directory, which every user can read."""

    address: str
    directory: Path


@pytest.fixture
def ray_cluster(user: User) -> Iterator[OneNode]:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'atoll[ray]'")
    directory = tempfile.mkdtemp(prefix="ray-")
    port = free_port()
    own = ("--temp-dir", directory, "--object-store-memory", "80000000", "--disable-usage-stats")
    head = user.start(
        *RAY, "start", "--head", "--port", str(port), "--num-cpus", "2", "--include-dashboard=false", "--block", *own
    )
    try:
        here = ""
        while "Ray runtime started" not in (line := first_line(head)):
            here = line.rpartition("Local node IP: ")[2] if "Local node IP: " in line else here
        yield OneNode(f"{here}:{port}", Path(directory))
    finally:
        processes = []
        with suppress(psutil.NoSuchProcess, ProcessLookupError):  # Ray could not start
            processes = psutil.Process(head.pid).children(recursive=True)
            os.kill(head.pid, signal.SIGTERM)
        finish(head)
        for process in processes:
            if process.is_running():
                process.kill()
        shutil.rmtree(directory, ignore_errors=True)


def has(user: User, address: str) -> str:
    """Return Ray's actors and placement groups."""
    look = f"""
        import ray
        ray.init({address!r}, log_to_driver=False, logging_level="ERROR")
        actors = [each["ActorClassName"] for each in ray._private.state.actors().values() if each["State"] != "DEAD"]
        groups = [each["name"] for each in ray.util.placement_group_table().values() if each["state"] != "REMOVED"]
        print(actors + groups)
    """
    return user.script(look).check().stdout


def shows(user: User, ray: OneNode, *secrets: str) -> list[str]:
    """Return the places in which Ray shows one of these texts to all users: its actors, jobs, tasks and directory."""
    look = f"""
        import ray
        from ray.experimental import internal_kv
        ray.init({ray.address!r}, log_to_driver=False, logging_level="ERROR")
        ray.nodes()
        known = ray._private.state.state._global_state_accessor
        print(known.get_actor_table(None, None))
        for name in ("job_table", "placement_group_table", "task_events", "worker_table"):
            print(name, getattr(known, f"get_{{name}}")())
        for space in (None, "fun", "job", "session", "dashboard", "cluster"):
            for key in internal_kv._internal_kv_list(b"", namespace=space):
                print("key", internal_kv._internal_kv_get(key, namespace=space))
    """
    output = user.script(look).check().stdout
    assert "EngineActor" in output
    found = [line[:200] for line in output.splitlines() if any(secret in line for secret in secrets)]
    for path in filter(Path.is_file, ray.directory.rglob("*")):
        content = path.read_bytes()
        found += [str(path) for secret in secrets if secret.encode() in content]
    return found


@pytest.fixture
def other_directory() -> Iterator[Path]:
    """Create the runtime directory of another user, whose path is short enough for unix sockets."""
    with tempfile.TemporaryDirectory(prefix="at-") as directory:
        yield Path(directory)


@pytest.mark.slow
def test_a_cluster_starts_on_ray_with_tls_shows_nobody_its_secrets_and_leaves_nothing_there(
    user: User, ray_cluster: OneNode, tmp_path: Path, other_directory: Path
) -> None:
    files = [tmp_path / f"join-{name}" for name in ("red", "default")]
    (tmp_path / "tenants.toml").write_text(f'[tenant.red]\ntoken = "{"r" * 32}"\nshare = 3\n')
    on_ray = ("up", "--engine", "ray", "--ray-address", ray_cluster.address, "--islands", "1x1x2")
    on_ray += ("--tenants", str(tmp_path / "tenants.toml"))
    started = user.atoll(*on_ray, "--join-file", str(tmp_path / "join-{tenant}"))
    assert started.check().stdout.startswith("tls://")
    # Connect like somebody who has only the join token.
    elsewhere = {"XDG_RUNTIME_DIR": str(other_directory), "ATOLL_JOIN": str(files[0])}
    code = "import jax; print(len(jax.devices()))"
    assert user.script(code, JAX_PLATFORMS="atoll", **elsewhere).check().stdout == "2\n"
    assert [each["name"] for each in json.loads(user.atoll("tenants", "--json", **elsewhere).check().stdout)] == ["red"]
    assert "only its operators may do this" in user.atoll("down", **elsewhere).error
    tokens = [file.read_text().strip().rpartition("/")[2] for file in files]
    assert tokens[0] == "r" * 32
    assert shows(user, ray_cluster, *tokens) == []
    user.atoll("down").check()
    assert has(user, ray_cluster.address) == "[]\n"
    assert [path for path in user.runtime.rglob("*") if path != user.runtime / "atoll"] == []


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("ATOLL_TEST_RAY"), reason="this takes a while: run it by `make ray`")
def test_without_tls_it_asks_for_a_token_and_serves_who_brings_it(user: User, ray_cluster: OneNode) -> None:
    on_ray = ("up", "--engine", "ray", "--ray-address", ray_cluster.address, "--islands", "1x1x2", "--insecure")
    assert "so it needs a token: set ATOLL_TOKEN" in user.atoll(*on_ray).error
    plain = {"ATOLL_TOKEN": "t", "ATOLL_INSECURE": "1"}
    address = user.atoll(*on_ray, ATOLL_TOKEN="t").check().stdout.strip()
    assert not address.startswith("tls://")
    code = "import jax; print(len(jax.devices()))"
    assert user.script(code, JAX_PLATFORMS="atoll", ATOLL_ADDRESS=address, **plain).check().stdout == "2\n"
    assert "token" in user.atoll("status", "--address", address, ATOLL_INSECURE="1").error
    user.atoll("down", **plain).check()
    assert has(user, ray_cluster.address) == "[]\n"


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("ATOLL_TEST_RAY"), reason="this takes a while: run it by `make ray`")
def test_the_next_cluster_with_the_same_authority_is_joined_by_the_same_strings(
    user: User, ray_cluster: OneNode, tmp_path: Path
) -> None:
    kept, join = tmp_path / "authority", tmp_path / "join"
    where = ("--listen", f"0.0.0.0:{free_port()}", "--authority", str(kept), "--join-file", str(join))
    on_ray = ("up", "--engine", "ray", "--ray-address", ray_cluster.address, "--islands", "1x1x2", *where)
    output = []
    for _ in range(2):
        user.atoll(*on_ray).check()
        output.append(join.read_text())
        code = "import jax; print(len(jax.devices()))"
        assert user.script(code, JAX_PLATFORMS="atoll", ATOLL_JOIN=output[0]).check().stdout == "2\n"
        user.atoll("down").check()
    assert output[0] == output[1]
    assert kept.stat().st_mode & 0o077 == 0
    assert "ATOLL_TOKEN is not the token in" in user.atoll(*on_ray, ATOLL_TOKEN="another").error


def test_where_no_ray_cluster_is_the_start_says_so_at_once(user: User) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'atoll[ray]'")
    error = user.atoll("up", "--engine", "ray", "--ray-address", f"127.0.0.1:{free_port()}").error
    assert "there is no Ray cluster at 127.0.0.1:" in error


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--listen", "unix:/tmp/socket"), "give HOST:PORT, or omit --listen"),
        (("--listen", "10.0.0.1:0"), "clients need to know the port; give one other than 0"),
        (("--listen", "10.0.0.1:7000", "--insecure"), "so it needs a token: set ATOLL_TOKEN"),
    ],
)
def test_where_it_cannot_listen_the_start_says_so_before_ray_is_asked(
    user: User, options: tuple[str, ...], text: str
) -> None:
    assert text in user.atoll("up", "--engine", "ray", *options).error


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("raise ImportError('nothing here')", "the engine ray needs Ray: pip install 'atoll[ray]' (nothing here)"),
        ("__version__ = '2.9.3'", "the engine ray needs Ray 2.60 or newer, but Ray 2.9.3 is installed"),
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
