"""Run the commands of the page "Several machines" on three machines."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.machines.bed import Machines
from tests.machines.clusters import ROOT, Commands, Process, environment
from tests.machines.plugin import long, machines, make_machines  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
PAGE = ROOT / "docs" / "start" / "several-machines.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def copy(commands: Commands, name: str, machine: str) -> None:
    """Copy a file of the home directory on m0 to that of another machine."""
    shown = commands.start("m0", ["cat", f"/tmp/home/{name}"])
    assert shown.wait() == 0, shown.output
    copied = commands.start(machine, ["bash", "-c", f"echo '{shown.output.strip()}' > /tmp/home/{name}"])
    assert copied.wait() == 0, copied.output


@long
def test_the_commands_of_the_page_print_what_it_shows(machines: Machines) -> None:  # noqa: F811
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def shell(machine: str, command: str) -> Process:
        return commands.start(machine, ["bash", "-c", f"cd /tmp/home\n{command}"], PATH=path, HOME="/tmp/home")

    up, host, script, down = blocks("sh")
    joined, is_up, result = blocks("text")
    with Commands(machines, environment(ATOLL_CACHE_DIR="off")) as commands:
        first = shell("m0", up)
        first.line(lambda line: "waiting for hosts" in line)
        hosts = []
        for machine in ("m0", "m1", "m2"):
            if machine != "m0":
                copy(commands, "join-hosts", machine)
            hosts.append(shell(machine, host))
        assert first.wait() == 0, first.output
        for line in is_up.splitlines():
            assert line.strip() in first.output
        copy(commands, "join", "m2")
        ran = shell("m2", script)
        assert ran.wait() == 0, ran.output
        assert result.strip() in ran.output
        assert shell("m0", down).wait() == 0
        assert [each.wait() for each in hosts] == [0, 0, 0]
        for line in joined.splitlines():
            assert any(line in each.output for each in hosts)
