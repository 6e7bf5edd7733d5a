"""The clusters of this user on this machine: where they listen, and which processes they are.

A cluster that stays (`atoll up`) has a directory in the user's runtime directory, named as the cluster is. Its record
and its sockets are there, and its engine removes the directory in the end. So a directory whose engine has ended
belongs to a cluster that was killed, and the next `atoll` command removes it.

An embedded cluster (of a script, or of `atoll proxy`) has its record in its own directory, which goes when it ends.

Invariant: the directory of a cluster that stays exists without a record only while the runtime directory is locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from atoll.cluster.processes.process_table import began, session_of, this_machine
from atoll.engines.engine_options import registry_directory, sockets_base
from atoll.errors import ClusterError
from atoll.wire.address import parse_address

DEFAULT_NAME = "default"

_FILE = "cluster.json"
_ASK_SECONDS = 1.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}")


class ClusterRecord(msgspec.Struct, frozen=True):
    """A cluster. `pid` is its engine's, `began` when that process started, in ticks of the machine's clock.

    `owner` is the process with which an embedded cluster ends, and `label` what a person calls that process; 0 and ""
    for a cluster that stays.
    """

    name: str
    address: str
    islands: str
    platform: str
    directory: str
    pid: int
    began: int
    owner: int = 0
    label: str = ""
    machine: str = ""  # whose processes these are; "": this one's
    ray: str = ""  # the Ray cluster on which it runs; `pid` is then that of the command that started it

    @property
    def is_here(self) -> bool:
        """Whether it is a cluster of this machine: others may share the directory, and their pids mean nothing here."""
        return self.machine in ("", this_machine())

    @property
    def is_alive(self) -> bool:
        """Whether the engine still runs; one that is elsewhere, and cannot be asked now, may."""
        return began(self.pid) == self.began or (bool(self.ray) and not _refuses(self.address))

    @property
    def title(self) -> str:
        """Its name, and whose it is where it is embedded."""
        return f"{self.name} ({self.label})" if self.label else self.name

    def pids(self) -> list[int]:
        """The cluster's processes that still run here: all are in the session that the engine leads."""
        if self.ray:
            return []
        if began(self.pid) not in (None, self.began):
            return []  # another process has this number now, so nothing is left of the old session
        return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and session_of(int(entry)) == self.pid]

    def terminate(self) -> None:
        """Asks its engine to end it."""
        if not self.ray and began(self.pid) == self.began:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> list[int]:
        """Ends by force what still runs, and removes the directory; returns the pids."""
        pids = self.pids()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.directory, ignore_errors=True)
        return pids


def runtime_directory() -> Path:
    """This user's directory for clusters that stay: in $XDG_RUNTIME_DIR or the system's temporary directory.

    Makes it. Raises ClusterError where another user could write to it or read it.
    """
    directory = registry_directory()
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ClusterError(f"{directory} must be a directory of your own with mode 0700: remove it, or repair it")
    return directory


class ClusterRegistry:
    """The clusters that stay, by name."""

    def __init__(self) -> None:
        self.root = runtime_directory()

    def directory(self, name: str) -> Path:
        """Where the cluster of that name keeps its sockets. Raises ClusterError for an impossible name."""
        if not _NAME.fullmatch(name):
            raise ClusterError(f"{name!r} is no cluster's name: expected up to 32 letters, digits and any of _.-")
        return self.root / name

    def address(self, name: str) -> str:
        """Where the cluster of that name listens unless another address was chosen for it."""
        return f"unix:{self.directory(name)}/controller.sock"

    def all(self) -> list[ClusterRecord]:
        """Those that are up. Removes what is left of those that were killed."""
        with self.locked():
            return self.live()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other `atoll` commands of this user from starting or cleaning, inside the block."""
        descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def live(self) -> list[ClusterRecord]:
        """As `all`; the caller holds the lock."""
        found = []
        for directory in sorted(self.root.iterdir()):
            record = _read(directory)
            if record is not None and not record.is_here:
                continue
            if record is not None and record.is_alive:
                found.append(record)
            elif record is not None:
                record.kill()
            else:
                shutil.rmtree(directory, ignore_errors=True)
        return found

    def register(self, name: str, address: str, islands: str, platform: str, pid: int, ray: str = "") -> ClusterRecord:
        """Writes the record of the cluster whose engine is `pid` to its directory; the caller holds the lock.

        Raises ClusterError where the engine has ended already.
        """
        directory, started = self.directory(name), began(pid)
        if started is None:
            raise ClusterError("the cluster ended at once")
        record = ClusterRecord(
            name, address, islands, platform, str(directory), pid, started, machine=this_machine(), ray=ray
        )
        _write(record)
        return record


def register_embedded(directory: Path, address: str, islands: str, platform: str, pid: int, label: str) -> None:
    """Records the embedded cluster of this process, whose engine is `pid`, in `directory`, which goes with it.

    Does nothing where the engine has ended already: who waits for it learns why.
    """
    owner, started = os.getpid(), began(pid)
    if started is not None:
        name = f"embedded-{owner}"
        _write(
            ClusterRecord(name, address, islands, platform, str(directory), pid, started, owner, label, this_machine())
        )


def embedded_clusters() -> list[ClusterRecord]:
    """The embedded clusters of this user that are up."""
    found = []
    for file in sorted(sockets_base().glob(f"atoll-*/{_FILE}")):
        with contextlib.suppress(OSError):
            if file.parent.stat().st_uid != os.getuid():  # a record says where to send the token
                continue
            record = _read(file.parent)
            if record is not None and record.is_here and record.owner and record.is_alive:
                found.append(record)
    return found


def _refuses(address: str) -> bool:
    """Whether the machine is there, and nothing listens at that address."""
    where = parse_address(address)
    try:
        socket.create_connection((where.host, where.port), _ASK_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


def _write(record: ClusterRecord) -> None:
    """A reader finds all of the file, or none."""
    file = Path(record.directory) / _FILE
    partial = file.with_suffix(".partial")
    partial.write_bytes(msgspec.json.encode(record))
    partial.rename(file)


def _read(directory: Path) -> ClusterRecord | None:
    try:
        return msgspec.json.decode((directory / _FILE).read_bytes(), type=ClusterRecord)
    except (OSError, msgspec.MsgspecError):
        return None
