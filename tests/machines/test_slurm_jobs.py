"""Tests that Slurm can run the batch scripts of `atoll slurm`: `make slurm`.

slurmctld runs on m0, and slurmd on all machines. All use one munged, since the machines share all of the file system
except /tmp. The packages are slurm-wlm and munge of Debian.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.machines.bed import Machines
from tests.machines.clusters import ATOLL, Commands, environment
from tests.machines.plugin import make_machines  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MACHINES = 3
CONFIGURATION = """\
ClusterName=test
SlurmctldHost=m0
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
SlurmdTimeout=10
SchedulerParameters=batch_sched_delay=0,sched_interval=2
NodeName=m[0-{last}] CPUs=4 RealMemory=2000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
SUM = "import jax, jax.numpy as jnp; print(len(jax.devices()), jnp.arange(4).sum())"


class Slurm(Commands):
    """Slurm on simulated machines, with its files in a directory that all of them can see."""

    def __init__(self, bed: Machines) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="atoll-slurm-", dir="/var/tmp"))
        own = {"SLURM_CONF": str(self.directory / "slurm.conf"), "ATOLL_CACHE_DIR": "off"}
        own["PATH"] = f"{self.directory}:{os.environ['PATH']}:/usr/sbin"
        super().__init__(bed, environment(**own))
        (self.directory / "slurm.conf").write_text(CONFIGURATION.format(directory=self.directory, last=MACHINES - 1))
        command = " ".join(map(shlex.quote, ATOLL))
        (self.directory / "atoll").write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (self.directory / "atoll").chmod(0o755)

    def begin(self) -> None:
        """Start the daemons, and wait until all nodes are idle."""
        key = self.directory / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        paths = {"socket": "munge.socket", "pid-file": "munge.pid", "seed-file": "munge.seed", "log-file": "munge.log"}
        files = [f"--{option}={self.directory / name}" for option, name in paths.items()]
        self.start("m0", ["munged", "--foreground", "--force", f"--key-file={key}", *files])
        eventually(lambda: (self.directory / "munge.socket").exists(), "munged listens")
        (self.directory / "state").mkdir()
        self.start("m0", ["slurmctld", "-D", "-i"])
        for name in self.bed.names:
            self.start(name, ["slurmd", "-D", "-N", name])
        eventually(lambda: self.output("m0", "sinfo", "-h", "-o", "%t %D") == f"idle {MACHINES}", "all nodes are idle")

    def output(self, machine: str, *command: str) -> str:
        process = self.start(machine, list(command))
        process.wait()
        self.forget(process)
        return process.output

    def submit(self, *arguments: str, script: str = "") -> Job:
        """Submit the script that `atoll slurm` prints for these arguments."""
        printed = self.output("m0", "atoll", "slurm", *arguments)
        number = len(list(self.directory.glob("job-*.sh")))
        path, output = self.directory / f"job-{number}.sh", self.directory / f"job-{number}.out"
        path.write_text(printed)
        files = ("--output", str(output), "--error", str(output.with_suffix(".err")))
        result = self.output("m0", "sbatch", "--parsable", *files, str(path))
        assert re.fullmatch(r"\d+", result), result
        return Job(self, int(result), output)

    def close(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)


class Job:
    """Submitted job."""

    def __init__(self, slurm: Slurm, number: int, output: Path) -> None:
        self._slurm = slurm
        self.number = number
        self._output = output

    @property
    def output(self) -> str:
        return self._output.read_text() if self._output.exists() else ""

    def field(self, name: str) -> str:
        shown = self._slurm.output("m0", "scontrol", "show", "job", str(self.number))
        found = re.search(rf"\b{name}=(\S+)", shown)
        return found[1] if found else ""

    def wait(self, seconds: float = 120.0) -> tuple[str, str]:
        """Wait until the job has ended. Return its state and exit status."""
        ended = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
        eventually(lambda: self.field("JobState") in ended, f"job {self.number} ends:\n{self.output}", seconds)
        return self.field("JobState"), self.field("ExitCode")

    def wait_for(self, text: str, seconds: float = 90.0) -> None:
        eventually(lambda: text in self.output, f"{text!r} in the output of job {self.number}", seconds)


def eventually(holds: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.3)


@pytest.fixture
def slurm(make_machines: Callable[..., Machines]) -> Iterator[Slurm]:  # noqa: F811
    missing = [each for each in ("slurmctld", "slurmd", "sbatch", "munged") if not has(each)]
    if not os.environ.get("ATOLL_TEST_SLURM"):
        pytest.skip("run these by `make slurm`")
    if missing:
        pytest.fail(f"{', '.join(missing)} are missing: apt-get install slurm-wlm munge")
    with Slurm(make_machines(MACHINES)) as made:
        try:
            made.begin()
            yield made
        finally:
            print(
                "\n".join(
                    f"--- {each.machine}: {each.process.args!r}\n{each.output[-3000:]}" for each in made.processes
                )
            )
            made.close()


