"""Tests of two machines that take turns as the controller: `atoll up --standby OTHER --continue
--leader-lease LEASE`.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.leadership.lease_record import JOURNAL, LeaseRecord
from atoll.operate.controller_pair import BeginRule
from tests.cluster_process import User, eventually, finish, first_line, free_port
from tests.leadership.lease_servers import FakeEtcd, decoded
from tests.thoroughness import TIMES, longer

# ---- conditions for a new cluster


def test_a_new_cluster_begins_at_once_if_there_is_none_to_continue():
    rule = BeginRule(60.0)
    assert rule.may_begin(0.0, None)
    assert rule.may_begin(0.0, LeaseRecord("", 3)), "`atoll down` has ended the cluster"


@pytest.mark.parametrize(
    "record", [LeaseRecord("one"), LeaseRecord("one", standby="tls://two:7000"), LeaseRecord("", standby=JOURNAL)]
)
def test_a_cluster_that_may_be_continued_is_not_replaced_until_nobody_has_done_so_for_long(record):
    rule = BeginRule(60.0)
    assert not rule.may_begin(100.0, record)
    assert not rule.may_begin(159.0, record)
    assert rule.may_begin(160.0, record)


def test_a_holder_that_renews_the_lease_is_never_replaced():
    rule = BeginRule(60.0)
    for seconds in range(0, 300, 2):
        assert not rule.may_begin(float(seconds), LeaseRecord("one", renewed=float(seconds)))


# ---- two commands


@pytest.fixture
def user(program_cache: Path) -> Iterator[User]:
    with tempfile.TemporaryDirectory(prefix="at-") as directory, User(Path(directory), program_cache) as someone:
        yield someone


@pytest.fixture
def etcd() -> Iterator[FakeEtcd]:
    server = FakeEtcd()
    with server.serving():
        yield server


LOSSES = 2 if TIMES > 1 else 1  # of controllers, one after the other
PAUSE = 0.3  # seconds between two questions for the state of a cluster, each of which starts a process


class Pair:
    """Commands of two machines, "one" and "two", on this machine."""

    def __init__(self, user: User, etcd: FakeEtcd, directory: Path) -> None:
        self.user = user
        self._etcd = etcd
        self._directory = directory
        self.addresses = {name: f"127.0.0.1:{free_port()}" for name in ("one", "two")}

    def start(self, name: str) -> subprocess.Popen[str]:
        (other,) = (address for key, address in self.addresses.items() if key != name)
        listen = ("--listen", self.addresses[name], "--advertise", self.addresses[name])
        kept = ("--authority", str(self._directory / "authority"), "--journal", str(self._directory / name))
        lease = ("--leader-lease", f"etcd://{self._etcd.address}/atoll")
        return self.user.start_atoll(
            *("up", "--foreground", "--engine", "hosts", "--islands", "1x1x2", "--name", name, "--continue"),
            *("--standby", other, *listen, *kept, *lease),
        )

    def host(self, name: str) -> subprocess.Popen[str]:
        """Start a host with the hosts' join token of the cluster that `name` serves."""
        file = self.user.runtime / "atoll" / name / "join-hosts"
        assert eventually(file.exists)
        return self.user.start_atoll("host", "--join", file.read_text(), "--stay")

    def status(self, name: str) -> dict[str, Any]:
        output = self.user.atoll("status", "--json", "--name", name)
        return json.loads(output.stdout) if output.returncode == 0 else {}

    def serves(self, name: str) -> bool:
        return [each["state"] for each in self.status(name).get("islands", [])] == ["ready"]

    def follows(self, name: str) -> bool:
        return bool(self.status(name).get("standby", {}).get("state") == "following")

    @property
    def serving(self) -> str:
        """Return the machine that serves while the other one follows, or ""."""
        for one, other in (("one", "two"), ("two", "one")):
            if self.serves(one) and self.follows(other):
                return one
        return ""

    @property
    def record(self) -> LeaseRecord:
        ((_, value),) = self._etcd.values.values()
        return LeaseRecord(**decoded(value))


SCRIPT = """
    import os, time
    import jax, jax.numpy as jnp
    x = jax.jit(lambda x: x + 1)(jnp.zeros(4))
    for number in range(3):
        print(float(x.sum()), flush=True)
        while not os.path.exists(os.path.join(os.environ["CUES"], str(number))):
            time.sleep(0.05)
        x = jax.jit(lambda x: x + 1)(x)
    print(float(x.sum()), flush=True)
"""


