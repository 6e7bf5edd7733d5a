"""Tests of the units for systemd on the pages for operators."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

OPERATE = Path(__file__).parents[2] / "docs" / "operate"
PROGRAM = "/opt/atoll-0.2.0/bin/atoll"
# The directories that systemd makes for a unit, writable by its user.
_MADE = {"StateDirectory": "/var/lib/", "CacheDirectory": "/var/cache/", "RuntimeDirectory": "/run/"}
_NEEDED = {"ATOLL_STATE_DIR", "ATOLL_CACHE_DIR", "XDG_RUNTIME_DIR"}
ANALYZE = shutil.which("systemd-analyze")


def units(page: str) -> dict[str, str]:
    """Return the text of each unit on a page, by its name."""
    blocks = re.findall(r"^```ini\n(.*?)^```", (OPERATE / page).read_text(), re.M | re.S)
    return {name: block for block in blocks for name in re.findall(r"# /etc/systemd/system/(\S+\.service)", block)}


ALL = {page.name: units(page.name) for page in sorted(OPERATE.glob("*.md")) if units(page.name)}
SERVICES = [(page, name) for page, found in ALL.items() for name in found if page != "monitoring.md"]


def values(unit: str, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", unit, re.MULTILINE)


def variables(unit: str) -> dict[str, str]:
    return dict(each.split("=", 1) for line in values(unit, "Environment") for each in shlex.split(line))


def arguments(command: str) -> list[str]:
    return shlex.split(command.replace("\\\n", " "))


def command_of(unit: str) -> list[str]:
    (command,) = re.findall(r"^ExecStart=((?:.*\\\n)*.*)$", unit, re.MULTILINE)
    return arguments(command)


def test_the_pages_have_units_for_each_kind_of_process() -> None:
    assert {page: set(found) for page, found in ALL.items()} == {
        "clusters.md": {"atoll.service", "atoll-host.service"},
        "monitoring.md": {"atoll-metrics.service"},
        "shared-cluster.md": {
            "atoll.service",
            "atoll-host.service",
            "atoll-standby.service",
            "atoll-metrics.service",
        },
    }


@pytest.mark.parametrize(("page", "name"), SERVICES)
def test_a_unit_has_writable_directories_for_all_that_atoll_writes(page: str, name: str) -> None:
    """The user `atoll` may have no home directory."""
    unit = ALL[page][name]
    made = {f"{root}{each}" for key, root in _MADE.items() for each in values(unit, key)}
    environment = variables(unit)
    assert {key: environment.get(key) for key in _NEEDED if environment.get(key) not in made} == {}


@pytest.mark.parametrize("name", ["atoll.service", "atoll-host.service"])
def test_units_of_two_pages_differ_only_in_their_commands(name: str) -> None:
    own = re.compile(r"^(?:# |ExecStart=|WorkingDirectory=|    ).*\n", re.MULTILINE)
    ours, theirs = (own.sub("", ALL[page][name]) for page in ("shared-cluster.md", "clusters.md"))
    assert ours == theirs


def test_the_services_of_the_shared_cluster_run_the_commands_of_the_page() -> None:
    page = (OPERATE / "shared-cluster.md").read_text()
    blocks = re.findall(r"^```sh\n((?:atoll (?:up|host|metrics) )(?:.*\n)*?)```", page, re.MULTILINE)
    by_hand = sorted(arguments(each) for each in blocks)
    services = [command_of(unit) for unit in ALL["shared-cluster.md"].values()]
    assert {command[0] for command in services} == {PROGRAM}
    assert (
        sorted(["atoll", *(each for each in command[1:] if each != "--foreground")] for command in services) == by_hand
    )


def test_the_services_of_the_shared_cluster_have_the_variables_of_its_shells() -> None:
    """Otherwise a service would have another key, other usage records and another cache."""
    page = (OPERATE / "shared-cluster.md").read_text()
    (profile,) = re.findall(r"\.bash_profile <<'EOF'\n(.*?)^EOF", page, re.M | re.S)
    shells = dict(each.split("=", 1) for each in shlex.split(profile) if "=" in each)
    for name, unit in ALL["shared-cluster.md"].items():
        different = {key for key, value in variables(unit).items() if shells[key] != value}
        assert different <= ({"XDG_RUNTIME_DIR"} if name == "atoll-host.service" else set()), name


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("page", ALL)
def test_systemd_accepts_the_units(page: str, tmp_path: Path) -> None:
    """The commands are replaced by one that exists, because systemd looks for their files."""
    assert ANALYZE is not None
    for name, unit in ALL[page].items():
        (tmp_path / name).write_text(unit.replace(PROGRAM, "/bin/true"))
    files = [str(tmp_path / name) for name in ALL[page]]
    ran = subprocess.run([ANALYZE, "verify", *files], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout + ran.stderr) == (0, "")
