"""Tests of clusters whose islands differ, end to end: `atoll up --cluster`."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.cluster_process import User, finish, free_port
from tests.forked_process import with_forked_children
from tests.operate.test_hosts import status, until

slow = pytest.mark.skipif(
    os.environ.get("ATOLL_TEST_MACHINES") != "1", reason="starts hosts again and again: set ATOLL_TEST_MACHINES=1"
)

CLUSTER = """
[[island]]
hosts = 2
devices = 2
topology = "2x2"

[[island]]
devices = 3
kind = "tpu"
"""

# A program on each island, transfers between them that reshard, and a slice selected by type.
SCRIPT = """
    import atoll, jax, jax.numpy as jnp, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

    devices = jax.devices()
    print([device.slice_index for device in devices])
    square = Mesh(np.array(devices[:4]).reshape(2, 2), ("x", "y"))
    line = Mesh(np.array(devices[4:]), ("z",))
    x = np.arange(72.0, dtype=np.float32).reshape(6, 12)
    step = jax.jit(lambda v: v * 2 + v.sum())
    first = step(jax.device_put(x, NamedSharding(square, P("x", "y"))))
    second = step(jax.device_put(first, NamedSharding(line, P("z", None))))
    back = jax.device_put(second, NamedSharding(square, P("y", "x")))
    expected = x * 2 + x.sum()
    expected = expected * 2 + expected.sum()
    print(np.array_equal(np.asarray(back), expected))
    piece = atoll.make_virtual_device_set().add_slice(tpu_devices=2)
    print(piece.island)
    y = jax.device_put(x, NamedSharding(piece.mesh("m"), P("m")))
    print(jax.jit(lambda v: v @ v.T)(y).sum() == (x @ x.T).sum())
