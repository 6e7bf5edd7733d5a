"""Tests of `atoll up --standby` as a user runs it."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from atoll.errors import ConnectError
from atoll.operate.cluster_queries import ClusterSource, Target
from atoll.security.join_token import read_join
from atoll.wire.address import parse_address
from scripts.soak.controllers import is_of_controller
from tests.cluster_process import User, eventually, finish, free_port, kill_at_once

WITHOUT_XLA = ("--platform", "null")


@pytest.fixture
def user(program_cache: Path) -> Iterator[User]:
    with tempfile.TemporaryDirectory(prefix="at-") as directory, User(Path(directory), program_cache) as someone:
        yield someone


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--standby", "unix:/a", "--islands", "1x1x1", "--journal", "j"), "a standby starts no hosts"),
        (("--standby", "unix:/a"), "a standby needs its own journal; add --journal DIRECTORY"),
        (
            ("--standby", "one:7000", "--journal", "j"),
            "a standby on TCP needs the cluster's authority; add --auth",
        ),
        (("--standby", "one:7000", "--journal", "j", "--insecure"), "a standby on TCP needs TLS; remove --insecure"),
        (
            ("--standby", "unix:/a", "--journal", "j", "--continue", "--engine", "hosts"),
            "a lease decides which of the two machines serves; add --leader-lease ADDRESS",
        ),
        (
            (
                *("--standby", "unix:/a", "--journal", "j", "--continue", "--engine", "hosts"),
                *("--leader-lease", "etcd://one:1/a"),
            ),
            "the command follows and serves by turns; add --foreground",
        ),
        (
            ("--leader-lease", "etcd://one:1/a"),
            "--leader-lease: only a standby or a restarted controller needs it; add --journal",
        ),
        (
            ("--leader-lease", "one:1/a", "--journal", "j"),
            "--leader-lease: the lease is 'one:1/a': expected etcd://HOST:PORT/NAME",
        ),
    ],
)
def test_what_cannot_be_a_standby_is_refused_before_anything_starts(user, arguments, expected):
    refused = user.atoll("up", *arguments)
    assert refused.returncode == 2
    assert expected in " ".join(refused.stderr.replace("│", " ").split())


def test_a_damaged_journal_is_not_continued_and_the_error_says_what_to_do(user, tmp_path):
    user.env["ATOLL_STATE_DIR"] = str(tmp_path / "state")
    journal = tmp_path / "journal"
    journal.mkdir(mode=0o700)
    (journal / "00000001.snapshot").write_bytes(b"torn")
    up = ("up", "--engine", "hosts", "--islands", "1x1x1", "--listen", f"127.0.0.1:{free_port()}", *WITHOUT_XLA)
    kept = ("--authority", str(tmp_path / "authority"), "--journal", str(journal))
    refused = user.atoll(*up, *kept, "--continue")
    assert refused.returncode == 1
    assert f"the cluster of the journal in {journal} did not start: " in refused.stderr
    assert "run the command once without --continue: sessions on disk stay, and a damaged journal" in refused.stderr
    assert (journal / "00000001.snapshot").exists()


def test_a_standby_that_has_ended_with_its_cluster_says_so(user, tmp_path):
    user.env["ATOLL_STATE_DIR"] = str(tmp_path / "state")
    first, second = (f"127.0.0.1:{free_port()}" for _ in range(2))
    kept = ("--authority", str(tmp_path / "authority"))
    user.atoll(
        "up", "--islands", "1x1x1", "--listen", first, *kept, "--journal", str(tmp_path / "1"), *WITHOUT_XLA
    ).check()
    user.atoll(
        "up", "--standby", first, "--listen", second, *kept, "--journal", str(tmp_path / "2"), "--name", "spare"
    ).check()
    user.atoll("down", "--name", "default").check()
    assert eventually(lambda: user.leftovers() == []), user.leftovers()
    runs = user.atoll("logs", "--runs", "--name", "spare").check().stdout
    assert "the cluster that it followed has ended" in " ".join(runs.replace("│", " ").split())


def started_on_hosts(user: User, directory: Path, *options: str) -> tuple[tuple[str, ...], list[Any]]:
    """Start a cluster with a journal on three host agents. Return the command and the agents."""
    hosts = str(directory / "hosts")
    up = ("up", "--engine", "hosts", "--islands", "3x1x1", *options, *WITHOUT_XLA)
    up += ("--journal", str(directory / "1"), "--continue", "--host-join-file", hosts)
    starting = user.start_atoll(*up)
    assert eventually(Path(hosts).exists)
    agents = [user.start_atoll("host", "--join", hosts) for _ in range(3)]
    finish(starting).check()
    return up, agents


@pytest.mark.slow
def test_a_cluster_whose_standby_has_taken_over_is_not_continued_from_the_old_journal(user, tmp_path):
    user.env["ATOLL_STATE_DIR"] = str(tmp_path / "state")
    first, second = (f"127.0.0.1:{free_port()}" for _ in range(2))
    kept = ("--authority", str(tmp_path / "authority"))
    up, hosts = started_on_hosts(user, tmp_path, "--listen", first, *kept)
    controller = user.process("atoll.controller_process.controller_main")
    engine = user.process("atoll.engines.engine_main")
    follows = ("up", "--standby", first, "--listen", second, *kept, "--journal", str(tmp_path / "2"))
    user.atoll(*follows, "--name", "spare").check()
    is_followed = f"the standby at tls://{second} follows"
    assert eventually(lambda: is_followed in user.atoll("status").check().stdout, pause=0.3)

    kill_at_once(engine, controller)

    def has_taken_over() -> bool:
        answer = user.atoll("status", "--json", "--name", "spare")
        return answer.returncode == 0 and is_of_controller(answer.stdout)

    assert eventually(has_taken_over, pause=0.3)
    for foreground in ((), ("--foreground",)):  # the second start is that of a controller that nobody tries to notify
        refused = user.atoll(*up, *foreground)
        assert refused.returncode == 78, refused.stderr
        assert f"the controller ended: the standby at tls://{second} has taken over" in refused.stderr
        advice = f"run the command with --standby {second}, and with another --journal instead of --continue"
        assert advice in refused.stderr

    def hosts_are_back() -> bool:
        """Return whether workers and agents are connected: an agent that is away would not learn of the end."""
        report = json.loads(user.atoll("status", "--json", "--name", "spare").check().stdout)
        agents = [each for each in report["machines"] if not each["state"].startswith(("away", "unknown"))]
        return len(agents) == len(hosts) and all(island["state"] == "ready" for island in report["islands"])

    assert eventually(hosts_are_back, pause=0.3)
    back = ("up", "--standby", second, "--listen", first, *kept, "--journal", str(tmp_path / "3"))
    assert f"follows the controller at tls://{second}" in user.atoll(*back).check().stderr
    user.atoll("down", "--name", "spare").check()
    for host in hosts:
        finish(host).check()
    ended = user.atoll(*up)
    assert ended.returncode == 78
    assert "If its cluster has ended, run the command once without --continue" in ended.stderr


@pytest.mark.slow
def test_an_old_journal_is_not_continued_after_two_takeovers_although_its_standby_is_lost(user, tmp_path):
    user.env["ATOLL_STATE_DIR"] = str(tmp_path / "state")
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(3)]
    first, third = addresses[0], addresses[2]
    kept = ("--authority", str(tmp_path / "authority"))
    up, hosts = started_on_hosts(user, tmp_path, "--listen", first, *kept)
    names = ["default", "second", "third"]
    for place in (1, 2):
        before, serves, name = addresses[place - 1], addresses[place], names[place]
        former = user.process("atoll.engines.engine_main"), user.process("atoll.controller_process.controller_main")
        follows = ("up", "--standby", before, "--listen", serves, *kept, "--journal", str(tmp_path / f"{place + 1}"))
        user.atoll(*follows, "--name", name).check()
        status = ("status", "--name", names[place - 1])
        is_followed = f"the standby at tls://{serves} follows"
        assert eventually(lambda text=is_followed, of=status: text in user.atoll(*of).check().stdout, pause=0.3)
        kill_at_once(*former)

        def has_taken_over(name: str = name) -> bool:
            answer = user.atoll("status", "--json", "--name", name)
            return answer.returncode == 0 and is_of_controller(answer.stdout)

        assert eventually(has_taken_over, pause=0.3)
    for _ in range(2):  # the second start finds the controller in the journal's directory
        refused = user.atoll(*up)
        assert refused.returncode == 78, refused.stderr
        assert f"the controller ended: the standby at tls://{third} has taken over" in refused.stderr
        assert f"run the command with --standby {third}" in refused.stderr
    user.atoll("down", "--name", "third").check()
    for host in hosts:  # one that is away when the cluster ends tries to reach it for ten minutes
        host.terminate()
        finish(host)


@pytest.mark.skipif(not int(os.environ.get("ATOLL_TEST_TAKEOVERS", "0")), reason="make restarts")
def test_a_standby_on_tcp_takes_over_and_is_the_cluster_from_then_on(user, tmp_path):
    first, second, third = (f"127.0.0.1:{free_port()}" for _ in range(3))
    kept = ("--authority", str(tmp_path / "authority"))
    up = user.atoll(
        "up", "--islands", "2x1x2", "--listen", first, *kept, "--journal", str(tmp_path / "1"), *WITHOUT_XLA
    )
    up.check()
    controller = user.process("atoll.controller_process.controller_main")
    stands_by = ("up", "--standby", first, "--listen", second, *kept, "--journal", str(tmp_path / "2"))
    says = user.atoll(*stands_by, "--name", "spare").check()
    assert says.stdout == f"tls://{second}\n"
    assert f"standby spare follows the controller at tls://{first}" in says.stderr
    also = user.atoll(
        "up", "--standby", first, "--journal", str(tmp_path / "3"), *kept, "--name", "third", "--listen", third
    )
    assert f"this controller has a standby, at tls://{second}" in also.stderr

    status = ("status", "--json", "--name", "spare")

    def is_followed() -> bool:  # on a busy machine, a standby may be silent for so long that it must follow again
        standby = json.loads(user.atoll(*status).check().stdout)["standby"]["state"]
        shown = user.atoll("status", "--name", "default").check().stdout
        return standby == "following" and f"the standby at tls://{second} follows" in shown

    assert eventually(is_followed)
    controller.kill()

    def has_taken_over() -> bool:
        answer = user.atoll(*status)
        return answer.returncode == 0 and is_of_controller(answer.stdout)

    assert eventually(has_taken_over)
    report = json.loads(user.atoll(*status).stdout)
    assert [island["state"] for island in report["islands"]] == ["ready", "ready"]
    (lost,) = report["islands"][0]["hosts"]
    psutil.Process(lost["pid"]).kill()

    def is_back() -> bool:
        island = json.loads(user.atoll(*status).stdout)["islands"][0]
        return island["state"] == "ready" and island["hosts"][0]["pid"] != lost["pid"]

    assert eventually(is_back), "a worker that starts now finds the standby"
    assert f"cluster default continues at tls://{second}" in user.atoll("status", "--name", "default").stderr
    assert "the engine of cluster default runs on this machine" in user.atoll("up", "--islands", "1x1x1").stderr
    user.atoll("down", "--name", "spare").check()
    assert eventually(lambda: user.leftovers() == []), user.leftovers()


def test_a_long_command_finds_the_cluster_although_a_standby_listens_at_the_earlier_address(user, tmp_path):
    first, second = (f"127.0.0.1:{free_port()}" for _ in range(2))
    kept = ("--authority", str(tmp_path / "authority"))
    join_file = tmp_path / "join"
    up = ("up", "--islands", "1x1x1", "--listen", first, *kept, "--journal", str(tmp_path / "1"), *WITHOUT_XLA)
    user.atoll(*up, "--join-file", str(join_file)).check()
    controller = user.process("atoll.controller_process.controller_main")
    stands_by = ("up", "--standby", first, "--listen", second, *kept, "--journal", str(tmp_path / "2"))
    user.atoll(*stands_by, "--name", "spare").check()

    both = parse_address(f"tls://{first},{second}")
    source = ClusterSource(Target(both, join=replace(read_join(str(join_file)), address=both)), "")

    def is_followed() -> bool:
        try:
            report = json.loads(runner.run(source.report()))
        except ConnectError:  # the end of the former controller
            return False
        return bool(report["load"]["journal"]["standby"])

    with asyncio.Runner() as runner, closing(source):
        assert eventually(is_followed)  # the controller has issued the certificate of the connection
        controller.kill()
        status = ("status", "--json", "--name", "spare")
        assert eventually(lambda: is_of_controller(user.atoll(*status).check().stdout))
        returns = ("up", "--standby", second, "--listen", first, *kept, "--journal", str(tmp_path / "3"))
        user.atoll(*returns, "--name", "returned").check()
        assert eventually(is_followed, seconds=60.0, pause=0.5)
