"""Tests of host agents on this machine that need no separate network. The others are in `tests.machines`."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import AtollError
from atoll.operate.operator_requests import request_report
from atoll.security.join_token import join_file, read_join
from tests.cluster_process import User, eventually, finish, first_line, free_port


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{free_port()}"


def status(user: User) -> dict[str, Any]:
    """Return the output of `atoll status --json`, or an empty report if the cluster does not listen yet."""
    try:
        join = read_join(str(join_file(user.runtime / "atoll" / "default")))
        report: dict[str, Any] = json.loads(request_report(join.address, "", join))
    except AtollError:
        return {"islands": [{"waits_for": None}]}
    return report


def until(user: User, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while not holds(report := status(user)):
        assert time.monotonic() < deadline, report
        time.sleep(0.05)
    return report


def test_a_cluster_waits_for_its_hosts_says_for_whom_and_runs_on_them(user: User, address: str) -> None:
    up = user.start_atoll("up", "--engine", "hosts", "--islands", "1x2x2", "--listen", address)
    until(user, lambda report: "waits for 2 of 2 hosts: ranks 0, 1" in str(report["islands"][0]["waits_for"]))
    first = user.start_atoll("host", "--address", address, "--rank", "1")
    until(user, lambda report: "waits for 1 of 2 hosts: rank 0 " in str(report["islands"][0]["waits_for"]))
    assert "waits for 1 of 2 hosts: rank 0" in user.atoll("status").check().stdout
    second = user.start_atoll("host", "--address", address, OMPI_COMM_WORLD_RANK="0")
    assert finish(up).check().stdout == f"tls://{address}\n"
    script = """
        import jax, jax.numpy as jnp
        mesh = jax.make_mesh((4,), ("x",))
        x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, jax.P("x")))
        print(jax.jit(jnp.sum)(x))
    """
    assert user.script(script, JAX_PLATFORMS="atoll", ATOLL_ADDRESS=address).check().stdout == "28.0\n"
    user.atoll("down").check()
    for host in (first, second):
        finish(host).check()
    assert user.leftovers() == []


def test_one_host_holds_an_island_of_null_devices(user: User, address: str) -> None:
    arguments = ("--engine", "hosts", "--platform", "null", "--islands", "2x8x4", "--listen", address)
    up = user.start_atoll("up", *arguments)
    until(user, lambda report: report["islands"][0]["waits_for"])
    hosts = [user.start_atoll("host", "--address", address) for _ in range(2)]
    finish(up).check()
    assert {host["machine"] != "" for island in status(user)["islands"] for host in island["hosts"]} == {True}
    user.atoll("down").check()
    for host in hosts:
        finish(host).check()
    assert user.leftovers() == []


def test_a_cluster_whose_hosts_do_not_come_gives_up_and_says_who_is_missing(user: User, address: str) -> None:
    up = user.start_atoll("up", "--engine", "hosts", "--islands", "1x1x1", "--listen", address, "--wait", "2")
    ended = finish(up)
    assert ended.returncode == 1
    assert "was not up within 2 s: island 0 waits for 1 of 1 host: rank 0" in ended.stderr
    assert user.leftovers() == []


def test_a_cluster_with_another_engine_takes_no_hosts(user: User, address: str) -> None:
    user.atoll("up", "--platform", "null", "--islands", "1x1x1", "--listen", address).check()
    ended = finish(user.start_atoll("host", "--address", address))
    assert ended.returncode == 1
    assert "this cluster's engine is 'local', which takes no hosts" in ended.stderr
    user.atoll("down").check()


def test_a_host_joins_by_the_string_for_hosts_and_not_by_that_for_clients(user: User, address: str) -> None:
    files = [user.runtime / name for name in ("join", "join-hosts")]
    options = ("--listen", address, "--join-file", str(files[0]), "--host-join-file", str(files[1]))
    up = user.start_atoll("up", "--engine", "hosts", "--platform", "null", "--islands", "1x1x1", *options)
    assert eventually(files[1].exists)
    refused = user.atoll("host", "--join", str(files[0])).stderr
    assert "this join token is for a client, not for a host" in refused
    assert "--host-join-file" in refused
    host = user.start_atoll("host", ATOLL_JOIN=str(files[1]))
    finish(up).check()
    user.atoll("down", "--join", str(files[0])).check()
    finish(host).check()
    for file in files:
        file.unlink()
    assert user.leftovers() == []


def test_tenants_have_join_tokens_of_their_own_and_none_of_them_is_a_hosts(user: User, address: str) -> None:
    directory = user.runtime / "tenants"
    directory.mkdir()
    (directory / "red.token").write_text("r" * 32)
    (directory / "tenants.toml").write_text('[tenant.red]\ntoken = "./red.token"\nshare = 3\n')
    files = {name: directory / f"join-{name}" for name in ("red", "default", "hosts")}
    options = ("--listen", address, "--tenants", str(directory / "tenants.toml"))
    options += ("--join-file", str(directory / "join-{tenant}"), "--host-join-file", str(files["hosts"]))
    up = user.start_atoll("up", "--engine", "hosts", "--platform", "null", "--islands", "1x1x1", *options)
    assert eventually(lambda: all(file.exists() for file in files.values()))
    for name in ("red", "default"):
        assert "is for a client, not for a host" in user.atoll("host", "--join", str(files[name])).stderr
    host = user.start_atoll("host", ATOLL_JOIN=str(files["hosts"]))
    finish(up).check()
    seen = {}
    for name in ("red", "default"):
        tenants = json.loads(user.atoll("tenants", "--json", "--join", str(files[name])).check().stdout)
        seen[name] = {each["name"]: each["share"] for each in tenants}
    assert seen == {"red": {"red": 3.0}, "default": {"default": 1.0, "red": 3.0}}
    assert "only its operators may do this" in user.atoll("down", "--join", str(files["red"])).error
    user.atoll("down", "--join", str(files["default"])).check()
    finish(host).check()
    shutil.rmtree(directory)
    assert user.leftovers() == []


def test_a_host_without_the_token_is_refused(user: User, address: str) -> None:
    user.env["ATOLL_INSECURE"] = "1"
    up = user.start_atoll(
        "up", "--engine", "hosts", "--islands", "1x1x1", "--listen", address, "--wait", "20", ATOLL_TOKEN="right"
    )
    ended = finish(user.start_atoll("host", "--address", address, ATOLL_TOKEN="wrong"))
    assert "this cluster asks for a token" in ended.stderr
    up.send_signal(signal.SIGTERM)
    finish(up)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "no cluster given"),
        (("--address", "unix:/run/atoll.sock"), "over TCP; give HOST:PORT"),
    ],
)
def test_a_host_that_does_not_know_its_controller_says_so(user: User, arguments: tuple[str, ...], text: str) -> None:
    assert text in user.atoll("host", *arguments).error


def test_hosts_need_an_address_that_they_can_reach(user: User) -> None:
    ended = user.atoll("up", "--engine", "hosts")
    assert ended.returncode == 78
    assert "choose where the controller listens" in ended.stderr
    assert "waiting for hosts" not in ended.stderr


def test_a_lease_that_signs_of_life_cannot_keep_is_refused(user: User) -> None:
    refused = user.atoll("up", "--lease", "1")
    assert refused.returncode == 2  # as for any invalid command line
    assert "--lease': '1': expected a number of seconds, 3 or more" in refused.stderr


def test_an_island_is_added_when_a_machine_has_come_for_it(user: User, address: str) -> None:
    up = user.start_atoll("up", "--engine", "hosts", "--platform", "null", "--islands", "1x2x2", "--listen", address)
    until(user, lambda report: report["islands"][0]["waits_for"])  # and the join token exists
    hosts = [user.start_atoll("host", "--address", address)]
    finish(up).check()
    adding = user.start_atoll("add-island")
    until(user, lambda report: "waits for 1 of 1 host" in str(report["islands"][-1]["waits_for"]))
    hosts.append(user.start_atoll("host", "--address", address))
    assert "island 1 is up, with devices 4, 5, 6, 7" in finish(adding).check().stdout
    assert "its workers have ended" in user.atoll("drain", "0").check().stdout
    until(user, lambda report: [each["state"] for each in report["machines"]] == ["free", "host 2 of island 1"])
    user.atoll("down").check()
    for host in hosts:
        finish(host).check()


ELASTIC = """
    import time
    import jax, jax.numpy as jnp, numpy as np
    import atoll

    def gradients(weights, rows):
        loss, gradient = jax.value_and_grad(lambda weights: jnp.mean((rows @ weights) ** 2))(weights)
        return gradient, loss

    def batch(step):
        time.sleep(0.05)
        return np.random.default_rng(step).normal(size=(4, 8)).astype(np.float32)

    training = atoll.elastic.data_parallel(gradients, lambda weights, gradient: weights - 0.1 * gradient)
    run, reported = atoll.elastic.run(training, np.ones((8, 8), np.float32), batch, steps=1 << 30, every=5), 0
    for step, loss in run:
        for each in run.changes[reported:]:
            print(each.reason, *each.islands, "again", each.repeated, flush=True)
            reported += 1
