"""Tests of the units for systemd on the pages for operators."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[2] / "docs" / "operate").glob("*.md"))
# The directories that systemd makes for a unit, writable by its user.
_MADE = {"StateDirectory": "/var/lib/", "CacheDirectory": "/var/cache/", "RuntimeDirectory": "/run/"}
_NEEDED = {"ATOLL_STATE_DIR", "ATOLL_CACHE_DIR", "XDG_RUNTIME_DIR"}
ANALYZE = shutil.which("systemd-analyze")


def units() -> dict[str, str]:
    """Return the text of each unit, by its name."""
    blocks = [block for page in PAGES for block in re.findall(r"^```ini\n(.*?)^```", page.read_text(), re.M | re.S)]
    return {name: block for block in blocks for name in re.findall(r"# /etc/systemd/system/(\S+\.service)", block)}


def values(unit: str, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", unit, re.MULTILINE)


def test_the_pages_have_units_for_the_controller_the_hosts_and_the_metrics() -> None:
    assert units().keys() == {"atoll.service", "atoll-host.service", "atoll-metrics.service"}


@pytest.mark.parametrize("name", ["atoll.service", "atoll-host.service"])
def test_a_unit_has_writable_directories_for_all_that_atoll_writes(name: str) -> None:
    """The user `atoll` has no home directory."""
    unit = units()[name]
    made = {f"{root}{each}" for key, root in _MADE.items() for each in values(unit, key)}
    environment = dict(each.split("=", 1) for line in values(unit, "Environment") for each in shlex.split(line))
    assert {key: environment.get(key) for key in _NEEDED if environment.get(key) not in made} == {}


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    """The commands are replaced by one that exists, because systemd looks for their files."""
    assert ANALYZE is not None
    for name, unit in units().items():
        (tmp_path / name).write_text(unit.replace("/opt/atoll-0.2.0/bin/atoll", "/bin/true"))
    files = [str(tmp_path / name) for name in units()]
    ran = subprocess.run([ANALYZE, "verify", *files], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout + ran.stderr) == (0, "")
