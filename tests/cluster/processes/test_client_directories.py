"""Tests of the directories of killed clients."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.cluster.held_directories import is_held
from atoll.cluster.processes import client_directories
from atoll.cluster.processes.client_directories import (
    HOST_DIRECTORIES,
    claim,
    in_use,
    make_transfer_directory,
    remove,
    sweep,
    transfer_directory,
)
from tests.file_limits import no_more_files
from tests.waiting import until


def directories(base: Path, name: str) -> tuple[Path, Path]:
    directory, transfers = base / f"atoll-client-{name}", base / f"shared-{name}"
    directory.mkdir()
    transfers.mkdir()
    (transfers / "large").write_bytes(b"x")
    return directory, transfers


def claim_elsewhere(directory: Path, transfers: Path) -> subprocess.Popen[bytes]:
    """Start a process that claims the directories and does not end."""
    code = f"""
import pathlib, sys
from atoll.cluster.processes.client_directories import claim
claim(pathlib.Path({str(directory)!r}), pathlib.Path({str(transfers)!r}))
print("claimed", flush=True)
sys.stdin.read()
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"claimed\n"
    return child


def test_directories_of_killed_clients_are_removed_and_those_of_live_ones_stay(tmp_path: Path):
    mine, dead, alive = (directories(tmp_path, name) for name in ("mine", "dead", "alive"))
    claim(*mine)
    killed, living = claim_elsewhere(*dead), claim_elsewhere(*alive)
    killed.kill()
    os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
    sweep(tmp_path)  # a zombie also counts as dead
    assert not any(directory.exists() for directory in dead)
    assert all(directory.exists() for directory in (*mine, *alive))
    for child in (killed, living):
        child.kill()
        child.communicate()


def test_directories_stay_if_it_is_unknown_whether_their_client_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(client_directories, "transfer_bases", lambda: (tmp_path,))
    directory, _ = directories(tmp_path, "mine")
    transfers = transfer_directory(tmp_path)
    make_transfer_directory(transfers)
    claim(directory, transfers)

    def fail(_: int) -> None:
        raise OSError(errno.ENFILE, "Too many open files in system")

    with monkeypatch.context() as patch:
        patch.setattr(client_directories, "began", fail)
        sweep(tmp_path)
    assert directory.exists()
    assert transfers.exists()
    with no_more_files():
        sweep(tmp_path)
        with pytest.raises(OSError, match="Too many open files"):
            in_use(transfers)
    remove(directory, transfers)


def test_a_removal_that_is_cut_short_is_finished_by_a_later_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    directory, transfers = directories(tmp_path, "dying")
    (directory / "owner").write_text(f"{os.getpid()} 1\n{transfers}\n")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", kill_after_one(shutil.rmtree))
        with pytest.raises(SystemExit):
            remove(directory, transfers)
    assert directory.exists() or not transfers.exists()
    sweep(tmp_path)
    assert not directory.exists()
    assert not transfers.exists()


def kill_after_one(rmtree: Callable[..., None]) -> Callable[..., None]:
    def remove_one(*arguments: object, **keywords: object) -> None:
        rmtree(*arguments, **keywords)
        sys.exit()

    return remove_one


