"""Tests that the image's Dockerfile agrees with the manifests and with pyproject.toml.

`make image` builds and runs it.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from atoll.manifests.kubernetes import CACHE, RUN, STATE
from atoll.manifests.kubernetes_policies import USER_ID

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
EXTRAS = ("web", "metrics", "kubernetes", "ray")


def locked() -> dict[str, str]:
    pins = (line.partition("==") for line in (ROOT / "docker" / "requirements.lock").read_text().splitlines())
    return {re.sub("[-_.]+", "-", name).lower(): version for name, equals, version in pins if equals}


def test_the_last_stage_runs_as_the_user_of_the_manifests_in_their_directories():
    last = DOCKERFILE.rpartition("\nFROM ")[2]
    assert DOCKERFILE.count("\nFROM ") == 2
    assert f"USER {USER_ID}:{USER_ID}\n" in last
    assert f"--uid {USER_ID} " in last
    (directories,) = re.findall(r"install -d .*?0700 (.*)", last)
    assert set(directories.split()) == {STATE, CACHE, RUN}
    for variable, path in (("ATOLL_STATE_DIR", STATE), ("ATOLL_CACHE_DIR", CACHE), ("XDG_RUNTIME_DIR", RUN)):
        assert f"{variable}={path}" in last


def test_the_lock_has_a_version_of_each_package_that_atoll_needs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(each for extra in EXTRAS for each in project["optional-dependencies"][extra])]
    versions = locked()
    for requirement in map(Requirement, wanted):
        if requirement.name != "atoll":
            assert versions[re.sub("[-_.]+", "-", requirement.name).lower()] in requirement.specifier, requirement


def test_each_file_that_is_copied_is_in_the_context():
    ignored = (ROOT / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    copied = [line.split()[1:-1] for line in DOCKERFILE.splitlines() if re.match(r"COPY (?!--from)", line)]
    names = {name for some in copied for name in some}
    assert names == allowed
    assert all((ROOT / name).exists() for name in names)
