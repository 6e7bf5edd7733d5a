"""Run the commands of the page "A shared cluster, step by step" on three machines."""

from __future__ import annotations

import contextlib
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


# Runs a command as systemd does, with `Restart=always` and `RestartPreventExitStatus=2 78`.
SERVICE = """\
while true; do
    setpriv --pdeathsig KILL {command}
    status=$?
    case $status in 2|78) exit $status;; esac
    sleep 5
done"""


def named(text: str) -> str:
    """Return text of the page with the names of the machines of the test."""
    return re.sub(r"\b(one|two|three)\b", lambda name: MACHINES[name[0]], text)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def variables(text: str) -> dict[str, str]:
    """Return the variables of a unit or a profile, with directories of the test."""
    directories = {"/var/lib/atoll": "/tmp/home", "/run/": "/tmp/run-", "/var/cache/atoll": "/tmp/cache"}
    found = dict(re.findall(r"\b((?:ATOLL|XDG)_\w+)=(\S+)", text))
    for there, here in directories.items():
        found = {key: value.replace(there, here) for key, value in found.items()}
    return found


def service(unit: str) -> str:
    """Return the command of a unit, in a loop that starts it again."""
    (command,) = re.findall(r"^ExecStart=\S+/(atoll (?:.*\\\n)*.*)$", unit, re.MULTILINE)
    return f"mkdir -p {variables(unit)['XDG_RUNTIME_DIR']}\n" + SERVICE.format(command=named(command))


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
def test_the_page_makes_a_cluster_of_services_that_outlives_its_first_machine(machines: Machines) -> None:  # noqa: F811
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def start(machine: str, command: str, **more: str) -> Process:
        own = {**profile, **more}
        return commands.start(machine, ["bash", "-c", f"cd /tmp/home\n{command}"], PATH=path, HOME="/tmp/home", **own)

    def shell(machine: str, command: str, **more: str) -> str:
        ran = start(machine, named(command), **more)
        assert ran.wait(120) == 0, ran.output
        return ran.output

    def output(machine: str, command: str) -> str:
        ran = start(machine, named(command))
        ran.wait(60)
        return ran.output

    def copy(name: str, machine: str) -> None:
        content = shell("m0", f"cat {name}")
        shell(machine, f"umask 077; cat > {name} <<'EOF'\n{content}\nEOF")

    install, _, tokens, up, host, standby, status, script, tenants, metrics, _, _, status_after, exchange = blocks("sh")
    follows, result = blocks("text")
    units = {name: each for each in blocks("ini") for name in re.findall(r"/system/(\S+)\.service", each)}
    profile = variables(install)
    read = f"{sys.executable} -c 'import urllib.request as u; print(u.urlopen(\"{{}}\").read().decode())'"
    with Commands(machines, environment()) as commands:
        shell("m0", tokens)
        first = start("m0", named(up))
        first.line(lambda line: "waiting for hosts" in line)
        by_hand = []
        for machine in ("m1", "m2"):
            copy("join-hosts", machine)
            by_hand.append(start(machine, f"exec {host}"))
        assert first.wait(120) == 0, first.output
        for name in ("authority", "tenants.toml", "research.token", "students.token", "service.token"):
            copy(name, "m1")
        shell("m1", standby)
        until(lambda: named(follows).strip() in shell("m0", status), pause=0.5)
        copy("join-research", "m2")
        assert result.strip() in shell("m2", script)
        assert {"research", "students", "service"} <= set(re.findall(r"\w+", shell("m0", tenants)))
        copy("join-default", "m2")
        by_hand.append(start("m2", f"exec {metrics}"))
        _, url = by_hand[-1].line(lambda line: line.startswith("http://"))
        assert "atoll_standby_follows 1.0" in shell("m2", read.format(url))
        before = shell("m0", "cat key | md5sum; cat join-research")

        shell("m0", "atoll down")
        for each in by_hand:
            psutil.Process(each.pid).terminate()
            each.wait(60)
        places = (("m1", "standby"), ("m2", "metrics"), ("m1", "host"), ("m2", "host"))
        start("m0", service(units["atoll"]), **variables(units["atoll"]))
        for machine, name in places:
            start(machine, service(units[f"atoll-{name}"]), **variables(units[f"atoll-{name}"]))
        until(lambda: named(follows).strip() in output("m0", status), pause=0.5)
        assert shell("m0", "cat key | md5sum; cat join-research") == before
        assert result.strip() in shell("m2", script)
        assert "research" in shell("m0", "atoll usage")  # by the commands before the services
        until(lambda: "atoll_standby_follows 1.0" in output("m2", read.format(url)), pause=0.5)

        for each in commands_of_atoll(start("m0", "sleep 1000")):
            with contextlib.suppress(psutil.NoSuchProcess):  # its parent was killed before
                each.kill()
        until(lambda: "cluster standby at" in output("m1", status_after), pause=0.5)
        assert result.strip() in shell("m2", script)
        (edit,) = re.findall(r"^sed (.*?) atoll-standby\.service", exchange, re.DOTALL | re.MULTILINE)
        shell("m0", f"cat > unit <<'EOF'\n{units['atoll-standby']}EOF")
        exchanged = shell("m0", f"sed {edit} unit")
        start("m0", service(exchanged), **variables(exchanged))
        until(lambda: "the standby at tls://m0:7000 follows" in output("m1", status_after), pause=0.5)
        until(lambda: "atoll_standby_follows 1.0" in output("m2", read.format(url)), pause=0.5)
        for machine in ("m0", "m1", "m2"):  # `one` has the join tokens that its standby has written
            assert "cluster " in shell(machine, f"{status_after.strip()} --join join-default")
