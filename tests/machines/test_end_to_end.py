"""Run the tests of `tests/end_to_end` unmodified, with their children's hosts and client on separate machines."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.machines.bed import Machines
from tests.machines.clusters import ROOT, MachineCluster, environment
from tests.machines.plugin import long, make_machines  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), long]

FILES = ("arrays_at_home", "checkpoints", "colocated_python", "data_end_to_end")
# It writes a module that only exists on the client's machine.
LEFT_OUT = ("tests/end_to_end/test_colocated_python.py::test_modules_on_the_users_path_are_found",)
# Children that request one of these topologies get the standing cluster, whose island has two hosts.
ISLANDS = ("1x1x4", "1x2x2")


@pytest.fixture
def shared_directory() -> Iterator[Path]:
    """Return a directory that all machines can see. Machines have a private /tmp, and share all other directories."""
    directory = Path(tempfile.mkdtemp(prefix="atoll-shared-", dir="/var/tmp"))
    yield directory
    shutil.rmtree(directory)


def test_end_to_end_tests_pass_over_two_machines(
    make_machines: Callable[..., Machines],  # noqa: F811
    shared_directory: Path,
) -> None:
    with MachineCluster(make_machines(4), "1x2x2", Path("/tmp/compiled")) as cluster:
        for machine in ("m1", "m2"):
            cluster.host(machine)
        cluster.is_up()
        join = cluster.of_clients["ATOLL_JOIN"]
        given = environment(
            JAX_PLATFORMS="cpu",
            XLA_FLAGS="--xla_force_host_platform_device_count=8",
            **{f"ATOLL_TEST_CLUSTER_{islands.upper()}": join for islands in ISLANDS},
        )
        options = ["-q", "-p", "no:cacheprovider", f"--basetemp={shared_directory}/tests"]
        left_out = [f"--deselect={each}" for each in LEFT_OUT]
        files = [f"{ROOT}/tests/end_to_end/test_{each}.py" for each in FILES]
        command = [sys.executable, "-m", "pytest", f"--rootdir={ROOT}", f"--config-file={ROOT}/pyproject.toml"]
        tests = cluster.start("m3", [*command, *options, *left_out, *files], **given)
        assert tests.wait(280) == 0, tests.output