def make_in_child(*prefix: str) -> tuple[subprocess.Popen[str], Path]:
    """Start a process, by the command `prefix`, that makes a transfer directory. Return both."""
    code = """
import pathlib, sys
from atoll.cluster.processes.client_directories import make_transfer_directory, transfer_directory
made = transfer_directory(pathlib.Path("/dev/shm"))
make_transfer_directory(made)
print(made, flush=True)
sys.stdin.read()
"""
    child = subprocess.Popen(
        [*prefix, sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    return child, Path(child.stdout.readline().strip())


def test_the_transfer_directory_of_a_killed_client_is_removed_though_nothing_names_it(tmp_path: Path):
    child, made = make_in_child()
    try:
        sweep(tmp_path)
        assert made.is_dir()
    finally:
        child.kill()
        child.communicate()
    sweep(tmp_path)
    assert not made.exists()


def test_a_pid_that_another_process_has_now_is_no_owner(tmp_path: Path):
    directory, transfers = directories(tmp_path, "old")
    (directory / "owner").write_text(f"{os.getpid()} 1\n{transfers}\n")
    sweep(tmp_path)
    assert not directory.exists()
    assert not transfers.exists()


def test_directories_that_say_nothing_are_left_alone(tmp_path: Path):
    directory, _ = directories(tmp_path, "silent")
    sweep(tmp_path)
    assert directory.exists()


def test_the_directories_of_a_client_on_another_machine_that_shares_them_stay(tmp_path: Path):
    directory, transfers = directories(tmp_path, "theirs")
    (directory / "owner").write_text(f"{os.getpid()} 1 elsewhere\n{transfers}\n")
    sweep(tmp_path)
    assert directory.exists()
    assert transfers.exists()


IN_NEW_PID_NAMESPACE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*IN_NEW_PID_NAMESPACE, "true"], check=False).returncode != 0,
    reason="the kernel refuses new PID namespaces",
)
def test_a_process_in_another_pid_namespace_leaves_the_directories_of_this_one(tmp_path: Path):
    directory, _ = directories(tmp_path, "mine")
    transfers = transfer_directory(Path("/dev/shm"))
    make_transfer_directory(transfers)
    claim(directory, transfers)
    code = f"""
import pathlib
from atoll.cluster.processes.client_directories import sweep
from atoll.cluster.processes.process_table import began
assert began({os.getpid()}) is None
sweep(pathlib.Path({str(tmp_path)!r}))
"""
    try:
        subprocess.run([*IN_NEW_PID_NAMESPACE, sys.executable, "-c", code], check=True)
        assert directory.exists()
        assert transfers.exists()
    finally:
        remove(directory, transfers)


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*IN_NEW_PID_NAMESPACE, "true"], check=False).returncode != 0,
    reason="the kernel refuses new PID namespaces",
)
def test_the_transfer_directory_of_a_pid_namespace_that_is_gone_is_removed(tmp_path: Path):
    child, made = make_in_child(*IN_NEW_PID_NAMESPACE, "--kill-child")
    try:
        sweep(tmp_path)
        assert made.is_dir(), "its process runs"
    finally:
        child.kill()
        child.communicate()
    until(lambda: not is_held(made))  # the namespace ends after the command that made it
    sweep(tmp_path)
    assert not made.exists()


@pytest.mark.parametrize("has_lock", [True, False])
def test_a_directory_of_another_pid_namespace_stays_if_its_process_could_not_lock_it(has_lock: bool, tmp_path: Path):
    other = Path("/dev/shm") / f"atoll-{os.getpid()}-0badcafe-1-{os.urandom(4).hex()}"
    other.mkdir()
    if has_lock:
        (other / "locked").touch()
    sweep(tmp_path)
    assert other.exists() is not has_lock
    shutil.rmtree(other, ignore_errors=True)


def test_directories_of_host_agents_are_removed_likewise_and_apart(tmp_path: Path):
    dead, client = tmp_path / "atoll-host-dead", tmp_path / "atoll-client-dead"
    for each in (dead, client):
        each.mkdir()
        (each / "owner").write_text(f"{os.getpid()} 1\n{each}\n")
    mine = tmp_path / "atoll-host-mine"
    mine.mkdir()
    claim(mine, mine)
    sweep(tmp_path, HOST_DIRECTORIES)
    assert not dead.exists()
    assert mine.exists()
    assert client.exists()


def test_the_directories_of_a_process_are_locked_until_they_are_removed(tmp_path: Path) -> None:
    directory, transfer = tmp_path / "client", tmp_path / "transfer"
    directory.mkdir()
    for _ in range(2):  # another client of the process has the same transfer directory
        claim(directory, transfer)
        make_transfer_directory(transfer)
        assert is_held(directory)
        assert is_held(transfer)
        shutil.rmtree(transfer)
    descriptors = len(os.listdir("/proc/self/fd"))
    remove(directory, transfer)
    assert len(os.listdir("/proc/self/fd")) == descriptors - 2
