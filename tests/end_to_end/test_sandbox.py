"""Tests that a tenant's Python on the hosts sees what the tenant was granted, and nothing of the cluster or of other
tenants.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import colocated_python

from atoll.cluster.tenant_settings import TenantSettings, token_hash
from tests.end_to_end.remote_python import RemoteError, RemotePython, StartPython
from tests.end_to_end.standing_cluster import StartCluster
from tests.end_to_end.test_checkpoints import restore, save, write_into


class Shared:
    """Start a cluster of the tenants ana and ben, with a journal, a compile cache, and directories that ana
    is granted.
    """

    def __init__(self, base: Path, start_cluster: StartCluster) -> None:
        self.base = base
        for name in ("data", "checkpoints", "cache", "home"):
            (base / name).mkdir()
        (base / "data" / "rows").write_text("rows of ana")
        (base / "home" / "ben.token").write_text(self.token("ben"))
        grants: dict[str, Any] = {"read": (str(base / "data"),), "write": (str(base / "checkpoints"),)}
        self.cluster = start_cluster(
            {
                "ATOLL_TEST_EXECUTED": "python_main",
                "ATOLL_CACHE_DIR": str(base / "cache"),
                "XDG_STATE_HOME": str(base / "state"),
            },
            islands="1x1x2",
            token="the token of the cluster's operator",
            journal=str(base / "journal"),
            grace_seconds=60.0,
            tenants=(
                TenantSettings("ana", token_hash(self.token("ana")), **grants),
                TenantSettings("ben", token_hash(self.token("ben"))),
            ),
        )

    @staticmethod
    def token(name: str) -> str:
        return f"the token of tenant {name}, 32 bytes"

    def client(self, start_python: StartPython, name: str) -> RemotePython:
        return start_python(ATOLL_ADDRESS=self.cluster.address, ATOLL_TOKEN=self.token(name))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, start_cluster: StartCluster) -> Shared:
    return Shared(tmp_path_factory.mktemp("shared").resolve(), start_cluster)


@pytest.fixture(scope="module")
def ana(start_python: StartPython, shared: Shared) -> RemotePython:
    return shared.client(start_python, "ana")


# ---- functions called in the children


def readable_for_python(places: list[str]) -> list[str]:
    """Return the files in these directories, or with these names, that Python on the hosts can read."""

    @colocated_python.colocated_python
    def look(x: jax.Array) -> jax.Array:
        import glob
        import os

        found = []
        for pattern in places:
            for place in glob.glob(pattern):
                inside = [os.path.join(root, name) for root, _, names in os.walk(place) for name in names]
                for path in inside if os.path.isdir(place) else [place]:
                    try:
                        with open(path, "rb") as file:
                            file.read(1)
                    except OSError:
                        continue
                    found.append(path)
        raise ValueError(f"found {found!r} there")

    try:
        look(on_host()).block_until_ready()
    except Exception as error:
        output = re.search(r"ValueError: found (\[.*?\]) there", str(error), re.DOTALL)
        if output is None:
            raise
        return list(ast.literal_eval(output[1]))
    raise AssertionError("it did not raise")


def on_host() -> jax.Array:
    cpus = colocated_python.colocated_cpu_devices(jax.devices()[:1])
    return jax.device_put(np.zeros(1), cpus[0])


def open_for_python(path: str, mode: str) -> None:
    @colocated_python.colocated_python
    def use(x: jax.Array) -> jax.Array:
        with open(path, mode) as file:
            if mode == "w":
                file.write("written")
            else:
                file.read()
        return x

    use(on_host()).block_until_ready()


# ---- the tests


def test_nothing_of_the_cluster_and_of_other_tenants_can_be_read(
    start_python: StartPython, shared: Shared, ana: RemotePython
) -> None:
    ben = shared.client(start_python, "ben")
    ben.call(readable_for_python, [])  # so that his process exists
    places = [str(shared.base / name) for name in ("journal", "cache", "home", "state")]
    places += [str(shared.cluster.directory), str(shared.cluster.directory.parent / "log")]
    assert any((shared.base / "journal").iterdir())
    read = ana.call(readable_for_python, [*places, "/proc/[0-9]*/environ", str(Path.home() / ".[a-z]*rc")])
    own = re.compile(r"/proc/(1|self)/environ")
    assert [each for each in read if not own.fullmatch(each)] == []


def test_granted_directories_are_used_as_they_are_granted(shared: Shared, ana: RemotePython) -> None:
    ana.call(open_for_python, str(shared.base / "data" / "rows"), "r")
    ana.call(open_for_python, str(shared.base / "checkpoints" / "note"), "w")
    note = shared.base / "checkpoints" / "note"
    assert note.read_text() == "written"
    assert note.stat().st_uid == (shared.base / "checkpoints").stat().st_uid


def test_an_error_says_which_setting_grants_what_is_missing(shared: Shared, ana: RemotePython) -> None:
    with pytest.raises(RemoteError, match=r"`write = \[\.\.\.\]` in the file of tenants"):
        ana.call(open_for_python, str(shared.base / "data" / "new"), "w")
    with pytest.raises(RemoteError, match=r"--python-read DIR"):
        ana.call(open_for_python, str(shared.base / "home" / "ben.token"), "r")


@pytest.mark.parametrize("way", ["colocated", "persistence"])
def test_checkpoints_go_to_a_granted_directory(shared: Shared, ana: RemotePython, way: str) -> None:
    directory, options = str(shared.base / "checkpoints" / way), {"use_ocdbt": way == "colocated"}
    ana.call(save, way, directory, options)
    assert ana.call(restore, way, directory, options) == []


def test_a_checkpoint_elsewhere_names_the_setting(shared: Shared, ana: RemotePython) -> None:
    with pytest.raises(RemoteError, match="--python-write DIR"):
        ana.call(write_into, str(shared.base / "home" / "checkpoint"))


def test_status_shows_the_mechanisms_of_each_host(shared: Shared) -> None:
    command = [sys.executable, "-m", "atoll.operate.command", "status", "--address", shared.cluster.address]
    environment = {"ATOLL_TOKEN": shared.token("ana"), "PATH": "/usr/bin"}
    output = subprocess.run([*command, "--security"], env=environment, capture_output=True, text=True, check=True)
    assert "those granted" in output.stdout
    output = subprocess.run([*command, "--json"], env=environment, capture_output=True, text=True, check=True)
    report = json.loads(output.stdout)
    assert report["python"]["write"] == [str(shared.base / "checkpoints")]
    assert report["islands"][0]["hosts"][0]["sandbox"]["namespaces"] != "none"
