"""When the soak considers a controller to answer after a fault."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import msgspec

from atoll.controller_process.standby_status import StandbyState, StandbyStatus
from scripts.soak.controllers import KILLED, Controllers

CONTROLLER = [sys.executable, "-S", "-c", "input()", "atoll.controller_process.controller_main"]


class FakeCluster:
    """Answers `atoll status --json` with each of `answers` in turn."""

    def __init__(self, answers: list[dict[str, Any]]) -> None:
        self.answers = answers
        self.address = "m0:7000"
        self.up = SimpleNamespace(machine="m0", pid=os.getpid(), said="")

    def start(self, machine: str, command: list[str]) -> Any:
        return SimpleNamespace(said="", wait=lambda: 0)

    def atoll(self, *arguments: str, machine: str) -> Any:
        assert arguments == ("status", "--json")
        return SimpleNamespace(process=SimpleNamespace(returncode=0), said=json.dumps(self.answers.pop(0)))

    def forget(self, process: Any) -> None:
        pass


def test_a_standby_that_reports_its_state_does_not_answer_for_the_cluster() -> None:
    standby = msgspec.to_builtins(StandbyStatus("tls://m0:7000", StandbyState.LOST, 0.0))
    cluster: Any = FakeCluster([{"standby": standby}, {"standby": standby}, {"islands": []}])
    users: Any = SimpleNamespace(doom=lambda kind, which: None)
    with (
        subprocess.Popen([sys.executable, "-S", "-c", ""]) as other,
        subprocess.Popen(CONTROLLER, stdin=subprocess.PIPE) as process,
    ):
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # a zombie beside the controller
        controllers = Controllers(cluster, [], lambda machine, users: None)
        controllers.inject(KILLED, users, random.Random(1))
        assert process.wait(30) < 0, "the fault was injected"
    assert cluster.answers == []
    assert len(controllers.seconds[KILLED]) == 1
