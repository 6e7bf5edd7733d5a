"""The directories of clients and host agents, and the removal of those whose owner has been killed.

The last one of a client and its proxy to end removes the client's directories. If both are killed, or if jaxlib ends
the client's process because its proxy ended, the directories stay. Each directory names its owner, so later clients
remove the directories of owners that do not run. The owner holds a lock of them (`cluster.held_directories`).

The pid of an owner means nothing in another PID namespace, such as that of a later container with the same /dev/shm.
There the lock decides whether the owner runs: shared memory belongs to one kernel, which knows the locks of all
containers.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
import zlib
from pathlib import Path

from atoll.cluster.directories import remove_tree
from atoll.cluster.held_directories import hold, is_held
from atoll.cluster.processes.process_table import began, pid_namespace, this_machine
from atoll.errors import ClusterError

_OWNER = "owner"
_LOCKED = "locked"  # a file in a transfer directory whose owner holds its lock for as long as it runs
_SHARED_MEMORY = Path("/dev/shm")
CLIENT_DIRECTORIES, HOST_DIRECTORIES = "client", "host"  # kinds, in the names of directories

_chosen: dict[int, Path] = {}  # by pid, since a fork also has the entry of its parent
_held: dict[Path, int] = {}  # descriptors of the locks of this process


def transfer_directory(base: Path) -> Path:
    """Return the path of this process's transfer directory: atoll-PID-MACHINE-START-..., in `base`.

    It is the same for all clients of a process, since jaxlib asks for the path only once.
    """
    pid = os.getpid()
    return _chosen.setdefault(pid, base / f"atoll-{pid}-{_mark()}-{began(pid)}-{secrets.token_hex(4)}")


def _mark() -> str:
    """Return a mark that distinguishes transfer directories of processes whose pids this process sees from others.

    Other machines may share the directory. So may containers on this machine, which may have its name.
    """
    return f"{zlib.crc32(' '.join(_place()).encode()):08x}"


def _place() -> list[str]:
    """Return the machine and the PID namespace in which this process's pid has a meaning."""
    return [this_machine(), pid_namespace()]


def make_transfer_directory(directory: Path) -> None:
    """Make the directory, readable only by this user.

    Claim it first, so that a sweep removes it if this process is killed.

    Raises:
        ClusterError: it exists and belongs to another user.
    """
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    status = directory.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
        raise ClusterError(f"{directory} does not belong to this user any more: restart the script")
    if _hold(directory):
        with contextlib.suppress(OSError):
            (directory / _LOCKED).touch(mode=0o600)


def _hold(directory: Path) -> bool:
    """Lock a directory, unless the file system has no locks or this process has too many open files.

    Return whether it is locked. If it was locked before, it remains locked meanwhile.
    """
    descriptor = -1
    with contextlib.suppress(OSError):
        descriptor = hold(directory)
    if descriptor < 0:
        return False
    _release(directory)
    _held[directory] = descriptor
    return True


def _release(directory: Path) -> None:
    descriptor = _held.pop(directory, None)
    if descriptor is not None:
        os.close(descriptor)


def remove(directory: Path, transfer_directory: Path) -> None:
    """Remove a client's directories. Remove `directory`, which names the other, last, so that sweeps find both."""
    for each in (transfer_directory, directory):
        remove_tree(each)
        _release(each)


def in_use(transfer_directory: Path) -> bool:
    """Return whether the process that a transfer directory is named after runs; False for other names.

    Raise OSError if that is unknown.
    """
    with contextlib.suppress(ValueError):
        _, pid, _, started, _ = transfer_directory.name.split("-")
        return _runs(pid, started)
    return False


def _runs(pid: str, started: str) -> bool:
    """Return whether the process that began at `started` still has this pid. Raise OSError if that is unknown."""
    return began(int(pid)) == int(started)


def claim(directory: Path, transfer_directory: Path) -> None:
    """Record this process as the owner of these directories."""
    _hold(directory)
    pid = os.getpid()
    (directory / _OWNER).write_text(f"{pid} {began(pid)} {' '.join(_place())}\n{transfer_directory}\n")


def sweep(base: Path, kind: str = CLIENT_DIRECTORIES) -> None:
    """Remove the directories of this user's clients that do not run any more, from `base` and from shared memory.

    With HOST_DIRECTORIES, remove those of host agents from `base`. A directory stays if it is unknown whether its owner
    runs; a later sweep removes it.
    """
    if kind == CLIENT_DIRECTORIES:
        _sweep_transfer_directories()
    for directory in _matches(base, f"atoll-{kind}-*"):
        with contextlib.suppress(OSError, ValueError):
            if directory.stat().st_uid != os.getuid():
                continue
            owner, transfer_directory = (directory / _OWNER).read_text().splitlines()
            pid, started, *place = owner.split()
            if place in ([], [this_machine()], _place()) and not _runs(pid, started):
                remove(directory, Path(transfer_directory))


def _sweep_transfer_directories() -> None:
    """Remove this user's transfer directories whose process has ended, even if no other directory names them.

    jaxlib ends a client's process when its proxy is killed, and other files of a container may be removed by then.
    """
    mark = _mark()
    for base in transfer_bases():
        for directory in _matches(base, "atoll-*-*-*-*"):
            with contextlib.suppress(OSError):
                if directory.lstat().st_uid != os.getuid():
                    continue
                is_of_this_namespace = directory.name.split("-")[2] == mark
                if not in_use(directory) if is_of_this_namespace else _is_abandoned(directory):
                    remove_tree(directory)


def _is_abandoned(directory: Path) -> bool:
    """Return whether the process that made a transfer directory in another PID namespace has ended.

    False if that is unknown: the directory may be on another machine's disk, or its process holds no lock. Raises
    OSError.
    """
    return directory.parent == _SHARED_MEMORY and (directory / _LOCKED).exists() and not is_held(directory)


def _matches(base: Path, pattern: str) -> list[Path]:
    with contextlib.suppress(OSError):
        return list(base.glob(pattern))
    return []


def transfer_bases() -> tuple[Path, ...]:
    """Return the parents of transfer directories: shared memory, and the directory for temporary files."""
    return _SHARED_MEMORY, Path(tempfile.gettempdir())
