"""Find the directories of clusters: for their sockets, and for files that outlive them, such as compiled programs.

Also removes directories.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from atoll.cluster.environment_variables import (
    CACHE_DIRECTORY,
    CACHE_HOME,
    KEY_FILE,
    RUNTIME_DIRECTORY,
    STATE_DIRECTORY,
    STATE_HOME,
)
from atoll.errors import ClusterError

OFF = "off"
_NO_HOME_DIRECTORY = Path("/nonexistent")  # the home directory of `nobody` on Debian
_FULL_DISK_DIRECTORY = Path("/var/tmp")  # which `tempfile` uses while /tmp is full
# Bytes of the path of a directory for sockets, whose paths Linux limits to 107 bytes. The rest is for a name such as
# atoll-client-12345678/cluster/controller.sock.
_MAX_SOCKETS_BASE = 60


def home_directory() -> Path:
    """Return the user's home directory. It may be missing, for example if a container has no entry for its user."""
    with contextlib.suppress(RuntimeError):
        return Path.home()
    return _NO_HOME_DIRECTORY


def expand_home(path: str | Path) -> Path:
    """Return a user's path, in which `~` stands for a home directory. It is unchanged if that directory is unknown."""
    return Path(os.path.expanduser(path))


def default_cache_directory(wanted: str = "") -> str:
    """Return $ATOLL_CACHE_DIR ("" if it is "off"), `wanted`, or the default directory for compiled programs."""
    chosen = CACHE_DIRECTORY.text()
    if chosen == OFF:
        return ""
    base = Path(CACHE_HOME.text() or home_directory() / ".cache")
    return chosen or wanted or str(base / "atoll" / "programs")


def usage_file(cluster: str) -> str:
    """Return the file for the usage of a cluster, in `state_directory`.

    Return "" if $ATOLL_STATE_DIR is "off": then no usage is stored.
    """
    if STATE_DIRECTORY.text() == OFF:
        return ""
    return str(state_directory() / "usage" / f"{cluster}.sqlite")


def logs_directory() -> Path | None:
    """Return the directory for the logs of standing clusters, in `state_directory`. See `cluster.cluster_runs`.

    Return None if $ATOLL_STATE_DIR is "off": then the logs end with their clusters.
    """
    return None if STATE_DIRECTORY.text() == OFF else state_directory() / "logs"


def suspended_directory() -> str:
    """Return the default directory for arrays of sessions that are suspended to disk, in `state_directory`."""
    return str(state_directory() / "suspended")


def key_file() -> str:
    """Return the file with the user's key: $ATOLL_KEY_FILE, or one in `state_directory`. See `security.user_key`."""
    return KEY_FILE.text() or str(state_directory() / "key")


def state_directory() -> Path:
    """Return $ATOLL_STATE_DIR, or a directory in the user's home directory if that is not set or "off"."""
    chosen = STATE_DIRECTORY.text()
    base = Path(STATE_HOME.text() or home_directory() / ".local" / "state")
    return Path(chosen if chosen and chosen != OFF else base / "atoll")


def sockets_bases() -> tuple[Path, ...]:
    """Return the directories in which this user's processes may have called `make_directory`, without repetition.

    That is $XDG_RUNTIME_DIR, or the temporary directories if that is not set or not writable: a process that starts
    while the disk of the system's temporary directory is full uses another one. Directories whose paths are too long
    for sockets are not used.
    """
    runtime = _runtime_directory()
    if runtime is not None:
        return (runtime,)
    found = [_temporary_directory(), _FULL_DISK_DIRECTORY]
    with contextlib.suppress(FileNotFoundError):
        found.append(Path(tempfile.gettempdir()))
    return tuple(dict.fromkeys(found))


def registry_directory() -> Path:
    """Return the directory of the registry of this user's standing clusters: see `operate.cluster_registry`."""
    runtime = _runtime_directory()
    return runtime / "atoll" if runtime is not None else _temporary_directory() / f"atoll-{os.getuid()}"


def make_directory(kind: str) -> Path:
    """Make a private directory for sockets of a cluster in one of `sockets_bases`, and return its path.

    Raise ClusterError if there is no space.
    """
    try:
        base = _runtime_directory() or Path(tempfile.gettempdir())
        base = base if _is_short(base) else _temporary_directory()
        return Path(tempfile.mkdtemp(prefix=f"atoll-{kind}-", dir=base))
    except OSError as error:
        raise ClusterError(
            f"cannot make a directory for sockets: {error}. Free space, or set XDG_RUNTIME_DIR to a directory on "
            "another disk"
        ) from None


def _runtime_directory() -> Path | None:
    base = RUNTIME_DIRECTORY.text()
    return Path(base) if base and os.access(base, os.W_OK) and _is_short(Path(base)) else None


def _temporary_directory() -> Path:
    """Return the system's temporary directory, also if its disk is full, or /tmp if its path is too long for sockets.

    `tempfile.gettempdir` returns another directory if the disk is full, in which no command would find the user's
    clusters.
    """
    for each in (*map(os.environ.get, ("TMPDIR", "TEMP", "TMP")), "/tmp"):
        if each and os.path.isdir(each) and os.access(each, os.W_OK) and _is_short(path := Path(os.path.abspath(each))):
            return path
    return Path(tempfile.gettempdir())


def _is_short(base: Path) -> bool:
    return len(os.fsencode(base)) <= _MAX_SOCKETS_BASE


def remove_tree(directory: str | Path) -> None:
    """Remove a directory with its contents, as far as possible, whatever programs of users have written to it.

    `shutil.rmtree` calls itself for each level, and raises RecursionError if there are too many.
    """
    try:
        shutil.rmtree(directory, ignore_errors=True)
    except RecursionError:
        with contextlib.suppress(OSError):
            subprocess.run(["rm", "-rf", "--", str(directory)], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