"""


@pytest.mark.thorough
def test_an_elastic_training_leaves_the_island_of_a_machine_that_leaves_and_comes_back_with_it(
    user: User, address: str
) -> None:
    up = user.start_atoll("up", "--engine", "hosts", "--islands", "2x1x1", "--listen", address)
    until(user, lambda report: report["islands"][0]["waits_for"])  # and the join token exists
    hosts = [user.start_atoll("host", "--address", address, "--rank", str(rank)) for rank in range(2)]
    finish(up).check()
    code = textwrap.dedent(ELASTIC)
    script = user.start(sys.executable, "-c", code, JAX_PLATFORMS="atoll", ATOLL_ADDRESS=address)
    assert first_line(script) == "begun 0 1 again 0"
    hosts[1].send_signal(signal.SIGTERM)
    assert first_line(script) == "leaving 0 again 0", "nothing is lost"
    finish(hosts[1]).check()
    assert [each["state"] for each in status(user)["islands"]] == ["ready", "drained"]
    hosts[1] = user.start_atoll("host", "--address", address, "--rank", "1")
    assert first_line(script) == "back 0 1 again 0"
    script.kill()
    script.communicate()
    user.atoll("down").check()
    for host in hosts:
        finish(host).check()


@pytest.mark.skipif(not socket.has_ipv6 or not Path("/proc/net/if_inet6").read_text(), reason="there is no IPv6 here")
def test_hosts_meet_over_ipv6(user: User) -> None:
    address = f"[::1]:{free_port()}"
    up = user.start_atoll("up", "--engine", "hosts", "--islands", "1x2x1", "--listen", address)
    until(user, lambda report: report["islands"][0]["waits_for"])  # and the join token exists
    hosts = [user.start_atoll("host", "--address", address) for _ in range(2)]
    finish(up).check()
    script = """
        import jax, jax.numpy as jnp
        x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(jax.make_mesh((2,), ("x",)), jax.P("x")))
        print(jax.jit(jnp.sum)(x))
    """
    assert user.script(script, JAX_PLATFORMS="atoll", ATOLL_ADDRESS=address).check().stdout == "28.0\n"
    user.atoll("down").check()
    for host in hosts:
        finish(host).check()
