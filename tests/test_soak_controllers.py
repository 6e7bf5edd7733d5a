"""When the soak considers a controller to answer after a fault, and which engine it considers to be the cluster's."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from atoll.controller_process.standby_status import StandbyState, StandbyStatus
from scripts.soak.controllers import KILLED, TAKEOVER_KILLED, Controllers
from scripts.soak.users import SoakError

# A process with a controller and an engine, like `atoll up`, which prints their pids, and ends them at its own end.
UP = """
import subprocess, sys
modules = "atoll.controller_process.controller_main", "atoll.engines.engine_main"
own = [subprocess.Popen([sys.executable, "-S", "-c", "input()", each], stdin=subprocess.PIPE) for each in modules]
print(*(each.pid for each in own), flush=True)
sys.stdin.readline()
for each in own:
    each.kill()
    each.wait()
"""


class Up:
    """An `atoll up` on a machine."""

    def __init__(self, machine: str) -> None:
        self.machine = machine
        self.output = "what it said"
        command = [sys.executable, "-S", "-c", UP]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.controller, self.engine = map(int, self.process.stdout.readline().split())

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self, holds: Any, seconds: float) -> None:
        pass

    def wait(self, seconds: float = 0.5) -> int:
        return self.process.wait(min(seconds, 0.5))

    def end(self) -> None:
        with self.process:
            if self.process.poll() is None:
                self.process.communicate("\n", timeout=30)


class FakeCluster:
    """Three machines. `atoll status --json` answers with each of `answers` in turn."""

    def __init__(self) -> None:
        self.answers: list[dict[str, Any]] = []
        self.address = "m0:7000"
        self.ups = [Up("m0")]
        names = ["m0", "m1", "m2"]
        self.bed = SimpleNamespace(names=names, address=lambda name: f"10.0.0.{name[1:]}", heal=lambda: None)

    @property
    def up(self) -> Any:
        return self.ups[0]

    def start(self, machine: str, command: list[str], **more: str) -> Any:
        if "--standby" in command:
            self.ups.append(Up(machine))
            return self.ups[-1]
        return SimpleNamespace(output="", wait=lambda: 0)

    def atoll(self, *arguments: str, machine: str) -> Any:
        assert arguments == ("status", "--json")
        return SimpleNamespace(process=SimpleNamespace(returncode=0), output=json.dumps(self.answers.pop(0)))

    def forget(self, process: Any) -> None:
        pass


@pytest.fixture
def cluster() -> Iterator[Any]:
    made = FakeCluster()
    yield made
    for each in made.ups:
        each.end()


USERS: Any = SimpleNamespace(doom=lambda kind, which: None)


def controllers_of(cluster: Any) -> Controllers:
    return Controllers(cluster, ["m0", "m1"], lambda machine, users: None)


def report(up: Up | None) -> dict[str, Any]:
    """Return a report of a cluster whose engine is that of an `atoll up`."""
    return {"engine": None if up is None else {"pid": up.engine, "machine": f"10.0.0.{up.machine[1:]}"}}


def take_over(cluster: Any) -> Controllers:
    """Return controllers after a standby on m1 has taken over, while the engine on m0 has its role."""
    controllers = controllers_of(cluster)
    cluster.answers = [report(cluster.up)]
    controllers.inject(TAKEOVER_KILLED, USERS, random.Random(1))
    assert controllers.machine == "m1"
    assert controllers.engine_machine == "m0"
    return controllers


def test_a_standby_that_reports_its_state_does_not_answer_for_the_cluster(cluster: Any) -> None:
    standby = msgspec.to_builtins(StandbyStatus("tls://m0:7000", StandbyState.LOST, 0.0))
    cluster.answers = [{"standby": standby}, {"standby": standby}, report(cluster.up)]
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as other:
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # a zombie beside the controller
        controllers = controllers_of(cluster)
        controllers.inject(KILLED, USERS, random.Random(1))
    assert cluster.answers == []
    assert len(controllers.seconds[KILLED]) == 1


def test_an_engine_goes_on_as_long_as_it_has_its_role(cluster: Any) -> None:
    controllers = take_over(cluster)
    controllers.await_superseded(lambda: report(cluster.up))
    for each in cluster.ups:
        each.end()
    assert controllers.ended(1.0) == []


def test_the_engine_is_the_one_that_the_cluster_reports(cluster: Any) -> None:
    controllers = take_over(cluster)
    first, standby = cluster.ups
    first.end()
    reports = [report(None), report(standby)]
    controllers.await_superseded(lambda: reports.pop(0))
    assert reports == []
    assert controllers.engine_machine == "m1"
    standby.end()
    assert controllers.ended(1.0) == []


def test_an_engine_without_its_role_and_without_the_controller_has_to_end(cluster: Any) -> None:
    controllers = take_over(cluster)
    with pytest.raises(SoakError, match="the engine on m0 has neither the role nor the controller"):
        controllers.await_superseded(lambda: report(cluster.ups[1]))


def test_a_standby_that_has_the_role_of_the_engine_goes_on_after_the_next_takeover(cluster: Any) -> None:
    controllers = take_over(cluster)
    first, standby = cluster.ups
    first.end()
    controllers.await_superseded(lambda: report(standby))
    cluster.answers = [report(standby)]
    controllers.inject(TAKEOVER_KILLED, USERS, random.Random(1))
    assert (controllers.machine, controllers.engine_machine) == ("m0", "m1")
    controllers.await_superseded(lambda: report(standby))
    assert standby.process.poll() is None


def test_an_engine_that_fails_at_the_end_is_left_over(cluster: Any) -> None:
    controllers = take_over(cluster)
    cluster.up.process.kill()
    cluster.ups[1].end()
    assert controllers.ended(1.0) == ["atoll up on m0 ended with status -9"]


def test_an_engine_that_the_soak_does_not_know_is_an_error(cluster: Any) -> None:
    with pytest.raises(SoakError, match="did not start the engine"):
        controllers_of(cluster).note({"engine": {"pid": 1, "machine": "m2"}})
