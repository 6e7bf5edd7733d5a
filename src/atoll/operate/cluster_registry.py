"""The clusters of this user on this machine: their addresses and processes.

A standing cluster (`atoll up`) has a directory with its name in the user's runtime directory. The directory holds its
record and its sockets, and its engine removes the directory at the end. So a directory whose engine has exited belongs
to a cluster that was killed, and the next `atoll` command removes it. If it is unknown whether the engine runs, because
its record or the table of processes cannot be read, the command reports the error and removes nothing. A directory that
an engine holds (`cluster.held_directories`) stays, also if its record is missing.

Only Ray knows whether a cluster on Ray has ended. An address that refuses connections proves nothing, since the
controller may be restarting, but then a command asks Ray. If Ray does not answer, the record stays until `atoll down`,
or until `atoll up` starts another cluster with its name there.

An embedded cluster (of a script, or of `atoll proxy`) has its record in its own directory, which is removed when it
ends.

Invariant: the directory of a standing cluster exists without a record only while the runtime directory is locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from atoll.atomic_files import write_atomically
from atoll.cluster.cluster_runs import ClusterRun
from atoll.cluster.directories import registry_directory, remove_tree, sockets_bases
from atoll.cluster.held_directories import RECORD_FILE, is_held
from atoll.cluster.moved_controllers import recorded_controller
from atoll.cluster.processes.process_table import began, processes_of_session, this_machine
from atoll.decodable import decodable
from atoll.errors import ClusterError, SettingsError
from atoll.missing import MISSING, read_if_exists
from atoll.wire.address import parse_address

DEFAULT_NAME = "default"

_ASK_SECONDS = 1.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}")


class ClusterRecord(msgspec.Struct, frozen=True):
    """A cluster. `pid` is its engine's, and `began` the start time of that process in ticks of the machine's clock.

    `owner` is the process with which an embedded cluster ends, and `label` its name for people; they are 0 and "" for a
    standing cluster.

    Methods that look at its processes raise ClusterError if the kernel does not answer.
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
    machine: str = ""  # the machine of the processes; "": this one
    ray: str = ""  # the address of its Ray cluster; `pid` is then that of the command that started it
    run: str = ""  # directory of this run, with its log: see `cluster.cluster_runs`
    advertised: str = ""  # the addresses at which others reach it; "": `address`

    @property
    def is_here(self) -> bool:
        """Whether the cluster is on this machine. Machines may share the directory, but not the meaning of pids."""
        return self.machine in ("", this_machine())

    @property
    def is_alive(self) -> bool:
        """Whether the engine runs. A cluster on Ray counts as alive while it has a record."""
        return bool(self.ray) or self._engine_runs()

    @property
    def starter_runs(self) -> bool:
        """Whether the engine runs, or the command that started the cluster if it is on Ray."""
        return self._engine_runs()

    @property
    def refuses(self) -> bool:
        """Whether the machine of its address responds, and nothing listens there now."""
        return _refuses(self.address)

    @property
    def continues_at(self) -> str:
        """The address of its controller after a standby took over and the engine stayed here; otherwise ""."""
        with _examining(self.directory):
            return recorded_controller(self.directory)

    @property
    def reached_at(self) -> str:
        """The addresses for users to give to programs and commands. `address` may be one that nobody can dial."""
        return self.advertised or self.address

    @property
    def title(self) -> str:
        """Its name, and its label if it is embedded."""
        return f"{self.name} ({self.label})" if self.label else self.name

    def pids(self) -> list[int]:
        """Return the cluster's processes on this machine, which are all in the session that the engine leads."""
        if self.ray:
            return []
        with _examining(self.directory):
            if began(self.pid) not in (None, self.began):
                return []  # the pid was reused, so the old session has ended
            return processes_of_session(self.pid)

    def terminate(self) -> None:
        """Ask the engine to end the cluster."""
        if not self.ray and self._engine_runs():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> list[int]:
        """Kill the remaining processes and remove the directory. Returns the pids."""
        pids = self.pids()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        remove_tree(self.directory)
        if self.run:
            ClusterRun(Path(self.run)).end_unknown("its engine")
        return pids

    def _engine_runs(self) -> bool:
        with _examining(self.directory):
            return began(self.pid) == self.began


def runtime_directory() -> Path:
    """Return this user's directory for standing clusters, in $XDG_RUNTIME_DIR or the system's temporary directory.

    Creates the directory. Raises ClusterError if another user can read or write it.
    """
    directory = registry_directory()
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ClusterError(
            f"{directory} must be your own directory with mode 0700: remove it, or fix its owner and mode"
        )
    return directory


