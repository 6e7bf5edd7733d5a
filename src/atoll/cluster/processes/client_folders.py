"""A client's folders, and the removal of those whose client has died.

The last of client and proxy to end removes the folders of a client. Where both are killed, or jaxlib ends the client's
process because its proxy ended, the folders stay. So each folder names its owner, and later clients remove those whose
owner does not run.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

from atoll.cluster.processes.process_table import began, this_machine
from atoll.errors import ClusterError

_OWNER = "owner"
CLIENT_FOLDERS, HOST_FOLDERS = "client", "host"  # kinds, in the names of folders

_made: dict[int, Path] = {}  # by the process that has made it: a fork has those of its parent, too


def make_transfer_directory(base: Path) -> Path:
    """A private folder, named after the process that makes it: atoll-PID-... All clients of a process have the same,
    one after another: jaxlib asks for its name once. Raises ClusterError where somebody else has made it since.
    """
    pid = os.getpid()
    directory = _made.get(pid)
    if directory is None:
        directory = _made[pid] = Path(tempfile.mkdtemp(prefix=f"atoll-{pid}-", dir=base))
        return directory
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    status = directory.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
        raise ClusterError(f"{directory} is not this user's any more: start the script anew")
    return directory


def in_use(transfer_directory: Path) -> bool:
    """Whether the process that made the folder runs."""
    pid = transfer_directory.name.split("-")[1]
    return pid.isdigit() and began(int(pid)) is not None


def claim(directory: Path, transfer_directory: Path) -> None:
    """Records this process as the owner of these folders."""
    pid = os.getpid()
    (directory / _OWNER).write_text(f"{pid} {began(pid)} {this_machine()}\n{transfer_directory}\n")


def sweep(base: Path, kind: str = CLIENT_FOLDERS) -> None:
    """Removes from `base`, and from shared memory, the folders of clients of this user that do not run any more.

    With HOST_FOLDERS those of host agents, which are named and claimed likewise.
    """
    for directory in base.glob(f"atoll-{kind}-*"):
        with contextlib.suppress(OSError, ValueError):
            if directory.stat().st_uid != os.getuid():
                continue
            owner, transfer_directory = (directory / _OWNER).read_text().splitlines()
            pid, started, *machine = owner.split()
            if machine in ([], [this_machine()]) and began(int(pid)) != int(started):
                shutil.rmtree(transfer_directory, ignore_errors=True)
                shutil.rmtree(directory, ignore_errors=True)
