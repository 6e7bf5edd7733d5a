"""Tests of a batch script for Slurm, run by bash with a stand-in for srun."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster_process import COMMAND, User, finish, first_line
from tests.forked_process import with_forked_children

# Runs the requested number of tasks, each with the number that Slurm assigns.
SRUN = """#!/bin/bash
for argument; do
  shift
  case $argument in --ntasks=*) tasks=${argument#*=} ;; --*) ;; *) set -- "$argument" "$@"; break ;; esac
done
stopped=
trap 'stopped=1' TERM
for ((i = 0; i < tasks; i++)); do
  SLURM_PROCID=$i "$@" &
done
# Bash can lose a signal that reaches a task before its program runs.
while [ -n "$(jobs -pr)" ]; do
  [ -z "$stopped" ] || kill $(jobs -pr) 2>/dev/null
  sleep 0.05
done
"""

# Ignores the first SIGTERM.
DEAF_SRUN = """#!/bin/bash
signals=0
trap 'signals=$((signals + 1)); [ $signals -gt 1 ] || echo "srun ignores SIGTERM" >>"$NOTES"' TERM
echo "srun is deaf" >>"$NOTES"
while [ $signals -lt 2 ]; do sleep 0.05; done
"""


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


# Records its arguments. `atoll up` ends if its port is in use, and otherwise writes its files. Both run until SIGTERM.
ATOLL = """#!/bin/bash
echo "$*" >>"$NOTES"
if [ "$1" = up ]; then
  while [ $# -gt 1 ]; do
    case $1 in --listen) port=${2##*:} ;; --join-file) clients=$2 ;; --host-join-file) hosts=$2 ;; esac
    shift
  done
  [ "$port" != "$TAKEN" ] || exit 1
  echo client >"$clients"
  echo host >"$hosts"
fi
exec sleep 300
"""
SCONTROL = """#!/bin/bash
echo "scontrol $*" >>"$NOTES"
"""
JOB = 123456


def start_job(
    user: User, directory: Path, *command: str, options: tuple[str, ...] = (), taken: int = 0, srun: str = SRUN
) -> subprocess.Popen[str]:
    """Start the script with stand-ins for atoll, srun and scontrol, which write to the file `notes`."""
    script = user.atoll("slurm", "--islands", "1x2x1", *options, "--", *command).check().stdout
    (directory / "bin").mkdir()
    for name, text in (
        ("srun", srun),
        ("atoll", ATOLL),
        ("scontrol", SCONTROL),
        ("hostname", "#!/bin/bash\necho 127.0.0.1\n"),
    ):
        executable(directory / "bin" / name, text)
    executable(directory / "job", script)
    path = f"{directory / 'bin'}:{os.environ['PATH']}"
    notes = str(directory / "notes")
    user.env = with_forked_children(user.env)
    return user.start(str(directory / "job"), PATH=path, SLURM_JOB_ID=str(JOB), NOTES=notes, TAKEN=str(taken))


def test_a_port_that_is_taken_is_replaced_by_another(user: User, tmp_path: Path) -> None:
    taken = 20000 + JOB % 10000
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", taken))
        sock.listen()
        done = finish(start_job(user, tmp_path, "echo", "ran", taken=taken))
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
    ups = [line for line in (tmp_path / "notes").read_text().splitlines() if line.startswith("up ")]
    assert [f"0.0.0.0:{taken} " in line for line in ups] == [True, False]


def test_a_controller_that_fails_for_another_reason_is_started_once(user: User, tmp_path: Path) -> None:
    done = finish(start_job(user, tmp_path, "echo", "ran", taken=20000 + JOB % 10000))  # without a listener
    assert (done.returncode, done.stdout) == (1, "")
    assert (tmp_path / "notes").read_text().count("up ") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize(("status", "requeues"), [(3, True), (0, False)])
def test_a_notice_of_slurm_reaches_the_command_and_requeues_what_is_not_over(
    user: User, tmp_path: Path, number: signal.Signals, status: int, requeues: bool
) -> None:
    saves = f"trap 'echo saved; exit {status}' TERM; echo runs; while :; do sleep 0.05; done"
    job = start_job(user, tmp_path, "bash", "-c", saves, options=("--requeue", "--notice", "90"))
    assert {"#SBATCH --requeue", "#SBATCH --signal=B:TERM@90"} <= set((tmp_path / "job").read_text().splitlines())
    assert first_line(job) == "runs"
    job.send_signal(number)
    done = finish(job)
    assert (done.returncode, done.stdout) == (status, "saved\n"), done.stderr
    assert (f"scontrol requeue {JOB}" in (tmp_path / "notes").read_text()) == requeues
    assert user.leftovers() == []


def test_a_job_ends_although_srun_has_ignored_a_signal(user: User, tmp_path: Path) -> None:
    """srun of Slurm 22.05 starts the step even if it received SIGTERM just before, when the command ended at once."""
    command = 'until grep -q deaf "$NOTES"; do sleep 0.01; done; exit 7'
    job = start_job(user, tmp_path, "bash", "-c", command, srun=DEAF_SRUN)
    assert finish(job).returncode == 7
    assert "srun ignores SIGTERM" in (tmp_path / "notes").read_text()
    assert user.leftovers() == []


def test_each_job_has_its_own_journal_and_removes_it(user: User, tmp_path: Path) -> None:
    journals = tmp_path / "it's shared"
    (journals / f"slurm-{JOB}").mkdir(parents=True)
    (journals / "slurm-1").mkdir()
    finish(start_job(user, tmp_path, "true", options=("--journal", str(journals)))).check()
    assert f"--journal {journals}/slurm-{JOB} " in (tmp_path / "notes").read_text()
    assert [each.name for each in journals.iterdir()] == ["slurm-1"]


def run_job(user: User, directory: Path, *command: str, options: tuple[str, ...] = ()) -> tuple[int, str, str]:
    """Run the script of `atoll slurm` as Slurm does on one node with several tasks."""
    script = user.atoll("slurm", "--islands", "1x2x1", *options, "--", *command).check().stdout
    (directory / "bin").mkdir()
    executable(directory / "bin" / "srun", SRUN)
    executable(
        directory / "bin" / "atoll", "#!/bin/bash\nexec " + " ".join(f"'{each}'" for each in COMMAND) + ' "$@"\n'
    )
    executable(directory / "bin" / "hostname", "#!/bin/bash\necho 127.0.0.1\n")
    executable(directory / "job", script)
    path = f"{directory / 'bin'}:{os.environ['PATH']}"
    done = finish(user.start(str(directory / "job"), PATH=path, SLURM_JOB_ID=str(os.getpid())))
    return done.returncode, done.stdout, done.stderr


# Hosts of null devices start in a third of the time.
@pytest.mark.parametrize(
    ("options", "code", "expected"),
    [
        (("--platform", "null"), "print(len(jax.devices()))", "2"),
        pytest.param((), "print(len(jax.devices()), jax.numpy.arange(4).sum())", "2 6", marks=pytest.mark.thorough),
    ],
)
def test_the_job_is_a_cluster_with_a_host_a_task_and_ends_with_its_command(
    user: User, tmp_path: Path, options: tuple[str, ...], code: str, expected: str
) -> None:
    status, out, error = run_job(user, tmp_path, sys.executable, "-c", f"import jax; {code}", options=options)
    assert (status, out.splitlines()[-1]) == (0, expected), error
    assert user.leftovers() == []


@pytest.mark.thorough
def test_tenants_of_a_job_join_by_files_that_go_with_it_and_its_script_has_no_token(user: User, tmp_path: Path) -> None:
    file = tmp_path / "it's tenants.toml"
    file.write_text(f'[tenant.red]\ntoken = "{"r" * 24}"\n')
    options = ("--tenants", str(file))
    refused = user.atoll("slurm", "--islands", "1x1x1", *options, "--join-file", "a", "--", "true")
    assert (refused.returncode, "--join-file with {tenant} in its name" in refused.stderr) == (2, True)
    options += ("--platform", "null", "--join-file", str(tmp_path / "join {tenant}"))
    asked = f'atoll tenants --json; atoll tenants --json --join "{tmp_path}/join red"; cat "{tmp_path}/join red"'
    script = user.atoll("slurm", "--islands", "1x2x1", *options, "--", "bash", "-c", asked).check().stdout
    assert "rrrr" not in script
    status, out, error = run_job(user, tmp_path, "bash", "-c", asked, options=options)
    assert status == 0, error
    assert out.count('"name": "red"') == 2
    assert out.count('"name": "default"') == 1
    assert out.rstrip().endswith("/" + "r" * 24)
    assert list(tmp_path.glob("join*")) == []
    assert user.leftovers() == []


def test_a_job_has_nodes_of_one_kind(user: User, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[[island]]\nhosts = 2\ndevices = 1\nkind = "it\'s"\n[[island]]\ndevices = 2\n')
    script = user.atoll("slurm", "--cluster", str(file), "--", "true").check().stdout
    assert "#SBATCH --nodes=3\n" in script
    directory = tmp_path / "job"
    directory.mkdir()
    line = script.partition("trap notice TERM USR1\n")[2].partition("for ((try")[0]
    finish(user.start("bash", "-c", line, directory=str(directory))).check()
    assert (directory / "cluster.toml").read_text() == file.read_text()
    file.write_text("platform = 'cuda'\n[[island]]\ndevices = 4\n[[island]]\ndevices = 8\n")
    refused = user.atoll("slurm", "--cluster", str(file), "--", "true")
    assert refused.returncode == 78
    assert (
        "all nodes of a Slurm job have the same GPUs, and these islands differ: island 0 has 1 host" in refused.stderr
    )


def test_the_job_ends_as_its_command_does(user: User, tmp_path: Path) -> None:
    status, _, error = run_job(user, tmp_path, sys.executable, "-c", "raise SystemExit(7)")
    assert status == 7, error
    assert user.leftovers() == []


def test_directives_and_devices_are_those_that_were_asked_for(user: User) -> None:
    asked = ("--islands", "2x4x8", "--platform", "cuda", "--sbatch=--time=1:00:00", "--", "python", "a b.py")
    lines = user.atoll("slurm", *asked).check().stdout.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert {"#SBATCH --nodes=8", "#SBATCH --gpus-per-node=8", "#SBATCH --time=1:00:00"} <= set(lines)
    assert "python 'a b.py' &" in lines