@pytest.mark.slow
def test_each_of_two_machines_serves_the_cluster_when_the_other_one_leaves_or_is_lost(user, etcd, tmp_path):
    pair = Pair(user, etcd, tmp_path)
    one = pair.start("one")
    host = pair.host("one")
    join = user.runtime / "atoll" / "one" / "join"
    assert first_line(one) == f"tls://{pair.addresses['one']},{pair.addresses['two']}"
    user.env["ATOLL_JOIN"] = join.read_text().strip()
    two = pair.start("two")
    first_line(two)
    assert eventually(lambda: pair.follows("two"), pause=PAUSE)
    script = start_script(user, tmp_path)
    assert first_line(script) == "4.0"

    one.terminate()  # like a drained node
    assert finish(one).returncode == 0
    assert eventually(lambda: pair.serves("two"), pause=PAUSE)
    assert pair.record.transitions == 1
    (tmp_path / "0").touch()
    assert first_line(script) == "8.0"

    one = pair.start("one")
    first_line(one)
    assert eventually(lambda: pair.follows("one"), pause=PAUSE)
    for process, command in user.commands().items():
        if str(tmp_path / "two") in command:  # like a lost node
            process.kill()
    two.communicate()
    assert eventually(lambda: pair.serves("one"), pause=PAUSE)
    assert pair.record.transitions == 2
    (tmp_path / "1").touch()
    assert first_line(script) == "12.0"

    two = pair.start("two")
    first_line(two)
    assert eventually(lambda: pair.follows("two"), pause=PAUSE)
    (tmp_path / "2").touch()
    assert finish(script).check().stdout == "16.0\n"
    user.atoll("down", "--name", "one").check()
    assert finish(one).returncode == finish(two).returncode == 0
    assert pair.record.holder == pair.record.standby == ""
    host.send_signal(signal.SIGTERM)
    finish(host)
    assert eventually(lambda: user.leftovers() == []), user.leftovers()


@pytest.mark.thorough
@longer
@pytest.mark.slow
def test_a_machine_that_loses_only_its_controller_follows_the_other_one(user, etcd, tmp_path):
    pair = Pair(user, etcd, tmp_path)
    commands = {"one": pair.start("one")}
    host = pair.host("one")
    first_line(commands["one"])
    user.env["ATOLL_JOIN"] = (user.runtime / "atoll" / "one" / "join").read_text().strip()
    commands["two"] = pair.start("two")
    first_line(commands["two"])
    assert eventually(lambda: pair.follows("two"), pause=PAUSE)
    script = start_script(user, tmp_path)
    assert first_line(script) == "4.0"

    serving = "one"
    for cue in range(LOSSES):
        for process, command in user.commands().items():
            if "controller_main" in command and str(tmp_path / serving) in command:
                process.kill()
        assert eventually(lambda: pair.serving, pause=PAUSE)
        serving = pair.serving
        (tmp_path / str(cue)).touch()
        assert first_line(script) == f"{8.0 + 4 * cue}"
    for cue in range(LOSSES, 3):
        (tmp_path / str(cue)).touch()
    assert finish(script).check().stdout.splitlines()[-1] == "16.0"
    user.atoll("down", "--name", serving).check()
    assert finish(commands["one"]).returncode == finish(commands["two"]).returncode == 0
    host.send_signal(signal.SIGTERM)
    finish(host)
    assert eventually(lambda: user.leftovers() == []), user.leftovers()


def start_script(user: User, cues: Path) -> subprocess.Popen[str]:
    code = textwrap.dedent(SCRIPT)
    return user.start(sys.executable, "-u", "-c", code, JAX_PLATFORMS="atoll", CUES=str(cues))


@pytest.mark.thorough
@pytest.mark.slow
def test_a_cluster_that_both_machines_leave_continues_from_the_journal_of_the_last_one(user, etcd, tmp_path):
    pair = Pair(user, etcd, tmp_path)
    one = pair.start("one")
    host = pair.host("one")
    first_line(one)
    user.env["ATOLL_JOIN"] = (user.runtime / "atoll" / "one" / "join").read_text().strip()
    script = start_script(user, tmp_path)
    assert first_line(script) == "4.0"
    one.terminate()
    finish(one)
    assert (pair.record.holder, pair.record.standby) == ("", JOURNAL)
    two = pair.start("two")  # it has no copy, and must not start another cluster
    one = pair.start("one")
    first_line(one)
    assert eventually(lambda: pair.serves("one"), pause=PAUSE)
    (tmp_path / "0").touch()
    assert first_line(script) == "8.0"
    first_line(two)
    assert eventually(lambda: pair.follows("two"), pause=PAUSE)
    script.kill()
    script.communicate()
    user.atoll("down", "--name", "one").check()
    finish(one)
    finish(two)
    host.terminate()
    finish(host)
