"""The clusters of this user on this machine that stay: one folder each, named as the cluster is.

`atoll up` makes a folder in the user's runtime folder and registers the cluster in it; the engine keeps its
sockets there and removes it all in the end. So a folder whose engine has ended was left by force, and is
stale: it is removed here by whoever looks next.

Invariant: a folder exists without a registration only while the runtime folder is locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from atoll.errors import ClusterError
from atoll.processes.process_table import began, session_of

DEFAULT_NAME = "default"

_FILE = "cluster.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}")


class Registration(msgspec.Struct, frozen=True):
    """A cluster that stays. `began`: when its engine, process `pid`, did, in ticks of the machine's clock."""

    name: str
    address: str
    islands: str
    platform: str
    directory: str
    pid: int
    began: int

    @property
    def is_alive(self) -> bool:
        """Whether the engine still runs."""
        return began(self.pid) == self.began

    def pids(self) -> list[int]:
        """The cluster's processes that still run: all are in the session that the engine leads."""
        if began(self.pid) not in (None, self.began):
            return []  # another process has this number now, so nobody is left of the old session
        return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and session_of(int(entry)) == self.pid]

    def kill(self) -> list[int]:
        """Ends by force what still runs, and removes the folder; returns the pids."""
        pids = self.pids()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.directory, ignore_errors=True)
        return pids


def runtime_folder() -> Path:
    """This user's folder for clusters that stay: in $XDG_RUNTIME_DIR or the system's temporary folder.

    Makes it. Raises ClusterError where somebody else could have a hand in it.
    """
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if base and os.access(base, os.W_OK):
        folder = Path(base) / "atoll"
    else:
        folder = Path(tempfile.gettempdir()) / f"atoll-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ClusterError(f"{folder} must be a folder of your own with mode 0700: remove it, or repair it")
    return folder


class Registrations:
    """All of this user's clusters."""

    def __init__(self) -> None:
        self.folder = runtime_folder()

    def directory(self, name: str) -> Path:
        """Where the cluster of that name keeps its sockets. Raises ClusterError for what is no name."""
        if not _NAME.fullmatch(name):
            raise ClusterError(f"{name!r} is no cluster's name: up to 32 letters, digits and any of _.- are")
        return self.folder / name

    def address(self, name: str) -> str:
        """Where the cluster of that name listens unless it was told otherwise."""
        return f"unix:{self.directory(name)}/controller.sock"

    def all(self) -> list[Registration]:
        """Those that are up. Removes what is stale."""
        with self.locked():
            return self.live()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other `atoll` commands of this user from starting or cleaning, inside the block."""
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def live(self) -> list[Registration]:
        """As `all`; for whoever holds the lock."""
        found = []
        for folder in sorted(self.folder.iterdir()):
            registration = _read(folder)
            if registration is not None and registration.is_alive:
                found.append(registration)
            elif registration is not None:
                registration.kill()
            else:
                shutil.rmtree(folder, ignore_errors=True)
        return found

    def register(self, name: str, address: str, islands: str, platform: str, pid: int) -> Registration:
        """Registers the engine `pid` in its folder; for whoever holds the lock."""
        directory = self.directory(name)
        started = began(pid)
        if started is None:
            raise ClusterError("the cluster ended at once")
        registration = Registration(name, address, islands, platform, str(directory), pid, started)
        (directory / _FILE).write_bytes(msgspec.json.encode(registration))
        return registration


def _read(folder: Path) -> Registration | None:
    try:
        return msgspec.json.decode((folder / _FILE).read_bytes(), type=Registration)
    except (OSError, msgspec.MsgspecError):
        return None
