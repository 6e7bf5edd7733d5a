"""Run the commands of the page "A shared cluster, step by step" on three machines."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import psutil
import pytest

from tests.machines.bed import Machines
from tests.machines.clusters import ROOT, Commands, Process, environment
from tests.machines.plugin import long, machines, make_machines  # noqa: F401
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]
PAGE = ROOT / "docs" / "operate" / "shared-cluster.md"
MACHINES = {"one": "m0", "two": "m1", "three": "m2"}


def blocks(language: str) -> list[str]:
    """Return the blocks of the page, with the names of the machines of the test."""
    found = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return [re.sub(r"\b(one|two|three)\b", lambda name: MACHINES[name[0]], each) for each in found]


def commands_of_atoll(machine: Process) -> list[psutil.Process]:
    """Return the processes of Atoll on the machine of this command, which still runs."""
    place = os.readlink(f"/proc/{machine.pid}/ns/pid")
    found = []
    for each in psutil.process_iter(["cmdline"]):
        try:
            is_here = os.readlink(f"/proc/{each.pid}/ns/pid") == place
        except OSError:
            continue
        if is_here and "atoll" in " ".join(each.info["cmdline"] or ()):
            found.append(each)
    return found


@long
def test_the_commands_of_the_page_make_a_cluster_that_outlives_its_first_machine(machines: Machines) -> None:  # noqa: F811
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def start(machine: str, command: str) -> Process:
        return commands.start(machine, ["bash", "-c", f"cd /tmp/home\n{command}"], PATH=path, HOME="/tmp/home")

    def shell(machine: str, command: str) -> str:
        ran = start(machine, command)
        assert ran.wait(120) == 0, ran.said
        return ran.said

    def output(machine: str, command: str) -> str:
        ran = start(machine, command)
        ran.wait(60)
        return ran.said

    def copy(name: str, machine: str) -> None:
        content = shell("m0", f"cat {name}")
        shell(machine, f"umask 077; cat > {name} <<'EOF'\n{content}\nEOF")

    _, tokens, up, host, standby, status, script, tenants, metrics, _, status_after, standby_after = blocks("sh")
    follows, result = blocks("text")
    with Commands(machines, environment(ATOLL_CACHE_DIR="off", ATOLL_STATE_DIR="")) as commands:
        shell("m0", tokens)
        first = start("m0", up)
        first.line(lambda line: "waiting for hosts" in line)
        for machine in ("m1", "m2"):
            copy("join-hosts", machine)
            start(machine, host)
        assert first.wait(120) == 0, first.said
        for name in ("authority", "tenants.toml", "research.token", "students.token", "service.token"):
            copy(name, "m1")
        shell("m1", standby)
        until(lambda: follows.strip() in shell("m0", status), pause=0.5)
        copy("join-research", "m2")
        assert result.strip() in shell("m2", script)
        assert {"research", "students", "service"} <= set(re.findall(r"\w+", shell("m0", tenants)))
        copy("join-default", "m2")
        serves = start("m2", metrics)
        _, url = serves.line(lambda line: line.startswith("http://"))
        read = f"{sys.executable} -c 'import urllib.request as u; print(u.urlopen(\"{url}\").read().decode())'"
        assert "atoll_standby_follows 1.0" in shell("m2", read)

        for each in commands_of_atoll(start("m0", "sleep 1000")):
            each.kill()
        until(lambda: "cluster standby at" in output("m1", status_after), pause=0.5)
        assert result.strip() in shell("m2", script)
        shell("m0", standby_after)
        until(lambda: "the standby at tls://m0:7000 follows" in shell("m1", status_after), pause=0.5)
        until(lambda: "atoll_standby_follows 1.0" in output("m2", read), pause=0.5)
        for machine in ("m0", "m1", "m2"):  # `one` has the join tokens that its standby has written
            assert "cluster " in shell(machine, f"{status_after.strip()} --join join-default")