def has(command: str) -> bool:
    return shutil.which(command, path=f"{os.environ['PATH']}:/usr/sbin") is not None


def leftovers(slurm: Slurm) -> list[str]:
    """Return Atoll's processes on all machines."""
    found = (slurm.output(name, "pgrep", "-af", "atoll[.]") for name in slurm.bed.names)
    return [line for result in found for line in result.splitlines() if "pgrep" not in line]


def test_a_job_is_a_cluster_over_its_nodes_and_ends_as_its_command_does(slurm: Slurm) -> None:
    options = ("--islands", "1x2x2", "--sbatch=--time=5")
    job = slurm.submit(*options, "--", sys.executable, "-c", SUM)
    assert job.wait() == ("COMPLETED", "0:0"), job.output
    assert job.output.splitlines()[-1] == "4 6"
    failed = slurm.submit(*options, "--", sys.executable, "-c", "raise SystemExit(7)")
    assert failed.wait() == ("FAILED", "7:0"), failed.output
    eventually(lambda: leftovers(slurm) == [], "nothing is left")


def test_a_job_ends_if_its_command_ends_before_the_hosts_have_started(slurm: Slurm) -> None:
    for number in range(3):
        job = slurm.submit("--islands", "1x1x1", "--", "bash", "-c", f"sleep 0.{number}; exit 7")
        assert job.wait() == ("FAILED", "7:0"), job.output
    eventually(lambda: leftovers(slurm) == [], "nothing is left")


def test_two_islands_on_three_nodes_and_a_second_job_at_the_same_time(slurm: Slurm) -> None:
    code = "import time, jax; print([d.slice_index for d in jax.devices()], flush=True); time.sleep(5)"
    first = slurm.submit("--islands", "2x1x2", "--", sys.executable, "-c", code)
    second = slurm.submit("--islands", "1x1x2", "--", sys.executable, "-c", SUM)
    assert second.wait() == ("COMPLETED", "0:0"), second.output
    assert first.wait() == ("COMPLETED", "0:0"), first.output
    assert "[0, 0, 1, 1]" in first.output
    eventually(lambda: leftovers(slurm) == [], "nothing is left")


SAVES = """
trap 'echo saved; exit 3' TERM
if [ "${SLURM_RESTART_COUNT:-0}" = 1 ]; then echo continued; exit 0; fi
echo began
while :; do sleep 0.1; done
"""


def test_before_the_time_limit_the_command_saves_and_the_job_runs_again(slurm: Slurm) -> None:
    options = ("--islands", "1x1x1", "--requeue", "--notice", "140", "--sbatch=--time=3")
    job = slurm.submit(*options, "--", "bash", "-c", SAVES)
    job.wait_for("saved")
    job.wait_for("continued", 240)  # Slurm starts a requeued job two minutes later
    assert job.wait() == ("COMPLETED", "0:0"), job.output
    assert job.output.index("began") < job.output.index("saved") < job.output.index("continued")
    assert job.field("Restarts") == "1"
    eventually(lambda: leftovers(slurm) == [], "nothing is left")


def test_a_controller_that_is_killed_continues_from_the_journal_of_the_job(slurm: Slurm) -> None:
    journals = slurm.directory / "journals"
    code = """if True:
        import time, jax, jax.numpy as jnp
        x = jnp.zeros(4)
        add = jax.jit(lambda x: x + 1)
        for step in range(40):
            x = add(x)
            print("step", float(x[0]), flush=True)
            time.sleep(0.25)
    """
    job = slurm.submit("--islands", "1x2x1", "--journal", str(journals), "--", sys.executable, "-c", code)
    job.wait_for("step 5.0")
    assert slurm.output("m0", "pkill", "-KILL", "-f", "controller_process[.]controller_main") == ""
    assert job.wait() == ("COMPLETED", "0:0"), job.output
    assert "step 40.0" in job.output
    assert list(journals.iterdir()) == []


def test_a_job_that_is_cancelled_leaves_nothing(slurm: Slurm) -> None:
    job = slurm.submit("--islands", "1x2x1", "--", sys.executable, "-c", SUM + "; import time; time.sleep(300)")
    job.wait_for("2 6")
    slurm.output("m0", "scancel", str(job.number))
    assert job.wait()[0] == "CANCELLED", job.output
    eventually(lambda: leftovers(slurm) == [], "nothing is left")