"""
PRINTED = "[0, 0, 0, 0, 1, 1, 1]\nTrue\n1\nTrue\n"


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    return str(tmp_path / "cluster.toml")


@pytest.mark.thorough
def test_programs_run_on_islands_that_differ_and_arrays_move_between_them(user: User, file: str) -> None:
    address = user.atoll("up", "--cluster", file).check().stdout.strip()
    assert user.script(SCRIPT, JAX_PLATFORMS="atoll", ATOLL_ADDRESS=address).check().stdout == PRINTED
    assert user.atoll("add-island").returncode == 1
    added = user.atoll("add-island", "--shape", "1x2", "--kind", "gpu").check().stdout
    assert added == "island 2 is up, with devices 7, 8\n"
    report = json.loads(user.atoll("status", "--json").check().stdout)
    assert report["topology"] == "1x2x2+1x1x3+1x1x2"
    assert report["islands"][2]["shape"]["kind"] == "gpu"
    user.atoll("down").check()
    assert user.leftovers() == []


@slow
def test_hosts_come_for_islands_that_differ_and_one_that_left_comes_back(user: User, file: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    (Path(file)).write_text(CLUSTER + "\n[[island]]\ndevices = 3\nkind = 'tpu'\n")
    up = user.start_atoll("up", "--engine", "hosts", "--cluster", file, "--listen", address)
    until(user, lambda report: report["islands"][0]["waits_for"])
    hosts = [user.start_atoll("host", "--address", address, SLURM_PROCID=str(number)) for number in range(4)]
    finish(up).check()
    run = user.script(SCRIPT.replace("4:]", "4:7]"), JAX_PLATFORMS="atoll", ATOLL_ADDRESS=address).check()
    assert run.stdout.splitlines()[1::2] == ["True", "True"]
    # The last island is drained when its machine leaves, and returns with the machine.
    hosts[3].send_signal(signal.SIGTERM)
    finish(hosts[3]).check()
    waits = {"state": "drained", "waits_for": "waits for 1 of 1 host: rank 0"}
    until(user, lambda report: waits.items() <= report["islands"][2].items())
    hosts[3] = user.start_atoll("host", "--address", address, SLURM_PROCID="3")
    until(user, lambda report: report["islands"][2]["state"] == "ready")
    script = "import jax; print([device.slice_index for device in jax.devices()][-3:])"
    assert user.script(script, JAX_PLATFORMS="atoll", ATOLL_ADDRESS=address).check().stdout == "[2, 2, 2]\n"
    user.atoll("down").check()
    for host in hosts:
        finish(host).check()
    assert user.leftovers() == []


def test_islands_and_a_file_say_the_same(user: User, file: str) -> None:
    refused = user.atoll("up", "--islands", "1x1x1", "--cluster", file)
    assert refused.returncode == 2
    assert "--islands and --cluster both define islands" in " ".join(refused.stderr.split())


def test_a_script_runs_on_an_embedded_cluster_of_the_file(user: User, file: str) -> None:
    code = "import jax; print(len(jax.devices()), jax.devices()[-1].slice_index)"
    user.env = with_forked_children(user.env)
    assert user.atoll("run", "--cluster", file, "--", sys.executable, "-c", code).check().stdout == "7 1\n"


@slow
def test_hosts_that_stay_find_the_next_cluster_with_the_same_authority(user: User, tmp_path: Path) -> None:
    address, kept, join = f"127.0.0.1:{free_port()}", str(tmp_path / "authority"), str(tmp_path / "join")
    arguments = ("up", "--engine", "hosts", "--islands", "1x1x1", "--listen", address, "--authority", kept)
    up = user.start_atoll(*arguments, "--host-join-file", join)
    until(user, lambda report: report["islands"][0]["waits_for"])
    first = Path(join).read_text()
    host = user.start_atoll("host", "--join", join, "--stay")
    finish(up).check()
    user.atoll("down").check()
    assert host.poll() is None
    user.atoll(*arguments, "--host-join-file", join).check()
    assert Path(join).read_text() == first
    user.atoll("down").check()
    host.send_signal(signal.SIGTERM)
    finish(host).check()
    assert user.leftovers() == []


@slow
def test_one_machine_is_several_hosts_of_several_islands(user: User, file: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    up = user.start_atoll("up", "--engine", "hosts", "--cluster", file, "--listen", address)
    until(user, lambda report: report["islands"][0]["waits_for"])
    host = user.start_atoll("host", "--address", address, "--workers", "3")
    finish(up).check()
    assert user.script(SCRIPT, JAX_PLATFORMS="atoll", ATOLL_ADDRESS=address).check().stdout == PRINTED
    machines = status(user)["machines"]
    assert sorted(each["name"].rpartition("/")[2] for each in machines) == ["0", "1", "2"]
    hosts = ["host 0 of island 0", "host 1 of island 0", "host 2 of island 1"]
    assert sorted(each["state"] for each in machines) == hosts
    # One of its workers ends. Only its island restarts, on the same devices.
    (worker,) = status(user)["islands"][1]["hosts"]
    os.kill(worker["pid"], signal.SIGKILL)
    report = until(
        user, lambda report: (report["islands"][1]["restarts"], report["islands"][1]["state"]) == (1, "ready")
    )
    assert report["islands"][0]["restarts"] == 0
    user.atoll("down").check()
    finish(host).check()
    assert user.leftovers() == []


@slow
def test_control_data_and_computing_have_networks_of_their_own(user: User, tmp_path: Path) -> None:
    port, join = free_port(), str(tmp_path / "join")
    where = ("--listen", f"0.0.0.0:{port}", "--advertise", "127.0.0.9:1,localhost", "--host-join-file", join)
    up = user.start_atoll("up", "--engine", "hosts", "--islands", "2x2x1", *where)
    until(user, lambda report: report["islands"][0]["waits_for"])
    # No controller listens at the first address.
    assert Path(join).read_text().startswith(f"atoll://127.0.0.9:1,localhost:{port}/")
    networks = ("--advertise", "127.0.0.2", "--listen", "127.0.0.2", "--coordinator-address", "127.0.0.3")
    hosts = [user.start_atoll("host", "--join", join, *networks) for _ in range(4)]
    address = finish(up).check().stdout.strip()
    script = """
        import jax, jax.numpy as jnp
        first, second = (jax.make_mesh((2,), ("x",), devices=jax.devices()[n:n + 2]) for n in (0, 2))
        x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(first, jax.P("x")))
        y = jax.jit(lambda v: v + v.sum())(x)
        print(jax.jit(jnp.sum)(jax.device_put(y, jax.NamedSharding(second, jax.P("x")))))
    """
    assert user.script(script, JAX_PLATFORMS="atoll", ATOLL_ADDRESS=address).check().stdout == "252.0\n"
    workers = [each for each, command in user.commands().items() if "atoll.worker.worker_main" in command]
    sockets = [each for worker in workers for each in worker.net_connections("tcp") if each.status == "LISTEN"]
    assert {each.laddr.ip.removeprefix("::ffff:") for each in sockets} == {"127.0.0.2", "127.0.0.3"}
    user.atoll("down").check()
    for host in hosts:
        assert " is ready, with 1 cpu device\n" in finish(host).check().stderr
    assert user.leftovers() == []
