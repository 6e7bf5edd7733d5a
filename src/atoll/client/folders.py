"""A client's folders, and the removal of those that nobody is left to remove.

Client and proxy remove the folders of a client, whichever ends last. Where both are killed, or jaxlib ends the client's
process over the end of its proxy, they stay. So each says whose it is, and who comes later looks.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

_OWNER = "owner"


def claim(directory: Path, transfer_directory: Path) -> None:
    """These folders are this process's."""
    pid = os.getpid()
    (directory / _OWNER).write_text(f"{pid} {_started(pid)}\n{transfer_directory}\n")


def sweep(base: Path) -> None:
    """Removes from `base`, and from shared memory, what belonged to clients of this user that are no more."""
    for directory in base.glob("atoll-client-*"):
        with contextlib.suppress(OSError, ValueError):
            if directory.stat().st_uid != os.getuid():
                continue
            owner, transfer_directory = (directory / _OWNER).read_text().splitlines()
            pid, started = owner.split()
            if _started(int(pid)) != started:
                shutil.rmtree(transfer_directory, ignore_errors=True)
                shutil.rmtree(directory, ignore_errors=True)


def _started(pid: int) -> str:
    """When the process started, in the kernel's words; "" for one that is not there, or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