class ClusterRegistry:
    """The standing clusters, by name."""

    def __init__(self) -> None:
        self.root = runtime_directory()

    def directory(self, name: str) -> Path:
        """Return the directory of the cluster with this name. Raises SettingsError for an invalid name."""
        if not is_cluster_name(name):
            raise SettingsError(f"invalid cluster name {name!r}: expected up to 32 letters, digits and any of _.-")
        return self.root / name

    def address(self, name: str) -> str:
        """Return the default address of the cluster with this name."""
        return f"unix:{self.directory(name)}/controller.sock"

    def all(self) -> list[ClusterRecord]:
        """Return the running clusters. Removes the remains of clusters that were killed.

        Raises ClusterError if it is unknown whether a cluster runs.
        """
        with self.locked():
            return self.live()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other `atoll` commands of this user from starting clusters or cleaning up, inside the block."""
        with _examining(self.root):
            descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def live(self) -> list[ClusterRecord]:
        """As `all`, for a caller that holds the lock."""
        found = []
        with _examining(self.root):
            directories = sorted(self.root.iterdir())
        for directory in directories:
            try:
                record = _read(directory)
            except msgspec.MsgspecError as error:
                raise ClusterError(
                    f"{directory / RECORD_FILE} is not the record of a cluster of this version of Atoll: {error}. End "
                    "the cluster with the version that started it, or remove the directory if the cluster has ended"
                ) from None
            if record is not None and not record.is_here:
                continue
            if record is not None and record.is_alive and not _has_ended_on_ray(record):
                found.append(record)
            elif record is not None:
                record.kill()
            elif not _is_held(directory):
                remove_tree(directory)
        return found

    def register(
        self,
        name: str,
        address: str,
        islands: str,
        platform: str,
        pid: int,
        *,
        ray: str = "",
        run: str = "",
        advertised: str = "",
    ) -> ClusterRecord:
        """Write the record of the cluster whose engine is `pid` to its directory. The caller holds the lock.

        Raises ClusterError if the engine has already exited.
        """
        directory, started = self.directory(name), began(pid)
        if started is None:
            raise ClusterError("the cluster ended immediately")
        record = ClusterRecord(
            name,
            address,
            islands,
            platform,
            str(directory),
            pid,
            started,
            machine=this_machine(),
            ray=ray,
            run=run,
            advertised=advertised,
        )
        _write(record)
        return record


def is_cluster_name(text: str) -> bool:
    """Return whether `text` may be the name of a cluster. Addresses never are, since they have a colon or a slash."""
    return _NAME.fullmatch(text) is not None


def standing_clusters() -> list[ClusterRecord]:
    """Return this user's running standing clusters. Unlike `ClusterRegistry`, creates and removes nothing."""
    found = []
    for file in _records_in(registry_directory(), "*"):
        with contextlib.suppress(*MISSING, msgspec.MsgspecError):
            if file.stat().st_uid == os.getuid():
                found.append(_read(file.parent))
    return [each for each in found if each is not None and each.is_here and each.is_alive]


def _records_in(base: Path, pattern: str) -> list[Path]:
    """Return where the directories in `base` with these names have their records, in order.

    A pattern with the name of the file would omit some files that cannot be examined, depending on Python's version.
    """
    return [directory / RECORD_FILE for directory in sorted(base.glob(pattern))]


def register_embedded(directory: Path, address: str, islands: str, platform: str, pid: int, label: str) -> None:
    """Record the embedded cluster of this process, whose engine is `pid`, in the cluster's own `directory`.

    Does nothing if the engine has already exited; the code that waits for the engine reports the reason.
    """
    owner, started = os.getpid(), began(pid)
    if started is not None:
        name = f"embedded-{owner}"
        _write(
            ClusterRecord(name, address, islands, platform, str(directory), pid, started, owner, label, this_machine())
        )


def embedded_clusters() -> list[ClusterRecord]:
    """Return this user's running embedded clusters. Raises ClusterError if it is unknown whether one runs."""
    found = []
    for file in sorted(file for base in sockets_bases() for file in _records_in(base, "atoll-*")):
        with contextlib.suppress(*MISSING, msgspec.MsgspecError):
            if file.parent.stat().st_uid != os.getuid():  # a record decides to which address the token is sent
                continue
            record = _read(file.parent)
            if record is not None and record.is_here and record.owner and record.is_alive:
                found.append(record)
    return found


def _has_ended_on_ray(record: ClusterRecord) -> bool:
    """Return whether this is a cluster on Ray that does not listen now, and of which Ray has no engine."""
    if not record.ray or record.starter_runs or not record.refuses:
        return False
    from atoll.engines.ray.ray_cluster import has_ended  # clients import this module, and need no engine

    with contextlib.suppress(ClusterError):
        return has_ended(record.ray, record.name)
    return False


def _refuses(address: str) -> bool:
    """Return whether the machine responds and nothing listens at the address."""
    where = parse_address(address)
    try:
        socket.create_connection((where.host, where.port), _ASK_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


def _write(record: ClusterRecord) -> None:
    """Write the record so that a reader finds a complete file or none."""
    write_atomically(Path(record.directory) / RECORD_FILE, msgspec.json.encode(record))


def _read(directory: Path) -> ClusterRecord | None:
    """Return the record of the cluster in this directory, or None if the file is missing.

    Raises ClusterError if it cannot be read, or msgspec.MsgspecError if it is not a record of this version of Atoll. A
    loss of power may leave an empty file, which counts as none.
    """
    with _examining(directory):
        content = read_if_exists(directory / RECORD_FILE)
    return msgspec.json.decode(content, type=decodable(ClusterRecord)) if content else None


def _is_held(directory: Path) -> bool:
    """Return whether a running engine holds this directory. Raises ClusterError if that is unknown."""
    with _examining(directory), contextlib.suppress(*MISSING):
        return is_held(directory)
    return False


@contextlib.contextmanager
def _examining(directory: Path | str) -> Iterator[None]:
    """Raise ClusterError for an OSError in this block, which does not show whether the cluster runs."""
    try:
        yield
    except OSError as error:
        raise ClusterError(
            f"cannot find out whether the cluster in {directory} runs, so nothing is changed: {error}"
        ) from None
