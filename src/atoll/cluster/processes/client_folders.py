"""A client's folders, and the removal of those whose client has died.

The last of client and proxy to end removes the folders of a client. Where both are killed, or jaxlib ends the client's
process because its proxy ended, the folders stay. So each folder names its owner, and later clients remove those whose
owner does not run.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from atoll.cluster.processes.process_table import began, this_machine

_OWNER = "owner"
CLIENT_FOLDERS, HOST_FOLDERS = "client", "host"  # kinds, in the names of folders


def make_transfer_directory(base: Path) -> Path:
    """A fresh private folder, named after the process that makes it: atoll-PID-..."""
    return Path(tempfile.mkdtemp(prefix=f"atoll-{os.getpid()}-", dir=base))


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
